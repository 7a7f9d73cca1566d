"""Two streams for the launches of one closure, and which launch waits for which.

Found once per closure; link relocates it with the launches. The second stream begins after what it
needs, and ends with the closure at the latest. A buffer's life is told in launches of the main
stream: a launch on the second one may run from the first moment to the last that the waits leave
it, and its operands are in use all that time. So buffers whose lives are apart are never in use
together, in whichever order a GPU runs the two, and a planner needs to know nothing of streams.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from ...reuse.torch_names import schema_of
from ..launches.kernel_list import ENTRY, BufferInfo, KernelList, Launch, Stream, views_in
from .roofline import is_product
from .torch_triton import LoadedKernel, read_only_arguments
from .triton_kernel import TritonKernel

_INPUTS = -1  # stands for any input, where one is changed: two of them may share memory


@dataclass(frozen=True)
class Access:
    """The buffers that a launch reads, and those that it may write."""

    reads: frozenset[int]
    writes: frozenset[int]

    def conflicts(self, other: Access) -> bool:
        """Whether the order of the two decides what is computed."""
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


def accesses(kernels: KernelList) -> list[Access]:
    """Returns what each launch of a closure reads and writes."""
    found = [_access(launch) for launch in kernels.launches]
    if not changes_inputs(kernels):
        return found
    inputs = frozenset(range(kernels.num_inputs))
    return [Access(_as_one(a.reads, inputs), _as_one(a.writes, inputs)) for a in found]


def changes_inputs(kernels: KernelList) -> bool:
    """Whether a closure's launches may write to what it is given."""
    inputs = frozenset(range(kernels.num_inputs))
    return any(_access(launch).writes & inputs for launch in kernels.launches)


def _as_one(buffers: frozenset[int], inputs: frozenset[int]) -> frozenset[int]:
    return buffers - inputs | {_INPUTS} if buffers & inputs else buffers


def _access(launch: Launch) -> Access:
    """What is not known to be only read counts as written."""
    written = {view.buffer for view in views_in(launch.results)}
    read: set[int] = set()
    reads_only = _reads_only(launch)
    for position, value in enumerate(launch.args):
        (read if reads_only(position) else written).update(v.buffer for v in views_in(value))
    for name, value in launch.kwargs:
        (read if reads_only(name) else written).update(v.buffer for v in views_in(value))
    return Access(frozenset(read), frozenset(written))


def _reads_only(launch: Launch) -> Callable[[int | str], bool]:
    if is_product(launch):
        return lambda argument: argument != "out"
    schema = schema_of(launch.function)
    if schema is not None:
        changed = {
            key
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None
            for key in (position, argument.name)
        }
        return lambda argument: argument not in changed
    known = read_only_arguments(launch.function)
    return lambda argument: argument in known


def on_two_streams(kernels: KernelList, second: Collection[int]) -> KernelList:
    """Returns a closure's launches with some of them on the second stream.

    Args:
        kernels: of the closure, on one stream.
        second: the numbers of those launches. They make no foreign buffer, and use none.
    """
    if not second:
        return kernels
    waits = list(_waits(accesses(kernels), second))
    launches = tuple(
        replace(launch, stream="second" if number in second else "main", waits_for=waits[number])
        for number, launch in enumerate(kernels.launches)
    )
    buffers = tuple(_lives(kernels, list(_spans(launches))))
    return replace(kernels, launches=launches, buffers=buffers)


def _waits(used: Sequence[Access], second: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Yields what each launch waits for, which is one launch on the other stream or none.

    A launch on the main stream also waits for the last but one that was begun on the second: else
    the operands of all of those would live to the end of the closure.
    """
    ended = {"main": ENTRY - 1, "second": ENTRY}  # the last launch of each that the other awaited
    begun: list[int] = []
    for number, access in enumerate(used):
        own, other = ("second", "main") if number in second else ("main", "second")
        earlier = [i for i in range(number) if (i in second) == (other == "second")]
        needed = [i for i in earlier if access.conflicts(used[i])]
        needed += begun[:-1] if own == "main" else [ENTRY]
        last = max(needed, default=ENTRY)
        if last > ended[other]:
            ended[other] = last
            yield (last,)
        else:
            yield ()
        if own == "second":
            begun.append(number)


def _spans(launches: Sequence[Launch]) -> Iterator[tuple[int, int]]:
    """Yields from when till when each launch may run, in launches of the main stream."""
    begin = 0
    for number, launch in enumerate(launches):
        if launch.stream == "main":
            yield number, number + 1
            continue
        begin = max(begin, *(awaited + 1 for awaited in launch.waits_for), 0)
        awaiting = (
            later
            for later in range(number + 1, len(launches))
            if launches[later].stream == "main"
            and any(awaited >= number for awaited in launches[later].waits_for)
        )
        yield begin, next(awaiting, len(launches))


def _lives(kernels: KernelList, spans: Sequence[tuple[int, int]]) -> Iterator[BufferInfo]:
    used: dict[int, list[tuple[int, int]]] = {}
    for launch, span in zip(kernels.launches, spans, strict=True):
        for view in launch.views():
            used.setdefault(view.buffer, []).append(span)
    for number, info in enumerate(kernels.buffers):
        own = used.get(number)
        if own is None:
            yield info
            continue
        first, last = min(begin for begin, _ in own), max(end for _, end in own) - 1
        yield replace(info, first=first, last=last)


def may_move(kernels: KernelList) -> list[int]:
    """Returns the launches that can be on the second stream.

    What allocates cannot: PyTorch hands its memory on when the main stream is done with it. Nor can
    a launch that nothing is known of.
    """
    if kernels.in_place:
        return []
    return _free(kernels)


def may_move_whole(kernels: KernelList) -> bool:
    """Whether all of a closure can be on the second stream, as a call beside others."""
    whole = bool(kernels.launches) and len(_free(kernels)) == len(kernels.launches)
    return whole and not changes_inputs(kernels)


def wholly_on(kernels: KernelList, stream: Stream) -> KernelList:
    """Returns a closure's launches, all on one stream."""
    launches = tuple(replace(launch, stream=stream) for launch in kernels.launches)
    return replace(kernels, launches=launches)


def _free(kernels: KernelList) -> list[int]:
    """Launches that allocate nothing, and of which it is known what they write."""
    foreign = set(kernels.foreign)
    return [
        number
        for number, launch in enumerate(kernels.launches)
        if not launch.results
        and foreign.isdisjoint(view.buffer for view in launch.views())
        and (is_product(launch) or isinstance(launch.function, (TritonKernel, LoadedKernel)))
    ]

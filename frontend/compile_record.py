"""Records of a compile: its numbers, sharing decisions, programs, and GPU predictions.

A record may live longer than the model, so it holds none of its tensors and no arena.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from torch import nn

from ..backend.arena import ArenaPlan
from ..backend.cache import CacheUse
from ..backend.gpu.targets import CONTEXT_BYTES, MARGIN, Prediction, Target, predict
from ..backend.kernels.lower import BackendName, InductorBackend, triton_kernels
from ..backend.launches.kernel_list import KernelList
from ..backend.link.layout import Layout
from ..backend.link.placement import gradients_of
from ..backend.run.planned import PlannedProgram
from ..backend.run.rank_program import RankPlan
from ..recompute.planner import RecomputeRecord
from ..reuse.ir.printer import WIDTH, bytes_text
from ..reuse.ir.program import Leaf, Program
from .capture.blocks import Reuse, first_repeated
from .capture.regions import ModeChoice, SharingDecision, text_of_keys

Item = TypeVar("Item")
_HEAD = "block"
_CALLS = 7
_INDENT = "  "
_WIDTH = WIDTH - len(_INDENT)  # the width of the table, which a report indents


def alike(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Groups items by kind, in the order of the first of each kind."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    return list(groups.values())


@dataclass(frozen=True)
class ReuseRow:
    """One traced block and the instances that call its closure."""

    key: str  # class and constructor arguments; an argument that differs shows its range
    num_calls: int  # the number of calls that inlining would expand
    note: str  # how evidence and key disagree, or an empty text


def reuse_rows(decisions: Sequence[SharingDecision]) -> list[ReuseRow]:
    """Returns a row for each traced block, in the order they were traced."""
    members = {_traced_at(group[0]): group for group in alike(decisions, _traced_at)}
    return [
        ReuseRow(
            text_of_keys([d.key for d in group]),
            sum(_num_runs(d.path, members) for d in group),
            _note(group, members),
        )
        for group in members.values()
    ]


def shared_classes(decisions: Sequence[SharingDecision]) -> list[str]:
    """Says of each class with fewer graphs than calls: ``12 Layer share one graph``, most first."""
    members = {_traced_at(group[0]): group for group in alike(decisions, _traced_at)}
    found = []
    for group in alike(decisions, lambda decision: decision.class_name):
        num_calls = sum(_num_runs(d.path, members) for d in group)
        num_graphs = sum(not (d.shared or d.shares) for d in group)
        # num_graphs is 0 if every instance shares with another class.
        if num_calls > max(num_graphs, 1):
            graphs = "one graph" if num_graphs <= 1 else f"{num_graphs} graphs"
            found.append((num_calls, f"{num_calls} {group[0].class_name} share {graphs}"))
    return [text for _, text in sorted(found, key=lambda each: -each[0])]


def _traced_at(decision: SharingDecision) -> str:
    """Returns the path of the instance whose closure this one calls."""
    return decision.compared_with if decision.shared else decision.path


def reuse_table(decisions: Sequence[SharingDecision]) -> list[str]:
    """Returns the rows as lines of text, or none if there is no block."""
    rows = reuse_rows(decisions)
    if not rows:
        return []
    room = _WIDTH - _CALLS
    keys = [textwrap.wrap(row.key, room, subsequent_indent=_INDENT) or [""] for row in rows]
    width = max(len(_HEAD), *(len(line) for key in keys for line in key))
    lines = [f"{_HEAD:<{width}}{'calls':>{_CALLS}}"]
    for key, row in zip(keys, rows, strict=True):
        first = f"{key[0]:<{width}}{row.num_calls:>{_CALLS}}"
        fits = len(first) + len(_INDENT) + len(row.note) <= _WIDTH and len(key) == 1
        lines += [f"{first}{_INDENT}{row.note}".rstrip() if fits else first, *key[1:]]
        if not fits:
            indent = 2 * _INDENT
            lines += textwrap.wrap(
                row.note, _WIDTH, initial_indent=indent, subsequent_indent=indent
            )
    return lines


def not_shared_lines(decisions: Sequence[SharingDecision]) -> list[str]:
    """Returns the reasons why blocks were traced again: ``layers.0..3: not shared, ...``.

    Blocks with the same reason whose paths differ in one number share a line.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[list[str]]] = {}
    for decision in decisions:
        parts = re.split(r"(\d+)", decision.path or decision.class_name)
        groups.setdefault((decision.reason, tuple(parts[::2])), []).append(parts[1::2])
    lines = []
    for (reason, texts), found in groups.items():
        columns = list(zip(*found, strict=True))
        # With two varying numbers, ranges would include blocks that are not in the group.
        varying = [column for column in columns if len(set(column)) > 1]
        rows = [list(map(_range_text, columns))] if len(varying) <= 1 else found
        for numbers in rows:
            path = "".join(t + n for t, n in zip(texts, (*numbers, ""), strict=True))
            lines.append(f"{path}: not shared, {reason}")
    return lines


def _range_text(column: Sequence[str]) -> str:
    """Formats the numbers of a column: ``0``, ``0..3``, or ``0,2,5``."""
    numbers = sorted(set(map(int, column)))
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}..{numbers[-1]}"
    return ",".join(map(str, numbers))


def nothing_shared(model: nn.Module, decisions: Sequence[SharingDecision], reuse: Reuse) -> str:
    """Says why a model shares nothing although modules repeat, and what to do; "" if it shares."""
    if reuse == "off" or any(d.shared or d.shares for d in decisions):
        return ""
    apart = next((d for d in decisions if d.reason), None)
    if apart is not None:
        return (
            f"nothing is shared: {apart.path} ({apart.class_name}) is not like "
            f"{apart.compared_with or 'others'}: {apart.reason}. "
            "lazyinline.advise(model, args) says what to change."
        )
    repeated = first_repeated(model)
    if repeated is None or (reuse == "auto" and decisions):
        return ""
    name, count = repeated
    if reuse == "auto":
        return (
            f"nothing is shared: {name} occurs {count} times, and has too few operators to pay as "
            "a block."
        )
    return (
        f"nothing is shared: {name} occurs {count} times and is not marked. Use reuse='auto', or "
        f"lazy_inline({name})."
    )


def _num_runs(path: str, members: dict[str, list[SharingDecision]]) -> int:
    """Returns how often an instance runs: once per call of the blocks around it."""
    # Blocks inside a shared block were traced in its first instance, and run in every one.
    outer = path.rpartition(".")[0]
    while outer and outer not in members:
        outer = outer.rpartition(".")[0]
    return sum(_num_runs(d.path, members) for d in members[outer]) if outer else 1


def _note(group: Sequence[SharingDecision], members: dict[str, list[SharingDecision]]) -> str:
    first = group[0]
    names = dict.fromkeys(n for d in group for n in first.key.differing(d.key))
    if names:
        verb = "differ" if len(names) > 1 else "differs"
        return f"one closure although {', '.join(names)} {verb}"
    other = [] if first.shares else members.get(first.compared_with, [])
    if first.reason and other and not first.key.differing(other[0].key):
        return f"kept apart from {other[0].path} although the key is equal"
    return ""


_MAX_PATHS = 3  # named in one line of parts
_MAX_CLASSES = 2  # named in a headline


@dataclass(frozen=True, slots=True)
class PassRecord:
    """The time that one pass took, and the size of its result."""

    name: str
    cpu_s: float
    wall_s: float
    num_nodes: int  # the number of graph nodes after the pass; once linked, of launches


@dataclass(frozen=True, slots=True)
class ClosureRecord:
    """The size of one closure of a captured program, and its number of calls."""

    name: str
    num_nodes: int
    num_calls: int


@dataclass(frozen=True, slots=True)
class PartRecord:
    """How one part runs of a model that runs eagerly as a whole.

    ``ran_eagerly`` says why its newest call ran eagerly, if it did; ``is_small`` whether that was
    because a program would be too small.
    """

    path: str
    class_name: str
    num_programs: int
    ran_eagerly: str = ""
    is_small: bool = False

    @property
    def how(self) -> str:
        """How its calls run: compiled, or eagerly with the reason."""
        return f"runs eagerly, {self.ran_eagerly}" if self.ran_eagerly else "compiled"


def part_lines(parts: Iterable[PartRecord]) -> Iterator[str]:
    """Yields a line for each group of parts of one class that run in the same way."""
    for group in alike(parts, lambda part: (part.class_name, part.how)):
        yield f"{_few([part.path for part in group])} ({group[0].class_name}): {group[0].how}"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_PATHS} more" if len(names) > _MAX_PATHS else ""
    return f"{', '.join(names[:_MAX_PATHS])}{more}"


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """Holds the arena's size on one of several devices, and names the model's tensors there."""

    device: str
    tensors: tuple[str, ...]
    arena_bytes: int

    def __str__(self) -> str:
        shown = _few(self.tensors) or "no tensor of the model"
        return f"on {self.device}: {shown}; an arena of {self.arena_bytes:,} bytes"


@dataclass
class CompileRecord:
    """The numbers of one compile, and its programs."""

    train: bool
    backend: BackendName
    reuse: Reuse
    model: str = ""  # the class of the model
    # Name, CPU-seconds (child processes included), wall seconds and nodes, in order.
    passes: list[PassRecord] = field(default_factory=list)
    num_nodes: int = 0  # graph nodes of the captured program
    num_nodes_if_inlined: int = 0  # its graph nodes without sharing
    num_closures: int = 0  # different closures of the captured program
    num_block_calls: int = 0  # calls of blocks
    num_kernels: int = 0  # closures that the backend compiled
    num_operators: int = 0  # operators in them
    num_launches: int = 0  # kernel launches of one forward (and backward, in training)
    # The most bytes planned at one time; None if memory is not planned. It includes gradients,
    # whose memory activations use before (in ``compile`` without a budget; in ``compile_step`` the
    # arena contains the gradients).
    peak_bytes: int | None = None
    arena_bytes: int | None = None  # the part of ``peak_bytes`` that is kept from run to run
    lower_bound_bytes: int | None = None  # the largest sum of live bytes; no plan can need less
    # The predicted peak of a run: planned bytes, results that the user receives, and allocations by
    # launches; None if memory is not planned.
    held_bytes: int | None = None
    unplanned: str = ""  # why memory is not planned, if it is not
    why_no_graph: str = ""  # why a planned program on a GPU is not one CUDA graph, if it is not
    # The tensors and arena on each device, if there are several. The bytes above are those of the
    # first, which is the GPU if there is one.
    devices: tuple[DeviceRecord, ...] = ()
    copied_bytes: int = 0  # bytes that one run copies between devices
    num_copies: int = 0  # the number of these copies
    update_after: str = ""  # why the optimizer's update runs after the step's program, if it does
    saved_bytes: int | None = None  # in training, the bytes that one forward saves for its backward
    recomputed_flops: int = 0  # FLOPs of recompute in one backward
    # Per closure and variant, what is saved and what is recomputed.
    recompute: list[RecomputeRecord] = field(default_factory=list)
    # With symbolic sizes, the input shapes that it was chosen for.
    recompute_chosen_for: tuple[tuple[int, ...], ...] = ()
    ran_eagerly: str = ""  # why the model ran eagerly, if it did
    # For a model that ran eagerly, how its modules ran.
    parts: list[PartRecord] = field(default_factory=list)
    # What came from the on-disk cache, and why a closure cannot be kept there.
    cache: CacheUse = field(default_factory=CacheUse)
    num_compiles: int = 1  # compiles of the module so far, including this one
    num_links: int = 0  # further shapes that only needed a link
    # Backwards compiled so far. There is one for each set of outputs that a loss used, because the
    # cotangents of unused outputs are undefined, not zero.
    num_backwards: int = 1
    # Programs of gradients compiled so far, for gradients that are differentiated.
    num_gradients: int = 0
    # The modes chosen for derivatives in the forward, with the reasons.
    modes: list[ModeChoice] = field(default_factory=list)
    left_out: Sequence[str] = ()  # places that the forward writes to, and a step does not
    # Operators without a rule in Taylor mode, with the user's lines: nested forward mode is used
    # for them.
    nested_forward: list[str] = field(default_factory=list)
    # Closures for which the backend failed to make kernels, so that PyTorch's run, with the errors.
    eager_kernels: list[str] = field(default_factory=list)
    why_static: str = ""  # why this shape was compiled with numbers although sizes vary
    # Each different closure, callees first, with its number of calls.
    closures: list[ClosureRecord] = field(default_factory=list)
    nothing_shared: str = ""  # if nothing is shared, what repeats all the same, and what to do
    opened_from: str = ""  # the file that the program was loaded from, if nothing was compiled
    # The number of fused boundaries per block, or why there is none; empty if fusing was not
    # requested.
    fused_boundaries: list[str] = field(default_factory=list)
    # The number of attention operators per closure whose constant mask was replaced by
    # ``is_causal``, or removed.
    told_masks: list[str] = field(default_factory=list)
    # For each block instance, whether it shares, and if not, why.
    decisions: list[SharingDecision] = field(default_factory=list)
    gpu: GpuRecord | None = None  # predictions for a GPU that is not here

    def __post_init__(self) -> None:
        # Programs, for a page. Not a field, so that a list of the fields has only numbers.
        self.made: Made | None = None

    @property
    def cpu_s(self) -> float:
        """The CPU-seconds of all passes, child processes included."""
        return sum(p.cpu_s for p in self.passes)

    @property
    def wall_s(self) -> float:
        """The wall seconds of all passes."""
        return sum(p.wall_s for p in self.passes)

    @property
    def num_shared_calls(self) -> int:
        """The number of instances that share: at capture, or by equal graphs afterwards."""
        return sum(d.shared or bool(d.shares) for d in self.decisions)

    def headline(self) -> str:
        """Says in a sentence which blocks share graphs, and how long the compile took."""
        shared = shared_classes(self.decisions)
        none = "all is inlined" if self.reuse == "off" else "no block repeats"
        what = self.opened_from or ", ".join(shared[:_MAX_CLASSES]) or none
        more = f", {len(shared) - _MAX_CLASSES} more classes" if len(shared) > _MAX_CLASSES else ""
        took = f"{self.cpu_s:.1f} CPU-s, {self.wall_s:.1f} s"
        kept = self.cache.directory and not self.cache.not_kept
        again = "; next time from cache" if self.cache.num_made and kept else ""
        return f"{what}{more}: {took}{again}"

    def notes(self) -> Iterator[str]:
        """Yields notes on this compile and those before it, for readers."""
        if self.num_links or self.num_compiles > 1:
            yield f"{self.num_compiles} compiles and {self.num_links} links so far"
        if self.num_backwards > 1:
            yield f"{self.num_backwards} backwards: losses used only some of the outputs"
        if self.num_gradients:
            yield f"gradients compiled, to be differentiated: {self.num_gradients}"
        yield from map(str, self.modes)
        if self.left_out:
            yield f"what the forward leaves in {', '.join(self.left_out)} is not left by a step"
        yield from (f"no Taylor rule, forward mode nested: {one}" for one in self.nested_forward)
        yield from (f"run operator by operator, {one}" for one in self.eager_kernels)
        if self.fused_boundaries:
            yield f"boundaries fused: {', '.join(self.fused_boundaries)}"
        if self.told_masks:
            yield f"constant attention masks replaced: {', '.join(self.told_masks)}"
        yield from map(str, self.devices)
        if self.devices:
            yield (
                f"{self.num_copies} copies between devices in a run, {self.copied_bytes:,} bytes"
            )
        if self.why_no_graph:
            yield (
                f"{self.num_launches} launches come one by one from Python, in no CUDA graph, "
                f"because {self.why_no_graph}"
            )
        if self.update_after:
            yield f"the optimizer updates after the step, because {self.update_after}"
        if self.why_static:
            yield f"sizes are numbers, because {self.why_static}"
        if self.recompute_chosen_for:
            shapes = ", ".join(map(str, filter(None, dict.fromkeys(self.recompute_chosen_for))))
            yield f"recompute was chosen for inputs of {shapes}"

    def not_shared(self) -> list[SharingDecision]:
        """Returns instances that were traced although an earlier one of their class was known."""
        return [d for d in self.decisions if not (d.shared or d.shares) and d.reason]

    def shared_with_constants(self) -> list[SharingDecision]:
        """Returns instances that were traced, but share a closure with constants as inputs."""
        return [d for d in self.decisions if d.shares and d.reason]


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory layout of a linked program."""

    layout: Layout  # every buffer and launch, on one timeline
    offsets: Sequence[int]  # the offset in bytes of each buffer that the plan places
    plan: ArenaPlan  # the plan of all of them
    arena_bytes: int  # the part of the plan that is kept from run to run
    # Whether the user's gradients follow the arena, because activations use their memory.
    hosts: Literal["none", "gradients"] = "none"

    @property
    def gradients(self) -> dict[int, int]:
        """The buffers behind the arena, with their offset in bytes."""
        # Their offsets come last in a plan.
        found = gradients_of(self.layout) if self.hosts == "gradients" else []
        first = len(self.plan.offsets) - len(found)
        return dict(zip(found, self.plan.offsets[first:].tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Made:
    """The programs of one compile, for a page to draw."""

    captured: Program  # the captured program
    forward: Program
    backward: Program | None = None
    micro_batches: int = 1  # how often both run in one step
    kernels: Mapping[Leaf, KernelList] | None = None  # the kernel lists of leaves, where known
    memory: Memory | RankPlan | None = None  # the memory layout; None if memory is not planned
    # Computes the Pareto frontiers of recompute, as rows for a page; empty without recompute.
    frontiers: Callable[[], Sequence[Mapping[str, Any]]] = tuple

    def __deepcopy__(self, memo: object) -> Made:
        """Returns itself, because it is immutable."""
        return self


@dataclass(frozen=True)
class GpuRecord:
    """Predictions for a program that was compiled and planned for a GPU."""

    target: Target  # the GPU
    num_kernels: int  # the number of different Triton kernels
    num_built: int  # how many of them were compiled to machine code
    code_bytes: int  # the bytes of machine code
    given_bytes: int  # the bytes of parameters, buffers and inputs
    arena_bytes: int  # the planned bytes of activations, gradients and scratch
    outside_bytes: int  # the most bytes at one time that launches allocate themselves
    result_bytes: int  # the bytes of results and gradients that the user gets in separate memory
    workspace_bytes: int  # the cuBLAS workspace
    allocating: Sequence[str]  # the names of launches that allocate
    prediction: Prediction  # the predicted time of one run

    @property
    def peak_bytes(self) -> int:
        """The most bytes of GPU memory that a run holds, without the optimizer's state."""
        held = self.given_bytes + self.arena_bytes + self.result_bytes
        return held + self.outside_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool:
        """Whether the GPU has that much memory, besides its context and a margin."""
        return self.peak_bytes <= self.target.usable_bytes

    def lines(self) -> Iterator[str]:
        """Yields the lines of a report."""
        target, predicted, cost = self.target, self.prediction, self.prediction.cost
        yield f"for {target.name} ({target.board}): compiled and planned, not run"
        built = f"all {self.num_built}" if self.num_built == self.num_kernels else self.num_built
        others = predicted.num_launches - predicted.num_triton
        yield (
            f"  {predicted.num_launches} launches: {predicted.num_triton} of {self.num_kernels} "
            f"Triton kernels, {others} of PyTorch's"
        )
        yield f"  {built} kernels compiled to machine code, {self.code_bytes / 2**10:.0f} KiB"
        verdict = "fits in" if self.fits else "does NOT fit in"
        yield (
            f"  memory {bytes_text(self.peak_bytes)}, {verdict} {bytes_text(target.usable_bytes)}: "
            f"of {bytes_text(target.memory_bytes)}, as PyTorch reports it, "
            f"{bytes_text(CONTEXT_BYTES)} are CUDA's context, {MARGIN:.0%} a margin"
        )
        own = {"parameters and inputs": self.given_bytes, "arena": self.arena_bytes}
        own |= {"results and gradients": self.result_bytes, "cuBLAS": self.workspace_bytes}
        yield "    " + ", ".join(f"{name} {bytes_text(size)}" for name, size in own.items() if size)
        if self.allocating:
            yield (
                f"    allocated by launches {bytes_text(self.outside_bytes)}: "
                f"{', '.join(self.allocating)}"
            )
        yield (
            f"  predicted {cost.seconds * 1e3:.3g} ms at least, by the roofline, and "
            f"{predicted.expected_s * 1e3:.3g} ms as such kernels usually run: "
            f"{cost.flops / 1e12:.3g} TFLOP in products, {bytes_text(cost.moved_bytes)} moved"
        )


def gpu_record(
    program: PlannedProgram, lists: Sequence[tuple[KernelList, int]], backend: InductorBackend
) -> GpuRecord:
    """Returns the record of a program that was planned for a GPU."""
    assert backend.target is not None
    kernels = {kernel.content for kernel in triton_kernels(one for one, _ in lists)}
    built = [backend.built[content] for content in kernels if content in backend.built]
    given = [b for b in program.layout.instances if b.kind == "given"]
    return GpuRecord(
        target=backend.target,
        num_kernels=len(kernels),
        num_built=len(built),
        code_bytes=sum(map(len, built)),
        given_bytes=sum(b.num_bytes for b in given),
        arena_bytes=program.plan.peak_bytes,
        outside_bytes=program.outside_bytes - program.workspace_bytes,
        result_bytes=program.result_bytes,
        workspace_bytes=program.workspace_bytes,
        allocating=tuple(dict.fromkeys(program.foreign_launches())),
        prediction=predict(lists, backend.target),
    )

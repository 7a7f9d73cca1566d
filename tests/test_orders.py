"""A program gives the same bits in every order that its dependencies allow, so it has no others.

What a launch depends on is what link says: its operands are written, and whoever else reads memory
that an update takes over has run. If numbers are the same in every such order, nothing else is
needed, and a device may run launches beside one another. Random draws take numbers off one
generator, so those stay in order.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from decoders import GptBlock, gpt
from programs import random_program
from torch import Tensor

import lazyinline
from lazyinline.backend.link.link import FlatProgram, Launch, link
from lazyinline.reuse.ir.leaf import ModalInterpreter
from lazyinline.reuse.ir.operators import may_draw
from lazyinline.reuse.ir.program import Program
from lazyinline.reuse.ir.torch_updates import results_in_place

Pick = Callable[[Sequence[int]], int]
"""Takes the launches that are ready, by number, and returns the one to run next."""


def first_in_first_out(ready: Sequence[int]) -> int:
    return ready[0]


def last_in_first_out(ready: Sequence[int]) -> int:
    return ready[-1]


def at_random(seed: int) -> Pick:
    generator = random.Random(seed)
    return lambda ready: generator.choice(list(ready))


def two_queues(seed: int) -> Pick:
    """Each launch belongs to one of two queues, which take turns as long as both have one ready."""
    turn = [0]

    def pick(ready: Sequence[int]) -> int:
        turn[0] += 1
        mine = [n for n in ready if (n * 7 + seed) % 2 == turn[0] % 2]
        return (mine or ready)[0]

    return pick


def dependencies(flat: FlatProgram) -> list[set[int]]:
    """Returns, for each launch, the launches that end before it begins."""
    writer = {slot: n for n, one in enumerate(flat.launches) for slot in one.results}
    readers: dict[int, set[int]] = {}
    for number, one in enumerate(flat.launches):
        for slot in one.operands:
            readers.setdefault(slot, set()).add(number)
    found = []
    last_draw = None
    for number, one in enumerate(flat.launches):
        needed = {writer[slot] for slot in one.operands if slot in writer}
        for operand in results_in_place(one.leaf):
            needed |= readers[one.operands[operand]] - {number}
        if any(may_draw(node.target) for node in one.leaf.nodes):
            needed |= set() if last_draw is None else {last_draw}
            last_draw = number
        found.append(needed)
    return found


class Scheduler:
    """Runs a linked program, ready launches in the order of a pick or beside one another.

    Args:
        flat: the program.
    """

    def __init__(self, flat: FlatProgram) -> None:
        self._flat = flat
        self._needed = dependencies(flat)
        self.order: list[int] = []

    def run(self, inputs: Sequence[Tensor], pick: Pick) -> list[Tensor]:
        """Runs one launch after the other."""
        slots = dict(zip(self._flat.inputs, inputs, strict=True))
        waiting, done = dict(enumerate(self._needed)), set[int]()
        self.order = []
        while waiting:
            number = pick([n for n, needed in waiting.items() if needed <= done])
            slots.update(_launched(self._flat.launches[number], slots))
            del waiting[number]
            done.add(number)
            self.order.append(number)
        return [slots[slot] for slot in self._flat.outputs]

    def run_in_threads(self, inputs: Sequence[Tensor], num_threads: int) -> list[Tensor]:
        """Runs every launch as soon as it is ready and a thread is free."""
        slots = dict(zip(self._flat.inputs, inputs, strict=True))
        waiting, done = dict(enumerate(self._needed)), set[int]()
        running: dict[Future[Any], int] = {}
        self.order = []
        with ThreadPoolExecutor(num_threads) as pool:
            while waiting or running:
                for number in [n for n, needed in waiting.items() if needed <= done]:
                    del waiting[number]
                    launch = self._flat.launches[number]
                    running[pool.submit(_launched, launch, dict(slots))] = number
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    number = running.pop(future)
                    slots.update(future.result())
                    done.add(number)
                    self.order.append(number)
        return [slots[slot] for slot in self._flat.outputs]


def _launched(launch: Launch, slots: dict[int, Tensor]) -> dict[int, Tensor]:
    results = ModalInterpreter(launch.leaf.module).run_flat([slots[s] for s in launch.operands])
    return dict(zip(launch.results, results, strict=True))


PICKS: dict[str, Pick] = {
    "first in first out": first_in_first_out,
    "last in first out": last_in_first_out,
    "random": at_random(0),
    "random again": at_random(1),
    "two queues": two_queues(0),
}


def inputs_of(flat: FlatProgram) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    types = [flat.slot_types[slot] for slot in flat.inputs]
    return [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in types]


def num_orders_with_same_bits(flat: FlatProgram, inputs: Sequence[Tensor]) -> int:
    """Runs in program order, by each pick, in two and in four threads; counts different orders."""
    scheduler, seen = Scheduler(flat), set()
    torch.manual_seed(0)
    expected = scheduler.run(inputs, first_in_first_out)
    for name, pick in PICKS.items():
        torch.manual_seed(0)
        found = scheduler.run(inputs, pick)
        seen.add(tuple(scheduler.order))
        assert all(map(torch.equal, found, expected)), name
    for num_threads in (2, 4):
        torch.manual_seed(0)
        found = scheduler.run_in_threads(inputs, num_threads)
        assert all(map(torch.equal, found, expected)), num_threads
    return len(seen)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_give_the_same_bits_in_every_order(seed: int) -> None:
    flat = link(random_program(seed))
    assert num_orders_with_same_bits(flat, inputs_of(flat)) >= 1


def step_of() -> tuple[Program, list[Tensor]]:
    """A step with dropout and an optimizer, and what it is run on."""
    sizes: dict[str, Any] = {"hidden": 32, "num_heads": 2, "vocab": 600, "seq": 4, "batch": 4}
    model, args = gpt(num_layers=2, dropout=0.1, **sizes)
    lazyinline.lazy_inline(GptBlock)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = lazyinline.compile_step(model, backend="eager", optimizer=optimizer, micro_batches=2)
    found: list[Program] = []
    step._watch = lambda one, before, after: found.extend(  # type: ignore[method-assign]
        after.programs.values() if one.name == "decompose" else ()
    )
    step(*args)
    entry = step._entries.first
    assert entry is not None
    return found[0], [tensor.clone() for tensor in entry._lease.tensors]


def test_a_step_with_dropout_and_updates_gives_the_same_bits_in_every_order() -> None:
    program, tensors = step_of()
    flat = link(program)
    assert any(one.leaf.name == "adam" for one in flat.launches)
    assert num_orders_with_same_bits(flat, tensors) > 3


def test_an_order_without_the_dependencies_fails() -> None:
    """The check can fail: what reads a slot that nobody has written yet is an error."""
    program, tensors = step_of()
    scheduler = Scheduler(link(program))
    scheduler._needed = [set() for _ in scheduler._needed]
    with pytest.raises(KeyError):
        scheduler.run(tensors, last_in_first_out)

"""Runs the launches of a linked program in any order that their dependencies allow.

What a launch depends on is what link says: its operands are written, and whoever else reads memory
that an update takes over has run. If numbers are the same in every such order, nothing else is
needed, and a device may run launches beside one another. Random draws take numbers off one
generator, so those stay in order.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from lazyinline.backend.link.link import FlatProgram, Launch
from lazyinline.reuse.ir.leaf import ModalInterpreter
from lazyinline.reuse.ir.operators import may_draw
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

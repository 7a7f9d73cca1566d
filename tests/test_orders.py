"""A program gives the same bits in every order that its dependencies allow, so it has no others.

What a launch depends on is what link says: its operands are written, and whoever else reads memory
that an update takes over has run. If numbers are the same in every such order, nothing else is
needed, and a device may run launches beside one another. Random draws take numbers off one
generator, so those stay in order.

Random programs in random orders, planned and run, are in ``test_planned.py``.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from decoders import GptBlock, gpt
from torch import Tensor

import lazyinline
from lazyinline.backend.link.link import FlatProgram, link
from lazyinline.reuse.ir.leaf import ModalInterpreter
from lazyinline.reuse.ir.operators import may_draw
from lazyinline.reuse.ir.program import Program
from lazyinline.reuse.ir.torch_updates import results_in_place

PICKS: list[Callable[[Sequence[int]], int]] = [
    lambda ready: ready[0],
    lambda ready: ready[-1],
    random.Random(0).choice,
    random.Random(1).choice,
]
"""Each takes the launches that are ready, by number, and returns the one to run next."""


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


def run(
    flat: FlatProgram, needed: list[set[int]], inputs: Sequence[Tensor], pick: Any
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Runs launches one after the other, as they are picked; returns results and the order."""
    slots = dict(zip(flat.inputs, inputs, strict=True))
    waiting, order = dict(enumerate(needed)), list[int]()
    torch.manual_seed(0)
    while waiting:
        order.append(pick([n for n, before in waiting.items() if before <= {*order}]))
        del waiting[order[-1]]
        launch = flat.launches[order[-1]]
        operands = [slots[slot] for slot in launch.operands]
        results = ModalInterpreter(launch.leaf.module).run_flat(operands)
        slots.update(zip(launch.results, results, strict=True))
    return [slots[slot] for slot in flat.outputs], tuple(order)


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
    runs = [run(flat, dependencies(flat), tensors, pick) for pick in PICKS]
    for found, _ in runs[1:]:
        assert all(map(torch.equal, found, runs[0][0]))
    assert len({order for _, order in runs}) > 3
    with pytest.raises(KeyError):  # the check can fail: a slot is read that nobody has written yet
        run(flat, [set() for _ in flat.launches], tensors, PICKS[1])

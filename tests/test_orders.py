"""A program gives the same bits in every order that its dependencies allow, so it has no others."""

from collections.abc import Sequence
from typing import Any

import orders
import pytest
import torch
from decoders import GptBlock, gpt
from orders import Pick, Scheduler
from programs import random_program
from torch import Tensor

import lazyinline
from lazyinline.backend.link.link import FlatProgram, link
from lazyinline.reuse.ir.program import Program

PICKS: dict[str, Pick] = {
    "first in first out": orders.first_in_first_out,
    "last in first out": orders.last_in_first_out,
    "random": orders.at_random(0),
    "random again": orders.at_random(1),
    "two queues": orders.two_queues(0),
}


def inputs_of(flat: FlatProgram) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    types = [flat.slot_types[slot] for slot in flat.inputs]
    return [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in types]


def num_orders_with_same_bits(flat: FlatProgram, inputs: Sequence[Tensor]) -> int:
    """Runs in program order, by each pick, in two and in four threads; counts different orders."""
    scheduler, seen = Scheduler(flat), set()
    torch.manual_seed(0)
    expected = scheduler.run(inputs, orders.first_in_first_out)
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
        scheduler.run(tensors, orders.last_in_first_out)

"""A gradient inside a forward goes through whatever was written in place on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import Door, assert_equals_eager, sgd
from models import Made
from torch import Tensor, nn

from lazyinline import lazy_inline

ATOMS, MOLECULES = 4, 2
PLACES = torch.tensor([0, 1, 0, 1])

Write = Callable[[Tensor, Tensor], Any]
"""Writes one number per atom into one per molecule, in place."""


def added(into: Tensor, values: Tensor) -> None:
    into += values.view(2, 2).sum(1)


def item(into: Tensor, values: Tensor) -> None:
    into[0] = values.sum()


def indexed(into: Tensor, values: Tensor) -> None:
    into[PLACES[:2]] = values[:2]


WRITES: dict[str, Write] = {
    "scatter_add_": lambda into, values: into.scatter_add_(0, PLACES, values),
    "scatter_reduce_": lambda into, values: into.scatter_reduce_(0, PLACES, values, "sum"),
    "scatter_": lambda into, values: into.scatter_(0, PLACES[:2], values[:2]),
    "index_add_": lambda into, values: into.index_add_(0, PLACES, values),
    "index_copy_": lambda into, values: into.index_copy_(0, PLACES[:2], values[:2]),
    "index_put_": lambda into, values: into.index_put_((PLACES,), values, accumulate=True),
    "put_": lambda into, values: into.put_(PLACES[:2], values[:2]),
    "masked_fill_": lambda into, values: into.masked_fill_(torch.tensor([True, False]), values[0]),
    "masked_scatter_": lambda into, values: into.masked_scatter_(torch.ones(2).bool(), values),
    "copy_": lambda into, values: into.copy_(values[:2]),
    "add_": lambda into, values: into.add_(values[1:3], alpha=2),
    "sub_": lambda into, values: into.sub_(values[2:]),
    "mul_": lambda into, values: into.add_(1).mul_(values[:2]),
    "div_": lambda into, values: into.add_(1).div_(values[:2] + 3),
    "pow_": lambda into, values: into.add_(2).pow_(values[:2]),
    "addcmul_": lambda into, values: into.addcmul_(values[:2], values[2:]),
    "addmv_": lambda into, values: into.addmv_(values.view(2, 2), values[:2]),
    "lerp_": lambda into, values: into.lerp_(values[:2], 0.25),
    "_foreach_add_": lambda into, values: torch._foreach_add_([into], [values[:2]]),
    "+=": added,
    "[0] =": item,
    "[places] =": indexed,
}

Root = Callable[[Write, Tensor], Tensor]
"""Returns one number per molecule that some numbers per atom were written into."""


def whole(write: Write, values: Tensor) -> Tensor:
    energies = torch.zeros(MOLECULES, dtype=values.dtype)
    write(energies, values)
    return energies


def through_a_view(write: Write, values: Tensor) -> Tensor:
    rows = torch.zeros(3, MOLECULES, dtype=values.dtype)
    write(rows[1], values)
    return rows.sum(0)


def through_a_view_of_what_is_returned(write: Write, values: Tensor) -> Tensor:
    column = torch.zeros(MOLECULES, 1, dtype=values.dtype)
    energies = column[:, 0]
    write(column.view(-1), values)
    return energies


def into_what_moves(write: Write, values: Tensor) -> Tensor:
    energies = values[:2] * 2
    write(energies, values.sin())
    return energies


ROOTS = [whole, through_a_view, through_a_view_of_what_is_returned, into_what_moves]


def take_forces(self: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Energies from a network per atom, and their gradient as packages take it: None is zeros."""
    positions = positions.view_as(positions).requires_grad_()
    values = self.net(positions)[:, 0]
    energies = torch.cat([self.root(write, values) for write in self.writes])
    (forces,) = torch.autograd.grad(
        energies, positions, torch.ones_like(energies), create_graph=True, allow_unused=True
    )
    return energies, torch.zeros_like(positions) if forces is None else forces


def forces_of(root: Root, *writes: Write) -> nn.Module:
    """Returns a model whose energies are written in place, in each of some ways again."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return Made(take_forces, net=net, root=root, writes=writes)


def positions() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(ATOMS, 3, dtype=torch.float64)


@pytest.mark.parametrize("door", ["compile", "step"])
@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.__name__)
@pytest.mark.parametrize("name", ["all", *WRITES])
@pytest.mark.sweep(keep=["[scatter_add_-through_a_view-step", "[all-into_what_moves-compile"])
def test_forces_and_all_gradients_are_eagers(name: str, root: Root, door: Door) -> None:
    model = forces_of(root, *(WRITES.values() if name == "all" else [WRITES[name]]))
    assert model(positions())[1].abs().max() > 1e-3
    options: dict[str, Any] = {} if door == "step" else {"fallback": "error"}
    assert_equals_eager(model, (positions(),), door=door, optimizer=sgd, tolerance=1e-7, **options)


class Writing(nn.Module):
    """A block that writes, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1).double()
        self.register_buffer("kept", torch.zeros(1 + MOLECULES).double())


@lazy_inline
class Adds(Writing):
    """Writes into its argument."""

    def forward(self, into: Tensor, positions: Tensor) -> None:
        into[1:].index_add_(0, PLACES, self.linear(positions).tanh()[:, 0])


@lazy_inline
class Keeps(Writing):
    """Writes into its own buffer."""

    def forward(self, into: Tensor, positions: Tensor) -> None:
        self.kept.zero_()
        self.kept.scatter_add_(0, PLACES, self.linear(positions).tanh()[:, 0])


class Blocks(nn.Module):
    """What blocks write, and its slopes by the positions or by each block's weight."""

    def __init__(self, block: type[nn.Module], by: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.by = nn.ModuleList(block() for _ in range(2)), by

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.view_as(positions).requires_grad_()
        energies, slopes = [], []
        for one in self.blocks:
            into = torch.zeros(1 + MOLECULES, dtype=positions.dtype)
            one(into, positions)
            energies.append(one.kept.clone() if isinstance(one, Keeps) else into)
            assert energies[-1].requires_grad
            moved = positions if self.by == "positions" else one.linear.weight
            slopes += torch.autograd.grad(
                energies[-1].sum(), moved, create_graph=True, allow_unused=True
            )
        return torch.cat(energies), torch.cat([g for g in slopes if g is not None])


@pytest.mark.parametrize("block", [Adds, Keeps])
@pytest.mark.parametrize("by", ["positions", "weight"])
@pytest.mark.sweep(keep=["positions-Adds", "weight-Keeps"])
def test_a_call_on_a_shared_closure_writes_as_python_does(block: type[nn.Module], by: str) -> None:
    model, options = Blocks(block, by), {"calls": 1, "tolerance": 1e-7}
    use = lambda run, x: run(x)  # noqa: E731 - the stride of one row is nobody's
    told = assert_equals_eager(model, (positions(),), use=use, fallback="error", **options).told
    assert [decision.shared for decision in told.decisions] == [False, True]

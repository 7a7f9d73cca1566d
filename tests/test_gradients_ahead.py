"""Gradients that losses keep asking for are computed with the forward: whatever a next one asks."""

import pathlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from comparing import assert_equals_eager
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lazyinline
from lazyinline.backend.kernels import torch_inductor
from lazyinline.frontend.autograd.gradients import Ahead

Model = Callable[..., Any]
Use = Callable[[Model, Tensor, Tensor], list[Tensor]]


class Potential(nn.Module):
    """The energy of each of two structures, of all, beside what it was read from, or of pairs."""

    def __init__(self, result: str = "sum", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.result, self.dropout = result, nn.Dropout(dropout)
        self.embed, self.mix, self.read = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, pos: Tensor, edges: Tensor) -> Any:
        if self.result == "simple":
            return self.read(self.embed(pos[edges[1]] - pos[edges[0]]).tanh()).sum()
        apart = (pos[edges[1]] - pos[edges[0]]).square().sum(-1, keepdim=True)
        x = self.dropout(self.embed(pos).tanh())
        x = x + torch.zeros_like(x).index_add(
            0, edges[0], self.mix(x)[edges[1]] * apart.neg().exp()
        )
        energies = self.read(x.tanh()).squeeze(-1)
        if self.result == "each":
            return energies.new_zeros(2).index_add(0, torch.arange(len(pos)) % 2, energies)
        if self.result == "mean":
            return energies.sum(), energies.sum() / len(pos)
        return (energies.sum(), x) if self.result == "both" else energies.sum()


def data(num_edges: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_edges)
    pos = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    return pos.requires_grad_(), torch.randint(5, (2, num_edges), generator=generator)


def energy(model: Model, pos: Tensor, edges: Tensor) -> Tensor:
    found = model(pos, edges)
    return found[0] if isinstance(found, tuple) else found


def slope_of(of: Tensor, pos: Tensor, **asked: Any) -> Tensor:
    (found,) = torch.autograd.grad(of.sum(), pos, **asked)
    return found


def forces(model: Model, pos: Tensor, edges: Tensor) -> list[Tensor]:
    """Trains on energies and forces."""
    found = energy(model, pos, edges)
    slope = slope_of(found, pos, create_graph=True)
    (found.square().sum() + slope.square().sum()).backward()
    return [found, slope]


def changed(model: Model, pos: Tensor, edges: Tensor) -> list[Tensor]:
    """Changes forces and energy in place before the loss."""
    found = energy(model, pos, edges)
    slope = slope_of(found, pos, create_graph=True).neg_()
    found *= 2
    (found.sum().sin() + slope.square().sum()).backward()
    return [found, slope]


def dynamics(model: Model, pos: Tensor, edges: Tensor) -> list[Tensor]:
    """Wants forces alone."""
    found = energy(model, pos, edges)
    slope = slope_of(found, pos)
    with torch.no_grad():
        pos.sub_(0.1 * slope)
    return [found, slope, pos]


def energies(model: Model, pos: Tensor, edges: Tensor) -> list[Tensor]:
    """Trains on energies alone."""
    found = energy(model, pos, edges)
    found.square().sum().backward()
    return [found]


def alone(model: Model, pos: Tensor, edges: Tensor) -> list[Tensor]:
    """Wants no gradient of energies."""
    return [energy(model, pos, edges)]


def weighted(model: Model, pos: Tensor, edges: Tensor) -> list[Tensor]:
    """Has cotangents that are no ones, which are trained themselves."""
    found = energy(model, pos, edges)
    weight = torch.full_like(found, 3.0, requires_grad=True)
    (slope,) = torch.autograd.grad(found, pos, weight, create_graph=True)
    (found.sum() + slope.square().sum()).backward()
    assert weight.grad is not None
    return [found, slope, weight.grad]


def parameters(model: Model, pos: Tensor, edges: Tensor) -> list[Tensor]:
    """Penalizes the gradient of a parameter."""
    found = energy(model, pos, edges)
    (slope,) = torch.autograd.grad(found.sum(), model.mix.weight, create_graph=True)  # type: ignore[attr-defined]
    (found.sum() + slope.square().sum()).backward()
    return [found, slope]


def hessian(model: Model, pos: Tensor, edges: Tensor) -> list[Tensor]:
    """Wants second derivatives, one by one and in a batch."""
    found = energy(model, pos, edges)
    slope = slope_of(found, pos, create_graph=True)
    one = slope_of(slope[0, 0], pos, retain_graph=True)
    rows = torch.eye(15, dtype=pos.dtype).reshape(15, 5, 3)
    (all_,) = torch.autograd.grad(slope, pos, rows, is_grads_batched=True)
    return [found, slope, one, all_]


def third(model: Model, pos: Tensor, edges: Tensor) -> list[Tensor]:
    """Differentiates forces twice."""
    slope = slope_of(energy(model, pos, edges), pos, create_graph=True)
    curve = slope_of(slope.square(), pos, create_graph=True)
    curve.square().sum().backward()
    return [slope, curve]


def twice(model: Model, pos: Tensor, edges: Tensor) -> list[Tensor]:
    """Asks for the same forces twice, then for all."""
    found = energy(model, pos, edges)
    slopes = [slope_of(found, pos, retain_graph=True) for _ in range(2)]
    found.sum().backward()
    return [found, *slopes]


def checkpointed(model: Model, pos: Tensor, edges: Tensor) -> list[Tensor]:
    """Runs the forward again for its backward, which counts what it saves."""
    found = checkpoint(energy, model, pos, edges, use_reentrant=False)
    slope = slope_of(found, pos)
    return [found, slope]


OTHERS = (checkpointed, changed, dynamics, energies, weighted, parameters, hessian, third, twice)
OTHERS += (alone,)


def assert_as_eager(model: nn.Module, uses: Sequence[Use]) -> None:
    """Compares results and all gradients after each of some uses with those of a twin."""
    batches = [
        (use, *data(0 if number == 7 else number % 5 + 11)) for number, use in enumerate(uses)
    ]
    options: dict[str, Any] = {"optimizer": torch.optim.Adam, "dynamic": True, "tolerance": 1e-11}
    assert_equals_eager(model.double(), batches=batches, use=used, **options)


def used(run: Model, use: Use, pos: Tensor, edges: Tensor) -> list[Tensor]:
    return [result.detach() for result in use(run, pos, edges)]


@pytest.fixture
def num_ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the forwards that ran with gradients."""
    inputs_of: list[Sequence[Tensor]] = []
    run = Ahead.run

    def counted(self: Ahead, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        inputs_of.append(inputs)
        return run(self, inputs)

    monkeypatch.setattr(Ahead, "run", counted)
    return lambda: len(inputs_of)


@pytest.mark.parametrize("result", ["sum", "each", "both"])
@pytest.mark.parametrize("habit", [forces, dynamics])
@pytest.mark.sweep
def test_whatever_a_loss_asks_is_right_after_a_habit(
    habit: Use, result: str, num_ahead: Callable[[], int]
) -> None:
    after = [use for other in OTHERS for use in (habit, habit, habit, other)]
    assert_as_eager(Potential(result), [*after, habit, habit])
    if habit is forces or result != "both":  # another result wants a graph of its own
        assert num_ahead() > len(OTHERS)


# A model, what losses ask for one after another, and how many forwards ran with gradients.
ROWS: dict[str, tuple[dict[str, Any], list[Use], int | None]] = {
    # With that of the energies, which ended it.
    "forces, once two losses asked": ({}, [forces] * 3 + [changed, energies], 3),
    "forces alone": ({"result": "each"}, [dynamics] * 4 + [energies], 3),
    "of what draws": ({"dropout": 0.5}, [forces] * 5 + [energies, parameters, forces], None),
    "nobody asks any more": ({}, [forces] * 2 + [alone] * 12, 9),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.sweep(keep="forces")
def test_forces_are_computed_ahead_as_long_as_losses_ask(
    name: str, num_ahead: Callable[[], int]
) -> None:
    options, uses, number = ROWS[name]
    assert_as_eager(Potential(**options), uses)
    assert number in (None, num_ahead())


SWEPT = [pytest.param(use, marks=pytest.mark.sweep) for use in (dynamics, energies, alone)]


@pytest.mark.parametrize("habit", [forces, *SWEPT])
def test_forward_and_backward_get_kernels_where_a_loss_needs_them(
    habit: Use, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    asked: list[int] = []
    compile_leaves = torch_inductor.compile_leaves

    def counted(modules: Sequence[Any], on_done: Callable[[], None]) -> Any:
        asked.append(len(modules))
        return compile_leaves(modules, on_done)

    monkeypatch.setattr(torch_inductor, "compile_leaves", counted)

    def gradients_of(model: nn.Module, compiled: Model, pos: Tensor, edges: Tensor) -> list[Any]:
        model.zero_grad()
        compiled(pos, edges).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    model, other = Potential("simple").double(), Potential("simple").double()
    late, early = (lazyinline.compile(one, dynamic=True) for one in (model, other))
    expected = gradients_of(other, early, data(11)[0] * 1, data(11)[1])  # computed: no late one
    num_both, asked[:] = sum(asked), []
    sizes = [11 + number for number in range(9 if habit is alone else 2)]
    found = [habit(late, *data(size)) for size in sizes]
    wanted = [habit(Potential("simple").double(), *data(size)) for size in sizes]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    first = sum(asked)
    is_made = habit in (energies, alone)  # by the first loss of parameters, or the ninth forward
    assert first == (num_both if is_made else 0) or habit is forces  # those of a derivative
    lazyinline.save(late, tmp_path / "model.lz")  # a file has all
    assert sum(asked) == first + (0 if is_made else num_both)
    energies(lazyinline.load(tmp_path / "model.lz"), *data(11))
    for num_edges in (11, 17):
        *others, gradients = (gradients_of(model, late, *data(num_edges)) for _ in range(3))
        for other in others:  # of forwards with PyTorch's kernels
            torch.testing.assert_close(other, gradients, rtol=1e-10, atol=1e-12)
        assert num_edges == 17 or all(map(torch.equal, gradients, expected))
    # The first ends the habit, by a program that has forces as well, or by its backward.
    ended = {forces: 1, dynamics: num_both}.get(habit, 0)
    assert sum(asked) == first + (0 if is_made else num_both) + ended


@pytest.mark.parametrize("result", ["both", "mean"])
@pytest.mark.parametrize("habit", [forces, dynamics])
@pytest.mark.sweep(keep="forces-both")
def test_results_get_what_comes_to_them_through_each_other_after_a_habit(
    habit: Use, result: str, num_ahead: Callable[[], int]
) -> None:
    def after(model: Model, pos: Tensor, edges: Tensor, *, also: bool) -> list[Tensor]:
        results = model(pos, edges)
        for one in results:
            one.retain_grad()
        slope = slope_of(results[0], pos, retain_graph=True)
        (results[0].square() + (results[1].sum().sin() if also else 0)).backward()
        return [slope, *(one.grad for one in results if one.grad is not None)]

    uses = [use for also in (False, True) for use in (*[habit] * 3, partial(after, also=also))]
    assert_as_eager(Potential(result), uses)
    assert num_ahead() > 0 or habit is dynamics


def test_parameters_may_be_frozen_between_a_forward_and_its_gradients() -> None:
    def frozen(model: Model, pos: Tensor, edges: Tensor) -> list[Tensor]:
        found = energy(model, pos, edges)
        own: nn.Module = model  # type: ignore[assignment]
        own.requires_grad_(False)
        slope = slope_of(found.sin(), pos, retain_graph=True)
        own.requires_grad_(True)
        found.sum().backward()
        return [found, slope]

    assert_as_eager(Potential("each"), [dynamics, dynamics, dynamics, frozen, dynamics])

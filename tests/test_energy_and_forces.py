"""`func.energy_and_forces`: energy, forces and virial equal PyTorch's and finite differences."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from test_forces import Energy
from torch import Tensor, nn

import lazyinline
from lazyinline import PlanError, func

NUM_ATOMS = 9


class Potential(Energy):
    """The same in cells that repeat; of one structure, or of the one that each atom is in."""

    def forward(
        self,
        numbers: Tensor,
        pos: Tensor,
        edges: Tensor,
        cell: Tensor | None = None,
        shifts: Tensor | None = None,
        structure: Tensor | None = None,
    ) -> Tensor:
        cells = torch.zeros(1, 3, 3) if cell is None else cell.view(-1, 3, 3)
        to = torch.zeros_like(edges[0]) if structure is None else structure[edges[0]]
        over = 0 if shifts is None else (shifts.unsqueeze(1) @ cells[to]).squeeze(1)
        of = torch.zeros_like(numbers) if structure is None else structure
        energies = self.of_edges(numbers, pos[edges[1]] - pos[edges[0]] + over, edges, of)
        return energies.sum() if structure is None else energies


class OfDictionary(nn.Module):
    """Takes a batch as a dictionary, fills it, and returns it, as packages do."""

    def __init__(self, potential: Potential) -> None:
        super().__init__()
        self.potential = potential

    def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        data["energy"] = self.potential(data["numbers"], data["pos"], data["edges"])
        return data


def atoms(seed: int = 0, num_edges: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    """Returns numbers, positions, and edges, some of them twice."""
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randint(3, (NUM_ATOMS,), generator=draw)
    pos = torch.rand(NUM_ATOMS, 3, generator=draw, dtype=torch.float64) * 4
    first = torch.randint(NUM_ATOMS, (num_edges,), generator=draw)
    step = torch.randint(1, NUM_ATOMS, (num_edges,), generator=draw)
    return numbers, pos, torch.stack([first, (first + step) % NUM_ATOMS])


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Potential:
    """A potential of as many layers as a test asks for, or of one."""
    torch.manual_seed(0)
    return Potential(getattr(request, "param", 1)).double()


def forces_of(model: nn.Module, numbers: Tensor, pos: Tensor, edges: Tensor) -> list[Tensor]:
    """Returns energy and forces as one writes them in PyTorch."""
    pos = pos.clone().requires_grad_()
    energy = model(numbers, pos, edges)
    (slope,) = torch.autograd.grad(energy, pos, create_graph=True)
    return [energy, -slope]


@pytest.mark.parametrize("model", [2], indirect=True)
def test_forces_train_as_eager_ones_over_adam_steps(model: Potential) -> None:
    eager = copy.deepcopy(model)
    potential = lazyinline.compile(func.energy_and_forces(model), backend="eager")
    optimizers = [torch.optim.Adam(one.parameters(), 1e-2) for one in (model, eager)]
    for seed in range(3):
        inputs = atoms(seed)
        truth = torch.randn(NUM_ATOMS, 3, dtype=torch.float64)
        results = [list(potential(*inputs))[:2], forces_of(eager, *inputs)]
        for optimizer, (energy, forces) in zip(optimizers, results, strict=True):
            optimizer.zero_grad()
            (energy.square() + (forces - truth).square().mean()).backward()
            optimizer.step()
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    report: Any = lazyinline.last_report(potential)
    assert not report.ran_eagerly
    assert report.num_block_calls == 2


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.sweep(keep="True")
def test_the_virial_is_the_slope_of_the_energy_over_a_strain(
    model: Potential, *, batched: bool
) -> None:
    numbers, pos, edges = atoms()
    shifts = torch.zeros(edges.shape[1], 3, dtype=torch.float64)
    shifts[::2, 0] = 1.0
    cell = torch.eye(3, dtype=torch.float64) * 4
    structure = (torch.arange(NUM_ATOMS) > 4).long() if batched else None
    if structure is not None:
        edges[1] = torch.where(structure[edges[0]] == structure[edges[1]], edges[1], edges[0])
        cell = torch.stack([cell, cell * 1.2])
    name = "structure" if batched else None
    potential = lazyinline.compile(
        func.energy_and_forces(model, strain="cell", batch=name), backend="eager"
    )
    with torch.no_grad():
        found = potential(numbers, pos, edges, cell, shifts, structure)
    assert not found.energy.requires_grad
    assert found.virial.shape == cell.shape
    for row, column in ((0, 0), (0, 1), (2, 1)):
        along = torch.zeros(cell.shape, dtype=torch.float64)
        along[..., row, column] += 0.5
        along[..., column, row] += 0.5
        amount = 1e-5
        ends = []
        for sign in (1, -1):
            by = torch.eye(3, dtype=torch.float64) + sign * amount * along
            rows = pos.unsqueeze(1)
            moved = (rows @ (by if structure is None else by[structure])).squeeze(1)
            with torch.no_grad():
                ends.append(model(numbers, moved, edges, cell @ by, shifts, structure).sum())
        slope = (ends[1] - ends[0]) / (2 * amount)
        entry = found.virial[..., row, column].sum()
        torch.testing.assert_close(entry, slope, rtol=1e-6, atol=1e-9)


def test_a_dictionary_is_taken_by_a_dotted_name_and_is_not_changed(model: Potential) -> None:
    numbers, pos, edges = atoms()
    data = {"numbers": numbers, "pos": pos, "edges": edges}

    def energy(found: Mapping[str, Tensor]) -> Tensor:
        return found["energy"]

    whole = func.energy_and_forces(OfDictionary(model), wrt="data.pos", energy=energy)
    found = lazyinline.compile(whole, backend="eager")(data)
    assert set(data) == {"numbers", "pos", "edges"}
    assert data["pos"] is pos
    assert not pos.requires_grad
    torch.testing.assert_close([*found[:2]], forces_of(model, numbers, pos, edges))


def test_an_input_that_is_not_there_is_named(model: Potential) -> None:
    with pytest.raises(PlanError, match="takes no 'positions', but numbers, pos, edges"):
        func.energy_and_forces(model, "positions")
    with pytest.raises(PlanError, match=r"'pos\.x': pos is no dictionary, but a Tensor"):
        func.energy_and_forces(model, "pos.x")(*atoms())
    with pytest.raises(PlanError, match="has to be a tensor, not NoneType"):
        func.energy_and_forces(model, strain="cell")(*atoms())


def test_an_energy_that_does_not_depend_on_positions_is_an_error_rather_than_zero_forces() -> None:
    class Constant(nn.Linear):
        def forward(self, pos: Tensor) -> Tensor:
            return super().forward(pos.detach()).sum()

    with pytest.raises(PlanError, match="The energy does not depend on pos"):
        func.energy_and_forces(Constant(3, 1))(torch.rand(4, 3))


def test_cells_of_several_structures_want_the_structure_of_each_atom(model: Potential) -> None:
    cells = torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
    with pytest.raises(PlanError, match="'cell' has 2 cells: name the input"):
        func.energy_and_forces(model, strain="cell")(*atoms(), cells)

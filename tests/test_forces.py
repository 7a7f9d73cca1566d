"""Interatomic potentials as their authors write them: energies of graphs, forces, any edges."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from comparing import Door, assert_equals_eager
from torch import Tensor, nn

WIDTH = 8
CUTOFF = 3.0
ATOMS = (4, 3)
EDGES = (13, 17, 11, 7)


def graph(num_edges: int, atoms: Sequence[int] = ATOMS) -> tuple[Tensor, ...]:
    """Returns kinds, positions, edges and molecules of atoms; edges stay in one molecule."""
    generator = torch.Generator().manual_seed(num_edges)
    molecule = torch.repeat_interleave(torch.arange(len(atoms)), torch.tensor(atoms))
    num = len(molecule)
    positions = torch.randn(num, 3, dtype=torch.float64, generator=generator)
    is_pair = (molecule[:, None] == molecule) & ~torch.eye(num, dtype=torch.bool)
    pairs = is_pair.nonzero().T
    chosen = torch.randint(pairs.shape[1], (num_edges,), generator=generator)
    return torch.arange(num) % 3, positions, pairs[:, chosen], molecule


class Interaction(nn.Module):
    """Sums messages of neighbours, filtered by distance, with repeated indices."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(4, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, basis: Tensor, cut: Tensor, edges: Tensor) -> Tensor:
        to, of = edges
        messages = self.inner(x)[of] * self.filter(basis) * cut[:, None]
        return x + self.outer(torch.zeros_like(x).index_add_(0, to, messages)).tanh()


class Energy(nn.Module):
    """A small SchNet: the energy of each molecule."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, WIDTH)
        self.layers = nn.ModuleList(Interaction() for _ in range(2))
        self.read = nn.Linear(WIDTH, 2)
        self.register_buffer("centers", torch.linspace(0, CUTOFF, 4))

    def forward(self, kinds: Tensor, positions: Tensor, edges: Tensor, molecule: Tensor) -> Tensor:
        to, of = edges
        distance = (positions[of] - positions[to]).norm(dim=1)
        basis = torch.exp(-((distance[:, None] - self.centers) ** 2))
        cut = 0.5 * (torch.cos(distance * math.pi / CUTOFF) + 1) * (distance < CUTOFF)
        x = self.embed(kinds)
        for layer in self.layers:
            x = layer(x, basis, cut, edges)
        energies = torch.zeros(len(ATOMS), dtype=x.dtype)
        return energies.index_add_(0, molecule, self.read(x).sum(-1))


class Forces(nn.Module):
    """Takes the forces of an energy in its forward."""

    def __init__(self, want: Callable[[Tensor], Tensor], **asked: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.energy, self.want, self.asked = Energy().double(), want, asked

    def forward(self, kinds: Tensor, positions: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        positions = self.want(positions)
        energy = self.energy(kinds, positions, *rest)
        found = torch.autograd.grad(energy.sum(), positions, create_graph=True, **self.asked)
        return energy, -found[0]


FORCES: dict[str, Callable[[], nn.Module]] = {
    "of a copy": lambda: Forces(lambda x: x.detach().requires_grad_()),
    "of the input": lambda: Forces(lambda x: x.requires_grad_(), allow_unused=True),
}


@pytest.mark.parametrize("door", ["compile", "step"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("way", FORCES)
@pytest.mark.sweep(keep="[of the input-None-step")
def test_forces_of_graphs_of_any_edges_are_compiled_once(
    way: str, dynamic: bool | None, door: Door
) -> None:
    told = assert_equals_eager(
        FORCES[way](),
        batches=[graph(num) for num in EDGES],
        door=door,
        optimizer=torch.optim.Adam,
        dynamic=dynamic,
    ).told
    num_compiles = 1 if dynamic else 2
    assert (told.num_compiles, told.num_links) == (num_compiles, len(EDGES) - num_compiles)

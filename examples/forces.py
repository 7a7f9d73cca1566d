"""A potential learns energies and forces of clusters of atoms, and is drawn beside the truth.

    python examples/forces.py

Forces are a gradient, so a loss of forces differentiates twice: what `torch.compile` refuses.
`energy_and_forces` makes a module of both from a model of the energy alone. Each cluster has
another number of neighbours: sizes are symbols, and one compile is for all of them.

What it prints, and a file `forces.svg` with each component of each force over its true value:

    3 Interaction share one graph; 1 compile(s)
    epoch  10  energy off by 0.070  forces off by 0.189
    ...
    epoch  50  energy off by 0.016  forces off by 0.048
    a step: 1.5 ms compiled, 3.3 ms eager (CPU time)
        forces: learnt (up) over true (right)
        |                            .#.|
        |                          ##.  |
        |                      .#: .    |
    ...
"""

from __future__ import annotations

import argparse
import copy
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import lazyinline
from lazyinline.func import EnergyAndForces, energy_and_forces

CUTOFF = 3.0


class Interaction(nn.Module):
    """Sums messages from neighbours into each atom, filtered by their distance."""

    def __init__(self, width: int, num_radial: int) -> None:
        super().__init__()
        self.filter = nn.Sequential(
            nn.Linear(num_radial, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.send = nn.Linear(width, width, bias=False)
        self.receive = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, atoms: Tensor, radial: Tensor, near: Tensor, edges: Tensor) -> Tensor:
        """Returns new features of the atoms."""
        messages = self.send(atoms)[edges[1]] * self.filter(radial) * near
        received = torch.zeros_like(atoms).index_add(0, edges[0], messages)
        return atoms + self.receive(received)


class Potential(nn.Module):
    """Computes the energy of a cluster, much as SchNet does."""

    def __init__(self, width: int = 32, depth: int = 3, num_radial: int = 16) -> None:
        super().__init__()
        self.kinds = nn.Embedding(2, width)
        self.layers = nn.ModuleList(Interaction(width, num_radial) for _ in range(depth))
        self.energy = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.register_buffer("centers", torch.linspace(0.5, CUTOFF, num_radial))

    def forward(self, kinds: Tensor, pos: Tensor, edges: Tensor) -> Tensor:
        """Returns one number."""
        far = (pos[edges[1]] - pos[edges[0]]).norm(dim=-1, keepdim=True)
        radial = torch.exp(-8 * (far - self.centers) ** 2)
        near = 0.5 * (torch.cos(far * torch.pi / CUTOFF) + 1)
        atoms = self.kinds(kinds)
        for layer in self.layers:
            atoms = layer(atoms, radial, near, edges)
        return self.energy(atoms).sum()


class Truth(nn.Module):
    """The energy to be learnt: a Morse potential of each pair, by the kinds of its atoms."""

    def forward(self, kinds: Tensor, pos: Tensor, edges: Tensor) -> Tensor:
        """Returns one number."""
        far = (pos[edges[1]] - pos[edges[0]]).norm(dim=-1)
        alike = kinds[edges[1]] == kinds[edges[0]]
        bond = torch.where(alike, 1.4, 1.2)
        depth = torch.where(alike, 0.5, 1.0)
        near = 0.5 * (torch.cos(far * torch.pi / CUTOFF) + 1)
        return 0.5 * (depth * ((1 - torch.exp(-1.5 * (far - bond))) ** 2 - 1) * near).sum()


@dataclass(frozen=True)
class Cluster:
    """Holds some atoms and the truth about them."""

    inputs: tuple[Tensor, Tensor, Tensor]
    truth: EnergyAndForces


def cluster(num_atoms: int, draw: torch.Generator) -> Cluster:
    """Draws atoms on a grid, jittered."""
    side = torch.arange(3.0) * 1.3
    places = torch.cartesian_prod(side, side, side)[torch.randperm(27, generator=draw)]
    pos = places[:num_atoms] + 0.2 * torch.randn(num_atoms, 3, generator=draw)
    kinds = torch.randint(2, (num_atoms,), generator=draw)
    far = torch.cdist(pos, pos).fill_diagonal_(torch.inf)
    inputs = kinds, pos, (far < CUTOFF).nonzero().T.contiguous()
    pos = pos.clone().requires_grad_()
    energy = Truth()(kinds, pos, inputs[2])
    (slope,) = torch.autograd.grad(energy, pos)
    return Cluster(inputs, EnergyAndForces(energy.detach(), -slope, None))


Step = Callable[[Cluster], Tensor]


def step_of(potential: nn.Module) -> Step:
    """Returns a training step: what is written here is the same for every way to run it."""
    optimizer = torch.optim.Adam(potential.parameters(), lr=2e-3, fused=True)

    def step(one: Cluster) -> Tensor:
        found = potential(*one.inputs)
        off = (found.energy - one.truth.energy) / len(one.inputs[0])
        loss = off.square() + (found.forces - one.truth.forces).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class Plain(nn.Module):
    """Energy and forces as they are written in PyTorch, for comparison."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, kinds: Tensor, pos: Tensor, edges: Tensor) -> EnergyAndForces:
        """Returns both."""
        pos = pos.detach().requires_grad_()
        energy = self.model(kinds, pos, edges)
        (slope,) = torch.autograd.grad(energy, pos, create_graph=True)
        return EnergyAndForces(energy, -slope, None)


@torch.no_grad()
def errors(potential: nn.Module, clusters: Sequence[Cluster]) -> tuple[float, float]:
    """Returns how far energies per atom and forces are off, on average."""
    found = [(potential(*one.inputs), one) for one in clusters]
    energy = [float((f.energy - c.truth.energy).abs()) / len(c.inputs[0]) for f, c in found]
    forces = [float((f.forces - c.truth.forces).abs().mean()) for f, c in found]
    return statistics.fmean(energy), statistics.fmean(forces)


def cpu_ms(step: Step, clusters: Sequence[Cluster], rounds: int = 5) -> float:
    """Returns CPU milliseconds of a step whose sizes have come before."""
    took = []
    for _ in range(rounds):
        begun = time.process_time()
        for one in clusters:
            step(one)
        took.append(time.process_time() - begun)
    return 1e3 * min(took) / len(clusters)


@torch.no_grad()
def draw(potential: nn.Module, clusters: Sequence[Cluster], path: str) -> None:
    """Draws the components of all forces over their true values, as text and into a file."""
    found = torch.cat([potential(*one.inputs).forces.flatten() for one in clusters])
    true = torch.cat([one.truth.forces.flatten() for one in clusters])
    reach = float(true.abs().quantile(0.98))
    inside = true.abs() < reach
    x, y = ((v[inside] / reach).clamp(-1, 1) for v in (true, found))
    rows, columns = 11, 31
    places = ((1 - y) / 2 * (rows - 1)).round() * columns + ((x + 1) / 2 * (columns - 1)).round()
    counts = torch.bincount(places.long(), minlength=rows * columns).reshape(rows, columns)
    print("    forces: learnt (up) over true (right)")
    for row in counts.tolist():
        print("    |" + "".join(" .:*#"[min(n, 4)] for n in row) + "|")
    size = 300
    dots = "".join(
        f'<circle cx="{size * (1 + a) / 2:.1f}" cy="{size * (1 - b) / 2:.1f}" r="1.5"/>'
        for a, b in zip(x.tolist(), y.tolist(), strict=True)
    )
    pathlib.Path(path).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" fill="steelblue">'
        f'<line x1="0" y1="{size}" x2="{size}" y2="0" stroke="gray"/>{dots}</svg>'
    )
    print(f"wrote {path}")


def main() -> None:
    """Trains, prints, compares and draws."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--clusters", type=int, default=20)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--svg", default="forces.svg")
    options = parser.parse_args()
    random = torch.Generator().manual_seed(0)
    clusters = [cluster(12 + n % 9, random) for n in range(options.clusters)]
    held_out, training = clusters[: len(clusters) // 4], clusters[len(clusters) // 4 :]

    torch.manual_seed(0)
    model = Potential()
    eager = Plain(copy.deepcopy(model))
    potential = lazyinline.compile(energy_and_forces(model), dynamic=True, backend=options.backend)
    step = step_of(potential)
    for epoch in range(1, options.epochs + 1):
        for one in training:
            step(one)
        if epoch == 1:
            report = lazyinline.last_report(potential)
            assert report is not None
            print(f"{report.headline().partition(':')[0]}; {report.num_compiles} compile(s)")
        if epoch % max(options.epochs // 5, 1) == 0:
            energy, forces = errors(potential, held_out)
            print(f"epoch {epoch:>3}  energy off by {energy:.3f}  forces off by {forces:.3f}")
    ours, theirs = cpu_ms(step, training), cpu_ms(step_of(eager), training)
    print(f"a step: {ours:.1f} ms compiled, {theirs:.1f} ms eager (CPU time)")
    draw(potential, held_out, options.svg)


if __name__ == "__main__":
    main()

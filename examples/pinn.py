"""A network learns the solution of the Laplace equation, and is drawn beside it.

    python examples/pinn.py

The loss holds second derivatives by `lazyinline.func.laplacian`, and training differentiates once
more; all of it is one program. Nobody marks anything: equal layers are found, and compiled once.

What it prints, and a file `pinn.svg` with the solution, the network and their difference:

    compiled: 39 nodes held, 35 if inlined; equation and boundary as one program
    step   200  loss 6.18e-01  off by 28.21 percent
    ...
    step  2000  loss 1.56e-03  off by 0.48 percent
        exact                     network
         .:=+*##%%@@@@%%##*+=:.    .:=+*##%%@@@@%%##*+=:.
         .:-==+***####***+==-:.    .:-==+***####***+==-:.
    ...
"""

from __future__ import annotations

import argparse
import math
import pathlib

import torch
from torch import Tensor, nn

import lazyinline
from lazyinline.func import laplacian

SHADES = " .:-=+*#%@"


def exact(points: Tensor) -> Tensor:
    """The solution on the unit square: zero on three sides, a half wave on the fourth."""
    x, y = points.unbind(-1)
    return torch.sin(math.pi * x) * torch.sinh(math.pi * y) / math.sinh(math.pi)


class Loss(nn.Module):
    """How far a network is from solving the equation inside, and from its values on the edge."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, inside: Tensor, edge: Tensor, values: Tensor) -> Tensor:
        """Returns the loss."""
        equation = laplacian(self.net)(inside)
        return equation.square().mean() + 50 * (self.net(edge)[:, 0] - values).square().mean()


def edge_points(num: int) -> Tensor:
    """Points on the four sides of the square."""
    along, zeros, ones = torch.rand(num), torch.zeros(num), torch.ones(num)
    sides = [(along, zeros), (along, ones), (zeros, along), (ones, along)]
    return torch.cat([torch.stack(side, -1) for side in sides])


def grid(num: int) -> Tensor:
    """Points in rows from the top down."""
    line = torch.linspace(0, 1, num)
    return torch.cartesian_prod(line.flip(0), line).flip(-1)


def error_percent(net: nn.Module) -> float:
    """How far the network is from the solution, in percent of its size."""
    points = grid(40)
    with torch.no_grad():
        found, wanted = net(points)[:, 0], exact(points)
    return float(100 * (found - wanted).norm() / wanted.norm())


def text_of(values: Tensor, rows: int, columns: int) -> list[str]:
    """Draws numbers between 0 and 1 as characters."""
    places = (values.clamp(0, 1) * (len(SHADES) - 1)).round().int().reshape(rows, columns)
    return ["".join(SHADES[place] for place in row) for row in places.tolist()]


def svg_of(panels: dict[str, Tensor], num: int) -> str:
    """Draws squares of numbers side by side, each from its least to its largest."""
    size, gap = 220, 30
    shapes = []
    for index, (name, values) in enumerate(panels.items()):
        left, step = index * (size + gap), size / num
        low, high = float(values.min()), float(values.max())
        scaled = ((values - low) / max(high - low, 1e-12)).reshape(num, num).tolist()
        shapes.append(f'<text x="{left}" y="14">{name}: {low:.2g} to {high:.2g}</text>')
        for row, line in enumerate(scaled):
            for column, value in enumerate(line):
                color = f"rgb({int(255 * value)},{int(90 + 60 * value)},{int(200 - 160 * value)})"
                shapes.append(
                    f'<rect x="{left + column * step:.2f}" y="{24 + row * step:.2f}" '
                    f'width="{step + 0.3:.2f}" height="{step + 0.3:.2f}" fill="{color}"/>'
                )
    width = len(panels) * (size + gap)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{size + 40}" '
        f'font-family="sans-serif" font-size="12">{"".join(shapes)}</svg>'
    )


def train(model: Loss, compiled: nn.Module, steps: int) -> None:
    """Takes some steps; prints ten lines on the way."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(1, steps + 1):
        inside, edge = torch.rand(512, 2), edge_points(32)
        loss = compiled(inside, edge, exact(edge))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step == 1:
            report = compiled.last_report
            print(
                f"compiled: {report.num_nodes} nodes held, {report.num_nodes_if_inlined} if "
                "inlined; equation and boundary as one program"
            )
        if step % max(steps // 10, 1) == 0:
            off = error_percent(model.net)
            print(f"step {step:>5}  loss {loss.item():.2e}  off by {off:.2f} percent")


@torch.no_grad()
def draw(net: nn.Module, svg: str) -> None:
    """Draws the solution beside the network, as text and into a file."""
    points = torch.cartesian_prod(torch.linspace(1, 0, 12), torch.linspace(0, 1, 24)).flip(-1)
    pictures = text_of(exact(points), 12, 24), text_of(net(points)[:, 0], 12, 24)
    print(f"    {'exact':<26}network")
    for left, right in zip(*pictures, strict=True):
        print(f"    {left}  {right}")
    points = grid(48)
    found = net(points)[:, 0]
    panels = {"exact": exact(points), "network": found, "difference": found - exact(points)}
    pathlib.Path(svg).write_text(svg_of(panels, 48))
    print(f"wrote {svg}")


def main() -> None:
    """Trains, prints and draws."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--svg", default="pinn.svg")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Loss(options.width, options.depth)
    train(model, lazyinline.compile(model, backend=options.backend), options.steps)
    draw(model.net, options.svg)


if __name__ == "__main__":
    main()

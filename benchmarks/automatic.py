"""What ``reuse="auto"`` costs where it finds nothing more than others; prints a table.

Models in which nothing repeats are compiled with ``reuse="off"`` beside it, a deep model whose
layers are marked with ``reuse="marked"``.

    python benchmarks/automatic.py

Compile CPU-seconds of a training step, both ways in turn in one process; the median of the ratios
of neighbouring rounds is what counts. Kernels are PyTorch's own, so that the part that differs
(capture) is the largest part it can be.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import lazyinline
from lazyinline.frontend.capture.blocks import Reuse

WIDTHS = (32, 48, 40, 56, 24, 72, 64, 80, 16, 88, 96, 8, 104, 112, 120, 128)


def mlp() -> tuple[nn.Module, Tensor]:
    """Layers of one class, each of another width."""
    layers = [
        nn.Sequential(nn.LayerNorm(a), nn.Linear(a, b), nn.GELU(), nn.Linear(b, b))
        for a, b in itertools.pairwise(WIDTHS)
    ]
    return nn.Sequential(*layers), torch.randn(4, WIDTHS[0])


class Residual(nn.Module):
    """A block of a convolutional network, wider than what it gets."""

    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(width, wider, 3, padding=1)
        self.b = nn.Conv2d(wider, wider, 3, padding=1)
        self.skip = nn.Conv2d(width, wider, 1)
        self.norms = nn.ModuleList([nn.GroupNorm(1, wider), nn.GroupNorm(1, wider)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](self.a(x)).relu()
        return (self.skip(x) + self.norms[1](self.b(h))).relu()


def convolutional() -> tuple[nn.Module, Tensor]:
    """Residual blocks, each wider than the one before."""
    widths = range(3, 19)
    blocks = [Residual(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*blocks), torch.randn(2, 3, 8, 8)


class Norm(nn.Module):
    """A norm as transformers write it: too small to share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Gated(nn.Module):
    """A feed-forward part of a width of its own, between norms that are all alike."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.before, self.after = Norm(width), Norm(width)
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        return x + self.after(self.down(nn.functional.silu(self.gate(h)) * self.up(h)))


def gated() -> tuple[nn.Module, Tensor]:
    """Layers that differ, of small parts that repeat."""
    return nn.Sequential(*(Gated(32, inner) for inner in WIDTHS)), torch.randn(4, 32)


@lazyinline.lazy_inline
class Layer(nn.Module):
    """A decoder's layer, marked."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixer, self.feed = Gated(width, 2 * width), Gated(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.mixer(x).softmax(-1) * x)


def marked() -> tuple[nn.Module, Tensor]:
    """32 equal layers, marked."""
    return nn.Sequential(*(Layer(32) for _ in range(32))), torch.randn(4, 32)


Build = Callable[[], tuple[nn.Module, Tensor]]

MODELS: dict[str, tuple[Build, Reuse]] = {
    "MLP of different widths": (mlp, "off"),
    "ResNet-like, each block wider": (convolutional, "off"),
    "different layers of small equal parts": (gated, "off"),
    "32 marked layers": (marked, "marked"),
}


def compile_cpu_s(model: nn.Module, x: Tensor, reuse: Reuse) -> float:
    """Returns the CPU-seconds of one compile for training."""
    compiled = lazyinline.compile(model, reuse=reuse, backend="eager")
    compiled(x)
    return compiled.last_report.cpu_s


def ratios(model: nn.Module, x: Tensor, against: Reuse, rounds: int) -> Sequence[float]:
    """Returns auto / against for each round; who goes first changes from round to round."""
    found = []
    order: tuple[Reuse, Reuse] = ("auto", against)
    for _ in range(rounds):
        seconds = {reuse: compile_cpu_s(model, x, reuse) for reuse in order}
        found.append(seconds["auto"] / seconds[against])
        order = (order[1], order[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    print("| model | against | compile: median | smallest | largest |\n|---|---|---|---|---|")
    for name, (build, against) in MODELS.items():
        model, x = build()
        compile_cpu_s(model, x, against)  # imports and first uses
        found = ratios(model, x, against, options.rounds)
        numbers = (statistics.median(found), min(found), max(found))
        print(f"| {name} | {against} | {' | '.join(f'{n:.3f}' for n in numbers)} |", flush=True)


if __name__ == "__main__":
    main()

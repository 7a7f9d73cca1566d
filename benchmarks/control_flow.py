"""Loops and branches: gradients beside ``torch.compile``'s, steps and compiles by length.

``python benchmarks/control_flow.py`` prints, for a scanned recurrent layer and for two scans in a
chain (the cases of pytorch#153679), the largest relative error of a gradient against the same loop
in plain Python, and milliseconds of a training step; then CPU seconds of a first step by length.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan

import lazyinline

HIDDEN, ROWS = 64, 4


def looped(step: Any, carried: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
    """Does what ``scan`` does, in plain Python."""
    rows = []
    for x in xs:
        carried, row = step(carried, x)
        rows.append(row)
    return carried, torch.stack(rows)


class Recurrent(nn.Module):
    """A recurrent layer; ``scan`` is PyTorch's, or the loop above."""

    scan: Any = staticmethod(scan)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def step(self, carried: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        carried = torch.tanh(self.a(x) + self.b(carried))
        return carried, carried.clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.scan(self.step, x.new_zeros(x.shape[1:]), x)[1]  # type: ignore[no-any-return]


class Chained(Recurrent):
    """A scan over what another one gives."""

    def forward(self, x: Tensor) -> Tensor:
        carried, rows = self.scan(self.step, x.new_zeros(x.shape[1:]), x)
        return self.scan(lambda h, r: (h * r, h + r), carried, rows)[1]  # type: ignore[no-any-return]


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


def milliseconds(run: Callable[[], Any], rounds: int) -> float:
    """Returns the least of some rounds."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times) * 1e3


def backward_of(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Any]:
    """Returns a training step of what autograd follows."""

    def step() -> None:
        model.zero_grad()
        loss(run(x)).backward()

    return step


def error(model: nn.Module, expected: nn.Module) -> float:
    """Returns the largest relative error of a gradient."""
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(((p.grad - q.grad).norm() / q.grad.norm()).item() for p, q in pairs)


def compare(kind: type[Recurrent], steps: int) -> None:
    """Prints a table of one model."""
    torch.manual_seed(0)
    plain = kind()
    x = torch.randn(steps, ROWS, HIDDEN)
    models = {name: copy.deepcopy(plain) for name in ("eager scan", "torch.compile", "lazyinline")}
    plain.scan = looped
    step = lazyinline.compile_step(models["lazyinline"], loss_fn=loss)
    runs = {
        "plain Python": backward_of(plain, plain, x),
        "eager scan": backward_of(models["eager scan"], models["eager scan"], x),
        "torch.compile": backward_of(
            models["torch.compile"], torch.compile(models["torch.compile"]), x
        ),
        "lazyinline": lambda: step(x),
    }
    print(f"{kind.__name__}, {steps} steps, hidden {HIDDEN}")
    runs["plain Python"]()
    for name, run in runs.items():
        try:
            run()
        except Exception as refused:
            print(f"  {name:<14} {type(refused).__name__}: {str(refused).splitlines()[0][:70]}")
            continue
        far = error(models[name], plain) if name in models else 0.0
        print(f"  {name:<14} gradient error {far:.1e}   step {milliseconds(run, 5):9.2f} ms")


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=256)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    for kind in (Recurrent, Chained):
        compare(kind, steps)
    for length in (16, 256, 1024):
        model = Recurrent()
        begun = time.process_time()
        lazyinline.compile_step(model, loss_fn=loss)(torch.randn(length, ROWS, HIDDEN))
        print(f"first step of {length:>4} steps: {time.process_time() - begun:.2f} CPU s")


if __name__ == "__main__":
    main()

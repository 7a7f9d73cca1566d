"""Derivatives inside a loss: networks trained to solve equations, compiled beside eager.

    python benchmarks/derivatives.py
    python benchmarks/derivatives.py --cases "laplace 5 50" "beam 4 32" --rounds 10

Two problems, each a training step (loss and every gradient): the Laplace equation on 100 x 100
points, ``u_xx + u_yy`` with values on the boundary, and a beam on 1,000 points, ``u_xxxx``. A case
is a problem, the depth and the width of a tanh network. The sides:

    eager       `torch.autograd.grad` over and over (reverse over reverse)
    traced      the same, traced whole by `make_fx` and compiled by TorchInductor
    reverse     the same model through `lazyinline.compile`
    ours        `lazyinline.func.laplacian` and `derivative`, compiled

``step`` is in CPU milliseconds, minima over rounds in which the sides take turns, one thread.
``first`` is the first call in a process of its own with empty caches, in CPU-seconds with those of
the C++ compiler; imports are not counted. ``error`` is the largest difference of a gradient from
eager's in float64, relative to the largest number in it. With JAX installed, a step of the same
network under `jax.jit` (reverse over reverse) is one more side.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ["LAZYINLINE_CACHE"] = "0"

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import lazyinline
from lazyinline import func

CASES = ("laplace 5 50", "laplace 5 256", "laplace 9 20", "beam 4 32")
SIDES = ("eager", "traced", "reverse", "ours")


def network(num_inputs: int, depth: int, width: int) -> nn.Sequential:
    """Returns a fully connected network with so many hidden layers."""
    layers: list[nn.Module] = [nn.Linear(num_inputs, width), nn.Tanh()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def slope(u: Tensor, x: Tensor) -> Tensor:
    """Returns the derivatives of each point's number by its coordinates."""
    (found,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return found


class Laplace(nn.Module):
    """The residual of the Laplace equation, and of the values on the boundary."""

    def __init__(self, depth: int, width: int, *, by_reverse: bool) -> None:
        super().__init__()
        self.net = network(2, depth, width)
        self.by_reverse = by_reverse

    def forward(self, points: Tensor, edge: Tensor, values: Tensor) -> Tensor:
        """Returns the loss."""
        if self.by_reverse:
            x = points.view_as(points).requires_grad_()
            first = slope(self.net(x), x)
            total = slope(first[:, 0], x)[:, 0] + slope(first[:, 1], x)[:, 1]
        else:
            total = func.laplacian(self.net)(points)[:, 0]
        return total.square().mean() + (self.net(edge)[:, 0] - values).square().mean()


class Beam(nn.Module):
    """The residual of the Euler-Bernoulli beam, and of where it is held."""

    def __init__(self, depth: int, width: int, *, by_reverse: bool) -> None:
        super().__init__()
        self.net = network(1, depth, width)
        self.by_reverse = by_reverse

    def forward(self, points: Tensor, edge: Tensor, values: Tensor) -> Tensor:
        """Returns the loss."""
        if self.by_reverse:
            x = points.view_as(points).requires_grad_()
            bent = self.net(x)
            for _ in range(4):
                bent = slope(bent, x)
        else:
            bent = func.derivative(self.net, points, "xxxx")
        return (bent[:, 0] - 1).square().mean() + (self.net(edge)[:, 0] - values).square().mean()


def model_of(case: str, *, by_reverse: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Returns the model of a case, and what it is called with."""
    problem, depth, width = case.split()
    torch.manual_seed(0)
    kind, num_points, num = (Laplace, 10000, 2) if problem == "laplace" else (Beam, 1000, 1)
    edge = torch.rand(400, num)
    args = torch.rand(num_points, num), edge, edge[:, 0].sin()
    torch.manual_seed(1)
    return kind(int(depth), int(width), by_reverse=by_reverse), args


def step_of(side: str, case: str) -> Callable[[], list[Tensor]]:
    """Returns what runs one step of a side: the loss, and every gradient."""
    model, args = model_of(case, by_reverse=side != "ours")
    if side == "traced":
        return traced(model, args)
    called = model if side == "eager" else lazyinline.compile(model, fallback="error")

    def step() -> list[Tensor]:
        for parameter in model.parameters():
            parameter.grad = None
        loss = called(*args)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    return step


def traced(model: nn.Module, args: tuple[Tensor, ...]) -> Callable[[], list[Tensor]]:
    """Returns a step that `make_fx` traced whole and TorchInductor compiled."""
    names, given = zip(*model.named_parameters(), strict=True)
    parameters = [p.detach().requires_grad_() for p in given]

    def whole(parameters: list[Tensor], *args: Tensor) -> list[Tensor]:
        state = dict(zip(names, parameters, strict=True))
        loss = functional_call(model, state, args)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [loss, *(g for g in found if g is not None)]

    compiled: list[Any] = []

    def step() -> list[Tensor]:
        if not compiled:
            graph = make_fx(whole, tracing_mode="fake")(parameters, *args)
            flat = [p.detach() for p in parameters]
            compiled.append(torch._inductor.compile(graph, [flat, *args]))
        found: list[Tensor] = compiled[0]([p.detach() for p in parameters], *args)
        return found

    return step


def jax_step_of(case: str) -> Callable[[], Any]:
    """Returns a step of the same network under `jax.jit`.

    Raises:
        ImportError: without JAX.
    """
    import jax
    import jax.numpy as np

    model, args = model_of(case, by_reverse=True)
    given = [p.detach().numpy() for p in model.parameters()]
    points, edge, values = (np.asarray(a.numpy()) for a in args)

    def net(parameters: Any, x: Any) -> Any:
        for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
            x = np.tanh(weight @ x + bias)
        return (parameters[-2] @ x + parameters[-1])[0]

    def residual(parameters: Any, x: Any) -> Any:
        if case.startswith("laplace"):
            return np.trace(jax.hessian(net, argnums=1)(parameters, x))
        bent = lambda s: net(parameters, s[None])  # noqa: E731
        for _ in range(4):
            bent = jax.grad(bent)
        return bent(x[0]) - 1

    def loss(parameters: Any) -> Any:
        inside = jax.vmap(lambda x: residual(parameters, x))(points)
        outside = jax.vmap(lambda x: net(parameters, x))(edge) - values
        return (inside**2).mean() + (outside**2).mean()

    compiled = jax.jit(jax.value_and_grad(loss))
    return lambda: jax.block_until_ready(compiled(given))


def cpu_seconds(function: Callable[[], Any]) -> float:
    """Runs a function and returns what it took, with the processes that it started."""
    before = os.times()
    function()
    after = os.times()
    return sum(after[:4]) - sum(before[:4])


def first_call(side: str, case: str) -> float:
    """Returns the CPU-seconds of a first call in a process of its own, with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, __file__, "--first", side, "--cases", case]
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, check=True
        )
    return float(done.stdout.split()[-1])


def errors_of(case: str) -> float:
    """Returns the largest difference between ours and eager in float64, relative."""
    found = []
    for by_reverse in (False, True):
        model, args = model_of(case, by_reverse=by_reverse)
        model, args = model.double(), tuple(a[:50].double() for a in args)
        called = model if by_reverse else lazyinline.compile(model, fallback="error")
        called(*args).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*found, strict=True))


def main() -> None:
    """Prints a row for each case and side."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--first", choices=(*SIDES, "jax"), help=argparse.SUPPRESS)
    parser.add_argument("--no-first", action="store_true", help="leave the first calls out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.first:
        step = step_of(options.first, options.cases[0])
        print(cpu_seconds(step))
        return
    print(f"torch {torch.__version__}, one thread, {options.rounds} rounds")
    print(f"{'case':<16}{'side':<10}{'step ms':>9}{'/ eager':>9}{'first s':>9}{'/ traced':>9}")
    for case in options.cases:
        steps = {side: step_of(side, case) for side in options.sides}
        with contextlib.suppress(ImportError):
            steps["jax"] = jax_step_of(case)
        for step in steps.values():
            step()
        best: dict[str, float] = {}
        for _ in range(options.rounds):
            for side, step in steps.items():
                begun = time.process_time()
                step()
                seconds = time.process_time() - begun
                best[side] = min(best.get(side, seconds), seconds)
        sides = () if options.no_first else options.sides
        firsts = {side: first_call(side, case) for side in sides}
        for side in steps:
            row = f"{case:<16}{side:<10}{best[side] * 1e3:>9.1f}{best[side] / best['eager']:>9.2f}"
            if side in firsts:
                row += f"{firsts[side]:>9.1f}"
            if side in firsts and "traced" in firsts:
                row += f"{firsts[side] / firsts['traced']:>9.2f}"
            print(row, flush=True)
        print(f"{case:<16}{'error':<10}{errors_of(case):>9.1e}", flush=True)


if __name__ == "__main__":
    main()

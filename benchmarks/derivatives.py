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

    jax ...     the same network under `jax.jit`, where JAX is installed, in each of its ways to a
                derivative (:mod:`jax_forms`); the last row is the best of them

``step`` is in CPU milliseconds, minima over rounds in which the sides take turns, one thread;
``wall`` is the same step by the clock: more than ``step`` where the machine does other work beside,
less where a side had a second thread. ``first`` is the first call in a process of its own with
empty caches, in CPU-seconds with those of the C++ compiler; imports are not counted. ``ours /`` is
ours over that side's, and in brackets what is asked. ``differs`` is how far loss and gradients are
from ours in float32: the largest of the tensors' relative norms. The last line of a case is the
same of ours beside eager in float64, for the gradients of the equation alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax_forms
import numpy
import torch
from jax_forms import Turn
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import lazyinline
from lazyinline import func

CASES = ("laplace 5 50", "laplace 5 256", "laplace 9 20", "beam 4 32")
SIDES = ("eager", "traced", "reverse", "ours")
BEST_JAX = "jax, best"
# Ours over a side's, at most: steps of each problem, and first calls.
STEP_ASKED = {
    "laplace": {"eager": 0.65, "traced": 0.85, BEST_JAX: 0.6},
    "beam": {"eager": 0.3},
}
FIRST_ASKED = {"laplace": {"traced": 0.3}}


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


def timed(step: Callable[[], list[Tensor]]) -> Turn:
    """Runs a step once."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    found = step()
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return Turn(cpu_s, wall_s, [f.detach().numpy().copy() for f in found])


@contextlib.contextmanager
def jax_turns(case: str) -> Iterator[dict[str, Callable[[], Turn]]]:
    """Yields what runs a step of each form of JAX, in a process that waits between the turns."""
    if importlib.util.find_spec("jax") is None:
        yield {}
        return
    model, args = model_of(case, by_reverse=True)
    problem = jax_forms.Problem(
        case.split()[0],
        [p.detach().numpy() for p in model.parameters()],
        [a.numpy() for a in args],
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=jax_forms.serve, args=(theirs, problem), daemon=True)
    process.start()
    theirs.close()

    def turn(form: str) -> Turn:
        ours.send(form)
        found: Turn = ours.recv()
        return found

    try:
        yield {f"jax {form}": lambda form=form: turn(form) for form in jax_forms.FORMS}
    finally:
        ours.close()
        process.join()


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


def error_of(case: str) -> float:
    """Returns the largest relative difference of a gradient, ours from eager's, in float64.

    The values on the boundary are the network's own. That term then has no gradient, which would
    hide an error in the equation's.
    """
    found = []
    for by_reverse in (False, True):
        model, args = model_of(case, by_reverse=by_reverse)
        points, edge, _ = (a[:50].double() for a in args)
        values = model.double().net(edge)[:, 0].detach()
        called = model if by_reverse else lazyinline.compile(model, fallback="error")
        called(points, edge, values).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    whole = sum(b.square().sum() for b in found[1]).sqrt()
    return max(
        # A bias that the equation does not know has a gradient of rounding errors alone.
        ((a - b).norm() / (b.norm() if b.norm() > 1e-9 * whole else whole)).item()
        for a, b in zip(*found, strict=True)
    )


def difference(found: Turn, wanted: Turn) -> float:
    """Returns the largest relative norm of a tensor's difference."""
    norm = numpy.linalg.norm
    pairs = zip(found.found, wanted.found, strict=True)
    return max(float(norm(f - w) / norm(w)) for f, w in pairs)


def best_turns(turns: Mapping[str, Callable[[], Turn]], num_rounds: int) -> dict[str, Turn]:
    """Returns the step of each side that took the least CPU time, the sides in turns."""
    best: dict[str, Turn] = {}
    for number in range(num_rounds + 1):
        for side, turn in turns.items():
            done = turn()
            if number and (side not in best or done.cpu_s < best[side].cpu_s):
                best[side] = done
    by_jax = [turn for side, turn in best.items() if side.startswith("jax ")]
    return best | ({BEST_JAX: min(by_jax, key=lambda turn: turn.cpu_s)} if by_jax else {})


def ratio(ours: float, other: float, asked: float | None) -> str:
    """Returns ours over another number, with the most that is asked."""
    return f"{ours / other:.2f}" + ("" if asked is None else f" ({asked})")


def rows(case: str, sides: Sequence[str], num_rounds: int, *, with_first: bool) -> Iterator[str]:
    """Measures a case; yields a row for each side."""
    problem = case.split()[0]
    with jax_turns(case) as by_jax:
        steps = {side: step_of(side, case) for side in sides}
        best = best_turns(
            {s: lambda step=step: timed(step) for s, step in steps.items()} | by_jax, num_rounds
        )
    firsts = {side: first_call(side, case) for side in sides} if with_first else {}
    ours = best["ours"]
    for side, turn in best.items():
        asked = STEP_ASKED[problem].get(side)
        row = f"{case:<15}{side:<17}{turn.cpu_s * 1e3:>9.1f}{turn.wall_s * 1e3:>9.1f}"
        row += f"{ratio(ours.cpu_s, turn.cpu_s, asked):>13}{difference(turn, ours):>9.0e}"
        if side in firsts:
            asked = FIRST_ASKED.get(problem, {}).get(side)
            row += f"{firsts[side]:>9.1f}{ratio(firsts['ours'], firsts[side], asked):>12}"
        yield row
    if not by_jax:
        yield f"{case:<15}{'jax':<17}{'not installed':>18}"
    yield f"{case:<15}float64: ours differs from eager by {error_of(case):.1e}"


def main() -> None:
    """Prints a row for each case and side."""
    os.environ["LAZYINLINE_CACHE"] = "0"  # or a compile of an earlier run is taken from disk
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--first", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--no-first", action="store_true", help="leave the first calls out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.first:
        print(cpu_seconds(step_of(options.first, options.cases[0])))
        return
    sides = [side for side in SIDES if side in {*options.sides, "ours"}]
    print(f"torch {torch.__version__}, one thread, {options.rounds} rounds")
    print(
        f"{'case':<15}{'side':<17}{'step ms':>9}{'wall ms':>9}{'ours / (most)':>13}{'differs':>9}"
        f"{'first s':>9}{'ours /':>12}"
    )
    for case in options.cases:
        for row in rows(case, sides, options.rounds, with_first=not options.no_first):
            print(row, flush=True)


if __name__ == "__main__":
    main()

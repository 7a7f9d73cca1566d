"""Second derivatives of a small GPT, compiled beside eager: times in turns, and what depth costs.

    python benchmarks/second_derivatives.py
    python benchmarks/second_derivatives.py --layers 2 8 --rounds 20

A Hessian-vector product of all parameters and a gradient penalty (the norm of the gradient of the
first embedding), each on both sides in turns: CPU milliseconds, minima, one thread. Attention is
eager's plain form on both sides: the fused one has no second derivative. ``first`` is the first
call of the product with its compiles, in CPU-seconds; ``error`` the largest difference of a
gradient from eager's, relative to the largest number in it.

Then the Hessian of a network with 64 inputs, by parts: `lazyinline.func.hessian` beside
`torch.func.hessian`, which has the whole alone. ``/ whole`` is the part's time over ours of the
whole.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import decoders as models
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lazyinline

SIZES = {"hidden": 128, "num_heads": 4, "vocab": 256, "seq": 32, "batch": 2}


def hessian_product(model: nn.Module, args: Sequence[Tensor]) -> list[Tensor]:
    """Returns the product of the Hessian with a vector of ones."""
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(model(*args), parameters, create_graph=True)
    ones = [torch.ones_like(p) for p in parameters]
    found = torch.autograd.grad(slopes, parameters, ones, allow_unused=True)
    return [f for f in found if f is not None]


def penalty(model: nn.Module, args: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients of the loss with the square of its own gradient added."""
    parameters = list(model.parameters())
    loss = model(*args)
    slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    total = loss + sum(s.square().sum() for s in slopes)
    return list(torch.autograd.grad(total, parameters))


def cpu_seconds(function: Callable[[], Any]) -> float:
    """Runs a function and returns what it took."""
    begun = time.process_time()
    function()
    return time.process_time() - begun


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Returns the largest difference, relative to the largest number of its tensor."""
    pairs = zip(found, wanted, strict=True)
    return max(((f - w).abs().max() / w.abs().max().clamp_min(1e-12)).item() for f, w in pairs)


def row(num_layers: int, rounds: int) -> str:
    """Measures one depth."""
    eager, args = models.gpt(num_layers, **SIZES)
    compiled = lazyinline.compile(copy.deepcopy(eager))
    first = cpu_seconds(lambda: hessian_product(compiled, args))
    cells = [f"{num_layers:6d} {first:8.1f}"]
    for work in (hessian_product, penalty):
        error = difference(work(compiled, args), work(eager, args))
        times: dict[str, list[float]] = {"ours": [], "eager": []}
        for _ in range(rounds):
            times["eager"].append(cpu_seconds(lambda work=work: work(eager, args)))
            times["ours"].append(cpu_seconds(lambda work=work: work(compiled, args)))
        ours, other = (min(times[side]) * 1e3 for side in ("ours", "eager"))
        cells.append(f"{ours:9.1f} {other:8.1f} {ours / other:6.2f} {error:8.1e}")
    return "  ".join(cells)


def parts_of_a_hessian(width: int, rounds: int) -> list[str]:
    """Measures each part of the Hessian of a network with 64 inputs, on new points every time."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Tanh(), nn.Linear(width, width))]
    net = nn.Sequential(nn.Linear(64, width), *hidden, nn.Tanh(), nn.Linear(width, 1))
    x, v = torch.rand(64), torch.rand(64)

    def function(x: Tensor) -> Tensor:
        result: Tensor = net(x).sum()
        return result

    ours, eager = lazyinline.func.hessian(function), torch.func.hessian(function)
    works: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
        "H[3]": (lambda: ours(x)[3], lambda whole: whole[3]),
        "H @ v": (lambda: ours(x) @ v, lambda whole: whole @ v),
        "H.diagonal()": (lambda: ours(x).diagonal(), lambda whole: whole.diagonal()),
        "H.dense()": (lambda: ours(x).dense(), lambda whole: whole),
    }
    with torch.no_grad():
        wanted: Tensor = eager(x)
        errors = {name: difference([run()], [of(wanted)]) for name, (run, of) in works.items()}
        times: dict[str, list[float]] = {name: [] for name in works}
        others: list[float] = []
        for _ in range(rounds):
            others.append(cpu_seconds(lambda: eager(x)))
            for name, (run, _) in works.items():
                run()  # what ran before it has left its own data in the caches
                times[name].append(cpu_seconds(run))
    best = {name: min(found) * 1e3 for name, found in times.items()}
    rows = [
        f"{width:6d} {name:14s} {ms:9.2f} {ms / best['H.dense()']:8.3f} {errors[name]:9.1e}"
        for name, ms in best.items()
    ]
    return [*rows, f"{width:6d} {'torch.func':14s} {min(others) * 1e3:9.2f}"]


def main() -> None:
    os.environ["LAZYINLINE_CACHE"] = "0"  # or a compile of an earlier run is taken from disk
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 8, 32])
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("                 Hessian product, ms                   gradient penalty, ms")
    print("layers    first       ours    eager  ratio    error       ours    eager  ratio    error")
    with sdpa_kernel(SDPBackend.MATH):
        for num_layers in options.layers:
            print(row(num_layers, options.rounds), flush=True)
    print(f"\n width {'part':14s} {'ms':>9s} {'/ whole':>8s} {'error':>9s}")
    for width in options.widths:
        print(*parts_of_a_hessian(width, options.rounds), sep="\n", flush=True)


if __name__ == "__main__":
    main()

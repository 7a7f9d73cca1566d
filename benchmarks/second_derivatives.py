"""Second derivatives of a small GPT, compiled beside eager: times in turns, and what depth costs.

    python benchmarks/second_derivatives.py
    python benchmarks/second_derivatives.py --layers 2 8 --rounds 20

A Hessian-vector product of all parameters and a gradient penalty (the norm of the gradient of the
first embedding), each on both sides in turns: CPU milliseconds, minima, one thread. Attention is
eager's plain form on both sides: the fused one has no second derivative. ``first`` is the first
call of the product with its compiles, in CPU-seconds; ``error`` the largest difference of a
gradient from eager's, relative to the largest number in it.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["LAZYINLINE_CACHE"] = "0"

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lazyinline
from lazyinline.frontend.measure import models

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("                 Hessian product, ms                   gradient penalty, ms")
    print("layers    first       ours    eager  ratio    error       ours    eager  ratio    error")
    with sdpa_kernel(SDPBackend.MATH):
        for num_layers in options.layers:
            print(row(num_layers, options.rounds), flush=True)


if __name__ == "__main__":
    main()

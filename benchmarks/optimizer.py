"""The optimizer in the step, beside the step and then PyTorch's: time, peak and bits, in one run.

    python benchmarks/optimizer.py                    # GPT-2 small: 12 x 768, one sequence of 256
    python benchmarks/optimizer.py --layers 4 --hidden 256 --vocab 1000 --rounds 30

Three copies of a model take steps in turns: AdamW as it comes and with ``fused=True``, both after a
compiled step, and AdamW inside it. CPU seconds of all threads, minima and medians. The peak is the
plan's: without parameters and the optimizer's state, which all three hold.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from decoders import GptBlock, gpt
from torch import nn

import lazyinline


def adamw(model: nn.Module, **options: bool) -> torch.optim.Optimizer:
    """Returns the optimizer of one copy."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {
        "layers": 12,
        "hidden": 768,
        "seq": 256,
        "batch": 1,
        "vocab": 50257,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    lazyinline.lazy_inline(GptBlock)
    model, args = gpt(
        num_layers=options.layers,
        hidden=options.hidden,
        num_heads=max(1, options.hidden // 64),
        seq=options.seq,
        batch=options.batch,
        vocab=options.vocab,
    )
    plain, fused, inside = model, copy.deepcopy(model), copy.deepcopy(model)
    after = {"default": (plain, adamw(plain)), "fused": (fused, adamw(fused, fused=True))}
    compiled = {name: lazyinline.compile_step(one) for name, (one, _) in after.items()}
    step = lazyinline.compile_step(inside, optimizer=adamw(inside))

    def then(name: str) -> Callable[[], None]:
        def run() -> None:
            compiled[name](*args)
            after[name][1].step()

        return run

    ways: dict[str, Callable[[], object]] = {name: then(name) for name in after}
    ways["inside"] = lambda: step(*args)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 2):
        for name, way in ways.items():
            start = time.process_time()
            way()
            if number > 1:
                seconds[name].append(time.process_time() - start)
    peaks = {name: one.stats.peak_bytes for name, one in {**compiled, "inside": step}.items()}
    print(f"{'update':<10}{'min ms':>10}{'median':>10}{'peak MB':>10}")
    for name, found in seconds.items():
        times = f"{1e3 * min(found):>10.2f}{1e3 * statistics.median(found):>10.2f}"
        print(f"{name:<10}{times}{peaks[name] / 1e6:>10.2f}")
    least = {name: min(found) for name, found in seconds.items()}
    pairs = zip(fused.parameters(), inside.parameters(), strict=True)
    print(
        f"inside / default {least['inside'] / least['default']:.2f}, "
        f"inside / fused {least['inside'] / least['fused']:.2f}, "
        f"peak {peaks['inside'] / peaks['fused']:.2f}; "
        f"bits of fused: {all(torch.equal(p, q) for p, q in pairs)}"
    )


if __name__ == "__main__":
    main()

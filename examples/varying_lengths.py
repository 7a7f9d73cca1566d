"""Batches of many lengths: two compiles serve them all, and a new length costs a link.

    python examples/varying_lengths.py

What it prints (seconds are those of one machine, others at work on it):

    length  first / s  again / s  compiles  links
        40     21.112      0.025         1      0
        42     22.216      0.061         2      0
        18      0.295      0.024         2      1
        32      0.437      0.019         2      2
        48      0.571      0.038         2      3
        47      0.453      0.050         2      4
        41      0.373      0.034         2      5
        35      0.355      0.026         2      6
    8 lengths, 2 compiles; each loss equals eager's
"""

from __future__ import annotations

import argparse
import copy
import random
import time

import torch
from decoder import Decoder

import lazyinline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Decoder(options.layers)
    plain = copy.deepcopy(model)
    compiled = lazyinline.compile(model, backend=options.backend)
    lengths = random.Random(0).sample(range(16, 65), options.lengths)

    print(f"{'length':>6}{'first / s':>11}{'again / s':>11}{'compiles':>10}{'links':>7}")
    for length in lengths:
        data = torch.randint(0, 128, (4, length + 1))
        # A slice of another size each time is not contiguous; a copy is.
        ids, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            loss = compiled(ids, targets)
            loss.backward()
            seconds.append(time.perf_counter() - start)
        torch.testing.assert_close(loss, plain(ids, targets), rtol=1e-5, atol=1e-6)
        report = compiled.last_report
        times = f"{seconds[0]:>11.3f}{seconds[1]:>11.3f}"
        print(f"{length:>6}{times}{report.num_compiles:>10}{report.num_links:>7}")
    print(f"{len(lengths)} lengths, {report.num_compiles} compiles; each loss equals eager's")


if __name__ == "__main__":
    main()

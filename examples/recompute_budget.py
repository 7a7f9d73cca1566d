"""What memory costs: peaks that recompute reaches, and what each computes again for it.

    python examples/recompute_budget.py
    python examples/recompute_budget.py --html budget.html  # the frontier of a block, as a chart

What it prints:

                      peak / MB  extra MFLOP
    everything saved      18.26          0.0  ########################################
    budget 14.92 MB       14.84          0.0  #################################
    budget 11.58 MB       11.57         29.4  #########################
    budget 8.24 MB         8.16        138.4  ##################
    each block again       4.90        335.5  ###########
    all gradients equal eager's
    chosen for the tightest budget, per call of a block:
      3 calls save 270,336 bytes; again: native_layer_norm, addmm, gelu
      3 calls save 663,552 bytes; again: native_layer_norm, addmm, gelu
      2 calls save 1,187,840 bytes; again: native_layer_norm, gelu
"""

from __future__ import annotations

import argparse
import copy

import torch
from decoder import Decoder

import lazyinline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--html", help="write a page about the tightest budget to this file")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Decoder(options.layers)
    data = torch.randint(0, 128, (8, 65))
    ids, targets = data[:, :-1], data[:, 1:]
    model(ids, targets).backward()
    expected = copy.deepcopy([parameter.grad for parameter in model.parameters()])

    def compiled(recompute):
        """Runs a step under a policy; checks its gradients."""
        step = lazyinline.compile_step(model, recompute=recompute, backend="eager")
        step(ids, targets)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
        return step

    def peak(step) -> int:
        return step.stats.peak_bytes + step.stats.outside_bytes

    def again(step) -> int:
        return sum(r.num_calls * r.recomputed_flops for r in step.last_report.recompute)

    most, least = compiled(None), compiled("full")
    width = peak(most) - peak(least)
    steps = {"everything saved": most}
    for part in (3, 2, 1):
        limit = peak(least) + width * part // 4
        steps[f"budget {limit / 1e6:.2f} MB"] = compiled(lazyinline.Budget(saved_bytes=limit))
    steps["each block again"] = least

    print(f"{'':<18}{'peak / MB':>9}{'extra MFLOP':>13}")
    for name, step in steps.items():
        bar = "#" * round(40 * peak(step) / peak(most))
        print(f"{name:<18}{peak(step) / 1e6:>9.2f}{again(step) / 1e6:>13.1f}  {bar}")
    print("all gradients equal eager's")

    print("chosen for the tightest budget, per call of a block:")
    tightest = list(steps.values())[-2].last_report
    for r in tightest.recompute:
        if r.closure == "Block":
            names = ", ".join(name for name, _ in r.recomputed) or "nothing"
            print(f"  {r.num_calls} calls save {r.saved_bytes:,} bytes; again: {names}")
    if options.html:
        tightest.save_html(options.html)


if __name__ == "__main__":
    main()

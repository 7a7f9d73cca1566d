"""Wall time from ``compile`` to the first training step done, from an empty cache directory.

Every start is a fresh process with a fresh directory; the modes take turns, and each row is printed
as it comes. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import statistics

from compile_time import Plan, run_once
from measurement import MODES, Measurement


def row(layers: int, mode: str, runs: list[Measurement]) -> str:
    """Formats the medians of one mode at one depth."""
    failed = [m.failure for m in runs if m.failure]
    if failed:
        return f"{layers:>6} {mode:<12}failed: {failed[0]}"
    wall, cpu, child = (
        statistics.median(seconds)
        for seconds in zip(*((m.wall_s, m.cpu_s, m.child_cpu_s) for m in runs), strict=True)
    )
    error = max(m.grad_error for m in runs)
    built = runs[0].objects_built
    return f"{layers:>6} {mode:<12}{wall:>8.1f}{cpu:>8.1f}{child:>8.1f}{built:>9}{error:>10.1e}"


def main() -> None:
    """Measures what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 48])
    parser.add_argument(
        "--modes", choices=MODES, nargs="+", default=["lazyinline", "per-block", "per-part"]
    )
    parser.add_argument("--repeat", type=int, default=1)
    options = parser.parse_args()
    plan = Plan("own", options.layers, options.modes, options.repeat, cold=True, timeout_s=3600)
    heads = "".join(f"{name:>8}" for name in ("wall s", "cpu s", "g++ s"))
    print(f"{'layers':>6} {'mode':<12}{heads}{'objects':>9}{'error':>10}")
    for layers in options.layers:
        found: dict[str, list[Measurement]] = {mode: [] for mode in options.modes}
        for _ in range(options.repeat):
            for mode in options.modes:
                found[mode].append(run_once(plan, mode, layers))
        for mode, runs in found.items():
            print(row(layers, mode, runs), flush=True)


if __name__ == "__main__":
    main()

"""What a CI job saves that keeps the cache of the job before: new processes, one folder.

    python examples/warm_cache.py
    python examples/warm_cache.py --folder .cache           # what to give to your CI's cache step

What it prints (seconds are those of one machine):

                          CPU s  wall s
    cold                  16.82   24.02  cache: 0 of 11 results
    warm                   0.43    1.42  cache: 11 of 11 results
    warm, twice as deep    1.23    3.81  cache: 10 of 11 results
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

JOB = """
import sys
import torch
from decoder import Decoder
import lazyinline

model = Decoder(int(sys.argv[1]))
data = torch.randint(0, 128, (4, 33))
compiled = lazyinline.compile(model)
compiled(data[:, :-1], data[:, 1:]).backward()
report = compiled.last_report
print(f"{report.cpu_s:.2f} {report.wall_s:.2f} {str(report.cache).split(' from ')[0]}")
"""


def run_job(folder: pathlib.Path, layers: int) -> tuple[float, float, str]:
    """Compiles in a new process with the caches of a folder; CPU seconds, seconds, what was found.

    Both caches are kept: that of lazyinline, and Inductor's of compiled C++.
    """
    kept = {
        "LAZYINLINE_CACHE_DIR": str(folder / "lazyinline"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PYTHONPATH": str(pathlib.Path(__file__).parent),
    }
    command = [sys.executable, "-c", JOB, str(layers)]
    done = subprocess.run(
        command, env=os.environ | kept, check=True, stdout=subprocess.PIPE, text=True
    )
    cpu, wall, found = done.stdout.split(maxsplit=2)
    return float(cpu), float(wall), found.strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--folder", type=pathlib.Path, help="of the caches; a new one if not said")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as new:
        folder = (options.folder or pathlib.Path(new)).absolute()
        folder.mkdir(mode=0o700, exist_ok=True)
        print(f"{'':<20}{'CPU s':>7}{'wall s':>8}")
        for job, layers in (
            ("cold", options.layers),
            ("warm", options.layers),
            ("warm, twice as deep", 2 * options.layers),
        ):
            cpu, wall, found = run_job(folder, layers)
            print(f"{job:<20}{cpu:>7.2f}{wall:>8.2f}  {found}")


if __name__ == "__main__":
    main()

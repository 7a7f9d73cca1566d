"""What a file costs to open in a new process, beside a compile with its caches warm.

    python benchmarks/load_time.py
    python benchmarks/load_time.py --cases step --rounds 5 --layers 8

CPU-seconds from an imported PyTorch and lazyinline to a first result, less what a later call takes;
by turns, each in a process of its own over one cache. ``compile`` is beside the imports that it
waits for (Dynamo, Inductor), ``+ imports`` with them: a load has none, where it imports no Dynamo.
``again`` is a load of the same file in the same process, its weights given as they are. A compile
finds its model made, a load reads it, and AdamW's state, twice as many bytes; ``step-sgd`` has
none. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from measurement import kept_environment

CASES = ("inference", "training", "sizes", "sizes-training", "step", "step-sgd")


def run_once(case: str, way: str, layers: int, path: str) -> dict[str, Any]:
    """Compiles, saves or loads in this process, and computes one result."""
    import subjects
    import torch

    import lazyinline

    torch.set_num_threads(1)
    subject: Any = None
    if way != "load":
        subject = subjects.family("own").build(layers, 1)
        torch.save(subject.args, f"{path}.inputs")
    args = torch.load(f"{path}.inputs")
    if way == "compile":
        importlib.import_module("torch._inductor.compile_fx")

    def made() -> Any:
        if way == "load":
            return lazyinline.load(path)
        if "step" in case:  # optimizers import Dynamo, but for a load
            kind = torch.optim.SGD if case == "step-sgd" else torch.optim.AdamW
            optimizer = kind(subject.model.parameters(), 1e-3)
            return lazyinline.compile_step(subject.model, optimizer=optimizer)
        return lazyinline.compile(subject.model, dynamic=True if "sizes" in case else None)

    def call(compiled: Any) -> Any:
        with torch.set_grad_enabled(case not in ("inference", "sizes")):
            result = compiled(*args)
            if "training" in case:
                result.backward()
            return result

    compiled, first = _timed(lambda: _called(made(), call))
    later = min(_timed(lambda: call(compiled))[1] for _ in range(3))
    found = {"cpu_s": first - later, "later_s": later, "dynamo": "torch._dynamo" in sys.modules}
    if way == "load":
        state = compiled.model.state_dict() if "step" in case else compiled.state_dict()
        again = _timed(lambda: _called(lazyinline.load(path, state_dict=state), call))[1]
        found["again_s"] = again - later
    elif way == "save":
        lazyinline.save(compiled, path)
    return found


def _called(compiled: Any, call: Callable[[Any], Any]) -> Any:
    call(compiled)
    return compiled


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    return run(), time.process_time() - start


def in_a_process(case: str, way: str, layers: int, folder: str) -> dict[str, Any]:
    """Runs one of them in a process of its own."""
    command = [sys.executable, __file__, "--once", case, way, str(layers), f"{folder}/{case}.lz"]
    settings = {"LAZYINLINE_CACHE_DIR": f"{folder}/cache", "LAZYINLINE_CACHE": "1"}
    settings |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = kept_environment() | settings
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def _median(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", nargs=4, metavar=("CASE", "WAY", "LAYERS", "PATH"))
    options = parser.parse_args()
    if options.once:
        case, way, layers, path = options.once
        print(json.dumps(run_once(case, way, int(layers), path)))
        return
    heads = ("compile", "+ imports", "load", "load again", "ratio", "+ imports")
    print(f"{'':<16}" + "".join(f"{head:>11}" for head in heads))
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases:
            in_a_process(case, "save", options.layers, folder)
            rows: dict[str, list[dict[str, Any]]] = {"compile": [], "new": [], "load": []}
            for _ in range(options.rounds):
                for way, found in rows.items():
                    found.append(in_a_process(case, way, options.layers, folder))
            said = "  Dynamo imported" if rows["load"][0]["dynamo"] else ""
            compiled, new, loaded = (_median(rows[way], "cpu_s") for way in rows)
            again = _median(rows["load"], "again_s")
            numbers = (compiled, new, loaded, again, loaded / compiled, loaded / new)
            print(f"{case:<16}" + "".join(f"{number:>11.2f}" for number in numbers) + said)
        size = sum(path.stat().st_size for path in pathlib.Path(folder).glob("*.lz"))
    print(f"{options.layers} layers, {options.rounds} rounds, {size / 1e6:.0f} MB of files")


if __name__ == "__main__":
    main()

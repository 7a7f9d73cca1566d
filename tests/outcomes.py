"""What becomes of every model: shared, compiled or eager and why, to compare before and after.

    python tests/outcomes.py families before.json        # the families of benchmarks/families.py
    pytest --outcomes tests-before.json                  # each model that a test compiles
    python tests/outcomes.py compare before.json after.json

A file holds a line of numbers for each model, by name. What depends on the machine (seconds) is not
in it, so two files of one PyTorch are equal unless a change shares less, plans more memory,
launches more or leaves more to eager. `compare` ends with 1 if they are not.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lazyinline import CompileReport
    from lazyinline.frontend.compiler import Compiler

Outcomes = dict[str, list[dict[str, Any]]]

NUMBERS = (
    *("train", "backend", "num_nodes", "num_nodes_if_inlined", "num_closures", "num_block_calls"),
    *("num_kernels", "num_operators", "num_launches", "peak_bytes", "arena_bytes", "saved_bytes"),
    *("recomputed_flops", "unplanned", "ran_eagerly", "num_compiles", "why_static"),
)
PLACE = re.compile(r"\b[\w.]+\.py:\d+|0x[0-9a-f]+")  # of a line or an object: they move


def outcome_of(report: CompileReport) -> dict[str, Any]:
    """Returns what a report says that no machine and no line number changes."""
    found = {name: getattr(report, name, None) for name in NUMBERS}
    parts = [f"{part.path}: {part.num_programs}" for part in report.parts if not part.is_small]
    found = {"model": report.model, **found, "parts": parts}
    return {name: PLACE.sub("*", x) if isinstance(x, str) else x for name, x in found.items()}


def families() -> Outcomes:
    """Returns what becomes of each family in an inference and in a training step."""
    root = pathlib.Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root / "benchmarks"))
    import torch
    from torch.utils._pytree import tree_leaves
    from zoo import ASKED, FURTHER, scalar

    import lazyinline

    def is_float(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point()

    found: Outcomes = {}
    for family in (*ASKED, *FURTHER):
        rows = []
        for train in (False, True):
            model, inputs = family.build()
            compiled = lazyinline.compile(model.train(train), reuse="auto", backend="eager")
            torch.manual_seed(1)
            with torch.set_grad_enabled(train):
                output = compiled(**inputs)
            if train:
                scalar(output).backward()
            floats = [x.detach() for x in tree_leaves(output) if is_float(x)]
            size = torch.stack([x.double().square().mean() for x in floats]).sum()
            rows.append(outcome_of(lazyinline.last_report(compiled)) | {"size": f"{size:.4e}"})
        found[family.name] = rows
        print(family.name, flush=True)
    return found


def differences(before: Outcomes, after: Outcomes) -> Iterator[str]:
    """Yields a line for each figure that is another, and for each model that is gone."""
    for name, rows in before.items():
        if name not in after:
            yield f"{name}: gone"
            continue
        if len(rows) != len(after[name]):
            yield f"{name}: {len(rows)} compiles, now {len(after[name])}"
        for index, (old, new) in enumerate(zip(rows, after[name], strict=False)):
            for key in old:
                if old[key] != new.get(key):
                    yield f"{name} #{index} {key}: {old[key]!r}, now {new.get(key)!r}"


# ---- as a plugin of pytest ---------------------------------------------------------------------


class Recorder:
    """Notes what each test compiles. Several processes write a file each; the first merges them."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.found: Outcomes = {}
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        self.own = path.with_suffix(f".{worker}.json") if worker else path

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        failures: list[str] = []
        with compiles_noted(failures) as reports:
            yield
        rows = [outcome_of(report) for report in reports]
        rows += [{"not compiled": PLACE.sub("*", text)} for text in failures]
        if rows:
            self.found[item.nodeid] = rows

    def pytest_sessionfinish(self) -> None:
        for part in sorted(self.path.parent.glob(f"{self.path.stem}.gw*.json")):
            if not os.environ.get("PYTEST_XDIST_WORKER"):
                self.found |= json.loads(part.read_text())
                part.unlink()
        write(self.own, self.found)


@contextmanager
def compiles_noted(failures: list[str] | None = None) -> Iterator[list[CompileReport]]:
    """Yields the reports of all compiles inside, in order; notes why others failed."""
    from lazyinline.frontend.compiler import Compiler

    reports: list[CompileReport] = []
    original = Compiler.compile

    def compile_and_note(self: Compiler, *args: Any, **kwargs: Any) -> Any:
        try:
            compiled, report = original(self, *args, **kwargs)
        except Exception as error:
            if failures is not None:
                failures.append(f"{type(error).__name__}: {error}")
            raise
        reports.append(report)
        return compiled, report

    Compiler.compile = compile_and_note  # type: ignore[method-assign]
    try:
        yield reports
    finally:
        Compiler.compile = original  # type: ignore[method-assign]


def write(path: pathlib.Path, found: Outcomes) -> None:
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("families").add_argument("path", type=pathlib.Path)
    compare = commands.add_parser("compare")
    compare.add_argument("before", type=pathlib.Path)
    compare.add_argument("after", type=pathlib.Path)
    options = parser.parse_args()
    if options.command == "families":
        write(options.path, families())
        return 0
    lines = list(differences(*(json.loads(p.read_text()) for p in (options.before, options.after))))
    print("\n".join(lines) or "equal")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())

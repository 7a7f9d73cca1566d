"""``make test-versions``: contract and smoke tests, once per supported PyTorch and Python.

Each pair gets an environment under build/versions/, which later runs use again, and a log beside
it. A pair whose interpreter or PyTorch cannot be had is named at the end; it fails the run only
where nothing else ran.

    python tests/run_versions.py                     # all pairs
    python tests/run_versions.py 2.15:3.13           # some
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "versions"
PAIRS = ("2.11:3.10", "2.13:3.11", "2.13:3.12", "2.15:3.13", "2.15:3.14")
NOTHING_RAN = 5  # of pytest


@dataclass(frozen=True)
class Pair:
    """A PyTorch and a Python, as ``2.13`` and ``3.11``."""

    torch: str
    python: str

    @classmethod
    def of(cls, text: str) -> Pair:
        torch, _, python = text.partition(":")
        return cls(torch, python)

    def __str__(self) -> str:
        return f"PyTorch {self.torch}, Python {self.python}"

    @property
    def folder(self) -> pathlib.Path:
        return FOLDER / f"torch{self.torch}-python{self.python}"


class MissingError(Exception):
    """What a pair needs cannot be had here."""


def interpreters(version: str) -> Iterator[str]:
    """Where a Python of some version may be: $PYTHONS, the PATH, and what pyenv has built."""
    name = f"python{version}"
    for place in filter(None, os.environ.get("PYTHONS", "").split(os.pathsep)):
        yield place if os.path.isfile(place) else os.path.join(place, name)
    yield shutil.which(name) or name
    root = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    yield from map(str, sorted(root.glob(f"versions/{version}.*/bin/{name}"), reverse=True))


def find_python(version: str) -> str:
    """Returns an interpreter that says that it is of that version (a pyenv shim may refuse)."""
    asked = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in interpreters(version):
        try:
            found = subprocess.run([candidate, "-c", asked], capture_output=True, text=True)
        except OSError:
            continue
        if found.returncode == 0 and found.stdout.strip() == version:
            return candidate
    raise MissingError(f"there is no python{version} in $PYTHONS, on the PATH or of pyenv")


def prepare(pair: Pair, log: pathlib.Path) -> pathlib.Path:
    """Makes the environment of a pair, or takes it up where an interrupted run left it."""
    python = pair.folder / "bin" / "python"
    if not python.exists():
        run([find_python(pair.python), "-m", "venv", str(pair.folder)], log, "no environment")
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if subprocess.run([str(python), "-c", "import torch"], capture_output=True).returncode:
        run([*pip, f"torch=={pair.torch}.*"], log, f"torch {pair.torch} cannot be installed")
    run([*pip, "--editable", f"{ROOT}[test]"], log, "a dependency cannot be installed")
    return python


def run(command: list[str], log: pathlib.Path, otherwise: str) -> None:
    """Runs a command; raises MissingError with what it said last if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with log.open("a") as file:
        file.write(done.stdout)
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise MissingError(f"{otherwise}: {said[-1]}")


def test(python: pathlib.Path, log: pathlib.Path) -> tuple[bool, str]:
    """Runs the tests; returns whether they passed, and pytest's closing line."""
    command = [str(python), "-m", "pytest", "-q", "-m", "smoke"]
    with log.open("a") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    # Libraries that are unloaded write after it.
    closing = [line for line in lines if re.search(r"\d (passed|failed|error).* in [\d.]+s", line)]
    return done.returncode == 0, (closing or lines)[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="TORCH:PYTHON")
    FOLDER.mkdir(parents=True, exist_ok=True)
    verdicts: list[tuple[Pair, str]] = []
    num_run = num_failed = 0
    for pair in map(Pair.of, parser.parse_args().pairs):
        begun, log = time.monotonic(), pair.folder.with_name(f"{pair.folder.name}.log")
        log.unlink(missing_ok=True)
        print(f"{pair}: {log.relative_to(ROOT)}", flush=True)
        try:
            python = prepare(pair, log)
        except MissingError as missing:
            verdicts.append((pair, f"NOT RUN, {missing}"))
            continue
        passed, closing = test(python, log)
        num_run += 1
        num_failed += not passed
        seconds = f"{time.monotonic() - begun:.0f} s with set-up"
        verdicts.append((pair, f"{'passed' if passed else 'FAILED'}, {closing} ({seconds})"))
    print(*(f"{pair}: {verdict}" for pair, verdict in verdicts), sep="\n")
    return 1 if num_failed else 0 if num_run else NOTHING_RAN


if __name__ == "__main__":
    sys.exit(main())

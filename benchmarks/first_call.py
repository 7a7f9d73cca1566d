"""How far the first call of a compiled model goes through our own files, and how deep.

Counts what is entered (a function of a file runs) in `compile(model)`, its first call, the backward
and the second call: files, calls, and the most own frames on the stack at one time.

    python benchmarks/first_call.py
    python benchmarks/first_call.py --backend eager --way
"""

import argparse
import os
import pathlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

import lazyinline
from lazyinline.backend.files.torch_store import DIRECTORY_VARIABLE

OWN = pathlib.Path(lazyinline.__file__).resolve().parents[2]
IS_FUNCTION = 0x2  # CO_NEWLOCALS: the body of a module or class runs when it is imported


class Entered:
    """Files entered, calls of each and the depth at which each was first entered."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.first_depth: dict[str, int] = {}
        self.depth = self.deepest = 0
        self._own_path: dict[str, str] = {}

    def _own(self, frame: FrameType) -> str:
        name = frame.f_code.co_filename
        if name not in self._own_path:
            path = pathlib.Path(name).resolve()
            is_own = path.is_relative_to(OWN) and path.suffix == ".py"
            is_own = is_own and path.relative_to(OWN).parts[0] not in ("benchmarks", ".venv")
            self._own_path[name] = str(path.relative_to(OWN)) if is_own else ""
        return self._own_path[name] if frame.f_code.co_flags & IS_FUNCTION else ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Looks at one event of ``sys.setprofile``."""
        if event not in ("call", "return"):
            return
        own = self._own(frame)
        if not own:
            return
        if event == "return":
            self.depth -= 1
            return
        self.calls[own] += 1
        self.first_depth.setdefault(own, self.depth)
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts within it."""
        self.depth = self.deepest = 0
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


class Block(nn.Module):
    """A layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def main() -> None:
    """Prints a row for each step of the first use, and with ``--way`` each file in order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--way", action="store_true", help="each file, and its depth when entered")
    arguments = parser.parse_args()
    model, x = nn.Sequential(*(Block(16) for _ in range(3))), torch.randn(4, 16)
    entered, made = Entered(), dict[str, Any]()

    def compiled() -> None:
        made["compiled"] = lazyinline.compile(model, backend=arguments.backend)

    def called() -> None:
        made["loss"] = made["compiled"](x).sum()

    steps: list[tuple[str, Callable[[], None]]] = [
        ("compile(model)", compiled),
        ("first call", called),
        ("backward", lambda: made["loss"].backward()),
        ("second call", called),
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.environ[DIRECTORY_VARIABLE] = folder
        for name, step in steps:
            known, before = set(entered.calls), entered.calls.total()
            with entered.counted():
                step()
            new, calls = len(entered.calls.keys() - known), entered.calls.total() - before
            print(
                f"{name:<15}{new:>4} files more ({len(entered.calls)}), {calls:>6} own calls, "
                f"{entered.deepest:>3} own frames deep"
            )
    for path, depth in entered.first_depth.items() if arguments.way else ():
        print(f"  {depth:>3}  {path}")


if __name__ == "__main__":
    main()

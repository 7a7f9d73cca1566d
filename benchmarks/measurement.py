"""One measured compile: its numbers, and how it travels between processes as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MODES = (
    "eager",
    "full",
    "deduplicated",
    "nested",
    "nested-kept",
    "nested-here",
    "per-part",
    "per-block",
    "lazyinline",
)
MODELS = ("own", "own-gpt", "hf-llama", "hf-gpt2")


def kept_environment() -> dict[str, str]:
    """Returns this environment with bytecode of a checkout kept, as that of what is installed is.

    Otherwise each process would compile our own source anew, and PyTorch's not.
    """
    return {n: value for n, value in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}


@dataclass(frozen=True)
class PassTime:
    """Seconds that one pass of lazyinline took, and the graph nodes held after it."""

    name: str
    cpu_s: float
    wall_s: float
    num_nodes: int


@dataclass(frozen=True)
class Measurement:
    """Compile and first training step of one model, in one mode, in one fresh process.

    Attributes:
        cpu_s: CPU-seconds, child processes included.
        wall_s: wall seconds of the same.
        child_cpu_s: the part of ``cpu_s`` that child processes spent: the C++ compiler, its checks.
        step_cpu_s: CPU-seconds of a later step, when all is compiled.
        import_cpu_s: the part of ``cpu_s`` that ``import lazyinline`` took.
        objects_built: C++ objects that had to be built; 0 when they were warm.
        loss_error: relative error of the loss against eager in the same process.
        grad_error: largest relative error of a gradient against eager (norm over norm).
        passes: what lazyinline's report says, pass by pass; empty in the other modes.
        failure: why there are no numbers, or an empty string.
    """

    mode: str
    layers: int
    cpu_s: float = 0.0
    wall_s: float = 0.0
    child_cpu_s: float = 0.0
    step_cpu_s: float = 0.0
    import_cpu_s: float = 0.0
    objects_built: int = 0
    loss: float = 0.0
    loss_error: float = 0.0
    grad_error: float = 0.0
    passes: tuple[PassTime, ...] = field(default=())
    nodes_held: int = 0
    nodes_if_inlined: int = 0
    failure: str = ""

    @property
    def net_cpu_s(self) -> float:
        """CPU-seconds of the compile alone: without one step."""
        return self.cpu_s - self.step_cpu_s

    @property
    def compile_cpu_s(self) -> float:
        """CPU-seconds of lazyinline's passes before link: capture, autodiff, lowering."""
        return sum(p.cpu_s for p in self.passes if p.name != "link")

    def to_dict(self) -> dict[str, Any]:
        """Returns fields and derived seconds, ready for JSON."""
        derived = {"net_cpu_s": self.net_cpu_s, "compile_cpu_s": self.compile_cpu_s}
        return dataclasses.asdict(self) | derived

    def to_json(self) -> str:
        """Returns one line that :meth:`from_json` reads back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Measurement:
        """Reads what :meth:`to_json` wrote."""
        values = json.loads(line)
        values["passes"] = tuple(PassTime(**p) for p in values["passes"])
        return cls(**values)


@dataclass
class Stopwatch:
    """Adds up CPU-seconds (child processes included) and wall seconds of its ``with`` blocks."""

    cpu_s: float = 0.0
    child_cpu_s: float = 0.0
    wall_s: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts what happens inside."""
        own, child, wall = _cpu(resource.RUSAGE_SELF), _cpu(resource.RUSAGE_CHILDREN), _wall()
        yield
        child = _cpu(resource.RUSAGE_CHILDREN) - child
        self.cpu_s += _cpu(resource.RUSAGE_SELF) - own + child
        self.child_cpu_s += child
        self.wall_s += _wall() - wall


def _cpu(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def _wall() -> float:
    return time.perf_counter()

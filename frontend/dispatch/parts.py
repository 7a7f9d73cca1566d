"""The parts of a model that runs eagerly: modules in it whose own calls are compiled.

While the model's Python runs, calls of the modules in it go through PyTorch's own slot, and each
either runs a program of its own or its own Python, between whose calls it is the same again. Parts
share one compiler, so that equal ones are differentiated, lowered and compiled once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ...reuse.errors import CaptureError, FinalCaptureError, LazyInlineError, PlanError
from ...reuse.evidence.module_state import module_state, walk_modules
from ...reuse.freeze import TELLS_APART
from ...reuse.process import ProcessLock
from ..capture.regions import shapes_of
from ..checks.refusals import DIFFERENTIATES, SETS_FOR_BACKWARDS
from ..compiler import Compiler
from ..options import Options
from ..passes.state import Compilation, Pass
from ..report import PartRecord
from ..sizes.shapes import CompileResult
from .dispatcher import Accepted, ModuleDispatcher, ModuleEntry, Refusals
from .torch_slot import asks_slot, fill_slot, in_slot, slots_empty

MIN_NODES = 3
"""Graph nodes from which on a program may pay; fewer are left to PyTorch's own kernels."""
MAX_PROGRAMS = 8
"""Programs of one part; where calls keep changing, it runs eagerly from then on."""
MAX_SHAPES = 4
"""Sets of input shapes for which parts that are alike are compiled, each for itself."""
MAX_DEPTH = 30
"""How deep modules may be nested: each dispatcher on the way adds frames to Python's stack."""

Likeness = tuple[Any, ...]


class TooSmallError(CaptureError):
    """A program of so few operators takes longer to call than it saves."""


@dataclass
class Alike:
    """Parts of the same classes and layouts, and what is known of all of them.

    Attributes:
        num_members: how many there are.
        refusals: which calls run them themselves.
        shapes: those of the inputs for which some were compiled.
    """

    num_members: int
    refusals: Refusals = field(default_factory=Refusals)
    shapes: set[Any] = field(default_factory=set)


class PartDispatcher(ModuleDispatcher):
    """Takes the calls of one part."""

    def __init__(
        self,
        module: nn.Module,
        options: Options,
        dynamic: bool | None,
        alike: Alike,
        compiler: Compiler,
        accepted: Accepted,
        thread: threading.local,
    ) -> None:
        # Equal layers share kernels for numbers; symbols of two captures are never equal.
        learns = dynamic is None and alike.num_members > 1
        dynamic = False if learns else dynamic
        super().__init__(module, options, dynamic, compiler=compiler, accepted=accepted)
        self._refusals = alike.refusals
        self._alike = alike
        self._thread = thread

    def _runner(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        why = getattr(self._thread, "why_alone", "")
        return partial(self._run_alone, why) if why else self._run

    def _why_eager(self, leaves: Sequence[Any]) -> str:
        if len(self.entries) >= MAX_PROGRAMS:
            return f"its calls keep changing, and it has {MAX_PROGRAMS} programs already"
        known, shapes = self._alike.shapes, shapes_of(leaves)
        if self.dynamic is False and shapes not in known and len(known) >= MAX_SHAPES:
            now = ", ".join(map(str, shapes))
            return f"the sizes of its inputs keep changing (now {now})"
        return super()._why_eager(leaves)

    def _entry(self, made: CompileResult, leaves: Sequence[Any]) -> ModuleEntry:
        entry = super()._entry(made, leaves)
        self._alike.shapes.add(shapes_of(leaves))
        return entry

    def _run_eagerly(
        self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, raised: str = ""
    ) -> Any:
        why = "what calls it raised where it was captured" if raised else why_alone(reason)
        with alone(self._thread, why), unchanged(self.model, "" if raised else reason):
            return self._run_alone(reason, args, kwargs)

    def _watch(self, one: Pass, before: Compilation, after: Compilation) -> None:
        if before.seen is None and after.seen is not None:
            count = after.seen.program.num_nodes_if_inlined()
            if count < MIN_NODES:
                raise TooSmallError(f"{_SMALL} {count} operators, fewer than {MIN_NODES}")

    def _may_run_eagerly(self, error: LazyInlineError) -> bool:
        is_known = isinstance(error, (CaptureError, PlanError))
        return is_known and not isinstance(error, FinalCaptureError)

    def _is_lasting(self, error: LazyInlineError) -> bool:
        return isinstance(error, TooSmallError)


@contextmanager
def alone(thread: threading.local, why: str) -> Iterator[None]:
    """Lets the parts of the module that runs inside run eagerly, too, where a reason is given."""
    before = getattr(thread, "why_alone", "")
    thread.why_alone = before or why
    try:
        yield
    finally:
        thread.why_alone = before


def unchanged(model: nn.Module, reason: str) -> AbstractContextManager[None]:
    """Leaves nothing of ours on the modules of a model whose forward looks at all they hold."""
    return slots_empty(model) if TELLS_APART in reason else nullcontext()


def why_alone(reason: str) -> str:
    """Returns why the parts of a module that runs eagerly do so as well, or ""."""
    if DIFFERENTIATES in reason:
        return "what calls it differentiates it inside its forward"
    if SETS_FOR_BACKWARDS in reason:
        return f"what calls it {SETS_FOR_BACKWARDS}"
    return ""


class Parts:
    """The parts of one model, and the routes of their calls while the model runs eagerly.

    Attributes:
        routes: lead their calls to their dispatchers.
        thread: notes which threads run a module that keeps those inside from being compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        dynamic: bool | None,
        compiler: Compiler,
        accepted: Accepted,
    ) -> None:
        self._model = model
        self._options, self._dynamic = options, dynamic
        self._compiler, self._accepted = compiler, accepted
        self._calls: dict[int, PartDispatcher] = {}
        self._alike: dict[Likeness, Alike] = {}
        self._paths: dict[int, str] = {}
        self.routes = Routes(self._find)
        self.thread = threading.local()

    def _find(self) -> list[PartDispatcher]:
        """Returns the dispatchers of the modules that are in the model now."""
        places = walk_modules(self._model)
        if max(path.count(".") for path, _ in places) > MAX_DEPTH:
            return []
        wanted = {
            id(module): (path, module)
            # Backwards, so that a module with several paths is named by the first of them.
            for path, module in reversed(places)
            if module is not self._model and in_slot(module) is None and _may_pay(module)
        }
        if any(id_ not in self._calls for id_ in wanted):
            self._make(list(wanted.values()))
        return [self._calls[id_] for id_ in wanted]

    def _make(self, places: Sequence[tuple[str, nn.Module]]) -> None:
        """Makes dispatchers for modules that are new."""
        likeness = {id(module): _likeness(module) for _, module in places}
        counts = Counter(likeness.values())
        self._paths = {id(module): path for path, module in places}
        known, self._calls = self._calls, {}
        for _, module in places:
            key = likeness[id(module)]
            alike = self._alike.setdefault(key, Alike(counts[key]))
            calls = known.get(id(module))
            if calls is None:
                shared = (alike, self._compiler, self._accepted, self.thread)
                calls = PartDispatcher(module, self._options, self._dynamic, *shared)
            self._calls[id(module)] = calls

    def compiled(self) -> list[nn.Module]:
        """Returns the parts that there are programs for."""
        return [calls.model for calls in self._calls.values() if len(calls.entries)]

    def records(self) -> list[PartRecord]:
        """Says of each part that was called how it runs, in the order of the model's modules."""
        found = []
        for id_, path in reversed(self._paths.items()):
            calls = self._calls[id_]
            report = calls.last_report
            if report is not None:
                name = type(calls.model).__name__
                small = report.ran_eagerly.startswith(_SMALL)
                found.append(
                    PartRecord(path, name, len(calls.entries), report.ran_eagerly, is_small=small)
                )
        return found


_SMALL = "it has only"


def _may_pay(module: nn.Module) -> bool:
    """Whether a module's calls are looked at: one of PyTorch's own layers is an operator or two."""
    if not asks_slot(module) or isinstance(module, torch.jit.ScriptModule):
        return False
    is_library = type(module).__module__.startswith(("torch.nn", "torch.ao"))
    has_children = any(module_state(module)["_modules"].values())
    return has_children or not is_library or isinstance(module, nn.RNNBase)


def _likeness(module: nn.Module) -> Likeness:
    """Returns classes and layouts, equal for parts that may share; a capture compares the rest."""
    tensors = tuple((t.dtype, t.device, tuple(t.shape)) for t in module.parameters())
    return (tuple(map(type, module.modules())), tensors)


class Routes:
    """Fills PyTorch's own slots of modules for as long as any thread runs the model around them.

    Args:
        find: returns the dispatchers; asked when the first thread comes.
    """

    def __init__(self, find: Callable[[], Sequence[ModuleDispatcher]]) -> None:
        self._find = find
        self._lock = ProcessLock()
        self._num_running = 0
        self._taken: list[tuple[ModuleDispatcher, Callable[[], None]]] = []

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Within it the calls of the modules go to their dispatchers."""
        with self._lock:
            if not self._num_running:
                self._taken = [(calls, fill_slot(calls.model, calls)) for calls in self._find()]
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                if not self._num_running:  # the last thread inside, whichever came first
                    self._close()

    def _close(self) -> None:
        for calls, put_back in self._taken:
            if in_slot(calls.model) is calls:  # else the model's Python has filled it anew
                put_back()
        self._taken = []

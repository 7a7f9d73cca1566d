"""Runs the calls of a whole model, which may run eagerly around compiled sub-modules.

If a model cannot be captured, it runs eagerly, and the slots of its sub-modules are filled
meanwhile (:mod:`.torch_slot`). Each of these parts runs by a program of its own, or eagerly around
its own sub-modules in the same way. All parts share one compiler, so that equal ones are
differentiated, lowered and compiled once.

PEFT's models are recognized by class name, once the user's code has imported PEFT: their
``generate`` calls the model inside, not themselves. Only this module names those classes.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from ...reuse.errors import CaptureError, FinalCaptureError, LazyInlineError, PlanError
from ...reuse.evidence.module_state import module_state, walk_modules
from ...reuse.freeze import TELLS_APART
from ...reuse.process import ProcessLock
from ..capture.regions import shapes_of
from ..compile_record import PartRecord
from ..compiler import Compiler
from ..guard import Inputs
from ..options import Options
from ..passes.state import Compilation, Pass
from ..refusals import DIFFERENTIATES, GIVES_NONE, SETS_FOR_BACKWARDS, way_of, wrapped_parts
from ..report import CompileReport
from ..sizes.shapes import CompileResult
from ..tracing.frames import warn_user
from ..tracing.torch_patches import replaced
from . import torch_slot
from .dispatcher import ModuleDispatcher, ModuleEntry, RunEagerly, TooSmallError
from .limits import Refusals

MIN_NODES = 3
"""The fewest graph nodes of a part's program; smaller parts run on PyTorch's own kernels."""
MAX_PROGRAMS = 8
"""The most programs of one part; a part whose calls keep changing then runs eagerly."""
MAX_SHAPES = 4
"""The most sets of input shapes that parts alike are compiled for, without symbolic sizes."""
MAX_DEPTH = 30
"""The deepest nesting of modules with parts: each dispatcher adds frames to Python's stack."""

Likeness = tuple[Any, ...]


@dataclass
class Alike:
    """The state that parts of the same classes and tensor shapes share.

    ``shapes`` are the input shapes that some of them were compiled for.
    """

    num_members: int
    refusals: Refusals = field(default_factory=Refusals)
    shapes: set[Any] = field(default_factory=set)


class PartDispatcher(ModuleDispatcher):
    """Runs the calls of one part."""

    def __init__(
        self,
        module: nn.Module,
        options: Options,
        dynamic: bool | None,
        alike: Alike,
        compiler: Compiler,
        thread: threading.local,
    ) -> None:
        # Equal layers share kernels only for fixed sizes, because symbols of two captures differ.
        learns = dynamic is None and alike.num_members > 1
        dynamic = False if learns else dynamic
        super().__init__(module, options, dynamic, compiler=compiler)
        self._refusals = alike.refusals
        self._alike = alike
        self._thread = thread

    def _runner(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        why = getattr(self._thread, "why_alone", "")
        return partial(self._run_alone, why) if why else self._run

    def _linked_for(self, inputs: Inputs) -> ModuleEntry | None:
        return None if len(self.entries) >= MAX_PROGRAMS else super()._linked_for(inputs)

    def _why_eager(self, leaves: Sequence[Any]) -> str:
        if reason := super()._why_eager(leaves):  # first, for a nested tensor has no shape
            return reason
        if len(self.entries) >= MAX_PROGRAMS:
            return f"its calls keep changing, and it has {MAX_PROGRAMS} programs already"
        known, shapes = self._alike.shapes, shapes_of(leaves)
        if self.dynamic is False and shapes not in known and len(known) >= MAX_SHAPES:
            now = ", ".join(map(str, shapes))
            return f"the sizes of its inputs keep changing (now {now})"
        return ""

    def _entry(self, made: CompileResult, leaves: Sequence[Any]) -> ModuleEntry:
        entry = super()._entry(made, leaves)
        self._alike.shapes.add(shapes_of(leaves))
        return entry

    def _run_eagerly(
        self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, raised: bool = False
    ) -> Any:
        why = "the module around it raised when it was captured" if raised else why_alone(reason)
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


def alone(thread: threading.local, why: str) -> AbstractContextManager[None]:
    """Makes all parts inside run eagerly, if ``why`` gives a reason."""
    return replaced(thread, why_alone=getattr(thread, "why_alone", "") or why)


def unchanged(model: nn.Module, reason: str) -> AbstractContextManager[None]:
    """Empties slots if the forward reads all attributes of a module: it would see a dispatcher."""
    return torch_slot.slots_empty(model) if TELLS_APART in reason else nullcontext()


def why_alone(reason: str) -> str:
    """Returns why the parts of a module that runs eagerly must run eagerly too, or ""."""
    if DIFFERENTIATES in reason:
        return "the module around it differentiates it inside its forward"
    found = [what for what in (SETS_FOR_BACKWARDS, GIVES_NONE) if what in reason]
    return f"the module around it {found[0]}" if found else ""


class Parts:
    """The parts of one model that runs eagerly, with their dispatchers."""

    def __init__(
        self, model: nn.Module, options: Options, dynamic: bool | None, compiler: Compiler
    ) -> None:
        self._model = model
        self._options, self._dynamic, self._compiler = options, dynamic, compiler
        self._calls: dict[int, PartDispatcher] = {}
        self._alike: dict[Likeness, Alike] = {}
        self._paths: dict[int, str] = {}
        self.routes = Routes(self._find)

    def _find(self) -> list[PartDispatcher]:
        """Returns the dispatchers of the parts, which are the modules in the model now."""
        places = walk_modules(self._model)
        if max(path.count(".") for path, _ in places) > MAX_DEPTH:
            return []
        wanted = {
            id(module): (path, module)
            # Reversed, so that a module with several paths gets its first.
            for path, module in reversed(places)
            if module is not self._model and torch_slot.in_slot(module) is None and _may_pay(module)
        }
        if any(id_ not in self._calls for id_ in wanted):
            self._make(list(wanted.values()))
        return [self._calls[id_] for id_ in wanted]

    def _make(self, places: Sequence[tuple[str, nn.Module]]) -> None:
        likeness = {id(module): _likeness(module) for _, module in places}
        counts = Counter(likeness.values())
        self._paths = {id(module): path for path, module in places}
        known, self._calls = self._calls, {}
        for _, module in places:
            key = likeness[id(module)]
            alike = self._alike.setdefault(key, Alike(counts[key]))
            calls = known.get(id(module))
            if calls is None:
                shared = (alike, self._compiler, self.routes.thread)
                calls = PartDispatcher(module, self._options, self._dynamic, *shared)
            self._calls[id(module)] = calls

    def compiled(self) -> list[nn.Module]:
        """Returns the parts that have compiled programs."""
        return [calls.model for calls in self._calls.values() if len(calls.entries)]

    def records(self) -> list[PartRecord]:
        """Returns a record of each part that was called, in the order of the model's modules."""
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
    """Whether to compile a module as a part; PyTorch's basic layers are too small."""
    if not torch_slot.asks_slot(module) or isinstance(module, torch.jit.ScriptModule):
        return False
    is_library = type(module).__module__.startswith(("torch.nn", "torch.ao"))
    has_children = any(module_state(module)["_modules"].values())
    return has_children or not is_library or isinstance(module, nn.RNNBase)


def _likeness(module: nn.Module) -> Likeness:
    """Returns classes and tensor shapes, equal for parts that may share."""
    tensors = tuple((t.dtype, t.device, tuple(t.shape)) for t in module.parameters())
    return (tuple(map(type, module.modules())), tensors)


class Routes:
    """Fills the slots of modules with their dispatchers while any thread runs the model."""

    def __init__(self, find: Callable[[], Sequence[ModuleDispatcher]]) -> None:
        self._find = find
        self.thread = threading.local()  # has the reason why all parts must run eagerly now
        self._lock = ProcessLock()
        self._num_running = 0
        self._taken: list[tuple[ModuleDispatcher, Callable[[], None]]] = []

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Routes the calls of the modules to their dispatchers inside."""
        with self._lock:
            # All threads share the slots: the first thread fills them, the last empties them.
            if not self._num_running:
                self._taken = [
                    (calls, torch_slot.fill_slot(calls.model, calls)) for calls in self._find()
                ]
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                taken = [] if self._num_running else self._taken
                for calls, put_back in taken:
                    # Else the model's Python has replaced it.
                    if torch_slot.in_slot(calls.model) is calls:
                        put_back()
                taken.clear()


# ---- a whole model -------------------------------------------------------------------------------


_WARN_AT_CALL = 2  # how many calls in a row run eagerly before a warning


class ModelDispatcher(ModuleDispatcher):
    """Runs a model's calls, and compiles sub-modules if the whole cannot be one program.

    There are two such cases. A wrapper for several devices (DDP, FSDP) runs eagerly around the
    models that it wraps, each of which is compiled as a whole model. A model that cannot be
    captured runs eagerly around its parts.
    """

    def __init__(self, model: nn.Module, options: Options, dynamic: bool | None = None) -> None:
        super().__init__(model, options, dynamic)
        self._class: type | None = None
        self._has_hooks_around = False
        self._wrapped: tuple[ModelDispatcher, ...] = ()
        self._parts: Parts | None = None
        self._generating: ModelDispatcher | None = None
        self._has_warned = False
        self._has_warned_eager = False
        self._num_eager = 0  # calls since the last compile that ran eagerly

    @property
    def last_report(self) -> CompileReport | None:
        """The report of the newest compile, which may be inside a wrapper or of the parts.

        Before the first call, that of the model which ``generate`` calls.
        """
        reports = [inside.last_report for inside in self._wrapped]
        known = next((r for r in reversed(reports) if r is not None), super().last_report)
        if known is None and self._generating is not None:
            return self._generating.last_report
        if known is self._eager and known is not None and self._parts is not None:
            known.parts = self._parts.records()
        return known

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compiles for the layouts of a call without running it; does nothing for wrappers."""
        if not (self.look_for_wrappers() or self._has_hooks_around):
            super().prepare(*args, **kwargs)

    def look_for_wrappers(self) -> tuple[ModelDispatcher, ...]:
        """Returns the dispatchers of models that are wrapped inside this one."""
        self._class = type(self.model)
        self._has_hooks_around = way_of(self.model) == "hooks"
        inside = [part for _, part in wrapped_parts(self.model)]
        if list(map(id, inside)) == [id(self.model)]:
            inside = []
        if list(map(id, inside)) != [id(known.model) for known in self._wrapped]:
            self._wrapped = tuple(ModelDispatcher(m, self.options, self.dynamic) for m in inside)
        return self._wrapped

    def called_past(self) -> tuple[ModelDispatcher, ...]:
        """Returns the dispatchers of models inside that code may call without this one."""
        inside = self.look_for_wrappers()
        generating = [known.look_for_generating() for known in (self, *inside)]
        return (*inside, *(known for known in generating if known is not None))

    def look_for_generating(self) -> ModelDispatcher | None:
        """Returns the dispatcher of the model that ``generate`` calls, if it is another one."""
        inside = model_that_generates(self.model)
        if inside is None or not torch_slot.asks_slot(inside):
            return None
        if self._generating is None or self._generating.model is not inside:
            self._generating = ModelDispatcher(inside, self.options, self.dynamic)
        return self._generating

    def warn_if_generate_is_eager(self) -> str:
        """Warns once if calls that ``generate`` makes do not use the compiled model; says why."""
        inside = model_that_generates(self.model) or self.model
        if torch_slot.asks_slot(inside) or not hasattr(inside, "generate"):
            return ""
        name = type(inside).__name__
        reason = f"generate() goes past it: {name} has a __call__ of its own"
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"generate() of the compiled model runs {name} eagerly: it has a __call__ of "
                "its own, which is not compiled. Put what it does into forward; then generate() "
                "runs compiled programs.",
                stacklevel=4,  # the user's line
            )
        return reason

    def note_generate(self) -> None:
        """Notes in the report, before ``generate`` runs, why it will run the model eagerly."""
        reason = self.warn_if_generate_is_eager()
        if reason:
            self._report_eager(reason)

    def _runner(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        if type(self.model) is not self._class:  # fully_shard changes it
            self.look_for_wrappers()
        if self._wrapped:
            return self._run_around_wrapped
        if self._has_hooks_around:
            return partial(torch_slot.call_with_hooks_around, self.model, self._run)
        return self._run

    def _why_never(self) -> str:
        return "a wrapper for several devices was put into it" if self.look_for_wrappers() else ""

    def _entry(self, made: CompileResult, leaves: Sequence[Any]) -> ModuleEntry:
        self._num_eager = 0
        return super()._entry(made, leaves)

    def _run_decided(self, found: RunEagerly, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._num_eager += 1
        should_warn = self._num_eager == _WARN_AT_CALL and not self._has_warned_eager
        result = super()._run_decided(found, args, kwargs)
        if should_warn:
            self._warn_if_mostly_eager(found)
        return result

    def _warn_if_mostly_eager(self, found: RunEagerly) -> None:
        """Warns if most of the model ran eagerly, with the reason."""
        # Only from the second call on: the first may have filled a cache of the model.
        layers = [m for m in self.model.modules() if not any(True for _ in m.children())]
        compiled = self._parts.compiled() if self._parts else []
        inside = {id(layer) for part in compiled for layer in part.modules()}
        count = sum(id(layer) in inside for layer in layers)
        if 2 * count >= len(layers):
            return
        self._has_warned_eager = True
        but = f", but for parts with {count} of its {len(layers)} layers" if count else ""
        is_refused = found.refused is not None and found.tries != "doubling"  # not a side effect
        how = " fallback='error' makes that an error." if is_refused else ""
        warn_user(
            f"{type(self.model).__name__} runs eagerly{but}: {found.reason.rstrip('.')}.{how} "
            "See lazyinline.last_report(model)."
        )

    def _may_run_eagerly(self, error: LazyInlineError) -> bool:
        may = super()._may_run_eagerly(error)
        if may and self.options.recompute is not None:
            raise FinalCaptureError(
                f"{error} The model could run eagerly, but recompute={self.options.recompute!r} "
                "would not hold there: compile with recompute=None."
            ) from error
        return may

    @cached_property
    def _to_wrapped(self) -> Routes:
        return Routes(lambda: self._wrapped)

    def _run_around_wrapped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._to_wrapped.opened():
            return torch_slot.call_past_slot(self.model, args, kwargs)

    def _run_eagerly(
        self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, raised: bool = False
    ) -> Any:
        if self._wrapped:
            return self._run_around_wrapped(args, kwargs)
        with ExitStack() as inside:
            if self.options.fallback == "eager" and not raised:
                if self._parts is None:
                    self._parts = Parts(self.model, self.options, self.dynamic, self._compiler)
                inside.enter_context(self._parts.routes.opened())
                inside.enter_context(alone(self._parts.routes.thread, why_alone(reason)))
            inside.enter_context(unchanged(self.model, "" if raised else reason))
            return self._run_alone(reason, args, kwargs)


_CLASSES = ("PeftModel", "PeftMixedModel")


def model_that_generates(model: nn.Module) -> nn.Module | None:
    """Returns the model that ``generate`` of a PEFT model calls; None for any other model."""
    peft = sys.modules.get("peft")
    found = (getattr(peft, name, None) for name in _CLASSES)
    if not isinstance(model, tuple(kind for kind in found if isinstance(kind, type))):
        return None
    base: Any = model.base_model  # the adapter's tuner, which has the methods of the model inside
    inside = getattr(getattr(base, "generate", None), "__self__", None)
    return inside if isinstance(inside, nn.Module) and inside is not model else None

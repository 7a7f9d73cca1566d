"""Runs the calls of a whole model, also where it runs eagerly around compiled modules in it.

PEFT's models are known by their class, once the user's code has imported PEFT: their ``generate``
calls the model inside and not themselves. This module alone says those names.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

from torch import nn

from ...reuse.errors import FinalCaptureError, LazyInlineError
from ..checks.refusals import way_of, wrapped_parts
from ..options import Options
from ..report import CompileReport
from ..sizes.shapes import CompileResult
from ..tracing.frames import user_frame
from .dispatcher import ModuleDispatcher, ModuleEntry, RunEagerly
from .parts import Parts, Routes, alone, unchanged, why_alone
from .torch_slot import asks_slot, call_past_slot, call_with_hooks_around

_WORTH_A_WORD = 2
"""The call that warns if it and those before it ran eagerly."""


class ModelDispatcher(ModuleDispatcher):
    """Takes a model's calls, and compiles modules in it where the whole cannot be one program.

    That is so for two reasons. A wrapper for several devices runs as it is, around the models that
    it wraps, of which each is a whole model. And what cannot be captured runs eagerly, around its
    parts.
    """

    def __init__(self, model: nn.Module, options: Options, dynamic: bool | None = None) -> None:
        super().__init__(model, options, dynamic)
        self._class: type | None = None
        self._has_hooks_around = False
        self._wrapped: tuple[ModelDispatcher, ...] = ()
        self._parts: Parts | None = None
        self._generating: ModelDispatcher | None = None
        self._has_warned = False
        self._has_told = False
        self._num_eager = 0  # calls since the last compile that ran eagerly

    @property
    def last_report(self) -> CompileReport | None:
        """Returns that of the newest compile inside wrappers, or with a record of each part.

        Before the first call, that of the model inside that generates.
        """
        reports = [inside.last_report for inside in self._wrapped]
        known = next((r for r in reversed(reports) if r is not None), super().last_report)
        if known is None and self._generating is not None:
            return self._generating.last_report
        if known is self._eager and known is not None and self._parts is not None:
            known.parts = self._parts.records()
        return known

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compiles for the layout of a call, and runs nothing. Wrappers have to run."""
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
        """Returns the dispatchers of models inside that others call as well."""
        inside = self.look_for_wrappers()
        generating = [known.look_for_generating() for known in (self, *inside)]
        return (*inside, *(known for known in generating if known is not None))

    def look_for_generating(self) -> ModelDispatcher | None:
        """Returns the dispatcher of the model that generates, if this one only calls that."""
        inside = model_that_generates(self.model)
        if inside is None or not asks_slot(inside):
            return None
        if self._generating is None or self._generating.model is not inside:
            self._generating = ModelDispatcher(inside, self.options, self.dynamic)
        return self._generating

    def warn_if_generate_is_eager(self, stacklevel: int = 3) -> str:
        """Warns, once, where calls that ``generate`` makes do not come to what is compiled.

        Args:
            stacklevel: of the user's line, as ``warnings.warn`` counts.

        Returns:
            Why they do not; "" where they do.
        """
        inside = model_that_generates(self.model) or self.model
        if asks_slot(inside) or not hasattr(inside, "generate"):
            return ""
        name = type(inside).__name__
        reason = f"generate() goes past it: {name} has a __call__ of its own"
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"generate() of the compiled model runs {name} eagerly: it has a __call__ of "
                "its own, which is not compiled. Put what it does into forward; then generate() "
                "runs compiled programs.",
                stacklevel=stacklevel,
            )
        return reason

    def note_generate(self) -> None:
        """Reports, before ``generate`` runs, why it will run the model eagerly, if so."""
        reason = self.warn_if_generate_is_eager(stacklevel=4)
        if reason:
            self._report_eager(reason)

    def _runner(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        if type(self.model) is not self._class:  # fully_shard changes it
            self.look_for_wrappers()
        if self._wrapped:
            return self._run_around_wrapped
        if self._has_hooks_around:
            return partial(call_with_hooks_around, self.model, self._run)
        return self._run

    def _why_never(self) -> str:
        return "a wrapper for several devices was put into it" if self.look_for_wrappers() else ""

    def _entry(self, made: CompileResult, leaves: Sequence[Any]) -> ModuleEntry:
        self._num_eager = 0
        return super()._entry(made, leaves)

    def _run_as_told(self, found: RunEagerly, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._num_eager += 1
        is_worth_a_word = self._num_eager == _WORTH_A_WORD and not self._has_told
        result = super()._run_as_told(found, args, kwargs)
        if is_worth_a_word:
            self._warn_if_mostly_eager(found)
        return result

    def _warn_if_mostly_eager(self, found: RunEagerly) -> None:
        """Says where most of the model ran eagerly although it was compiled, and why."""
        # The second such call warns: the first may have filled a cache of the model.
        layers = [m for m in self.model.modules() if not any(True for _ in m.children())]
        compiled = self._parts.compiled() if self._parts else []
        inside = {id(layer) for part in compiled for layer in part.modules()}
        count = sum(id(layer) in inside for layer in layers)
        if 2 * count >= len(layers):
            return
        self._has_told = True
        frame = user_frame(sys._getframe(1))
        but = f", but for parts with {count} of its {len(layers)} layers" if count else ""
        how = " fallback='error' makes that an error." if found.refused is not None else ""
        warnings.warn_explicit(
            f"{type(self.model).__name__} runs eagerly{but}: {found.reason.rstrip('.')}.{how} "
            "See lazyinline.last_report(model).",
            UserWarning,
            *((frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)),
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
            return call_past_slot(self.model, args, kwargs)

    def _run_eagerly(
        self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, raised: str = ""
    ) -> Any:
        if self._wrapped:
            return self._run_around_wrapped(args, kwargs)
        with ExitStack() as inside:
            if self.options.fallback == "eager" and not raised:
                if self._parts is None:
                    made_of = (self.options, self.dynamic, self._compiler, self._accepted)
                    self._parts = Parts(self.model, *made_of)
                inside.enter_context(self._parts.routes.opened())
                inside.enter_context(alone(self._parts.thread, why_alone(reason)))
            inside.enter_context(unchanged(self.model, "" if raised else reason))
            return self._run_alone(reason, args, kwargs)


_CLASSES = ("PeftModel", "PeftMixedModel")


def model_that_generates(model: nn.Module) -> nn.Module | None:
    """Returns the model that ``generate`` of one of PEFT's calls; None for any other model."""
    peft = sys.modules.get("peft")
    found = (getattr(peft, name, None) for name in _CLASSES)
    if not isinstance(model, tuple(kind for kind in found if isinstance(kind, type))):
        return None
    base: Any = model.base_model  # what puts adapters in; it has the methods of the model inside
    inside = getattr(getattr(base, "generate", None), "__self__", None)
    return inside if isinstance(inside, nn.Module) and inside is not model else None

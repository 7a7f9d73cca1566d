"""What runs the calls of a model: the programs compiled for it, and itself where none can."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from types import CodeType
from typing import Any

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.evidence.module_state import module_state, own_hooks
from ..capture.capture import backward_hooked, one_at_a_time
from ..capture.float_inputs import OpenCapture
from ..checks.plain_inputs import watching_tensor, written_out
from ..checks.runnable import check_runnable, check_writes
from ..checks.torch_modes import mode_around
from ..checks.wrappers import model_inside, way_of, wrapped_parts
from ..compiler import Compiler
from ..effects.effects import EffectError, EffectsSeen
from ..guards.guard import Guard
from ..guards.kept_programs import Inputs, KeptPrograms
from ..guards.varying_floats import VaryingFloats
from ..marks import WRAPPED
from ..options import Options
from ..report import CompileReport
from ..sizes.shapes import Made, Shapes
from .entry import ModuleEntry
from .torch_slot import (
    call_past_slot,
    call_with_hooks_around,
    in_slot,
    slot_filled,
)


class Calls:
    """Takes a model's calls: finds or compiles the program for each, and runs it.

    It has the signature of the model's ``forward``, which tools look at.

    Attributes:
        model: whose calls they are.
        options: how they are compiled.
        dynamic: which sizes are symbols, see :class:`Shapes`; so do ``names``.
        entries: the programs there are.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        dynamic: bool | None = None,
        names: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        self.model = model
        self.options = options
        self.dynamic = dynamic
        self.entries = KeptPrograms[ModuleEntry]()
        self._report: CompileReport | None = None
        self._parts: tuple[Calls, ...] = ()
        self._class: type | None = None
        self._has_hooks_around = False
        self._compiler = Compiler(options)
        self._shapes = Shapes(model, options, dynamic, names)
        self._effects = EffectsSeen()
        self._floats = VaryingFloats()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call's compiled program, compiling first if the inputs' layout is new."""
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(self._call)(args, kwargs)
        return self._call(args, kwargs)

    @property
    def last_report(self) -> CompileReport | None:
        """What the newest compile did; None before the first call."""
        reports = [part.last_report for part in self._parts]
        return next((r for r in reversed(reports) if r is not None), self._report)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compiles for the layout of a call, and runs nothing."""
        if self.look_for_wrappers() or self._has_hooks_around:
            return
        leaves, tree = torch_pytree.flatten_call(args, kwargs)
        if not (mode_around() or self._why_itself(leaves)):
            self._compile(leaves, tree)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model's forward."""
        return inspect.signature(self.model.forward)

    @property
    def __code__(self) -> CodeType:
        """That of the model's forward; ``torch.export`` asks where it stands."""
        code: CodeType = self.model.forward.__code__
        return code

    def summary(self) -> str:
        """Says in one line what is compiled, and how."""
        how = f"{type(self.model).__name__}, reuse {self.options.reuse}, backend "
        how += f"{self.options.backend}, "
        report = self.last_report
        if report is None:
            return f"{how}not compiled yet"
        how += _counted(len(self.entries), "program")
        if report.ran_eagerly:
            return f"{how}, not compiled last: {report.ran_eagerly}"
        return f"{how}, {_counted(report.num_shared_calls, 'shared call')}"

    def __reduce__(self) -> Any:
        """A copy of a module that holds this has an empty place there: the copy is plain."""
        return _no_calls, ()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(self.model) is not self._class:  # fully_shard changes it
            self.look_for_wrappers()
        if self._parts:
            return self._run_around_parts(args, kwargs)
        if self._has_hooks_around:
            run = lambda *args, **kwargs: self._run(args, kwargs)  # noqa: E731
            return call_with_hooks_around(self.model, run, args, kwargs)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode = mode_around()
        if mode:
            reason = f"{mode} is active, which sees or changes every operator"
            return self._run_itself(reason, args, kwargs)
        leaves, tree = torch_pytree.flatten_call(args, kwargs)
        entry = self.entries.fitting(leaves, tree)
        if entry is not None:
            return entry.run(leaves, args, kwargs)
        plain = written_out(leaves)
        if plain is not None:
            entry = self.entries.fitting(plain, tree)
        if entry is None:
            if self.look_for_wrappers():
                return self._run_around_parts(args, kwargs)
            reason = self._why_itself(leaves)
            if reason:
                return self._run_itself(reason, args, kwargs)
            try:
                entry = self._compile(leaves if plain is None else plain, tree)
            except EffectError as effect:
                reason = self._effects.note(self._state(), str(effect))
                return self._run_itself(reason, args, kwargs)
        if plain is None:
            return entry.run(leaves, args, kwargs)
        if entry.is_tied_to_inputs:
            reason = "an input that it changes or returns is conjugated or negated only in name"
            return self._run_itself(reason, args, kwargs)
        return entry.run(plain, args, kwargs)

    # ---- where wrappers run as they are, around programs -------------------------------------

    def look_for_wrappers(self) -> tuple[Calls, ...]:
        """Returns what runs the calls of models that wrappers in this one stand around."""
        self._class = type(self.model)
        self._has_hooks_around = way_of(self.model) == "hooks"
        parts = [part for _, part in wrapped_parts(self.model)]
        if list(map(id, parts)) == [id(self.model)]:
            parts = []
        if list(map(id, parts)) != [id(known.model) for known in self._parts]:
            self._parts = tuple(Calls(part, self.options, self.dynamic) for part in parts)
        return self._parts

    def _run_around_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with ExitStack() as filled:
            for part in self._parts:
                filled.enter_context(slot_filled(part.model, part))
            return call_past_slot(self.model, args, kwargs)

    # ---- where the model itself runs -----------------------------------------------------

    def _why_itself(self, leaves: Sequence[Any]) -> str:
        """Returns why no program can stand for a call of the model, or an empty text."""
        watching = watching_tensor(self.model, leaves)
        if watching:
            return watching
        hooked = backward_hooked(self.model) if torch.is_grad_enabled() else ""
        if hooked:
            return f"{hooked} has a backward hook, which no compiled program calls"
        return self._effects.why_itself(self._state()) if self._effects else ""

    def _state(self) -> tuple[Any, ...]:
        """What the effects of a forward may depend on: modes, and which hooks there are."""
        modes = [(m.training, *own_hooks(m, "forward")) for m in self.model.modules()]
        return (torch.is_grad_enabled(), *modes)

    def _run_itself(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._report_eager(reason)
        return call_past_slot(self.model, args, kwargs)

    def _report_eager(self, reason: str) -> None:
        """Notes why the model itself runs."""
        known = self._report
        if known is None or known.ran_eagerly != reason:
            options = self.options
            self._report = CompileReport(True, options.backend, options.reuse, ran_eagerly=reason)

    # ---- where a program is compiled -----------------------------------------------------

    @one_at_a_time
    def _compile(self, leaves: list[Any], tree: torch_pytree.TreeSpec) -> ModuleEntry:
        made_meanwhile = self.entries.fitting(leaves, tree)
        if made_meanwhile is not None:
            return made_meanwhile
        check_runnable(self.model)
        inputs = Inputs.of(leaves, tree)
        made = self._shapes.made(inputs) or self._made_for(inputs)
        check_writes(made.compiled.captured.program)
        entry = ModuleEntry(made, leaves)
        entry.can_be_linked_again = made.is_linked
        if self.entries.add(entry):
            self._compiler = Compiler(self.options)
        self._report = made.report
        return entry

    def _made_for(self, inputs: Inputs) -> Made:
        """Compiles for the sizes of a call alone; floats that varied are inputs, if they can be."""
        self.entries.warn_if_many(self.model, inputs)
        train, reuse = torch.is_grad_enabled(), self.options.reuse
        opened = self._floats.opened(self.model, inputs, reuse=reuse, train=train)
        if opened.places:
            try:
                return self._shapes.note(self._made_with(inputs, opened, train=train), inputs)
            except Exception:  # the call can be compiled for its numbers
                self._floats.close(inputs, opened.places)
        made = self._made_with(inputs, OpenCapture(), train=train)
        return self._shapes.note(made, inputs)

    def _made_with(self, inputs: Inputs, opened: OpenCapture, *, train: bool) -> Made:
        compiled, report = self._compiler.compile(
            self.model, inputs.args, inputs.kwargs, train=train, known=opened.captured
        )
        hold, places = compiled.runtime.hold, opened.places
        guard = Guard(self.model, compiled.captured, inputs.leaves, inputs.tree, hold, places)
        return Made(guard, compiled.without_tensors(), report, numbers=opened.numbers)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def calls_of(module: Any) -> Calls | None:
    """Returns what runs the calls of a module that was compiled, in place or with a wrapper."""
    if not isinstance(module, nn.Module):
        return None
    held = module_state(module).get(WRAPPED, in_slot(module))
    if held is None:
        inside = model_inside(module)
        return None if inside is None else calls_of(inside)
    return held if isinstance(held, Calls) else None


def _no_calls() -> None:
    """Stands in a copied model for the calls of the model that it was copied from."""

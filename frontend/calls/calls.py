"""What runs the calls of a model: the programs compiled for it, and itself where none can."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.evidence.module_state import module_state, own_hooks
from ..capture.capture import backward_hooked, one_at_a_time
from ..capture.effects import EffectError, EffectsSeen
from ..checks.plain_inputs import watching_tensor, written_out
from ..checks.runnable import check_runnable, check_writes
from ..checks.torch_modes import mode_around
from ..compiler import Compiler
from ..guards.guard import Guard
from ..guards.kept_programs import Inputs, KeptPrograms
from ..marks import WRAPPED
from ..options import Options
from ..report import CompileReport
from ..sizes.shapes import Made, Shapes
from .entry import ModuleEntry
from .torch_slot import call_past_slot, in_slot


class Calls:
    """Takes a model's calls: finds or compiles the program for each, and runs it.

    It has the signature of the model's ``forward``, which tools look at.

    Attributes:
        model: whose calls they are.
        options: how they are compiled.
        dynamic: which sizes are symbols, see :class:`Shapes`; so do ``names``.
        entries: the programs there are.
        last_report: what the newest compile did; None before the first call.
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
        self.last_report: CompileReport | None = None
        self._compiler = Compiler(options)
        self._shapes = Shapes(model, options, dynamic, names)
        self._effects = EffectsSeen()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call's compiled program, compiling first if the inputs' layout is new."""
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(self._run)(args, kwargs)
        return self._run(args, kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compiles for the layout of a call, and runs nothing."""
        leaves, tree = torch_pytree.flatten_call(args, kwargs)
        if not (mode_around() or self._why_itself(leaves)):
            self._compile(leaves, tree)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model's forward."""
        return inspect.signature(self.model.forward)

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
        known = self.last_report
        if known is None or known.ran_eagerly != reason:
            options = self.options
            self.last_report = CompileReport(
                True, options.backend, options.reuse, ran_eagerly=reason
            )

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
        entry = ModuleEntry(made.guard, made.compiled, leaves)
        entry.can_be_linked_again = made.is_linked
        if self.entries.add(entry):
            self._compiler = Compiler(self.options)
        self.last_report = made.report
        return entry

    def _made_for(self, inputs: Inputs) -> Made:
        """Compiles for the sizes of a call alone."""
        self.entries.warn_if_many(self.model, inputs)
        compiled, report = self._compiler.compile(
            self.model, inputs.args, inputs.kwargs, train=torch.is_grad_enabled()
        )
        hold = compiled.runtime.hold
        guard = Guard(self.model, compiled.captured, inputs.leaves, inputs.tree, hold)
        return self._shapes.note(Made(guard, compiled.without_tensors(), report), inputs)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def calls_of(module: Any) -> Calls | None:
    """Returns what runs the calls of a module that was compiled, in place or with a wrapper."""
    if not isinstance(module, nn.Module):
        return None
    held = module_state(module).get(WRAPPED, in_slot(module))
    return held if isinstance(held, Calls) else None


def _no_calls() -> None:
    """Stands in a copied model for the calls of the model that it was copied from."""

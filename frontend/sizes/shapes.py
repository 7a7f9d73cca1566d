"""Finds the program for the sizes of a call: sizes that vary become symbols, others need a link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.errors import LazyInlineError, PlanError, check_choice
from ...reuse.ir.program import Program, UserInput
from ...reuse.torch_names import memory_id
from ..capture.capture import Subject, capture_model
from ..capture.regions import shapes_of
from ..compiled import Compiled
from ..compiler import Compiler, Linker
from ..guard import MAX_PROGRAMS, Guard, Inputs
from ..options import Options
from ..passes.link import WRONG_SIZES, OverBudgetError
from ..passes.state import Goal
from ..refusals import RaisedError, WrongCallError
from ..report import CompileReport

if TYPE_CHECKING:
    from .torch_input_sizes import InputSizes, Names

MAX_SYMBOLIC = 8
"""The most symbolic programs for calls that differ in sizes only; then a shape gets numbers."""


@dataclass(frozen=True)
class CompileResult:
    """A compiled program, the guard that says when it may run, and the report of its compile."""

    guard: Guard
    compiled: Compiled
    report: CompileReport
    is_linked: bool = False


@dataclass
class _Compile:
    """An earlier compile, with guard and shapes of the call that it was made for."""

    guard: Guard
    shapes: tuple[tuple[int, ...], ...]
    why_static: str = ""  # why its sizes are numbers although sizes vary, if so
    linker: Linker | None = None  # None if its sizes are numbers, or a link failed


class ShapeCache:
    """Keeps the compiles of one module, and learns from them which sizes vary.

    ``dynamic`` None makes dimensions symbolic that varied, True all, False none; those with
    ``names`` are known to vary from the start.
    """

    def __init__(
        self, model: nn.Module, options: Options, dynamic: bool | None, names: Names = ()
    ) -> None:
        check_choice(PlanError, Literal[None, True, False], dynamic=dynamic)
        self._model = model
        # The cache on disk does not record guards on sizes.
        self._options = replace(options, cache="off")
        self.dynamic = dynamic
        self._names = names if any(map(any, names)) else ()
        self._compiles: tuple[_Compile, ...] = ()  # the newest last
        self._num_compiles = self._num_links = 0
        self._why_static = self._why_numbers = ""

    @property
    def has_symbols(self) -> bool:
        """Whether a program may be linked for further sizes."""
        return any(compile_.linker is not None for compile_ in self._compiles)

    @property
    def linkers(self) -> list[tuple[Guard, Linker]]:
        """The programs that may be linked for further sizes, with their guards."""
        return [(c.guard, c.linker) for c in self._compiles if c.linker is not None]

    def adopt(self, guard: Guard, linker: Linker) -> None:
        """Adds a symbolic program, older than all here, to link for the sizes of calls."""
        self._compiles = (_Compile(guard, linker.sizes.shapes, "", linker), *self._compiles)
        self.dynamic = None

    def linked(self, inputs: Inputs) -> CompileResult | None:
        """Links a symbolic program for the sizes of a call; None if none fits."""
        self._why_static = ""
        for compile_, guard in self._fitting(inputs):
            made = self._linked(compile_, guard, inputs)
            if made is not None:
                self._num_links += 1
                return self._counted(made)
        return None

    def symbolic(self, inputs: Inputs, goal: Goal) -> CompileResult | None:
        """Links or compiles a symbolic program for a call; None if its sizes must be numbers."""
        made = self.linked(inputs)
        if made is not None:
            return made
        fitting = self._fitting(inputs)
        # A compile that failed with symbols would fail again, and takes long.
        alike = [c for c, _ in fitting]
        self._why_static = next((c.why_static for c in alike if c.why_static), "")
        growing = torch_pytree.growing_leaves(inputs.tree)
        grows = self.dynamic is None and any(dim is not None for dim in growing)
        expected = self.dynamic or alike or grows or self._names
        if self._why_static or not expected:
            return None
        if sum(c.linker is not None for c in alike) >= MAX_SYMBOLIC:
            return None
        made = self._compiled(alike, inputs, goal)
        earlier = [c.linker.sizes for c in alike if c.linker is not None]
        if made is not None and earlier:
            made.report.why_static = made.report.why_static or earlier[-1].why_not(inputs.leaves)
        return made

    def note(self, compiled: Compiled, report: CompileReport, inputs: Inputs) -> CompileResult:
        """Remembers a program that was compiled for the sizes of one call."""
        report.why_static = self._why_static or self._why_numbers
        return self._counted(self._kept(compiled, report, inputs))

    def _kept(self, compiled: Compiled, report: CompileReport, inputs: Inputs) -> CompileResult:
        """Keeps a compile; makes the guard of its call."""
        guard = Guard(self._model, compiled.captured, inputs.given, inputs.tree, compiled.hold)
        known = _Compile(guard, shapes_of(inputs.leaves), self._why_static, compiled.linker)
        self._compiles = (*self._compiles, known)[-MAX_PROGRAMS:]
        self._num_compiles += 1
        is_linked = compiled.linker is not None
        return CompileResult(guard, compiled.without_tensors(), report, is_linked=is_linked)

    def _counted(self, made: CompileResult) -> CompileResult:
        made.report.num_compiles, made.report.num_links = self._num_compiles, self._num_links
        return made

    def _fitting(self, inputs: Inputs) -> list[tuple[_Compile, Guard]]:
        """Returns compiles whose calls differ in sizes only, each with a guard for this call."""
        if self.dynamic is False:
            return []
        resized = ((c, c.guard.resized(inputs.given)) for c in self._compiles)
        pairs = [(c, g) for c, g in resized if g is not None]
        return [(c, g) for c, g in pairs if g.accepts(inputs.given, inputs.tree)]

    def _linked(self, compile_: _Compile, guard: Guard, inputs: Inputs) -> CompileResult | None:
        """Links a symbolic program for a call, if its conditions hold for the sizes."""
        linker = compile_.linker
        values = linker.sizes.values(inputs.leaves) if linker is not None else None
        if values is None or linker is None:
            return None
        try:
            compiled, report = linker.relink(values)
        except OverBudgetError:
            return None  # another program may fit the budget, and this one fits it at other sizes
        except LazyInlineError as error:
            compile_.linker, compile_.why_static = None, str(error)
            return None
        return CompileResult(guard, compiled, report, is_linked=True)

    def _compiled(
        self, alike: Sequence[_Compile], inputs: Inputs, goal: Goal
    ) -> CompileResult | None:
        """Compiles with symbols; returns None if the sizes of this call must be numbers."""
        for names in self._learned(alike, inputs):
            try:
                return self._counted(self._compiled_with(names, inputs, goal))
            except WrongCallError:
                raise
            except Exception as error:  # the call can be compiled for its sizes alone
                self._why_static = f"{type(error).__name__}: {error}".splitlines()[0]
        return None

    def _learned(self, alike: Sequence[_Compile], inputs: Inputs) -> list[Names]:
        """Returns the choices of symbolic dimensions to try: first with the batch, then without."""
        from .torch_input_sizes import learned_names  # brings in sympy

        if self._names and not alike:
            return [self._names]
        learned = partial(
            learned_names,
            inputs.leaves,
            [c.shapes for c in alike],
            every=self.dynamic is True,
            growing=torch_pytree.growing_leaves(inputs.tree),
        )
        varied, with_batch = learned(), learned(batch="open")
        # The batch has not varied yet. If the model specializes it, it stays a number.
        return list(dict.fromkeys([with_batch, varied])) if any(map(any, varied)) else []

    def _compiled_with(self, names: Names, inputs: Inputs, goal: Goal) -> CompileResult:
        from .torch_input_sizes import InputSizes

        # Example sizes (hints) in the trace differ from the model's own sizes: otherwise a batch of
        # 64 would be unified with a layer of width 64.
        tensors = (*self._model.parameters(), *self._model.buffers())
        hints: frozenset[int] | None = frozenset(n for tensor in tensors for n in tensor.shape)
        while True:
            sizes = partial(InputSizes, inputs.leaves, names, hints)
            try:
                return self._compiled_once(sizes, inputs, goal)
            except Exception as error:
                if isinstance(error, RaisedError) and hints is not None:
                    self._refuse_wrong(inputs)
                # The model may need relations between sizes that hold in this call: try these.
                if hints is None or not sizes().moved:
                    raise
                hints = None

    def _refuse_wrong(self, inputs: Inputs) -> None:
        """Raises WrongCallError if the model's Python also raises with numbers for sizes."""
        train = torch.is_grad_enabled()
        try:
            subject = Subject(self._model, inputs.args, inputs.kwargs)
            capture_model(subject, reuse="off", train=train)
        except WrongCallError:
            raise
        except Exception:  # raised again when the call is compiled for its sizes
            return

    def _compiled_once(
        self, sizes: Callable[[], InputSizes], inputs: Inputs, goal: Goal
    ) -> CompileResult:
        # Symbols of two captures differ, so each has a compiler of its own.
        compiler = Compiler(self._options)
        compiled, report = compiler.compile(
            self._model, inputs.args, inputs.kwargs, goal, sizes=sizes
        )
        if compiled.captured.sizes.values(inputs.leaves) is None:
            raise PlanError(WRONG_SIZES)
        if _writes_shared(compiled.captured.program, inputs.leaves):
            raise PlanError("the forward changes memory in which two of its tensors lie")
        self._why_static, self._why_numbers = "", compiled.captured.sizes.why_numbers
        report.why_static = self._why_numbers
        return self._kept(compiled, report, inputs)


def _writes_shared(program: Program, leaves: Sequence[Any]) -> bool:
    """Whether a program writes to memory of two tensors, which a trace with symbols has apart."""
    given = [leaves[s.index] if isinstance(s, UserInput) else s.tensor for s in program.sources]
    places = {id(t): memory_id(t) for t in given if isinstance(t, torch.Tensor)}
    written = {places.get(id(given[index])) for _, index in program.writes}
    return any(count > 1 for place, count in Counter(places.values()).items() if place in written)

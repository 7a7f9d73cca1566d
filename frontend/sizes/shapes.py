"""Which call gets which program: sizes that vary become symbols, further sizes cost a link."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.errors import LazyInlineError, PlanError
from ..capture.capture import capture_model
from ..capture.regions import CapturedModel
from ..capture.signatures import shapes_of
from ..checks.refusals import RaisedError, WrongCallError
from ..compiled import AnyCompiled, CompiledProgram, CompiledStep
from ..guards.guard import Guard
from ..guards.kept_programs import MAX_PROGRAMS, Inputs
from ..passes.sizes import OverBudgetError
from ..report import CompileReport

if TYPE_CHECKING:
    from ...reuse.ir.torch_symbols import Values
    from .torch_input_sizes import InputSizes, Names

MAX_SYMBOLIC = 8
"""Programs of symbolic sizes for calls that differ in sizes only; further shapes are numbers."""
DYNAMIC_CHOICES = (None, True, False)


class Symbolic(Protocol):
    """What is compiled with symbols for sizes. Not run itself."""

    @property
    def captured(self) -> CapturedModel:
        """What capture saw."""

    @property
    def sizes(self) -> InputSizes:
        """The symbols, and what the compile took for granted of them."""

    def without_tensors(self) -> Any:
        """Returns the same for one who has the model's tensors from elsewhere."""


Linked = TypeVar("Linked", bound=CompiledProgram | CompiledStep, covariant=True)


class SymbolicCompiling(Protocol[Linked]):
    """Compiles for any sizes. One for one capture: symbols of two are not the same."""

    def report(self) -> CompileReport:
        """Returns the report of a compile or a link that is about to begin."""

    def compile_symbolic(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sizes: Callable[[], InputSizes],
        report: CompileReport,
    ) -> Symbolic:
        """Runs the passes up to link.

        Raises:
            CaptureError: if the model cannot be captured with symbolic sizes.
            PlanError: if an option needs numbers.
        """

    def at(self, symbolic: Any, values: Values, report: CompileReport) -> Linked:
        """Links for numbers that the conditions of what is compiled hold for.

        Raises:
            PlanError: if it cannot be right for them after all.
        """


@dataclass
class Made(Generic[AnyCompiled]):
    """What runs a call, when it may, and what making it took."""

    guard: Guard
    compiled: AnyCompiled
    report: CompileReport
    is_linked: bool = False


@dataclass
class _Compile(Generic[AnyCompiled]):
    """One compile of the past.

    Attributes:
        guard: of the call it was made for.
        shapes: of that call.
        why_static: why its sizes are numbers although others came, if so.
        symbolic: the program, if its sizes are symbols, and what links it.
    """

    guard: Guard
    shapes: tuple[tuple[int, ...], ...]
    why_static: str = ""
    symbolic: tuple[Symbolic, SymbolicCompiling[AnyCompiled]] | None = None


class Shapes(Generic[AnyCompiled]):
    """The compiles of one module, and what they teach about the next.

    Args:
        model: the module.
        compiler: makes what compiles for any sizes; asked once they are known to vary.
        dynamic: None makes symbols of the dimensions that varied, True of all, False of none.
        names: of dimensions that are known to vary before any did.

    Raises:
        PlanError: for another ``dynamic``.
    """

    def __init__(
        self,
        model: nn.Module,
        compiler: Callable[[], SymbolicCompiling[AnyCompiled]],
        dynamic: bool | None,
        names: Names = (),
    ) -> None:
        if dynamic not in DYNAMIC_CHOICES:
            raise PlanError(f"dynamic={dynamic!r} is unknown; there are {DYNAMIC_CHOICES}.")
        self._model = model
        self._compiler = compiler
        self.dynamic = dynamic
        self._names = names if any(map(any, names)) else ()
        self._compiles: tuple[_Compile[AnyCompiled], ...] = ()  # the newest last
        self._num_compiles = self._num_links = 0
        self._why_static = ""

    def made(self, inputs: Inputs) -> Made[AnyCompiled] | None:
        """Returns a program of symbolic sizes for a call, or None if it gets one of its own."""
        self._why_static = ""
        fitting = self._fitting(inputs)
        for compile_, guard in fitting:
            made = self._linked(compile_, guard, inputs)
            if made is not None:
                self._num_links += 1
                return self._counted(made)
        alike = [c for c, _ in fitting]
        self._why_static = next((c.why_static for c in alike if c.why_static), "")
        growing = torch_pytree.growing_leaves(inputs.tree)
        grows = self.dynamic is None and any(dim is not None for dim in growing)
        expected = self.dynamic or alike or grows or self._names
        if self._why_static or not expected:
            return None
        if sum(c.symbolic is not None for c in alike) >= MAX_SYMBOLIC:
            return None
        return self._compiled(alike, inputs)

    def note(self, made: Made[AnyCompiled], inputs: Inputs) -> Made[AnyCompiled]:
        """Remembers a program that was compiled for the sizes of a call alone."""
        made.report.why_static = self._why_static
        shapes = shapes_of(inputs.leaves)
        known: _Compile[AnyCompiled] = _Compile(made.guard, shapes, self._why_static)
        self._keep(known)
        return self._counted(made)

    def _keep(self, compile_: _Compile[AnyCompiled]) -> None:
        self._compiles = (*self._compiles, compile_)[-MAX_PROGRAMS:]
        self._num_compiles += 1

    def _counted(self, made: Made[AnyCompiled]) -> Made[AnyCompiled]:
        made.report.num_compiles, made.report.num_links = self._num_compiles, self._num_links
        return made

    def _fitting(self, inputs: Inputs) -> list[tuple[_Compile[AnyCompiled], Guard]]:
        """Returns the compiles of calls that differ in sizes only, each with a guard for these."""
        if self.dynamic is False:
            return []
        resized = ((c, c.guard.resized(inputs.given)) for c in self._compiles)
        pairs = [(c, g) for c, g in resized if g is not None]
        return [(c, g) for c, g in pairs if g.accepts(inputs.given, inputs.tree)]

    def _linked(
        self, compile_: _Compile[AnyCompiled], guard: Guard, inputs: Inputs
    ) -> Made[AnyCompiled] | None:
        """Links a program of symbolic sizes for a call, if it is right for its sizes."""
        if compile_.symbolic is None:
            return None
        program, compiler = compile_.symbolic
        values = program.sizes.values(inputs.leaves)
        if values is None:
            return None
        report = compiler.report()
        try:
            compiled = compiler.at(program, values, report)
        except OverBudgetError:
            return None  # another may keep it, and this one will for other sizes
        except LazyInlineError as error:
            compile_.symbolic, compile_.why_static = None, str(error)
            return None
        return Made(guard, compiled, report, is_linked=True)

    def _compiled(
        self, alike: Sequence[_Compile[AnyCompiled]], inputs: Inputs
    ) -> Made[AnyCompiled] | None:
        """Compiles with symbols; returns None where the sizes of this call have to be numbers."""
        for names in self._learned(alike, inputs):
            try:
                made = self._compiled_with(names, inputs)
            except WrongCallError:
                raise
            except Exception as error:  # the call can be compiled for its sizes alone
                self._why_static = f"{type(error).__name__}: {error}".splitlines()[0]
            else:
                self._why_static = ""
                return self._counted(made)
        return None

    def _learned(self, alike: Sequence[_Compile[AnyCompiled]], inputs: Inputs) -> list[Names]:
        """Returns which dimensions may be symbols, the most first: with a batch, and without."""
        from .torch_input_sizes import learned_names, without_numbers  # brings in sympy

        if self._names and not alike:
            return [self._names]
        learned = partial(
            learned_names,
            inputs.leaves,
            [c.shapes for c in alike],
            every=self.dynamic is True,
            growing=torch_pytree.growing_leaves(inputs.tree),
        )
        programs = [c.symbolic[0].sizes for c in alike if c.symbolic is not None]
        varied, with_batch = (
            without_numbers(names, programs) for names in (learned(), learned(batch="open"))
        )
        return list(dict.fromkeys([with_batch, varied])) if any(map(any, varied)) else []

    def _compiled_with(self, names: Names, inputs: Inputs) -> Made[AnyCompiled]:
        from .torch_input_sizes import InputSizes

        hints: frozenset[int] | None = _sizes_of(self._model, inputs)
        while True:
            sizes = partial(InputSizes, inputs.leaves, names, hints)
            try:
                return self._compiled_once(sizes, inputs)
            except Exception as error:
                if isinstance(error, RaisedError) and hints is not None:
                    self._refuse_wrong(inputs)
                # Relations that hold between the sizes of this call may be needed.
                if hints is None or not sizes().moved:
                    raise
                hints = None

    def _refuse_wrong(self, inputs: Inputs) -> None:
        """Raises WrongCallError if the model's Python raises with the sizes of the call, too."""
        train = torch.is_grad_enabled()
        try:
            capture_model(self._model, inputs.args, inputs.kwargs, reuse="off", train=train)
        except WrongCallError:
            raise
        except Exception:  # it is told where the call is compiled for its sizes
            return

    def _compiled_once(self, sizes: Callable[[], InputSizes], inputs: Inputs) -> Made[AnyCompiled]:
        compiler = self._compiler()
        report = compiler.report()
        program = compiler.compile_symbolic(self._model, inputs.args, inputs.kwargs, sizes, report)
        captured = program.captured
        program = program.without_tensors()
        values = program.sizes.values(inputs.leaves)
        if values is None:
            raise PlanError("its questions have other answers here")
        compiled = compiler.at(program, values, report)
        hold = compiled.hold  # at hand only once something is linked
        guard = Guard(self._model, captured, inputs.given, inputs.tree, hold)
        self._keep(_Compile(guard, shapes_of(inputs.leaves), symbolic=(program, compiler)))
        return Made(guard, compiled, report, is_linked=True)


def _sizes_of(model: nn.Module, inputs: Inputs) -> frozenset[int]:
    """Returns the sizes that the model's tensors have."""
    return frozenset(n for p in (*model.parameters(), *model.buffers()) for n in p.shape)

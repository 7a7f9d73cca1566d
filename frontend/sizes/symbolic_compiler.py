"""Programs of symbolic sizes: compiled once, linked for each shape.

compile     capture, autodiff, decompose and lower, with symbols in place of sizes
at          numbers in place of symbols, then link: kernels are shared, offsets are the shape's
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from ...autodiff.aliasing import saved_inputs
from ...autodiff.derivative import Derivative
from ...backend.kernels.lower import kernel_at
from ...backend.link.link import FlatProgram, Launch, link
from ...reuse.errors import CaptureError, PlanError
from ...reuse.ir.program import Closure, Composite, Leaf, Program, Value, walk_closures
from ...reuse.ir.torch_symbols import (
    SIZE_TYPES,
    Values,
    expression_of,
    refuse_inexact,
    tensor_type_at,
    type_at,
    value_of,
)
from ..capture.assemble import OutputTree
from ..capture.capture import capture_model, one_at_a_time
from ..capture.regions import CapturedModel
from ..compiler import CompiledProgram, Compiler, Options
from ..parts import programs_of
from ..recomputing import has_marks
from ..report import CompileReport
from ..requests import differentiation
from ..unused_outputs import UnusedOutputs
from .torch_input_sizes import InputSizes

_WEIGHS_BYTES = "recompute weighs bytes, which have to be numbers"


@dataclass(frozen=True)
class SymbolicProgram:
    """A compiled program whose sizes are symbols. Not run itself.

    ``settled`` says which symbols had turned out to be others, or numbers, when it was compiled.
    """

    captured: CapturedModel
    sizes: InputSizes
    flats: tuple[FlatProgram, ...]
    derivative: Derivative | None
    watched_inputs: tuple[int, ...]
    unused_outputs: UnusedOutputs | None
    settled: tuple[Any, ...]


class SymbolicCompiler(Compiler):
    """Compiles for any sizes. One compiler for one capture: symbols of two are not the same.

    Nothing is taken from disk: an entry would not bring the questions that were asked of sizes.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(replace(options, cache="off"))
        self._variants: dict[Closure, SymbolicProgram] = {}

    @one_at_a_time
    def compile_symbolic(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sizes: Callable[[], InputSizes],
        report: CompileReport,
    ) -> SymbolicProgram:
        """Runs the passes up to link.

        Raises:
            CaptureError: if the model cannot be captured with symbolic sizes.
            PlanError: if an option needs numbers.
        """
        if self.options.recompute is not None:
            raise PlanError(_WEIGHS_BYTES)
        with report.timed("capture") as nodes:
            captured = capture_model(
                model, args, kwargs, reuse=self.options.reuse, train=report.train, sizes=sizes
            )
            program = captured.program
            nodes.count = program.num_nodes()
        assert isinstance(captured.sizes, InputSizes)
        for closure in walk_closures(program):
            if isinstance(closure, Leaf):
                refuse_inexact(closure.module)
        request = differentiation(program) if report.train else None
        if request is not None:
            assert isinstance(request.closure, Composite)
            if has_marks(request.closure):
                raise PlanError(_WEIGHS_BYTES)
        with report.timed("autodiff") as nodes:
            derivative = self._differentiator.of(request) if request is not None else None
            programs = programs_of(program, derivative)
            nodes.count = sum(p.num_nodes() for p in programs)
        programs = self._lowered(programs, report)
        watched = saved_inputs(programs[0]) if derivative is not None else ()
        flats = tuple(map(link, programs))
        unused = UnusedOutputs(derivative) if derivative is not None else None
        settled = captured.sizes.settled
        return SymbolicProgram(
            captured, captured.sizes, flats, derivative, watched, unused, settled
        )

    @one_at_a_time
    def at(
        self, symbolic: SymbolicProgram, values: Values, report: CompileReport
    ) -> CompiledProgram:
        """Links the program for numbers that its conditions hold for.

        Raises:
            PlanError: if a kernel lays a result out in another way than the program says, or what
                was compiled later settled sizes that this program has open.
        """
        if symbolic.sizes.settled != symbolic.settled:
            raise PlanError("a backward without some outputs' cotangents settled sizes")
        with report.timed("link") as nodes:
            lowered: dict[Leaf, Leaf] = {}
            flats = [self._flat_at(flat, values, lowered) for flat in symbolic.flats]
            derivative = symbolic.derivative and _derivative_at(symbolic.derivative, values)
            captured = symbolic.captured
            runtime = self._runtime(captured.program, flats, derivative, report, self._gradients)
            report.num_launches = nodes.count = runtime.num_launches
        report.describe(captured)
        for symbol_leaf, leaf in lowered.items():
            _check_layouts(self._kernel_lists.get(leaf))
            if leaf is not symbol_leaf:
                self._kernels.pop(leaf), self._kernel_lists.pop(leaf, None)
        captured = replace(captured, program=_program_at(captured.program, values))
        relinked = partial(self._relinked_at, symbolic, values)
        without = partial(self._without, relinked=relinked, report=report)
        watched, unused = symbolic.watched_inputs, symbolic.unused_outputs
        return CompiledProgram(captured, runtime, derivative, watched, unused, without)

    def _relinked_at(
        self,
        symbolic: SymbolicProgram,
        values: Values,
        compiled: CompiledProgram,
        derivative: Derivative,
        report: CompileReport,
    ) -> CompiledProgram | None:
        """Returns the program with another derivative, which is compiled once for all shapes.

        None if that is not right for these sizes.
        """
        key = derivative.backward
        try:
            if key not in self._variants:
                programs = self._lowered(programs_of(symbolic.captured.program, derivative), report)
                flats = tuple(map(link, programs))
                self._variants[key] = replace(symbolic, flats=flats, derivative=derivative)
            if _is_compiled(key) and not symbolic.sizes.are_right(values):
                return None
            return self.at(self._variants[key], values, report)
        except Exception:  # whatever cannot be had with symbols
            return None

    def _flat_at(self, flat: FlatProgram, values: Values, lowered: dict[Leaf, Leaf]) -> FlatProgram:
        types = {t: tensor_type_at(t, values) for t in set(flat.slot_types)}
        launches = []
        for launch in flat.launches:
            if launch.leaf not in lowered:
                leaf, kernel = kernel_at(launch.leaf, self._kernels[launch.leaf], values)
                lowered[launch.leaf] = leaf
                self._kernels[leaf] = kernel
            launches.append(
                Launch(
                    lowered[launch.leaf],
                    launch.operands,
                    launch.results,
                    launch.frees,
                    launch.path,
                )
            )
        slot_types = tuple(types[t] for t in flat.slot_types)
        return FlatProgram(flat.inputs, tuple(launches), flat.outputs, slot_types)


def _is_compiled(closure: Closure) -> bool:
    """Whether the backend compiles any of it, which asks questions of sizes."""
    assert isinstance(closure, Composite)
    leaves = (c for c in walk_closures(closure.program) if isinstance(c, Leaf))
    return any(leaf.kernels == "backend" for leaf in leaves)


def _check_layouts(kernels: Any) -> None:
    """Raises PlanError unless what a closure returns is laid out as the program says."""
    for view, type_ in zip(kernels.outputs, kernels.output_types, strict=True) if kernels else ():
        strides = zip(view.shape, view.stride, type_.stride, strict=True)
        if view.shape != type_.shape or any(n > 1 and a != b for n, a, b in strides):
            raise PlanError(f"@{kernels.name} returns strides {view.stride}, not {type_.stride}")


def _derivative_at(derivative: Derivative, values: Values) -> Derivative:
    forward, backward = (_signature(c, values) for c in (derivative.forward, derivative.backward))
    return replace(derivative, forward=forward, backward=backward)


def _signature(closure: Closure, values: Values) -> Composite:
    """Returns a closure of the same types, for those who ask for types only."""
    inputs = tuple(Value(type_at(t, values)) for t in closure.input_types)
    outputs = tuple(Value(type_at(t, values)) for t in closure.output_types)
    return Composite(closure.name, Program(inputs, (), outputs))


def _program_at(program: Program, values: Values) -> Program:
    """Returns the program with numbers among its results."""
    tree = program.output_tree
    leaves = tuple(
        (kind, value_of(expression_of(value), values) if isinstance(value, SIZE_TYPES) else value)
        for kind, value in tree.leaves
    )
    return replace(program, output_tree=OutputTree(leaves, tree.spec))


__all__ = ["CaptureError", "SymbolicCompiler", "SymbolicProgram"]

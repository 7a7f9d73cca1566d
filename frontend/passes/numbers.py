"""Replaces symbols by numbers: among results, and in a linked program and its kernels.

Kernels are made once, for symbolic sizes; a shape has kernels of its own only while it is linked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...backend.kernels.lower import kernel_at, numbered
from ...backend.launches.kernel_list import SymbolicList
from ...backend.link.link import FlatProgram, Launch
from ...reuse.errors import PlanError
from ...reuse.ir import torch_symbols
from ...reuse.ir.program import Closure, Composite, Leaf, Program, Value
from .context import Context
from .state import State


def results_at(program: Program, values: torch_symbols.Values) -> Program:
    """Returns the program with numbers for the symbolic sizes that it returns."""
    tree = program.output_tree
    if tree is None:  # a program of gradients
        return program
    leaves = tuple((kind, _at(values, value)) for kind, value in tree.leaves)
    if all(new[1] is old[1] for new, old in zip(leaves, tree.leaves, strict=True)):
        return program
    return replace(program, output_tree=replace(tree, leaves=leaves))


def _at(values: torch_symbols.Values, held: Any) -> Any:
    # A literal comes from a file.
    size = held.size if isinstance(held, torch_symbols.SizeLiteral) else held
    is_size = held is not size or isinstance(held, torch_symbols.SIZE_TYPES)
    return torch_symbols.value_of(torch_symbols.expression_of(size), values) if is_size else held


def kernel_at_numbers(context: Context, leaf: Leaf, values: torch_symbols.Values) -> Leaf:
    """Makes the kernel of a symbolic leaf for numbers; returns the leaf that has it."""
    known = context.recorded.get(leaf)
    if isinstance(known, SymbolicList):
        found, context.recorded[found] = numbered(leaf, known, values)
        return found
    if known is not None:  # without symbols, such as an update of parameters
        return leaf
    found, kernel = kernel_at(leaf, context.kernels[leaf], values)
    context.kernels[found] = kernel
    return found


def forget_numbers(context: Context, leaves: Mapping[Leaf, Leaf]) -> None:
    """Drops the kernels of one shape."""
    for of_symbols, leaf in leaves.items():
        if leaf is not of_symbols:
            context.forget(leaf)


def with_numbers(state: State, values: torch_symbols.Values, leaves: Mapping[Leaf, Leaf]) -> State:
    """Returns a linked state with numbers for symbols; ``leaves`` maps symbolic to plain leaves."""
    flats = {name: _flat_at(flat, values, leaves) for name, flat in state.flats.items()}
    derivative = state.derivative
    if derivative is not None:
        both = derivative.forward, derivative.backward
        forward, backward = (signature_at(closure, values) for closure in both)
        derivative = replace(derivative, forward=forward, backward=backward)
    return replace(state, flats=flats, derivative=derivative)


def _flat_at(
    flat: FlatProgram, values: torch_symbols.Values, leaves: Mapping[Leaf, Leaf]
) -> FlatProgram:
    types = {t: torch_symbols.tensor_type_at(t, values) for t in set(flat.slot_types)}
    launches = tuple(
        Launch(leaves[one.leaf], one.operands, one.results, one.frees, one.path)
        for one in flat.launches
    )
    slot_types = tuple(types[t] for t in flat.slot_types)
    return FlatProgram(flat.inputs, launches, flat.outputs, slot_types)


def check_layouts(kernels: Any) -> None:
    """Raises PlanError if a closure returns other shapes or strides than the program says."""
    for view, type_ in zip(kernels.outputs, kernels.output_types, strict=True) if kernels else ():
        strides = zip(view.shape, view.stride, type_.stride, strict=True)
        # A stride of a dimension of size 1 is never used, so it may be anything.
        if view.shape != type_.shape or any(n > 1 and a != b for n, a, b in strides):
            raise PlanError(f"@{kernels.name} returns strides {view.stride}, not {type_.stride}")


def signature_at(closure: Closure, values: torch_symbols.Values) -> Composite:
    """Returns an empty closure with the types of another one, with the numbers of a shape."""
    inputs = (torch_symbols.type_at(t, values) for t in closure.input_types)
    outputs = (torch_symbols.type_at(t, values) for t in closure.output_types)
    program = Program(tuple(map(Value, inputs)), (), tuple(map(Value, outputs)))
    return Composite(closure.name, program)

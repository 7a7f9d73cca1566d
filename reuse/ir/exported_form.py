"""A captured program as an ``ExportedProgram``, and back.

PyTorch exports the module that ``fx_form`` makes, so it is flat. The program's text stands beside
its graph in what PyTorch saves, and is taken only while the graph is the one it was written for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch.export import Dim, ExportedProgram

from ..errors import ExportError, ParseError
from ..torch_pytree import has_containers
from . import program as ir
from .fx_form import digest_of, tensor_names, to_fx, with_tensors
from .leaf import stamp_of
from .parser import parse_program
from .printer import text_to_compare
from .torch_fake_rules import kernels_own_rules
from .torch_symbols import Values, environment_of, symbols_of, tensor_type_at, value_of
from .types import TensorType, reach

_SAID = "lazyinline"  # key in what PyTorch saves of a graph for others


def to_exported(program: ir.Program) -> ExportedProgram:
    """Returns what ``torch.export`` makes of a program; see :meth:`Program.to_exported`."""
    tree, count = program.output_tree, len(program.outputs)
    if tree is not None and has_containers(tree.spec):
        tree, program = None, replace(program, output_tree=None)
    leaves = [closure for closure in program.closures if isinstance(closure, ir.Leaf)]
    controls = [f"@{leaf.name} is control flow" for leaf in leaves if leaf.control is not None]
    for reason in [*controls, *["it was not captured"] * (not program.sources)]:
        raise ExportError(f"to_exported has no form for this program: {reason}.")
    sources = zip(program.inputs, program.sources, strict=True)
    types = [ir.tensor_type(value) for value, s in sources if isinstance(s, ir.UserInput)]
    values = _example(leaves)
    varying = [{i: Dim.DYNAMIC for i, n in enumerate(t.shape) if type(n) is not int} for t in types]
    module = to_fx(program)
    # Where all of it ran without gradients, so does the export: no operator has to say it then.
    stamps = [stamp_of(node) for leaf in leaves for node in leaf.nodes]
    with kernels_own_rules(), torch.set_grad_enabled(any(s.grad_enabled for s in stamps)):
        made = tuple(_zeros(tensor_type_at(type_, values)) for type_ in types)
        try:
            exported = torch.export.export(module, made, dynamic_shapes=tuple(varying))
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise ExportError(f"torch.export cannot take this program: {reason}") from error
    if not values:  # a text does not hold what was taken for granted of sizes
        exported.graph_module.meta.setdefault("custom", {})[_SAID] = {
            "text": text_to_compare(program),
            "graph": digest_of(exported.graph_module),
            "tensors": tensor_names(module),
            "leaves": tree.leaves if tree else [("output", i) for i in range(count)],
        }
    return exported


def _example(leaves: list[ir.Leaf]) -> Values:
    """Returns a number for each symbol, for which all that was taken for granted holds."""
    sized = [leaf.module for leaf in leaves if symbols_of(leaf.module)]
    symbols = sorted({s for module in sized for s in symbols_of(module)}, key=str)
    guards = [guard.expr for module in sized[:1] for guard in environment_of(module).guards]
    for least in (12, 16, 60, 2, 5040):
        values = Values({symbol: least * (i + 1) for i, symbol in enumerate(symbols)})
        if all(value_of(guard, values) for guard in guards):
            return values
    raise ExportError("to_exported found no example for the sizes that vary.")


def _zeros(type_: TensorType) -> torch.Tensor:
    size = max(reach(type_.shape, type_.stride), 0)
    flat = torch.zeros(size, dtype=type_.dtype, device=type_.device)
    return flat.as_strided(type_.shape, type_.stride)


def program_in(exported: ExportedProgram) -> tuple[ir.Program, Any] | None:
    """Returns the program that was exported, and the leaves of its result; None if unknown."""
    said = exported.graph_module.meta.get("custom", {}).get(_SAID)
    if said is None or said["graph"] != digest_of(exported.graph_module):
        return None
    held = {**exported.constants, **exported.state_dict}
    try:
        read = parse_program(said["text"])
    except ParseError:  # of an operator that is a Python function of the user's
        return None
    program = with_tensors(read, [held[name] for name in said["tensors"]])
    for source, value in zip(program.sources, program.inputs, strict=True):
        if isinstance(source, ir.ModelTensor) and TensorType.of(source.tensor) != value.type:
            return None
    return program, tuple(map(tuple, said["leaves"]))

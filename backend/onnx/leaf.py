"""One leaf closure as an ONNX graph: traced for ONNX, translated, and tidied up on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from onnxscript import ir, optimizer, version_converter

from ...autodiff.traces.forwards import trace_forward_on
from ...autodiff.traces.origins import origin_of
from ...autodiff.traces.torch_make_fx import fake_tensor, new_fake_mode, sizes_kept_open
from ...autodiff.traces.torch_user_rules import rules_in
from ...reuse.errors import ExportError
from ...reuse.ir.leaf import flat_types, stamp_of
from ...reuse.ir.operators import mutated_args
from ...reuse.ir.program import Leaf
from . import torch_onnx


def leaf_graph(leaf: Leaf, opset: int, input_names: Sequence[str]) -> ir.Graph:
    """Translates a leaf; the graph can serve as the body of a function.

    Raises:
        ExportError: for operators that ONNX cannot express, with the user's lines.
    """
    module = _traced(leaf, opset)
    torch_onnx.prepare(module)
    _refuse_untranslatable(leaf, module, opset)
    model = _translated(leaf, module, opset)
    for node in model.graph:
        _set_source(node)
    version_converter.convert_version(model, opset)
    optimizer.optimize_ir(model)
    _constants_inside(model.graph)
    _name_inputs(model.graph, _flat_names(leaf, input_names))
    return model.graph


def _name_inputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Names the inputs; a value inside that already has such a name gets another one."""
    inside = [value for node in graph for value in node.outputs]
    taken = {str(value.name) for value in inside}.union(names)
    for value in inside:
        if value.name in names:
            number = 1
            while f"{value.name}_{number}" in taken:
                number += 1
            value.name = f"{value.name}_{number}"
            taken.add(value.name)
    for value, name in zip(graph.inputs, names, strict=True):
        value.name = name


def _flat_names(leaf: Leaf, names: Sequence[str]) -> list[str]:
    found = []
    for type_, name in zip(leaf.input_types, names, strict=True):
        inner = flat_types([type_])
        found += [name] if len(inner) == 1 else [f"{name}.{i}" for i in range(len(inner))]
    return found


def _traced(leaf: Leaf, opset: int) -> torch.fx.GraphModule:
    """Returns the body with operators that ONNX has; composite ones whole where it can be."""
    if leaf.level == "aten" and torch_onnx.is_traced(leaf.module):
        return leaf.module
    for node in leaf.nodes:
        node.meta["stack_trace"] = stamp_of(node).source
    module, table = leaf.module, torch_onnx.keeping_decompositions(opset)
    inputs, mode = _fake_inputs(leaf)
    changing = any(mutated_args(n) or stamp_of(n).autocast for n in leaf.nodes)
    if changing or rules_in(leaf.nodes):  # what a rule does inside is not known
        with torch_onnx.exact_attention(), sizes_kept_open(mode):
            module = trace_forward_on(module, inputs, mode, torch_onnx.batch_norm())
        table = torch_onnx.exact_decompositions(opset)
    return torch_onnx.trace(module, inputs, mode, table)


def _fake_inputs(leaf: Leaf) -> tuple[list[Any], Any]:
    """Returns fake inputs and their mode; symbolic ones as they were captured."""
    types = flat_types(leaf.input_types)
    traced = [n.meta["val"] for n, t in zip(leaf.entries, types, strict=True) if t.is_symbolic]
    mode = traced[0].fake_mode if traced else new_fake_mode()
    captured = iter(traced)
    return [next(captured) if t.is_symbolic else fake_tensor(mode, t) for t in types], mode


def _refuse_untranslatable(leaf: Leaf, module: torch.fx.GraphModule, opset: int) -> None:
    found = torch_onnx.untranslatable(module, opset)
    if not found:
        return
    lines = dict.fromkeys(_place(leaf, node) for node, _ in found)
    raise ExportError(
        f"ONNX (opset {opset}) has no operator for " + "; ".join(lines) + ". Write that part with "
        "other operators, or try a newer opset (up to 24)."
    )


def _translated(leaf: Leaf, module: torch.fx.GraphModule, opset: int) -> ir.Model:
    try:
        return torch_onnx.translate(module, opset)
    except torch_onnx.UntranslatedError as error:
        place = leaf.name if error.node is None else _place(leaf, error.node)
        raise ExportError(
            f"torch.onnx cannot write {place} the way it is called: {error.reason} "
            "Write that part with other operators."
        ) from error


def _place(leaf: Leaf, node: torch.fx.Node) -> str:
    """Returns what the user called, in which block, and on which line."""
    origin = origin_of(node)
    source = str(node.meta.get("stack_trace") or "").strip().splitlines()
    operator: object = node.meta.get("original_aten", node.target)
    if origin is not None:  # a joint graph knows what the user called
        operator, source = origin, origin.source.splitlines()
    return f"{operator} in {leaf.name}" + (f" at {source[-1].strip()}" if source else "")


def _set_source(node: ir.Node) -> None:
    """Leaves the user's line on a node, and nothing else."""
    source = node.metadata_props.get("pkg.torch.onnx.stack_trace", "")
    node.metadata_props.clear()
    node.meta.clear()
    if source:
        node.metadata_props["source"] = source


def _constants_inside(graph: ir.Graph) -> None:
    """Turns initializers into Constant nodes: a function has no initializers."""
    first = next(iter(graph), None)
    for name, value in list(graph.initializers.items()):
        node = ir.node(
            "Constant", [], attributes={"value": value.const_value}, name=f"const_{name}"
        )
        made = node.outputs[0]
        made.type, made.shape = value.type, value.shape
        ir.convenience.replace_all_uses_with(value, made, replace_graph_outputs=True)
        del graph.initializers[name]
        made.name = name
        if first is None:
            graph.append(node)
        else:
            graph.insert_before(first, [node])

"""The flat form of an ONNX model: every call replaced by its function's nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir.passes.common as passes
from onnxscript import ir


def inline_functions(model: ir.Model) -> None:
    """Inlines every function, in place; nodes and values are named by module path."""
    paths = list(_paths(model, model.graph, ""))
    passes.InlinePass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    kept = {v for v in model.graph.outputs}
    for node, (path, operator) in zip(model.graph, paths, strict=True):
        assert node.op_type == operator, (node.op_type, operator)
        if path:
            node.name = f"{path}/{node.name}"
            for value in node.outputs:
                if value not in kept:
                    value.name = f"{path}/{value.name}"


def _paths(model: ir.Model, nodes: Iterable[ir.Node], path: str) -> Iterator[tuple[str, str]]:
    """Yields the module path and operator of each node there will be."""
    for node in nodes:
        function = model.functions.get(node.op_identifier())
        if function is None:
            yield path, node.op_type
        else:
            name = (
                "" if "." not in str(node.name) and str(node.name).startswith("glue") else node.name
            )
            yield from _paths(model, function, "/".join(p for p in (path, name) if p))

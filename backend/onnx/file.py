"""An ONNX model, flattened if asked for, and written to disk.

Weights are inside the file, or streamed into a file next to it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator

import onnx_ir.passes.common as passes
from onnxscript import ir

from ...reuse.errors import ExportError

_INLINE_LIMIT_BYTES = 2**31 - 2**27
"""A protobuf holds less than 2 GiB; an eighth of a GiB is left for the graph."""


def save_model(model: ir.Model, path: pathlib.Path, *, external_data: bool | None) -> None:
    """Writes a model into an ``.onnx`` file; weights may go to ``<name>.data`` next to it.

    Those are written one by one, straight from the tensors; ``external_data=None`` decides by their
    size. Raises ExportError if the file cannot be written, or weights do not fit into one file.
    """
    num_bytes = weight_bytes(model)
    if external_data is None:
        external_data = num_bytes > _INLINE_LIMIT_BYTES
    if not external_data and num_bytes > _INLINE_LIMIT_BYTES:
        raise ExportError(
            f"The weights are {num_bytes / 2**30:.1f} GiB, and an ONNX file holds less than 2. "
            "Leave external_data=None, or make it True."
        )
    try:
        if external_data:
            ir.save(model, path, external_data=f"{path.name}.data", size_threshold_bytes=256)
        else:
            ir.save(model, path)
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror or error}.") from error


def weight_bytes(model: ir.Model) -> int:
    """Returns the bytes of a model's initializers."""
    values = (v.const_value for v in model.graph.initializers.values())
    return sum(v.nbytes for v in values if v is not None)


def inline_functions(model: ir.Model) -> None:
    """Inlines every function, in place; nodes and values are named by module path."""
    paths = list(_paths(model, model.graph, ""))
    passes.InlinePass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    kept = {v for v in model.graph.outputs}  # the user chose their names
    for node, (path, operator) in zip(model.graph, paths, strict=True):
        assert node.op_type == operator, (node.op_type, operator)
        if path:
            node.name = f"{path}/{node.name}"
            for value in node.outputs:
                if value not in kept:
                    value.name = f"{path}/{value.name}"


def _paths(model: ir.Model, nodes: Iterable[ir.Node], path: str) -> Iterator[tuple[str, str]]:
    """Yields the module path and operator of each node after inlining."""
    for node in nodes:
        function = model.functions.get(node.op_identifier())
        if function is None:
            yield path, node.op_type
        else:
            # Operators outside of any block have no module to be named after.
            name = (
                "" if "." not in str(node.name) and str(node.name).startswith("glue") else node.name
            )
            yield from _paths(model, function, "/".join(p for p in (path, name) if p))

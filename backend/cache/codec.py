"""What the cache holds, as JSON: leaf closures, derivatives, kernel lists.

Encoding is exact or it fails: whatever is not known here (an operator of the user's own, a symbolic
size, a tensor) raises :class:`NotCacheableError`, and the closure is compiled as if there were no
cache. Decoding builds known constructs only, so that no entry can make anything else happen.
"""

from __future__ import annotations

import base64
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
import torch.fx

from ...autodiff.leaf_derivative import Derivative
from ...reuse.ir.leaf import DEFAULT_STAMP, Stamp, stamp_of
from ...reuse.ir.program import Leaf
from ...reuse.ir.torch_graphs import module_of
from ...reuse.ir.types import StructType, TensorType, Type
from ...reuse.torch_names import memory_id
from ..gpu.torch_triton import MachineCode
from ..gpu.triton_kernel import TritonKernel
from ..launches import torch_facts
from ..launches.kernel_list import BufferInfo, KernelList, Launch, View
from ..launches.native_ops import with_native

ObjectOf = Callable[[Any], Any]
KernelOf = Callable[[Any], Any]


class NotCacheableError(Exception):
    """Says what a closure holds that the cache cannot."""


class MalformedError(Exception):
    """An entry does not say what it should."""


# ---- values --------------------------------------------------------------------------------

_DTYPES = {str(t): t for t in vars(torch).values() if isinstance(t, torch.dtype)}
_LAYOUTS = {str(t): t for t in vars(torch).values() if isinstance(t, torch.layout)}
_FORMATS = {str(t): t for t in vars(torch).values() if isinstance(t, torch.memory_format)}
_NAMED: tuple[tuple[str, type, dict[str, Any]], ...] = (
    ("dtype", torch.dtype, _DTYPES),
    ("layout", torch.layout, _LAYOUTS),
    ("format", torch.memory_format, _FORMATS),
)


def encode_value(value: Any, wire: Callable[[Any], Any] | None = None) -> Any:
    """Encodes an operand: constants with their type, lists, and what ``wire`` knows."""
    kind = type(value)
    if value is None or kind is bool or kind is int or kind is str:
        return value
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, list):
        return [encode_value(item, wire) for item in value]
    if kind is tuple or kind is torch.Size:
        return {"tuple": [encode_value(item, wire) for item in value]}
    if isinstance(value, dict):
        if not all(type(k) is str for k in value):
            raise NotCacheableError("a dictionary whose keys are not text")
        return {"dict": [[k, encode_value(v, wire)] for k, v in value.items()]}
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return {"slice": [encode_value(item, wire) for item in parts]}
    if kind is torch.device:
        return {"device": str(value)}
    for name, type_, known in _NAMED:
        if kind is type_ and str(value) in known:
            return {name: str(value)}
    if wire is not None and (encoded := wire(value)) is not None:
        return encoded
    raise NotCacheableError(f"an operand of type {kind.__name__}")


def decode_value(data: Any, unwire: Callable[[str, Any], Any] | None = None) -> Any:
    """Reads what :func:`encode_value` wrote."""
    if data is None or isinstance(data, (bool, int, str)):
        return data
    if isinstance(data, list):
        return [decode_value(item, unwire) for item in data]
    ((name, inner),) = data.items()
    if name == "float":
        return float.fromhex(inner)
    if name == "complex":
        return complex(*map(float.fromhex, inner))
    if name == "tuple":
        return tuple(decode_value(item, unwire) for item in inner)
    if name == "dict":
        return {k: decode_value(v, unwire) for k, v in inner}
    if name == "slice":
        return slice(*(decode_value(item, unwire) for item in inner))
    if name == "device":
        return torch.device(inner)
    for named, _, known in _NAMED:
        if name == named:
            return known[inner]
    if unwire is None:
        raise MalformedError(f"{name} is not expected here")
    return unwire(name, inner)


def encode_type(type_: Type) -> Any:
    """Encodes a type; sizes must be numbers."""
    if isinstance(type_, StructType):
        return {"struct": [encode_type(field) for field in type_.fields]}
    return _layout_of(type_.dtype, type_.shape, type_.stride, type_.device)


def decode_type(data: Any) -> Type:
    """Reads what :func:`encode_type` wrote."""
    if isinstance(data, dict):
        return StructType(tuple(map(decode_type, data["struct"])))
    dtype, shape, stride, device = data
    return TensorType(_DTYPES[dtype], tuple(shape), tuple(stride), torch.device(device))


def _layout_of(dtype: torch.dtype, shape: Any, stride: Any, device: Any) -> list[Any]:
    if torch.device(device).type != "cpu":
        raise NotCacheableError(f"a tensor on {device}")
    return _layout(TensorType(dtype, shape, stride, device))


def _layout(type_: TensorType) -> list[Any]:
    dtype, shape, stride, device = type_.dtype, type_.shape, type_.stride, type_.device
    sizes = (*shape, *stride)
    if not all(type(size) is int for size in sizes):
        raise NotCacheableError("a symbolic size")
    return [str(dtype), list(shape), list(stride), str(device)]


# ---- operators -----------------------------------------------------------------------------


def _encode_target(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    name = torch_facts.operator_name(target)
    if name is None:
        raise NotCacheableError(f"the operator {target}")
    return name


def _decode_target(name: str) -> Any:
    return operator.getitem if name == "getitem" else torch_facts.operator_named(name)


# ---- leaves --------------------------------------------------------------------------------


def leaf_content(leaf: Leaf) -> Any:
    """Encodes all of a leaf that decides what is computed: no names and no source lines."""
    return _Graph(leaf).content()


def encode_leaf(leaf: Leaf) -> Any:
    """Encodes a leaf with the names and the layouts of its nodes."""
    graph = _Graph(leaf)
    names = [node.name for node in leaf.module.graph.nodes]
    return {**graph.content(), "names": names, "values": graph.values()}


def decode_leaf(data: Any, name: str, input_names: tuple[str, ...]) -> Leaf:
    """Rebuilds a leaf, its nodes' fake values with it."""
    graph = torch.fx.Graph()
    nodes: list[torch.fx.Node] = []

    def unwire(kind: str, inner: Any) -> Any:
        if kind != "node":
            raise MalformedError(f"{kind} is not an operand of a graph")
        return nodes[inner]

    for (op, target, args, kwargs, stamp), own in zip(data["nodes"], data["names"], strict=True):
        arguments = decode_value(args, unwire), decode_value(kwargs, unwire)
        if op == "output":
            nodes.append(graph.output(arguments[0][0]))
            continue
        aim: Any = target if op == "placeholder" else _decode_target(target)
        node = graph.create_node(op, aim, *arguments, name=own)
        if stamp is not None:
            node.meta["stamp"] = _decode_stamp(stamp)
        nodes.append(node)
    values = torch_facts.fake_values(
        [None if v is None else (decode_type(v[0]), v[1], v[2]) for v in data["values"]]
    )
    for node, value in zip(nodes, values, strict=True):
        if value is not None:
            node.meta["val"] = value
    return Leaf(
        name,
        module_of(graph),
        tuple(map(decode_type, data["inputs"])),
        tuple(map(decode_type, data["outputs"])),
        input_names,
        data["level"],
        data["kernels"],
    )


class _Graph:
    """One leaf's graph, its nodes numbered."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._number = {node: i for i, node in enumerate(leaf.module.graph.nodes)}

    def content(self) -> dict[str, Any]:
        return {
            "inputs": [encode_type(t) for t in self._leaf.input_types],
            "outputs": [encode_type(t) for t in self._leaf.output_types],
            "level": self._leaf.level,
            "kernels": self._leaf.kernels,
            "nodes": [self._node(node) for node in self._number],
        }

    def _node(self, node: torch.fx.Node) -> list[Any]:
        if node.op == "placeholder":
            return [node.op, f"a{self._number[node]}", {"tuple": []}, {"dict": []}, None]
        if node.op not in ("call_function", "output"):
            raise NotCacheableError(f"a node of kind {node.op}")
        target = "output" if node.op == "output" else _encode_target(node.target)
        stamp = None if node.op == "output" else _encode_stamp(stamp_of(node))
        args = encode_value(tuple(node.args), self._wire)
        return [node.op, target, args, encode_value(dict(node.kwargs), self._wire), stamp]

    def _wire(self, value: Any) -> Any:
        return {"node": self._number[value]} if isinstance(value, torch.fx.Node) else None

    def values(self) -> list[Any]:
        """For each node its layout, the number of its memory, and its place in there."""
        memories: dict[int, int] = {}
        found: list[Any] = []
        for node in self._number:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                found.append(None)  # of an operator with several results; getitem has the tensors
                continue
            memory = memories.setdefault(memory_id(value), len(memories))
            found.append([encode_type(TensorType.of(value)), memory, int(value.storage_offset())])
        return found


def _encode_stamp(stamp: Stamp) -> Any:
    if stamp.grad_enabled and not stamp.autocast:
        return None
    return [stamp.grad_enabled, [[d, e, str(t)] for d, e, t in stamp.autocast]]


def _decode_stamp(data: Any) -> Stamp:
    if data is None:
        return DEFAULT_STAMP
    grad_enabled, autocast = data
    return Stamp(bool(grad_enabled), tuple((d, bool(e), _DTYPES[t]) for d, e, t in autocast))


# ---- derivatives ---------------------------------------------------------------------------

_BOUNDARY = ("kept_inputs", "kept_outputs", "cotangent_outputs", "gradient_inputs")


def encode_derivative(derivative: Derivative) -> Any:
    """Encodes a leaf's derivative."""
    pair = (derivative.forward, derivative.backward)
    assert isinstance(pair[0], Leaf)
    assert isinstance(pair[1], Leaf)
    data = {name: list(getattr(derivative, name)) for name in _BOUNDARY}
    return {**data, "forward": encode_leaf(pair[0]), "backward": encode_leaf(pair[1])}


def decode_derivative(data: Any, primal: Leaf) -> Derivative:
    """Rebuilds the derivative of a leaf."""
    return Derivative(
        decode_leaf(data["forward"], f"{primal.name}.forward", primal.input_names),
        decode_leaf(data["backward"], f"{primal.name}.backward", ()),
        *(tuple(map(int, data[name])) for name in _BOUNDARY),
    )


# ---- kernel lists --------------------------------------------------------------------------


def encode_kernels(kernels: KernelList, object_of: ObjectOf) -> Any:
    """Encodes the launches of a leaf.

    Args:
        kernels: the launches.
        object_of: keeps a compiled kernel; returns what finds it again (plain data), or None.
    """
    return {
        "num_inputs": kernels.num_inputs,
        "buffers": [[b.kind, b.num_bytes, b.first, b.last, b.is_returned] for b in kernels.buffers],
        "launches": [_encode_launch(launch, object_of) for launch in kernels.launches],
        "outputs": [_encode_view(view) for view in kernels.outputs],
        "output_types": [_layout(t) for t in kernels.output_types],
        "in_place": [list(pair) for pair in kernels.in_place],
    }


def decode_kernels(
    data: Any, name: str, kernel_of: KernelOf, runs: Literal["native", "python"] = "native"
) -> KernelList:
    """Rebuilds the launches of a leaf.

    Args:
        data: from :func:`encode_kernels`.
        name: of the leaf.
        kernel_of: loads a compiled kernel by what ``object_of`` returned.
        runs: who may run the launches.
    """
    types = [decode_type(t) for t in data["output_types"]]
    return KernelList(
        name,
        data["num_inputs"],
        tuple(BufferInfo(*info) for info in data["buffers"]),
        tuple(_decode_launch(launch, kernel_of, runs) for launch in data["launches"]),
        tuple(_decode_view(view) for view in data["outputs"]),
        tuple(t for t in types if isinstance(t, TensorType)),
        tuple((first, second) for first, second in data["in_place"]),
    )


def _encode_launch(launch: Launch, object_of: ObjectOf) -> Any:
    def wire(value: Any) -> Any:
        return {"view": _encode_view(value)} if isinstance(value, View) else None

    if isinstance(launch.function, TritonKernel):
        function: dict[str, Any] = {"triton": [launch.function.name, launch.function.source]}
    elif launch.operands == "addresses":
        reference = object_of(launch.function)
        if reference is None:
            raise NotCacheableError(f"the kernel {launch.name}, whose object was not kept")
        function = {"kernel": reference}
    else:
        name = torch_facts.function_name(launch.function)
        if name is None:
            raise NotCacheableError(f"the kernel {launch.name}")
        function = {"torch": name}
    return [
        launch.name,
        function,
        encode_value(launch.args, wire),
        encode_value(dict(launch.kwargs), wire),
        encode_value(launch.results, wire),
        launch.returns,
        launch.operands,
    ]


def _decode_launch(data: Any, kernel_of: KernelOf, runs: Literal["native", "python"]) -> Launch:
    def unwire(kind: str, inner: Any) -> Any:
        if kind != "view":
            raise MalformedError(f"{kind} is not an operand of a launch")
        return _decode_view(inner)

    name, function, args, kwargs, results, returns, operands = data
    ((kind, which),) = function.items()
    launch = Launch(
        name,
        _decode_function(kind, which, kernel_of),
        decode_value(args, unwire),
        tuple(decode_value(kwargs, unwire).items()),
        decode_value(results, unwire),
        returns,
        operands,
    )
    return with_native(launch) if runs == "native" else launch


def _decode_function(kind: str, which: Any, kernel_of: KernelOf) -> Callable[..., Any]:
    if kind == "triton":
        name, source = which
        if not isinstance(name, str) or not isinstance(source, str):
            raise MalformedError("the text of a kernel")
        return TritonKernel(name, source)
    function = kernel_of(which) if kind == "kernel" else torch_facts.function_named(which)
    return cast("Callable[..., Any]", function)


def encode_code(made: MachineCode) -> Any:
    """Encodes a kernel's machine code."""
    return [base64.b64encode(made.code).decode(), made.shared_memory_bytes, made.num_warps]


def decode_code(data: Any) -> MachineCode:
    """Reads what :func:`encode_code` wrote."""
    code, shared_memory_bytes, num_warps = data
    return MachineCode(base64.b64decode(code, validate=True), shared_memory_bytes, num_warps)


def _encode_view(view: View) -> Any:
    sizes: Sequence[Any] = (*view.shape, *view.stride, view.offset_bytes)
    if not all(type(size) is int for size in sizes):
        raise NotCacheableError("a symbolic size")
    return [view.buffer, str(view.dtype), list(view.shape), list(view.stride), view.offset_bytes]


def _decode_view(data: Any) -> View:
    buffer, dtype, shape, stride, offset = data
    return View(buffer, _DTYPES[dtype], tuple(shape), tuple(stride), offset)

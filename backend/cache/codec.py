"""Cached leaf closures, derivatives and kernel lists as JSON.

Encoding is exact or it fails: anything unknown (a custom operator, a symbolic size, a tensor)
raises :class:`NotCacheableError`, and the closure is compiled as if there were no cache. Decoding
builds only known objects, so that an entry cannot run code.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

import sympy
import torch
import torch.fx

from ...autodiff.leaf_derivative import Derivative
from ...reuse.ir.leaf import DEFAULT_STAMP, Stamp, stamp_of
from ...reuse.ir.program import Leaf
from ...reuse.ir.types import StructType, TensorType
from ...reuse.torch_names import memory_id, module_of
from ..gpu.torch_cuda import TritonKernel
from ..launches import torch_facts
from ..launches.kernel_list import BufferInfo, KernelList, Launch, SymbolicList, View, with_native
from ..launches.torch_native import BuiltKernel

Encode = Callable[[Any], Any]
Decode = Callable[[str, Any], Any]
Coded = tuple[str, Callable[[Any], Any], Callable[[Any], Any]]


class NotCacheableError(Exception):
    """A closure holds something that the cache cannot; the message says what."""


class MalformedError(Exception):
    """An entry has an unexpected form."""


# ---- values --------------------------------------------------------------------------------


def _one_of_few(kind: type) -> Coded:
    """Returns the coding of a class whose objects are all attributes of ``torch``, as dtypes."""
    known = {str(value): value for value in vars(torch).values() if isinstance(value, kind)}
    return kind.__name__, str, known.__getitem__


def _record(kind: type) -> Coded:
    """Returns the coding of a dataclass by its fields."""
    names = [field.name for field in fields(kind)]
    return kind.__name__, lambda x: map(partial(getattr, x), names), lambda made: kind(*made)


# Written as in JSON; a list in JSON is a tuple.
_PLAIN = frozenset((type(None), bool, int, str))
# The name, the writer and the reader of each class: of single values, and of values with parts.
_WHOLE: dict[type, Coded] = {
    # Hexadecimal is exact, and has infinities and NaN, which JSON lacks.
    float: ("float", float.hex, float.fromhex),
    complex: (
        "complex",
        lambda z: [z.real.hex(), z.imag.hex()],
        lambda parts: complex(*map(float.fromhex, parts)),
    ),
    bytes: ("bytes", lambda b: base64.b64encode(b).decode(), base64.b64decode),
    torch.device: ("device", str, torch.device),
    **{kind: _one_of_few(kind) for kind in (torch.dtype, torch.layout, torch.memory_format)},
}
_PARTS: dict[type, Coded] = {
    list: ("list", list, list),
    dict: ("dict", lambda d: list(d.items()), dict),
    slice: ("slice", lambda s: [s.start, s.stop, s.step], lambda made: slice(*made)),
    **{kind: _record(kind) for kind in (TensorType, StructType, Stamp, View, BufferInfo)},
    **{kind: _record(kind) for kind in (Launch, KernelList, SymbolicList, TritonKernel)},
}
_READ_WHOLE = {name: read for name, _, read in _WHOLE.values()}
_READ_PARTS = {name: read for name, _, read in _PARTS.values()}


def encode_value(value: Any, own: Encode = lambda value: None) -> Any:
    """Writes a value with its type; ``own`` writes values that only the caller knows, else None."""
    kind: type = type(value)
    if isinstance(value, (list, dict)):  # torch.fx has its own subclasses of them
        kind = list if isinstance(value, list) else dict
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is torch.Size:
        return [encode_value(part, own) for part in value]
    if (encoded := own(value)) is not None:
        return encoded
    if kind in _WHOLE:
        name, write, _ = _WHOLE[kind]
        return {name: write(value)}
    if kind in _PARTS:
        name, write, _ = _PARTS[kind]
        return {name: [encode_value(part, own) for part in write(value)]}
    if callable(value):
        if (function := torch_facts.function_name(value)) is None:
            raise NotCacheableError(f"the operator {value}")
        return {"torch": function}
    if isinstance(value, (torch.SymInt, sympy.Expr)):
        raise NotCacheableError("a symbolic size")
    raise NotCacheableError(f"an operand of type {kind.__name__}")


def decode_value(data: Any, own: Decode | None = None) -> Any:
    """Reads a value of :func:`encode_value`; ``own`` reads values that only the caller knows."""
    if type(data) in _PLAIN:
        return data
    if isinstance(data, list):
        return tuple([x if type(x) in _PLAIN else decode_value(x, own) for x in data])
    ((name, inner),) = data.items()  # any other shape raises, and the entry is made anew
    if name in _READ_WHOLE:
        return _READ_WHOLE[name](inner)
    if name in _READ_PARTS:
        return _READ_PARTS[name](list(decode_value(inner, own)))
    if name == "torch":
        return torch_facts.function_named(inner)
    if own is None:
        raise MalformedError(f"{name} is not expected here")
    return own(name, inner)


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

    def node_of(kind: str, inner: Any) -> Any:
        if kind != "node":
            raise MalformedError(f"{kind} is not an operand of a graph")
        return nodes[inner]

    for (op, target, args, kwargs, stamp), own in zip(data["nodes"], data["names"], strict=True):
        arguments = decode_value(args, node_of), decode_value(kwargs, node_of)
        if op == "output":
            nodes.append(graph.output(arguments[0][0]))
            continue
        node = graph.create_node(op, decode_value(target), *arguments, name=own)
        if stamp is not None:
            node.meta["stamp"] = decode_value(stamp)
        nodes.append(node)
    values = torch_facts.fake_values(decode_value(data["values"]))
    for node, value in zip(nodes, values, strict=True):
        if value is not None:
            node.meta["val"] = value
    return Leaf(
        name,
        module_of(graph),
        decode_value(data["inputs"]),
        decode_value(data["outputs"]),
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
            "inputs": self._encode(self._leaf.input_types),
            "outputs": self._encode(self._leaf.output_types),
            "level": self._leaf.level,
            "kernels": self._leaf.kernels,
            "nodes": list(map(self._node, self._number)),
        }

    def _node(self, node: torch.fx.Node) -> list[Any]:
        if node.op == "placeholder":
            return [node.op, f"a{self._number[node]}", [], {"dict": []}, None]
        if node.op not in ("call_function", "output"):
            raise NotCacheableError(f"a node of kind {node.op}")
        target = node.target if node.op == "call_function" else "output"
        # Where a line stands says nothing of what it computes.
        stamp = replace(stamp_of(node), source="")
        parts = (target, node.args, dict(node.kwargs), None if stamp == DEFAULT_STAMP else stamp)
        return [node.op, *map(self._encode, parts)]

    def _encode(self, value: Any) -> Any:
        return encode_value(value, self._own)

    def _own(self, value: Any) -> Any:
        if isinstance(value, TensorType) and value.device.type not in ("cpu", "cuda"):
            raise NotCacheableError(f"a tensor on {value.device}")
        return {"node": self._number[value]} if isinstance(value, torch.fx.Node) else None

    def values(self) -> list[Any]:
        """For each node its layout, the number of its memory, and its place in there."""
        memories: dict[int, int] = {}

        def described(value: Any) -> Any:
            if isinstance(value, (tuple, list)):  # of an operator with several results
                return [described(part) for part in value]
            if not isinstance(value, torch.Tensor):
                return None
            memory = memories.setdefault(memory_id(value), len(memories))
            return (TensorType.of(value), memory, int(value.storage_offset()))

        return [self._encode(described(node.meta.get("val"))) for node in self._number]


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


def encode_kernels(kernels: KernelList, object_of: Callable[[BuiltKernel], Any]) -> Any:
    """Encodes a leaf's launches; ``object_of`` keeps a kernel and returns data that finds it."""

    def own(value: Any) -> Any:
        if isinstance(value, sympy.Basic):
            return {"size": str(value)}
        if not isinstance(value, BuiltKernel):
            return None
        reference = object_of(value)
        if reference is None:
            raise NotCacheableError("a kernel whose object was not kept")
        return {"kernel": reference}

    # The native form holds addresses of this process; it is made again from the launch.
    launches = tuple(replace(launch, native=None) for launch in kernels.launches)
    return encode_value(replace(kernels, name="", launches=launches), own)


def decode_kernels(
    data: Any,
    name: str,
    kernel_of: Callable[[Any], BuiltKernel],
    runs: Literal["native", "python"] = "native",
    size_of: Callable[[str], Any] | None = None,
) -> KernelList:
    """Rebuilds the launches of a leaf.

    ``kernel_of`` loads a compiled kernel by what ``object_of`` returned; ``size_of`` reads an
    expression of symbols.
    """

    def own(kind: str, inner: Any) -> Any:
        if kind == "size" and size_of is not None:
            return size_of(inner)
        if kind != "kernel":
            raise MalformedError(f"{kind} is not a part of a launch")
        return kernel_of(inner)

    kernels = decode_value(data, own)
    if not isinstance(kernels, KernelList):
        raise MalformedError("no launches")
    launches = kernels.launches
    if runs == "native" and not isinstance(kernels, SymbolicList):
        launches = tuple(map(with_native, launches))
    return replace(kernels, name=name, launches=launches)

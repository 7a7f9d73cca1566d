"""Adapter: a function of tensors traced into a graph, on fake tensors of given types.

No value in a graph has a lazy bit. ``x.conj()`` computes nothing: PyTorch sets a bit on a view, and
operators that read the view have to heed it (``_neg_view`` likewise; an efficient zero tensor has
no memory at all). A kernel that gets an address sees no bit, so each such operator is replaced by
the one that writes the values. To keep the bits would save one pass over operands of matrix
products, but every kernel, cache entry, transfer and saved value would have to heed them.

A graph traced with symbolic sizes can be read at given sizes (:class:`SizesAt`). A choice of what
is recomputed names values, so it holds for all sizes; what it saves and costs is computed at given
ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import map_aggregate

from ...reuse.errors import CaptureError
from ...reuse.ir import torch_symbols
from ...reuse.ir.leaf import memory_of
from ...reuse.ir.operators import changed_operand, is_view, may_draw, mutated_args
from ...reuse.ir.program import Leaf
from ...reuse.ir.types import HOST, TensorType, Type, flatten_type
from ...reuse.process import ProcessLock
from ...reuse.torch_names import module_of, modules_left, schema_of


def _written(write: Any, of_number: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that writes a tensor's values, those of expanded dimensions once."""

    def written(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):  # the 2j of `x * 2j`, which autograd conjugates
            return of_number(tensor)
        shape, repeated = tensor.shape, tensor
        # Expanded dimensions are written once: `x.expand(1000, n).conj()` is n numbers.
        for dim, (size, step) in enumerate(zip(shape, tensor.stride(), strict=True)):
            if step == 0 and size > 1:
                repeated = repeated.narrow(dim, 0, 1)
        result: torch.Tensor = write(repeated)
        return result if repeated is tensor else result.expand(shape)

    return written


WRITTEN: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._conj.default: _written(
        torch.ops.aten._conj_physical.default, lambda number: number.conjugate()
    ),
    torch.ops.aten._neg_view.default: _written(torch.ops.aten.neg.default, operator.neg),
}
"""For each operator that only sets a lazy bit, a function that writes the values."""

PLAIN_ZEROS: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten._efficientzerotensor.default: torch.zeros
}
"""Lazy zeros are written at once: operators on fake ones return tensors of the meta device."""

_WRITERS = (torch.ops.aten._conj_physical.default, torch.ops.aten.neg.default)


def is_lazy(node: torch.fx.Node) -> bool:
    """Returns whether an operator only sets a lazy bit."""
    return node.target in WRITTEN


def drop_pairs(module: torch.fx.GraphModule) -> None:
    """Removes pairs of lazy operators: the second undoes the first, and both are views."""
    for node in module.graph.nodes:
        before = node.args[0] if is_lazy(node) else None
        if isinstance(before, torch.fx.Node) and before.target is node.target:
            node.replace_all_uses_with(before.args[0])
    module.graph.eliminate_dead_code()


def refuse_strides_of_lazy(module: torch.fx.GraphModule) -> None:
    """Raises CaptureError for ``as_strided`` of a view with a lazy bit.

    It counts elements from the start of a storage, and a written value has a storage of its own.
    """
    for node in module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.as_strided.default
    ):
        source = node.args[0]
        while is_view(source):
            if is_lazy(source):
                raise CaptureError(
                    "as_strided of a conjugated or negated view has no form to compile. Take it of "
                    "a tensor with values of its own: x.conj().clone()."
                )
            source = source.args[0]


def compute_anew(module: torch.fx.GraphModule, but: Container[Any]) -> None:
    """Replaces in-place operators on values without another use by out-of-place ones.

    PyTorch's formulas have some (in ``1 - x``). Functionalization would give the same graph, but
    takes as long as the trace. Operators in ``but`` have a decomposition and stay.
    """
    # By memory: an item of ``split`` is a view, which its node does not say.
    first: dict[Any, torch.fx.Node] = {}
    for node in module.graph.nodes:
        first.setdefault(memory_of(node), node)
        operand = changed_operand(node)
        plain = None if operand is None else _out_of_place(node.target)
        if operand is None or plain is None or node.target in but or plain in but:
            continue
        is_own = operand.op == "call_function" and list(operand.users) == [node]
        if not is_own or first[memory_of(operand)] is not operand or mutated_args(operand):
            continue
        args, kwargs = map_aggregate((node.args, node.kwargs), _value)
        made = plain(*args, **kwargs)
        if TensorType.of(made) == TensorType.of(node.meta["val"]):
            # Views of the result are found by its storage, so the operand gets another one.
            node.target, operand.meta["val"] = plain, made


def _value(argument: Any) -> Any:
    if isinstance(argument, torch.fx.Node):
        return argument.meta["val"]
    return argument.size if isinstance(argument, torch_symbols.SizeLiteral) else argument


def _out_of_place(target: Any) -> Any:
    """Returns the out-of-place variant of an in-place operator; None if it has none."""
    packet, _, _ = str(target).rpartition(".")
    if not packet.startswith("aten.") or not packet.endswith("_") or may_draw(target):
        return None
    # Not by the overload's name: that of `pow_.Scalar` is `pow.Tensor_Scalar`.
    found: Any = getattr(torch.ops.aten, packet[len("aten.") : -1], None)
    overloads = [getattr(found, name) for name in found.overloads()] if found is not None else []
    return next((one for one in overloads if _operands(one) == _operands(target)), None)


def _operands(operator: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema_of(operator).arguments]


def drop_copies(module: torch.fx.GraphModule) -> None:
    """Removes clones of written values, which PyTorch made to resolve the lazy bit.

    In a functional graph they cannot be told from the originals, unless they are returned.
    """
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        source = node.args[0]
        if not isinstance(source, torch.fx.Node) or source.target not in _WRITERS:
            continue
        if graph.output_node() in node.users:
            continue
        if source.meta["val"].stride() == node.meta["val"].stride():
            node.replace_all_uses_with(source)
            graph.erase_node(node)


# ---- traces --------------------------------------------------------------------------------------


Decompositions: TypeAlias = Mapping[Any, Callable[..., Any]]
"""For each operator, the function that a trace calls instead."""


def traced(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    sizes: Sequence[Any],
    decompositions: Decompositions,
) -> torch.fx.GraphModule:
    """Traces a function of tensors, or lists of them, into a graph with an input for each tensor.

    ``sizes`` are symbols that become literals in the graph; without them it computes its sizes.
    """
    table = {**decompositions, **PLAIN_ZEROS, **_norms_beside_float32(decompositions)}
    # Sizes are inputs of the trace, or each read of one would add a node.
    run = make_fx(lambda *groups: function(*groups[:-1]), decomposition_table=table)
    with modules_left():
        module = run(*inputs, list(sizes))
    if sizes:
        torch_symbols.sizes_as_literals(module.graph)
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    module.recompile()
    return module


_NORMS = tuple(
    getattr(torch.ops.aten, f"native_{name}_norm{way}").default
    for name in ("batch", "group", "layer")
    for way in ("", "_backward")
)


def _norms_beside_float32(table: Decompositions) -> Decompositions:
    """Returns rules for norms of 16 bits beside weights of 32, as in autocast on a CPU.

    Eager has their statistics in float32. PyTorch's fake kernels and its rules say 16 bits, and so
    rounded a mean far from zero takes the digits of a batch norm's gradient.
    """
    return {operator: _in_float32(operator, table.get(operator)) for operator in _NORMS}


def _in_float32(operator: Any, rule: Callable[..., Any] | None) -> Callable[..., Any]:
    def decomposition(x: torch.Tensor, *args: Any) -> Any:
        others = [other for other in args if isinstance(other, torch.Tensor)]
        is_mixed = not others or any(_is_wide(other) for other in others)
        if x.device.type != "cpu" or not x.is_floating_point() or _is_wide(x) or not is_mixed:
            return rule(x, *args) if rule is not None else NotImplemented
        wide = [a.float() if isinstance(a, torch.Tensor) else a for a in (x, *args)]
        first, *rest = operator(*wide)
        return (first if first is None else first.to(x.dtype), *rest)

    return decomposition


def _is_wide(tensor: torch.Tensor) -> bool:
    return tensor.dtype not in (torch.bfloat16, torch.float16)


def growing_graph() -> torch.fx.Graph:
    """Returns the graph of the current trace."""
    proxy_mode = get_proxy_mode()
    assert proxy_mode is not None
    graph: torch.fx.Graph = proxy_mode.tracer.graph
    return graph


_LOCK = ProcessLock()  # one trace at a time replaces PyTorch's dropout
_EMBEDDING_BACKWARD: Any = torch.ops.aten.embedding_dense_backward.default
_DROPOUT_KEYS = (torch.DispatchKey.Autograd, torch.DispatchKey.CompositeImplicitAutograd)


def new_fake_mode(module: torch.fx.GraphModule | None = None) -> FakeTensorMode:
    """Returns a fake mode for one compile; it allows the real constants of Inductor's passes.

    Its tensors may have the symbolic sizes of the module's shape environment.
    """
    environment = None if module is None else torch_symbols.environment_of(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment, static_shapes=True)
    if environment is not None:
        # With symbolic sizes the mode's cache has hardly any hits.
        mode.cache_enabled = False
    return mode


def sizes_kept_open(mode: FakeTensorMode) -> AbstractContextManager[Any]:
    """Makes operators run in Python, if sizes are symbolic, so that no symbol is specialized.

    ``constant_pad_nd`` reads sizes as integers in C++, and has a second version in Python.
    """
    return nullcontext() if mode.shape_env is None else _in_python()


@contextmanager
def _in_python() -> Iterator[None]:
    """Makes operators run in Python; dropout with ``p=1`` draws nothing there, as in C++."""
    dropout, embedding = torch.ops.aten.dropout.default, _EMBEDDING_BACKWARD
    found = dropout.py_kernels
    kernels = [(dropout, k, _without_draw_of_all(found[k])) for k in _DROPOUT_KEYS if k in found]
    # Its derivative in C++ reads sizes as integers, and PyTorch has none in Python.
    kernels.append((embedding, torch.DispatchKey.Autograd, _EmbeddingGradient.apply))
    with _LOCK:
        before = [(overload, dict(overload.py_kernels)) for overload in (dropout, embedding)]
        for overload, key, kernel in kernels:
            overload.py_kernels[key] = kernel
            overload._dispatch_cache.clear()
        try:
            with enable_python_dispatcher():
                yield
        finally:
            for overload, known in before:
                overload.py_kernels.clear()
                overload.py_kernels.update(known)
                overload._dispatch_cache.clear()


class _EmbeddingGradient(torch.autograd.Function):
    """The gradient of an embedding's rows, with the derivative that it has in C++."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, indices: torch.Tensor, *options: Any) -> Any:
        ctx.save_for_backward(indices)
        ctx.padding = options[1]
        with torch._C._AutoDispatchBelowAutograd():
            return _EMBEDDING_BACKWARD(gradient, indices, *options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (indices,) = ctx.saved_tensors
        found = gradient.index_select(0, indices.reshape(-1))
        if ctx.padding >= 0:
            found = found.masked_fill((indices == ctx.padding).reshape(-1, 1), 0)
        return found.view(*indices.shape, gradient.shape[1]), None, None, None, None


def _without_draw_of_all(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(input: torch.Tensor, p: float, train: bool) -> Any:
        if train and p == 1:
            return input * torch.zeros((), dtype=input.dtype, device=input.device)
        return kernel(input, p, train)

    return dropout


def fake_tensor(mode: FakeTensorMode, type_: TensorType) -> torch.Tensor:
    """Returns a fake tensor of a type."""
    shape, stride = (
        [torch_symbols.size_in(mode.shape_env, n) for n in ns] for ns in (type_.shape, type_.stride)
    )
    with mode:
        return torch.empty_strided(shape, stride, dtype=type_.dtype, device=type_.device)


TO_COPY = torch.ops.aten._to_copy.default  # copies a tensor to another type or device


def traced_operator(
    target: Any,
    types: Sequence[TensorType],
    made: TensorType,
    more: Sequence[Any] = (),
    options: Mapping[str, Any] | None = None,
    sized: torch.fx.GraphModule | None = None,
) -> torch.fx.GraphModule:
    """Returns the graph of one operator on tensors, ``more`` positional arguments and ``options``.

    ``sized`` is a graph whose shape environment the symbolic sizes belong to.
    """
    mode, graph = new_fake_mode(sized), torch.fx.Graph()
    given = tuple(graph.placeholder(f"a{i}") for i in range(len(types)))
    node = graph.call_function(target, (*given, *more), dict(options or {}))
    graph.output((node,))
    for n, type_ in zip((*given, node), (*types, made), strict=True):
        n.meta["val"] = fake_tensor(mode, type_)
    return module_of(graph)


# ---- values of symbols ---------------------------------------------------------------------------


@dataclass(frozen=True)
class SizesAt:
    """A value for each symbolic size; empty if no size is symbolic."""

    values: torch_symbols.Values = field(default_factory=torch_symbols.Values)

    def num_bytes(self, type_: Type) -> int:
        """Returns the bytes of a value of a type."""
        return self.type(type_).num_bytes

    def host_bytes(self, type_: Type) -> int:
        """Returns those of them that are offloaded to host memory."""
        types = flatten_type(self.type(type_))
        return sum(one.num_bytes for one in types if one.device == HOST)

    def type(self, type_: Type) -> Type:
        """Returns a type with integer sizes."""
        return torch_symbols.type_at(type_, self.values)

    def leaf(self, leaf: Leaf) -> Leaf:
        """Returns a leaf with integer sizes, in its types and its graph."""
        module = self.module(leaf.module)
        if module is leaf.module:
            return leaf
        both = (tuple(map(self.type, types)) for types in (leaf.input_types, leaf.output_types))
        return replace(leaf.retyped(*both), module=module)

    def module(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Returns a graph of the same nodes with integer sizes, also in the nodes' fake values.

        A graph without symbols is returned itself.
        """
        if not torch_symbols.has_sizes(module):  # the same object: what is cached by it stays valid
            return module
        made, mode = torch_symbols.module_at(module, self.values), new_fake_mode()

        def number(value: Any) -> Any:
            if isinstance(value, torch_symbols.SIZE_TYPES):
                return torch_symbols.value_of(torch_symbols.expression_of(value), self.values)
            if not isinstance(value, torch.Tensor):
                return value
            type_ = TensorType.of(value)
            return fake_tensor(mode, torch_symbols.tensor_type_at(type_, self.values))

        for node in made.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = map_aggregate(node.meta["val"], number)
        return made

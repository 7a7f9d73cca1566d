"""Adapter: torch.onnx's operator translation. Each private torch.onnx name is named here.

torch.onnx knows how hundreds of ATen operators are written in ONNX, and which operators must be
taken apart first. It is asked for one graph at a time: what becomes of graphs is decided elsewhere.

What it cannot write is written here. ONNX has no backward of a convolution: its gradients are
convolutions as well. And it has no grouped product of experts: each group is a product of its own.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from onnxscript import FLOAT, INT32, ir
from onnxscript.onnx_opset import opset18 as op
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import _config as symbolic_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.onnx._internal.exporter import (
    _constants,
    _core,
    _decomp,
    _dispatching,
    _errors,
    _fx_passes,
    _ir_passes,
    _registration,
)

from ...autodiff.traces.torch_make_fx import Decompositions
from ...reuse.ir.leaf import without_autocast
from ...reuse.ir.program import input_nodes
from ...reuse.torch_names import operator_named

_convolution = torch.ops.aten.convolution.default


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    """Decomposes ``aten.convolution_backward``; the arguments are that operator's."""
    dims = weight.dim() - 2
    # One number stands for each dimension.
    stride, padding, dilation = (list(x) * (dims // len(x)) for x in (stride, padding, dilation))
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        # A stride may not reach the last elements of the input: they get zeros.
        missing = [0] * dims
        if not transposed:
            reached = [
                (grad_output.shape[2 + d] - 1) * stride[d]
                - 2 * padding[d]
                + dilation[d] * (weight.shape[2 + d] - 1)
                + 1
                for d in range(dims)
            ]
            missing = [input.shape[2 + d] - reached[d] for d in range(dims)]
        grad_input = _convolution(
            grad_output, weight, None, stride, padding, dilation, not transposed, missing, groups
        )
        grad_input = _cropped(grad_input, input)
    if output_mask[1]:
        pair = (grad_output, input) if transposed else (input, grad_output)
        grad_weight = _correlation(*pair, weight, stride, padding, dilation, groups)
    if output_mask[2]:
        grad_bias = grad_output.sum([0, *range(2, 2 + dims)])
    return grad_input, grad_weight, grad_bias


def _correlation(
    image: Tensor,
    kernel: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Returns a weight's gradient: one batch as the image, the other as a kernel over it.

    Stride and dilation change places, channels and batch too; groups stay groups.
    """
    channels_first = _channels_as_batch(image, groups)
    batch, size = image.shape[0], image.shape[1] // groups
    image = channels_first.transpose(0, 1).flatten(1, 2)  # [channels of a group, groups * batch]
    slides = _channels_as_batch(kernel, groups).flatten(0, 1)  # [groups * channels, batch]
    assert image.shape[:2] == (size, groups * batch)
    found = _convolution(
        image, slides, None, dilation, padding, stride, False, [0] * len(stride), groups
    )
    return _cropped(found, weight).transpose(0, 1).contiguous()


def _cropped(tensor: Tensor, like: Tensor) -> Tensor:
    """Crops the dimensions after the channels to another tensor's size."""
    for dim, length in enumerate(like.shape[2:], 2):
        if tensor.shape[dim] != length:
            tensor = tensor.narrow(dim, 0, length)
    return tensor


def _channels_as_batch(tensor: Tensor, groups: int) -> Tensor:
    """Returns ``[groups, channels of a group, batch, ...]``."""
    return tensor.unflatten(1, (groups, -1)).movedim(0, 2)


_END = 2**31 - 1


def grouped_mm(
    self: FLOAT,
    mat2: FLOAT,
    offs: INT32 | None = None,
    bias: FLOAT | None = None,
    out_dtype: int = -1,
) -> FLOAT:
    """Translates ``aten._grouped_mm``: a product of its own for each group of rows or columns.

    ``offs`` is where each group ends; without it there is a matrix per group on both sides.
    """
    product = op.MatMul(self, mat2) if offs is None else _ragged(self, mat2, offs)
    if bias is not None:
        product = op.Add(product, bias)
    return op.Cast(product, to=out_dtype) if out_dtype not in (None, -1) else product


def _ragged(left: Any, right: Any, offs: Any) -> Any:
    num_groups = offs.shape[0]
    starts = [op.Constant(value_ints=[0])] + [_end(offs, g) for g in range(num_groups)]
    spans = list(itertools.pairwise(starts))

    def part(value: Any, group: int, axis: int) -> Any:
        start, end = spans[group]
        return op.Slice(value, start, end, op.Constant(value_ints=[axis]))

    def matrix(value: Any, group: int) -> Any:
        return op.Gather(value, op.Constant(value_int=group), axis=0)

    cases: dict[tuple[int, int], tuple[Callable[[int], Any], int | None]] = {
        (2, 3): (lambda g: op.MatMul(part(left, g, 0), matrix(right, g)), 0),
        (3, 2): (lambda g: op.MatMul(matrix(left, g), part(right, g, 1)), 1),
        (2, 2): (lambda g: op.MatMul(part(left, g, 1), part(right, g, 0)), None),
    }
    of_group, axis = cases[len(left.shape), len(right.shape)]
    products = [of_group(group) for group in range(num_groups)]
    if axis is None:
        zero = op.Constant(value_ints=[0])
        return op.Concat(*[op.Unsqueeze(p, zero) for p in products], axis=0)
    return op.Concat(*products, _rest(left, right, starts[-1], axis), axis=axis)


def _end(offs: Any, group: int) -> Any:
    bounds = (op.Constant(value_ints=[i]) for i in (group, group + 1, 0))
    return op.Cast(op.Slice(offs, *bounds), to=ir.DataType.INT64.value)


def _rest(left: Any, right: Any, start: Any, axis: int) -> Any:
    """Returns zeros for the rows behind the last group, which no matrix belongs to."""
    # PyTorch leaves these rows undefined; without them the result would be shorter than PyTorch's.
    ragged, whole = (left, right) if axis == 0 else (right, left)
    end, along = op.Constant(value_ints=[_END]), op.Constant(value_ints=[axis])
    length = op.Shape(op.Slice(ragged, start, end, along), start=axis, end=axis + 1)
    other = op.Shape(whole, start=2, end=3) if axis == 0 else op.Shape(whole, start=1, end=2)
    shape = op.Concat(*((length, other) if axis == 0 else (other, length)), axis=0)
    return op.CastLike(op.Expand(op.Constant(value_float=0.0), shape), left)


# ---- leaves by torch.onnx ------------------------------------------------------------------------


_ATEN = torch.ops.aten
_ATTENTION = _ATEN.scaled_dot_product_attention.default
_NOISY_LOGGERS = ("torch.onnx._internal.exporter", "onnx_ir._convenience")
_METADATA_OPERATORS = frozenset(
    {_ATEN.size.default, _ATEN.stride.default, _ATEN.storage_offset.default, _ATEN.numel.default}
)


@dataclass(frozen=True)
class Operators:
    """Operators that torch.onnx can translate."""

    registry: Any  # its translations for one operator set
    implemented: frozenset[Any]  # the operators among them
    decompositions: Decompositions  # how the other operators are taken apart


@functools.cache
def operators(opset: int) -> Operators:
    """Returns the operators that can be translated for an operator set."""
    with _quiet():
        registry = _registration.ONNXRegistry.from_torchlib(opset_version=opset)
    grouped = getattr(_ATEN, "_grouped_mm", None)
    if grouped is not None:
        registry.register_op(grouped.default, grouped_mm)
    implemented = frozenset(_decomp.get_onnx_implemented_overloads(registry))
    table = _decomp.create_onnx_friendly_decomposition_table(set(implemented))
    return Operators(registry, implemented, table)


@functools.cache
def exact_decompositions(opset: int) -> Decompositions:
    """Returns decompositions that give every result of an operator its true value."""
    # Some translations fake the results that only a backward reads (``nll_loss_forward`` gives a
    # total weight of 1), which no inference notices. So for training the operators that autograd
    # calls in place of the user's (``native_layer_norm`` for ``layer_norm``) are taken apart.
    table = dict(operators(opset).decompositions)
    for operator, decompose in torch._decomp.decomposition_table.items():
        name = getattr(operator, "__name__", "")
        if name.startswith(("native_", "_native_", "_fused_")) or "_forward" in name:
            table[operator] = decompose
        elif operator is _ATEN.embedding_dense_backward.default:
            table[operator] = decompose  # its translation forgets padding_idx
    table[_ATEN.convolution_backward.default] = convolution_backward
    table[torch.ops.prims.broadcast_in_dim.default] = _broadcast_in_dim
    return table


@functools.cache
def keeping_decompositions(opset: int) -> Decompositions:
    """Returns decompositions for a trace before autograd: of what ONNX lacks, and nothing else."""
    known = operators(opset)
    table = dict(known.decompositions)
    for operator in _composite_operators():
        if operator not in known.implemented:
            table.setdefault(operator, operator.decompose)
    # Attention stays whole where it can: ONNX has one operator, for which runtimes have a kernel.
    table[_ATTENTION] = _masked_attention
    return table


def _broadcast_in_dim(x: Any, shape: Sequence[Any], dims: Sequence[int]) -> Any:
    """Takes a primitive apart that functionalization does not know (as PyTorch computes it)."""
    for dim in range(len(shape)):
        if dim not in dims:
            x = x.unsqueeze(dim)
    return x.expand(shape)


def batch_norm() -> Decompositions:
    """Returns a decomposition that shows that batch normalization changes its statistics."""
    operator = _ATEN.native_batch_norm.default
    return {operator: torch._decomp.decomposition_table[operator]}


def exact_attention() -> AbstractContextManager[None]:
    """Decomposes attention inside the context into operators that ONNX has, masks included."""
    return sdpa_kernel(SDPBackend.MATH)


def _masked_attention(*args: Any, **kwargs: Any) -> Any:
    """Takes attention with a mask apart, and leaves it whole without one."""
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if mask is None:
        return NotImplemented
    # The translation has no answer for a query that may attend to nothing (padding on the left),
    # where PyTorch gives zeros.
    with exact_attention():
        return _ATTENTION.decompose(*args, **kwargs)


def _composite_operators() -> Iterator[Any]:
    """Yields every ATen operator that is made of others, except questions about layout."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    found = (operator_named(name) for name in names if name.startswith("aten::"))
    yield from (one for one in found if one is not None and one not in _METADATA_OPERATORS)


@without_autocast()
def trace(
    module: torch.fx.GraphModule, inputs: Sequence[Any], mode: Any, table: Decompositions
) -> torch.fx.GraphModule:
    """Traces a leaf body; composite operators that are not in the table stay whole.

    Nothing in it changes memory in place or switches autocast.
    """

    def forward(flat: list[Any]) -> tuple[Any, ...]:
        return tuple(torch.fx.Interpreter(module).run(*flat))

    with mode, oblivious(), torch.no_grad(), torch.fx.traceback.preserve_node_meta():
        return make_fx(forward, decomposition_table=dict(table), pre_dispatch=True)(list(inputs))


def oblivious() -> AbstractContextManager[Any]:
    """Treats symbolic sizes that may be 0 or 1 like any others, inside the context."""
    config: Any = symbolic_config
    return config.patch(backed_size_oblivious=True)  # type: ignore[no-any-return]


def is_traced(module: torch.fx.GraphModule) -> bool:
    """Whether a graph's inputs carry fake tensors, from which types are promoted."""
    return all(isinstance(n.meta.get("val"), FakeTensor) for n in input_nodes(module))


def untranslatable(module: torch.fx.GraphModule, opset: int) -> list[torch.fx.Node]:
    """Returns the nodes that ONNX has no operator for."""
    registry = operators(opset).registry
    asked = (n for n in module.graph.nodes if n.op == "call_function" and _name(n) != "getitem")
    return [node for node in asked if _dispatching.dispatch(node, registry)[0] is None]


def _name(node: torch.fx.Node) -> str:
    return getattr(node.target, "__name__", "")


def prepare(module: torch.fx.GraphModule) -> None:
    """Makes type promotion explicit and drops checks, in place."""
    for node in list(module.graph.nodes):
        # A forward under no_grad says so in the graph; ONNX knows no gradients.
        if node.op == "call_function" and _name(node) == "_set_grad_enabled":
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    _fx_passes.insert_type_promotion_nodes(module)
    _fx_passes.remove_assertion_nodes(module)


class UntranslatedError(Exception):
    """A translation gave up."""

    def __init__(self, node: torch.fx.Node | None, reason: str) -> None:
        super().__init__(reason)
        self.node = node  # the node, if torch.onnx's message names it
        self.reason = reason  # the message of the innermost cause


def translate(module: torch.fx.GraphModule, opset: int) -> ir.Model:
    """Translates a prepared graph; torchlib's functions stay calls. May raise UntranslatedError."""
    graph = ir.Graph((), (), nodes=(), name="graph")
    model = ir.Model(graph, ir_version=_constants.ONNX_IR_VERSION)
    try:
        with _quiet():
            _core._translate_fx_graph(
                module.graph,
                model,
                graph_like=graph,
                owned_graphs={},
                lower="at_conversion",
                registry=operators(opset).registry,
            )
    except _errors.ConversionError as error:
        raise _untranslated(module, error) from error
    add_opset_imports(model)
    return model


def _untranslated(module: torch.fx.GraphModule, error: BaseException) -> UntranslatedError:
    named = (n for n in module.graph.nodes if str(n.format_node()) in str(error))
    bottom = error
    while bottom.__cause__ is not None:
        bottom = bottom.__cause__
    return UntranslatedError(next(named, None), str(bottom) or type(bottom).__name__)


def add_opset_imports(model: ir.Model) -> None:
    """Writes down the operator sets that a model's graph and functions use."""
    _ir_passes.add_opset_imports(model)


def tensor_data(tensor: torch.Tensor, name: str) -> ir.Tensor:
    """Wraps a tensor so that its bytes are read only when a file is written."""
    return _core.TorchTensor(tensor.detach(), name=name)


def onnx_dtype(dtype: torch.dtype) -> ir.DataType:
    """Returns ONNX's name of a dtype."""
    return _core.torch_dtype_to_onnx_dtype(dtype)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch.onnx from warning of nodes without a module stack and of empty lists of axes."""
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

"""Adapter: torch.onnx's operator translation. Each private torch.onnx name is named here.

torch.onnx knows how hundreds of ATen operators are written in ONNX, and which operators must be
taken apart first. It is asked for one graph at a time: what becomes of graphs is decided elsewhere.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from onnxscript import ir
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
from .operators import convolution_backward, grouped_mm

_ATEN = torch.ops.aten
_ATTENTION = _ATEN.scaled_dot_product_attention.default
_NOISY_LOGGERS = ("torch.onnx._internal.exporter", "onnx_ir._convenience")
_METADATA_OPERATORS = frozenset(
    {_ATEN.size.default, _ATEN.stride.default, _ATEN.storage_offset.default, _ATEN.numel.default}
)


@dataclass(frozen=True)
class Operators:
    """Operators that torch.onnx can translate.

    Attributes:
        registry: its translations for one operator set.
        implemented: the operators among them.
        decompositions: how the other operators are taken apart.
    """

    registry: Any
    implemented: frozenset[Any]
    decompositions: Decompositions


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
    # Whole where it can be: one operator of ONNX's that runtimes have a kernel for.
    table[_ATTENTION] = _masked_attention
    return table


def _broadcast_in_dim(x: Any, shape: Sequence[Any], dims: Sequence[int]) -> Any:
    """Takes a primitive apart that functionalization does not know (as PyTorch computes it)."""
    for dim in range(len(shape)):
        if dim not in dims:
            x = x.unsqueeze(dim)
    return x.expand(shape)


def batch_norm() -> Decompositions:
    """Decompositions that make it plain that batch normalization changes its statistics."""
    operator = _ATEN.native_batch_norm.default
    return {operator: torch._decomp.decomposition_table[operator]}


def exact_attention() -> AbstractContextManager[None]:
    """Attention inside is taken apart into operators that ONNX has, masks and all."""
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
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten" and hasattr(_ATEN, packet):
            operator = getattr(getattr(_ATEN, packet), overload or "default", None)
            if operator is not None and operator not in _METADATA_OPERATORS:
                yield operator


@without_autocast()
def trace(
    module: torch.fx.GraphModule, inputs: Sequence[Any], mode: Any, table: Decompositions
) -> torch.fx.GraphModule:
    """Traces a leaf body; composite operators that are not in the table stay whole.

    Args:
        module: the body; nothing in it changes memory in place or switches autocast.
        inputs: its fake inputs.
        mode: their fake mode.
        table: which operators are taken apart.
    """

    def forward(flat: list[Any]) -> tuple[Any, ...]:
        return tuple(torch.fx.Interpreter(module).run(*flat))

    with mode, oblivious(), torch.no_grad(), torch.fx.traceback.preserve_node_meta():
        return make_fx(forward, decomposition_table=dict(table), pre_dispatch=True)(list(inputs))


def oblivious() -> AbstractContextManager[Any]:
    """Inside, a symbolic size that may be 0 or 1 is treated like any other."""
    config: Any = symbolic_config
    return config.patch(backed_size_oblivious=True)  # type: ignore[no-any-return]


def is_traced(module: torch.fx.GraphModule) -> bool:
    """Whether a graph's inputs carry fake tensors, from which types are promoted."""
    return all(isinstance(n.meta.get("val"), FakeTensor) for n in input_nodes(module))


def untranslatable(module: torch.fx.GraphModule, opset: int) -> list[tuple[torch.fx.Node, str]]:
    """Returns the nodes that ONNX has no operator for, each with what torch.onnx says."""
    registry = operators(opset).registry
    found = []
    for node in module.graph.nodes:
        if node.op == "call_function" and _name(node) != "getitem":
            function, message = _dispatching.dispatch(node, registry)
            if function is None:
                found.append((node, str(message)))
    return found


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
    """A translation gave up.

    Attributes:
        node: what it was of, if torch.onnx's message says so.
        reason: the error at the bottom of it.
    """

    def __init__(self, node: torch.fx.Node | None, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


def translate(module: torch.fx.GraphModule, opset: int) -> ir.Model:
    """Translates a prepared ATen graph; helper functions of torchlib are still called.

    Raises:
        UntranslatedError: if the translation of an operator does not cover the way it is called.
    """
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

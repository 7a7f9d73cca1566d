"""Adapter: what Inductor would decompose or write otherwise than eager runs, corrected.

Each correction of what it writes is a context; outside of it Inductor is as it was.

* Integers divided by zero. From torch 2.13 on its C++ kernels notice that, but for a quotient that
  is rounded towards zero: there the processor ends the process, where eager raises.
* Draws out of order. Inductor orders kernels by what they read, and draws that read nothing of each
  other may change places: each would then get the numbers that eager gives to another one. From
  torch 2.13 on a pass of its own chains them, but a dropout may still come before a draw that
  nobody reads; ours takes its place on every version.
* Indices that are slow to simplify. To choose tiles it asks of each index how far it moves with a
  variable, and ``sympy.simplify`` tries a dozen ways on it, which took a fifth of the time of
  writing kernels. Most indices are sums of products of numbers and variables, and for the
  difference of two of those expanding is enough.
* Rules of dtypes that are made again. Inductor has one object of them, and fills it anew for each
  operator that it writes: a tenth of the time of writing kernels.
* Values that are found again. Before it lowers a graph Inductor runs it under fake tensors, because
  passes over it may have noted other strides. Ours keep the values of the trace, and with symbols
  in sizes a sixth of its time went there.
* Indices that are printed again: once for each kernel that is written of a loop.
* Tiles added elsewhere. Where a kernel that several threads run adds to memory from tiles of two
  axes, it moves the index to the place within the tile twice before torch 2.15
  (pytorch/pytorch#191837): it adds to other memory, also past the end.

Its table of decompositions has corrections, too. One of them: writing into a part of a complex
tensor is writing into one of pairs of real numbers. Inductor makes these operators a write in place
through a view. It orders what reads the tensor after the write only where the view is its own, and
the views of complex numbers are PyTorch's: a product after the write could run before it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import sympy
import torch
import torch.fx
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...autodiff.traces.joint_trace import draw_mask
from ...reuse.ir.operators import is_view, may_draw
from ...reuse.ir.types import TensorType
from ...reuse.process import package_digest

_MESSAGE = '"ZeroDivisionError"'
_ONE = f"[](auto divisor) {{ TORCH_CHECK(divisor != 0, {_MESSAGE}); return divisor; }}"
_MANY = (
    "[](auto divisor) { std::array<typename decltype(divisor)::value_type, "
    "decltype(divisor)::size()> each; divisor.store(each.data()); "
    f"for (auto one : each) TORCH_CHECK(one != 0, {_MESSAGE}); return divisor; }}"
)


@contextmanager
def settings() -> Iterator[None]:
    """Holds the Inductor settings that lazyinline relies on."""
    import torch._inductor.config as config

    compiler_config: Any = importlib.import_module("torch.compiler.config")
    # Eager's generator, so that masks equal eager's under one seed; and layouts are proved by the
    # linker, not asserted in every kernel call. The tag keeps Inductor's own cache of graphs apart
    # from those that were written with other corrections, or with none. A user's wish for CUDA
    # graphs is for whole models: what is made here is one closure's list of launches. Whether
    # padding a product pays is measured on a GPU, where it is here; with a target it would be not.
    own = {
        "fallback_random": True,
        "size_asserts": False,
        "alignment_asserts": False,
        "triton.cudagraphs": False,
        "graph_partition": False,
        "shape_padding": False,
    }
    tag = f"{compiler_config.cache_key_tag} lazyinline {package_digest()}"
    with config.patch(own), compiler_config.patch(cache_key_tag=tag):
        yield


@contextmanager
def quotients_checked() -> Iterator[None]:
    """Lets kernels that are written within this context throw instead."""
    from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

    one = staticmethod(_checked(CppOverrides.truncdiv, _ONE))
    many = staticmethod(_checked(CppVecOverrides.truncdiv, _MANY))
    checked = mock.patch.object(CppOverrides, "truncdiv", one)
    with checked, mock.patch.object(CppVecOverrides, "truncdiv", many):
        yield


def _checked(quotient: Callable[[Any, Any], str], check: str) -> Callable[[Any, Any], str]:
    def truncdiv(a: Any, b: Any) -> str:
        dividend, divisor = quotient(a, b).split(" / ", 1)
        return f"{dividend} / {check}({divisor})"

    return truncdiv


@contextmanager
def drawn_in_order() -> Iterator[None]:
    """Lets every draw, within this context, wait for the one before it in its graph."""
    import torch._inductor.fx_passes.post_grad as post_grad
    from torch._inductor.graph import GraphLowering

    run_node = GraphLowering.run_node
    last: Any = (None, "")

    def ordered(self: Any, node: torch.fx.Node) -> Any:
        nonlocal last
        num_known = len(self.operations)
        result = run_node(self, node)
        made = self.operations[num_known:]
        if made and may_draw(node.target):
            draw = _of_the_draw(made)
            graph, buffer = last
            if graph is self:
                graph.additional_buffer_deps[draw.get_operation_name()].add(buffer)
            last = self, draw.get_name()
        return result

    # Not before torch 2.13.
    no_chain = mock.patch.object(
        post_grad, "_chain_random_ops_for_ordering", lambda graph: None, create=True
    )
    with mock.patch.object(GraphLowering, "run_node", ordered), no_chain:
        yield


def _of_the_draw(made: Sequence[Any]) -> Any:
    """Picks the operation that draws among those a node was lowered to: its operands come first."""
    from torch._inductor.ir import FallbackKernel

    return next((operation for operation in made if isinstance(operation, FallbackKernel)), made[0])


def home_of_strides() -> Any:
    """Returns the module of Inductor that asks how far an index moves."""
    from torch._inductor import sizevars
    from torch._inductor.codegen import cpp

    return sizevars if hasattr(sizevars, "stride_at_vec_range") else cpp  # before torch 2.13


@contextmanager
def polynomials_expanded() -> Iterator[None]:
    """Lets Inductor expand polynomials, within this context, where it simplifies an index."""
    home = home_of_strides()
    with mock.patch.object(home, "sympy", _Sympy(home.sympy)):
        yield


@contextmanager
def dtype_rules_made_once() -> Iterator[None]:
    """Lets Inductor fill its rules of dtypes once within this context."""
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    fill, filled = DtypePropagationOpsHandler.__init__, False

    def fill_once(self: Any) -> None:
        nonlocal filled
        if not filled:
            fill(self)
            filled = True

    with mock.patch.object(DtypePropagationOpsHandler, "__init__", fill_once):
        yield


@contextmanager
def values_as_traced() -> Iterator[None]:
    """Lets Inductor take the values that nodes have, within this context, where all are known."""
    from torch._inductor import compile_fx

    propagate = compile_fx.fake_tensor_prop

    def known(module: torch.fx.GraphModule, inputs: Sequence[Any], *rest: Any) -> Any:
        mode = detect_fake_mode(inputs)
        if mode is None or not all(_has_its_value(node, mode) for node in module.graph.nodes):
            return propagate(module, inputs, *rest)
        return mode

    with mock.patch.object(compile_fx, "fake_tensor_prop", known):
        yield


def _has_its_value(node: torch.fx.Node, mode: FakeTensorMode) -> bool:
    """Whether a node's value is that of a run under fake tensors of this mode."""
    if node.op == "output":
        return True
    # An input may have been moved to another address. A copy that functionalization put in keeps
    # the offset of the view that it was written through.
    is_moved = node.meta.get("unaligned") or node.target is torch.ops.aten.copy.default
    if is_moved or "unbacked_bindings" in node.meta or "val" not in node.meta:
        return False
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(v.fake_mode is mode for v in values if isinstance(v, FakeTensor))


@contextmanager
def indices_printed_once() -> Iterator[None]:
    """Lets Inductor print each index in C++ once within this context."""
    from torch._inductor.codegen.cpp_utils import CppPrinter

    write, written = CppPrinter._print, dict[Any, str]()

    def write_once(self: Any, expression: Any, **settings: Any) -> str:
        if settings or not isinstance(expression, sympy.Basic):
            return write(self, expression, **settings)
        if expression not in written:
            written[expression] = write(self, expression)
        return written[expression]

    with mock.patch.object(CppPrinter, "_print", write_once):
        yield


@contextmanager
def quicker_writing() -> Iterator[None]:
    """Holds what makes Inductor quicker within this context, and changes nothing that it writes."""
    with ExitStack() as stack:
        for quicker in (
            polynomials_expanded,
            dtype_rules_made_once,
            values_as_traced,
            indices_printed_once,
        ):
            stack.enter_context(quicker())
        yield


@contextmanager
def offsets_added_once() -> Iterator[None]:
    """Lets kernels that are written within this context add into given memory."""
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppTile2DKernel, CppVecKernel

    original = CppTile2DKernel.store

    def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
        by_threads = self.num_threads > 1 or config.cpp.dynamic_threads
        if mode != "atomic_add" or not by_threads or self.need_vec_transpose(index):
            return original(self, name, index, value, mode)
        CppVecKernel.store(self, name, index, value, mode)  # it finds the place within the tile

    with mock.patch.object(CppTile2DKernel, "store", store):
        yield


class _Sympy:
    """The module ``sympy``, with another ``simplify``."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def simplify(self, expression: Any) -> Any:
        """Returns a simpler form of an expression."""
        home = home_of_strides()
        # Quotients and remainders were simplified where they were made, and stand for themselves.
        quotients = expression.atoms(home.FloorDiv, home.ModularIndexing)
        named = {one: self._original.Dummy(integer=True) for one in quotients}
        plain = expression.xreplace(named) if named else expression
        if not is_polynomial(plain):
            return self._original.simplify(expression)
        return plain.expand().xreplace({name: one for one, name in named.items()})


def is_polynomial(expression: Any) -> bool:
    """Whether a sympy expression is a number, a variable, or made of sums and products of those."""
    if expression.is_Add or expression.is_Mul:
        return all(map(is_polynomial, expression.args))
    if expression.is_Pow:  # the square of a size that is a symbol
        base, exponent = expression.args
        return bool(exponent.is_Integer and exponent > 0) and is_polynomial(base)
    return bool(expression.is_Symbol or expression.is_Integer)


aten = torch.ops.aten

NOT_FROM_THE_END = (
    torch.ops.aten.index_select.default,
    torch.ops.aten.index_add.default,
    torch.ops.aten.index_copy.default,
    torch.ops.aten.index_reduce.default,
)
"""Inductor writes them as ``x[index]``, but in eager their index -1 is an error."""

_POOLING = (
    torch.ops.aten.max_pool2d_with_indices.default,
    torch.ops.aten.max_pool3d_with_indices.default,
)

_PUTTING = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Returns Inductor's decomposition table, with seven corrections.

    Operators that do not count from the end do not here either. ``cat`` of one tensor and empty
    ones is laid out as PyTorch lays it out. And Inductor lowers ``bernoulli.p`` to an in-place
    draw, and on CPU it may fuse a reader of the mask into a kernel that runs before the draw.
    ``native_dropout`` draws the same mask out of place. ``bernoulli`` of probabilities in double
    precision draws numbers of double precision, as the operator itself does. Those of pooling ask a
    module of Inductor's that is imported only when Inductor compiles, which is later. And elements
    are put into a copy where those of a tensor share memory: Inductor would put them into that
    memory. Parts of complex tensors are written as pairs of real numbers.
    """
    from torch._inductor.decomposition import select_decomp_table

    with settings():
        table = dict(select_decomp_table())
    table[torch.ops.aten.bernoulli.p] = draw_mask
    table[torch.ops.aten.bernoulli.default] = _below_probabilities
    for operator in NOT_FROM_THE_END:
        table[operator] = _without_wrapping(table[operator])
    table[torch.ops.aten.cat.default] = _dense(table[torch.ops.aten.cat.default])
    for operator in _POOLING:
        if operator in table:
            table[operator] = _with_lowerings(table[operator])
    table |= {operator: _into_a_copy(operator) for operator in _PUTTING}
    table |= scatters_of_pairs()
    return table


def _below_probabilities(probabilities: torch.Tensor, generator: Any = None) -> Any:
    """Decomposes ``bernoulli`` into the comparison that PyTorch's kernel for a CPU makes."""
    if generator is not None or not probabilities.is_floating_point():
        return NotImplemented
    is_double = probabilities.dtype is torch.float64
    numbers = torch.rand(
        probabilities.shape,
        dtype=torch.float64 if is_double else torch.float32,
        device=probabilities.device,
    )
    return (numbers < probabilities).to(probabilities.dtype)


def _into_a_copy(operator: Any) -> Callable[..., Any]:
    """Keeps an operator from a tensor that has gaps, or one place for several elements."""

    def decomposition(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if TensorType.of(x).is_dense else operator(x.clone(), *args, **kwargs)

    return decomposition


def _with_lowerings(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Imports what a decomposition of PyTorch takes for imported."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module("torch._inductor.lowering")
        return decomposition(*args, **kwargs)

    return decomposed


def _dense(cat: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a result contiguous that is a mere copy, in an operand's order of strides."""

    def decomposition(tensors: list[torch.Tensor], dim: int = 0) -> Any:
        made = cat(tensors, dim)
        if not isinstance(made, torch.Tensor) or (made.dim() in (4, 5) and _is_channels_last(made)):
            return made
        return made.contiguous()

    return decomposition


def _is_channels_last(tensor: torch.Tensor) -> bool:
    form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=form)


def _without_wrapping(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an index below zero one that is out of range, which a kernel notices."""

    def checked(x: torch.Tensor, dim: int, index: torch.Tensor, *rest: Any, **options: Any) -> Any:
        size = x.shape[dim] if x.dim() else 1
        return decomposition(x, dim, torch.where(index < 0, size, index), *rest, **options)

    return checked


def scatters_of_pairs() -> Mapping[Any, Callable[..., Any]]:
    """Returns a decomposition for each operator that writes into a view of a copy."""
    return {
        aten.diagonal_scatter.default: _of_pairs(_diagonal),
        aten.select_scatter.default: _of_pairs(_select),
        aten.slice_scatter.default: _of_pairs(_slice),
        aten.as_strided_scatter.default: _of_pairs(_as_strided),
    }


def _of_pairs(scatter: Callable[..., Tensor]) -> Callable[..., Any]:
    """Makes a scatter one of complex numbers; of real ones it stays the operator it is."""

    def decomposition(x: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not x.is_complex():
            return NotImplemented
        pairs = torch.view_as_real(x), torch.view_as_real(source.to(x.dtype))
        return torch.view_as_complex(scatter(*pairs, *args, **kwargs))

    return decomposition


def _diagonal(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    # The diagonal is the last dimension of what is taken, after that of the pairs.
    dims = _from_the_start(dim1, x), _from_the_start(dim2, x)
    return aten.diagonal_scatter.default(x, source.transpose(-1, -2), offset, *dims)


def _select(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    return aten.select_scatter.default(x, source, _from_the_start(dim, x), index)


def _slice(x: Tensor, source: Tensor, dim: int = 0, *range_: Any, **named: Any) -> Tensor:
    return aten.slice_scatter.default(x, source, _from_the_start(dim, x), *range_, **named)


def _as_strided(
    x: Tensor,
    source: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Tensor:
    offset = None if storage_offset is None else 2 * storage_offset
    strides = (*(2 * s for s in stride), 1)
    return aten.as_strided_scatter.default(x, source, (*size, 2), strides, offset)


def _from_the_start(dim: int, pairs: Tensor) -> int:
    """Returns a dimension of complex numbers as one of their pairs."""
    return dim % (pairs.dim() - 1)


_PADDED = (aten.slice_scatter.default, aten.constant_pad_nd.default)


def pads_realized(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Has a padded tensor written into memory where another shape of it is padded again.

    Inductor computes such a chain in one expression per element. An index through a reshape of what
    was padded has a quotient and a remainder for each dimension, of a number that may be negative
    as far as Inductor knows, so that nothing cancels, and the next reshape has as many of each of
    those. The backward of Funnel's relative shift has four: sympy did not end within ten minutes.
    """
    found: dict[torch.fx.Node, set[torch.fx.Node]] = {}  # the pads that an element is read through
    reshaped: dict[torch.fx.Node, set[torch.fx.Node]] = {}  # those of them before a reshape
    realized: set[torch.fx.Node] = set()
    for node in module.graph.nodes:
        if not _is_read_through(node):
            continue
        found[node], reshaped[node] = (
            {pad for x in node.all_input_nodes for pad in of.get(x, ())} for of in (found, reshaped)
        )
        if node.target is aten.view.default:
            reshaped[node] = found[node]
        elif node.target in _PADDED:
            realized |= reshaped[node]
            found[node], reshaped[node] = found[node] - reshaped[node] | {node}, set()
    for node in [n for n in module.graph.nodes if n in realized]:
        _realize(module.graph, node)
    if realized:
        module.recompile()
    return module


def _is_read_through(node: torch.fx.Node) -> bool:
    """Returns whether Inductor may compute an element of it where that is read."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    by_element = torch.Tag.pointwise in node.target.tags or node.target is aten.copy.default
    return is_view(node) or by_element or node.target in _PADDED


def _realize(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    import torch._inductor.test_operators

    with graph.inserting_after(node):
        written = graph.call_function(torch.ops._inductor_test.realize.default, (node,))
    written.meta = dict(node.meta)
    node.replace_all_uses_with(written, delete_user_cb=lambda user: user is not written)

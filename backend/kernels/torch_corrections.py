"""Adapter: corrections of Inductor, where its kernels differ from eager or it takes needless time.

Each correction of its code generation is a context manager; outside of it Inductor is unchanged.

* Integer division by zero. From torch 2.13 on its C++ kernels check for it, except in division that
  rounds towards zero: there the process dies, where eager raises.
* Order of random draws. Inductor orders kernels by their reads, so independent draws may change
  places, and each would get the random numbers that eager gives to the other. From torch 2.13 on a
  pass of Inductor chains them, but a dropout may still come before an unused draw; our correction
  replaces that pass on every version.
* Slow simplification of indices. To choose tiles Inductor asks for the stride of each index in a
  variable. ``sympy.simplify`` tries a dozen ways, which took a fifth of the time of code
  generation. Most indices are polynomials, for which ``expand`` is enough.
* Dtype rules. Inductor fills the one object of them again for each operator: a tenth of the time of
  code generation.
* Fake values. Before it lowers a graph Inductor runs it under fake tensors, because passes may have
  recorded other strides. Our graphs keep the values of the trace, and with symbolic sizes a sixth
  of the time went there.
* Printed indices: Inductor prints one again for each kernel that it generates for a loop.
* Triton's files. For a key that it does not use where no GPU is, Inductor reads all of them once in
  a process: half a CPU-second where Triton is installed, which it is beside PyTorch with CUDA.
* Atomic adds from tiles. In a kernel of several threads that adds to memory from two-dimensional
  tiles, torch before 2.14 adds the offset within the tile to the index twice
  (pytorch/pytorch#191837): it adds to other memory, even out of bounds.
* Scaled sums with a product. Inductor makes one ``addmm`` of ``x.add(a @ b, alpha=0.1)``, and one
  kernel of a sum of two products under ``max_autotune``, without alpha (torch 2.11 to 2.14 at
  least; the same in another pass is pytorch/pytorch#167313).
* Casts to fewer bits. In a kernel that reads the result of ``x.bfloat16()`` as float32 again,
  Inductor reads ``x``: what quantizes, or adds up what a cast lost, computed something else.
* Sums in tiles. Where a loop stands between the two of a tile, and the inner one is summed over, a
  kernel stores whole vectors past the end of a row, even out of bounds (pytorch/pytorch#196681).
* Sizes made numbers. The lowerings of adaptive pooling, of nearest upsampling's gradient and, from
  torch 2.13 on, of a convolution's gradient make numbers of the symbolic sizes of an image, so that
  each size was a compile. PyTorch's kernels, which the last one calls anyway, take any size.
* Long indices. Quotients and remainders by symbolic sizes do not cancel, so a chain of reshapes, as
  MobileViT has, became one index of 20,000 characters, if sympy came to an end. Each reshape that
  copies is written to memory instead, and a quotient of sizes is computed once, by the wrapper.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import sympy
import torch
import torch.fx
from sympy.core.function import Application
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ...reuse.ir.operators import is_view, may_draw
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
    # Eager's generator, so that masks equal eager's for the same seed. The linker checks layouts,
    # so kernel calls need no asserts. The tag keeps Inductor's own cache apart from graphs compiled
    # with other corrections, or with none. A user's setting for CUDA graphs is for whole models,
    # not for one closure's launches. Inductor decides padding of products by a measurement on the
    # GPU, which may not be here.
    own = {
        "fallback_random": True,
        "size_asserts": False,
        "alignment_asserts": False,
        "triton.cudagraphs": False,
        "graph_partition": False,
        "shape_padding": False,
    }
    if torch.__version__ < "2.13":
        # There a gradient of ``cross_entropy`` that became a comparison was lost where gradients of
        # other reads of the same tensor were added by index.
        own["optimize_scatter_upon_const_tensor"] = False
    tag = f"{compiler_config.cache_key_tag} lazyinline {package_digest()}"
    with config.patch(own), compiler_config.patch(cache_key_tag=tag):
        yield


@contextmanager
def quotients_checked() -> Iterator[None]:
    """Makes kernels generated inside check the divisors of integer division for zero."""
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
    """Makes every draw of a graph lowered inside depend on the draw before it."""
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
            draw = _drawing_operation(made)
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


def _drawing_operation(made: Sequence[Any]) -> Any:
    """Returns the operation that draws among those of a lowered node: a fallback, or the first."""
    from torch._inductor.ir import FallbackKernel

    return next((operation for operation in made if isinstance(operation, FallbackKernel)), made[0])


def home_of_strides() -> Any:
    """Returns the module of Inductor that computes the strides of indices."""
    from torch._inductor import sizevars
    from torch._inductor.codegen import cpp

    return sizevars if hasattr(sizevars, "stride_at_vec_range") else cpp  # before torch 2.13


def polynomials_expanded() -> AbstractContextManager[Any]:
    """Makes Inductor expand an index that is a polynomial instead of simplifying it."""
    home = home_of_strides()
    return mock.patch.object(home, "sympy", _Sympy(home.sympy))


def dtype_rules_made_once() -> AbstractContextManager[Any]:
    """Makes Inductor fill its dtype rules only once inside."""
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    fill, filled = DtypePropagationOpsHandler.__init__, False

    def fill_once(self: Any) -> None:
        nonlocal filled
        if not filled:
            fill(self)
            filled = True

    return mock.patch.object(DtypePropagationOpsHandler, "__init__", fill_once)


def values_as_traced() -> AbstractContextManager[Any]:
    """Makes Inductor use the fake values that nodes have, if all have one of the right mode."""
    from torch._inductor import compile_fx

    propagate = compile_fx.fake_tensor_prop

    def known(module: torch.fx.GraphModule, inputs: Sequence[Any], *rest: Any) -> Any:
        mode = detect_fake_mode(inputs)
        if mode is None or not all(_has_its_value(node, mode) for node in module.graph.nodes):
            return propagate(module, inputs, *rest)
        _renew_copies(module, mode)
        return mode

    return mock.patch.object(compile_fx, "fake_tensor_prop", known)


def _has_its_value(node: torch.fx.Node, mode: FakeTensorMode) -> bool:
    """Whether a node's value equals the result of a run under fake tensors of this mode."""
    if node.op == "output":
        return True
    # An input may have been made unaligned.
    if node.meta.get("unaligned") or "unbacked_bindings" in node.meta or "val" not in node.meta:
        return False
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(v.fake_mode is mode for v in values if isinstance(v, FakeTensor))


def _renew_copies(module: torch.fx.GraphModule, mode: FakeTensorMode) -> None:
    """Computes the fake values of copies, and of what depends on them, again."""
    # A copy that functionalization added has the offset of the view that was written.
    renewed: set[torch.fx.Node] = set()
    for node in module.graph.nodes:
        is_copy = node.target is torch.ops.aten.copy.default
        if node.op == "call_function" and (is_copy or not renewed.isdisjoint(node.all_input_nodes)):
            args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
            with mode, enable_python_dispatcher():
                node.meta["val"] = node.target(*args, **kwargs)
            renewed.add(node)


def indices_printed_once() -> AbstractContextManager[Any]:
    """Makes Inductor print each index in C++ only once inside."""
    from torch._inductor.codegen.cpp_utils import CppPrinter

    write, written = CppPrinter._print, dict[Any, str]()

    def write_once(self: Any, expression: Any, **settings: Any) -> str:
        if settings or not isinstance(expression, sympy.Basic):
            return write(self, expression, **settings)
        if expression not in written:
            written[expression] = write(self, expression)
        return written[expression]

    return mock.patch.object(CppPrinter, "_print", write_once)


@contextmanager
def quicker_writing() -> Iterator[None]:
    """Applies the corrections that save time and do not change the generated code."""
    with (
        polynomials_expanded(),
        dtype_rules_made_once(),
        values_as_traced(),
        indices_printed_once(),
        triton_unread(),
    ):
        yield


def triton_unread() -> AbstractContextManager[Any]:
    """Makes Inductor describe this machine without reading Triton's files, where no GPU is."""
    from torch._inductor import codecache
    from torch._inductor.runtime import triton_compat

    if torch.cuda.is_available():
        return nullcontext()
    if hasattr(codecache, "triton_key"):
        return mock.patch.object(codecache, "triton_key", lambda: None)
    return mock.patch.object(triton_compat, "triton_key", lambda: None)  # before torch 2.13


def offsets_added_once() -> AbstractContextManager[Any]:
    """Makes kernels generated inside add a tile's offset once in atomic adds."""
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppTile2DKernel, CppVecKernel

    original = CppTile2DKernel.store

    def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
        by_threads = self.num_threads > 1 or config.cpp.dynamic_threads
        if mode != "atomic_add" or not by_threads or self.need_vec_transpose(index):
            return original(self, name, index, value, mode)
        CppVecKernel.store(self, name, index, value, mode)  # it adds the offset itself

    return mock.patch.object(CppTile2DKernel, "store", store)


def sums_tiled_beside() -> AbstractContextManager[Any]:
    """Makes kernels generated inside take vectors of the inner loop where a sum's tile is wrong."""
    from torch._inductor.codegen.cpp import TilingSelect

    original = TilingSelect._select_tiling_indices

    def select(self: Any, bodies: Any, sizes: Sequence[Any], factor: int) -> list[int]:
        chosen: list[int] = original(self, bodies, sizes, factor)
        outer, summed = max(sizes, key=lambda groups: len(groups[1]))
        # Inductor masks what it stores only where the loop after the tile's first one is summed.
        is_wrong = len(chosen) == 2 and summed and chosen[0] + 1 < len(outer)
        return chosen[1:] if is_wrong else chosen

    return mock.patch.object(TilingSelect, "_select_tiling_indices", select)


@contextmanager
def casts_rounded() -> Iterator[None]:
    """Makes casts in kernels generated inside round, though the kernel computes in float32."""
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.lowering import lowerings

    cast = torch.ops.prims.convert_element_type.default
    lower = lowerings[cast]

    def rounded(*args: Any, **kwargs: Any) -> Any:
        with config.patch(emulate_precision_casts=True):
            return lower(*args, **kwargs)

    # With it a C++ kernel takes the number before the cast for what reads the result as float32.
    no_cache = mock.patch.object(CppKernel, "cache_dtype_convert", lambda *args: None, create=True)
    with mock.patch.dict(lowerings, {cast: rounded}), no_cache:
        yield


def quotients_of_sizes_named() -> AbstractContextManager[Any]:
    """Makes kernels generated inside take each quotient of symbolic sizes as an operand."""
    from torch._inductor.codegen.common import Kernel
    from torch._inductor.virtualized import V

    rename = Kernel.rename_indexing

    def renamed(self: Any, index: Any) -> Any:
        is_plain = not isinstance(index, sympy.Expr)
        if is_plain or not any(map(_is_of_sizes, index.atoms(FloorDiv))):
            return rename(self, index)
        graph: Any = V.graph
        sizes, index = graph.sizevars, graph.sizevars.simplify(index)  # as the original does first
        quotients = [q for q in index.atoms(FloorDiv) if _is_of_sizes(q)]
        return rename(
            self, index.xreplace({q: sizes.lookup_precomputed_size(q) for q in quotients})
        )

    return mock.patch.object(Kernel, "rename_indexing", renamed)


def _is_of_sizes(quotient: Any) -> bool:
    return all(symbol_is_type(symbol, SymT.SIZE) for symbol in quotient.free_symbols)


def kernels_for_any_size() -> AbstractContextManager[Any]:
    """Makes graphs lowered inside call PyTorch's kernels where Inductor's are for one size.

    What is cloned is written to memory, so that a chain of reshapes is not one index.
    """
    from torch._inductor.lowering import fallback_handler, lowerings

    kernels = {one: fallback_handler(one, add_to_fallback_set=False) for one in _FOR_ONE_SIZE}
    clone = lowerings[aten.clone.default]

    def written(*args: Any, **kwargs: Any) -> Any:
        made = clone(*args, **kwargs)
        made.realize()
        return made

    return mock.patch.dict(lowerings, {**kernels, aten.clone.default: written})


_FOR_ONE_SIZE = (
    torch.ops.aten.convolution_backward.default,
    torch.ops.aten._adaptive_avg_pool2d.default,
    torch.ops.aten.adaptive_max_pool2d.default,
    torch.ops.aten.upsample_nearest2d_backward.default,
)


class _Sympy:
    """The module ``sympy``, with another ``simplify``."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def simplify(self, expression: Any) -> Any:
        """Returns a simpler form of an expression."""
        # Functions, such as quotients, were simplified when they were made: treated as variables.
        quotients = expression.atoms(Application)
        named = {one: self._original.Dummy(integer=True) for one in quotients}
        plain = expression.xreplace(named) if named else expression
        if not is_polynomial(plain):
            return self._original.simplify(expression)
        return plain.expand().xreplace({name: one for one, name in named.items()})


def is_polynomial(expression: Any) -> bool:
    """Whether a sympy expression is a number, a variable, or made of sums and products of those."""
    if expression.is_Add or expression.is_Mul:
        return all(map(is_polynomial, expression.args))
    if expression.is_Pow:  # the square of a symbolic size
        base, exponent = expression.args
        return bool(exponent.is_Integer and exponent > 0) and is_polynomial(base)
    return bool(expression.is_Symbol or expression.is_Integer)


aten = torch.ops.aten

PUTTING = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)

_PADDED = (aten.slice_scatter.default, aten.constant_pad_nd.default)


def pads_realized(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Makes Inductor write a padded tensor to memory if a reshape of it is padded again.

    Inductor would compute such a chain as one expression per element. An index through a reshape of
    a padded tensor has a quotient and a remainder per dimension, which do not cancel, since
    Inductor does not know that they are not negative; each further reshape multiplies their number.
    The backward of Funnel's relative shift has four: sympy did not finish within ten minutes.
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
        with module.graph.inserting_after(node):
            written = _written(module.graph, node)
        node.replace_all_uses_with(written, delete_user_cb=partial(operator.is_not, written))
    if realized:
        module.recompile()
    return module


def _is_read_through(node: torch.fx.Node) -> bool:
    """Returns whether Inductor may fuse a node into its readers."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    by_element = torch.Tag.pointwise in node.target.tags or node.target is aten.copy.default
    return is_view(node) or by_element or node.target in _PADDED


def sums_scaled(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Keeps products apart from the sums that they are added to with an ``alpha``.

    Inductor makes one ``addmm`` of ``x.add(a @ b, alpha=0.1)`` and, under ``max_autotune``, one
    kernel of a sum of two products. Both passes forget ``alpha``.
    """
    graph = module.graph
    sums = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    scaled = [node for node in sums if node.kwargs.get("alpha", 1) != 1]
    shown = _shown(graph) if scaled else {}
    for node in scaled:
        for read in node.all_input_nodes:
            if any(x.target is aten.mm.default for x in shown[read]):
                with graph.inserting_before(node):
                    node.replace_input_with(read, _written(graph, read))
    return module


def values_kept_apart(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Copies what ``index_put`` reads if it may be a view of the tensor that it changes.

    Inductor turns ``index_put`` into ``index_put_`` if nobody reads its operand afterwards, and
    does not look at the operator's own values: ``x.index_put((i,), x[:2])`` read them while it
    wrote over them. A copy of a view is one too, since Inductor takes ``clone`` out. ``index_add``,
    ``index_copy`` and ``put`` are made of it. Seen on torch 2.14, in ``torch.compile``, too.
    """
    graph = module.graph
    puts = [n for o in PUTTING for n in graph.find_nodes(op="call_function", target=o)]
    shown = _shown(graph) if puts else {}
    for node in puts:
        changed, *others = node.args
        for read in [x for x in _nodes_in(others) if shown[x] & shown[changed]]:
            with graph.inserting_before(node):
                copied = _written(graph, read)
            others = map_arg(others, partial(_replaced, {read: copied}))
        node.args = (changed, *others)
    return module


def _shown(graph: torch.fx.Graph) -> dict[torch.fx.Node, set[torch.fx.Node]]:
    """Returns for each node those whose memory it may show."""
    from torch._inductor.fx_passes.post_grad import noop_registry

    shown: dict[torch.fx.Node, set[torch.fx.Node]] = {}
    for node in graph.nodes:
        is_call = isinstance(node.target, torch._ops.OpOverload)
        is_through = is_call and (is_view(node) or node.target in noop_registry)
        inputs = node.all_input_nodes if is_through else ()
        shown[node] = set().union(*(shown[x] for x in inputs)) or {node}
    return shown


def _replaced(by: Mapping[torch.fx.Node, torch.fx.Node], node: torch.fx.Node) -> torch.fx.Node:
    return by.get(node, node)


def _nodes_in(args: Any) -> list[torch.fx.Node]:
    found: dict[torch.fx.Node, None] = {}
    map_arg(args, found.setdefault)
    return list(found)


def _written(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    """Adds an operator that makes Inductor write a tensor to memory, and returns a copy of it."""
    import torch._inductor.test_operators

    written = graph.call_function(torch.ops._inductor_test.realize.default, (node,))
    written.meta = dict(node.meta)
    return written

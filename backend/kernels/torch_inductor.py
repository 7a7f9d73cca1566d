"""Adapter: TorchInductor as a kernel maker for one ATen graph. Its private names live here.

Compiling a leaf has two halves: Python writes the kernels' source, and a C++ compiler builds it.
:func:`compile_leaves` collects the second half and waits once, at the end, so that the source of
the next leaf is written while earlier ones are being built, many kernels in one run of the
compiler (:mod:`.torch_builds`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ...autodiff.traces.joint_cut import copy_graph
from ...autodiff.traces.pure_memory import draw_mask
from ...reuse.errors import LazyInlineError
from ...reuse.ir.program import input_nodes
from ...reuse.ir.torch_symbols import sizes_as_literals, symbols_of, with_size_inputs
from ...reuse.ir.types import TensorType
from ...reuse.own_code import package_digest
from ..gpu.torch_gpu import gpu_codegen_settings, kernels_as_text
from ..launches.torch_native import check_cpp_compiler
from .scatters import scatters_of_pairs
from .torch_builds import deferred_builds, vector_units_probed_here
from .torch_divisions import quotients_checked
from .torch_draws import drawn_in_order
from .torch_index import offsets_added_once, polynomials_expanded
from .torch_layouts import Layouts

NOT_FROM_THE_END = (
    torch.ops.aten.index_select.default,
    torch.ops.aten.index_add.default,
    torch.ops.aten.index_copy.default,
    torch.ops.aten.index_reduce.default,
)
"""Inductor writes them as ``x[index]``, but in eager their index -1 is an error."""

BoxedCallable = Callable[[list[Any]], Sequence[Any]]


@contextmanager
def settings() -> Iterator[None]:
    """Holds the Inductor settings that lazyinline relies on.

    Random operators keep PyTorch's generator, so that masks equal eager's under one seed. Layouts
    are proved by the linker, not asserted in every kernel call. And what Inductor keeps on disk of
    a graph was written with the same corrections: another version's, or none, find none of it.
    """
    import torch._inductor.config as config

    compiler_config: Any = importlib.import_module("torch.compiler.config")
    own = {"fallback_random": True, "size_asserts": False, "alignment_asserts": False}
    tag = f"{compiler_config.cache_key_tag} lazyinline {package_digest()}"
    with config.patch(own), compiler_config.patch(cache_key_tag=tag):
        yield


def graph_cache_off() -> Any:
    """Returns a context manager in which no compiled graph is taken from Inductor's cache.

    Built C++ objects still are: what Python does is measured, not what a disk remembers.
    """
    import torch._inductor.config as config

    return config.patch(fx_graph_cache=False, fx_graph_remote_cache=False)


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


_POOLING = (
    torch.ops.aten.max_pool2d_with_indices.default,
    torch.ops.aten.max_pool3d_with_indices.default,
)

_PUTTING = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)


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


def rewrite_joint(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Runs Inductor's passes over a joint forward and backward graph.

    A pass may put in nodes of its own; within a tracing context they get values of the graph's fake
    mode. A cut that saves such a value could not be compiled otherwise.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    symbols = symbols_of(module)
    if symbols:
        module = with_size_inputs(module, symbols, "last")
    first = input_nodes(module)[0].meta["val"]
    device, context = first.device, TracingContext(first.fake_mode)
    if device.type == "cpu":
        check_cpp_compiler()
    layouts = Layouts(module.graph)
    with settings(), vector_units_probed_here(), tracing(context):
        module = _recursive_joint_graph_passes(module, input_device=device)
    layouts.restore(module.graph)
    module.recompile()
    if symbols:
        sizes_as_literals(module.graph)
        module.recompile()
    return module


@dataclass(frozen=True)
class NotCompiled:
    """A graph that Inductor has no kernels for; ``reason`` says why."""

    reason: str


def compile_leaves(
    modules: Sequence[torch.fx.GraphModule], on_compiled: Callable[[], None]
) -> list[BoxedCallable | NotCompiled]:
    """Compiles ATen graphs; each result takes a list of tensors, which it empties.

    Where sizes are symbolic, the list begins with a number for each symbol.

    Args:
        modules: graphs whose nodes carry fake tensors of one fake mode each.
        on_compiled: called after each graph.
    """
    if not modules:  # all from the cache: Inductor need not even be imported
        return []
    if any(n.meta["val"].device.type == "cpu" for m in modules for n in _tensor_inputs(m)):
        check_cpp_compiler()
    compiled: list[BoxedCallable | NotCompiled] = []
    asked: list[int] = []
    probes = vector_units_probed_here()
    with settings(), probes, _corrections(), deferred_builds() as builds:
        for module in modules:
            symbols = symbols_of(module)
            copy = with_size_inputs(module, symbols, "first") if symbols else copy_graph(module)
            compiled.append(_compiled_or_why_not(copy))  # its passes change what they get
            asked += [len(compiled) - 1] * (len(builds) - len(asked))
            on_compiled()
        for place, error in zip(asked, builds.errors(), strict=True):
            if error is not None:
                compiled[place] = _why_not(error)
    return compiled


def _compiled_or_why_not(module: torch.fx.GraphModule) -> BoxedCallable | NotCompiled:
    """Compiles a graph. Whatever fails here is no reason to fail: PyTorch can run it."""
    try:
        return _compile(module)
    except LazyInlineError:
        raise
    except Exception as error:
        return _why_not(error)


def _why_not(error: Exception) -> NotCompiled:
    from torch._inductor.exc import InductorError

    kind = "" if isinstance(error, InductorError) else f"{type(error).__name__}: "
    return NotCompiled(f"{kind}{error}".strip())


@contextmanager
def _corrections() -> Iterator[None]:
    """Holds what is not left to Inductor while it writes C++ kernels."""
    with polynomials_expanded(), offsets_added_once(), drawn_in_order(), quotients_checked():
        yield


def write_gpu_leaves(
    modules: Sequence[torch.fx.GraphModule], on_written: Callable[[], None]
) -> list[BoxedCallable]:
    """Writes the code of ATen graphs on a GPU; what it launches is text.

    Within :func:`..gpu.torch_gpu.gpu_described` that GPU need not be here.
    """
    import torch._inductor.config as config

    written = []
    way = drawn_in_order(), polynomials_expanded()
    with settings(), config.patch(gpu_codegen_settings()), kernels_as_text(), way[0], way[1]:
        for module in modules:
            written.append(_compile(copy_graph(module)))  # its passes change what they get
            on_written()
    return written


def with_inputs_anywhere(
    module: torch.fx.GraphModule, positions: Collection[int]
) -> torch.fx.GraphModule:
    """Returns a graph whose kernels take some inputs at any address.

    Inductor believes of an input what the offset of its fake tensor says: one that is no multiple
    of 16 bytes is not loaded several elements at once.
    """
    copied = copy_graph(module)
    for position in positions:
        input_nodes(copied)[position].meta["anywhere"] = True
    return copied


def _example(node: torch.fx.Node) -> Any:
    value = node.meta["val"]
    if not node.meta.get("anywhere"):
        return value
    with value.fake_mode:
        size = value.untyped_storage().nbytes() // value.element_size()
        whole = torch.empty(size + 1, dtype=value.dtype, device=value.device)
        return whole.as_strided(value.shape, value.stride(), 1)


def _tensor_inputs(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [n for n in input_nodes(module) if isinstance(n.meta["val"], torch.Tensor)]


def _compile(module: torch.fx.GraphModule) -> BoxedCallable:
    from torch._inductor.compile_fx import compile_fx_inner

    output = module.graph.output_node()
    results = output.args[0]
    assert isinstance(results, (tuple, list))
    # All results keep the layout that the program's types promise, saved tensors too.
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    for node in input_nodes(module):
        node.meta["val"] = _example(node)
    inputs = [n.meta["val"] for n in input_nodes(module)]
    artifact = compile_fx_inner(module, inputs)
    function = getattr(artifact, "current_callable", None)
    return function if function is not None else artifact

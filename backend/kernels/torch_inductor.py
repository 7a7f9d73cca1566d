"""Adapter: TorchInductor as a kernel maker for one ATen graph. Its private names live here.

Compiling a leaf has two halves: Python writes the kernels' source, and a C++ compiler builds it.
:func:`compile_leaves` collects the second half and waits once, at the end, so that the source of
the next leaf is written while earlier ones are being built, many kernels in one run of the
compiler (:mod:`.torch_builds`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from ...autodiff.traces.joint_cut import copy_graph
from ...reuse.errors import LazyInlineError
from ...reuse.ir.program import input_nodes
from ...reuse.ir.torch_symbols import sizes_as_literals, symbols_of, with_size_inputs
from ...reuse.ir.types import TensorType, strides_that_matter
from ..gpu.torch_gpu import kernels_as_text
from ..launches.torch_native import check_cpp_compiler
from .torch_builds import deferred_builds, vector_units_probed_here
from .torch_corrections import (
    drawn_in_order,
    offsets_added_once,
    polynomials_expanded,
    quotients_checked,
    settings,
)

aten = torch.ops.aten

BoxedCallable = Callable[[list[Any]], Sequence[Any]]


def graph_cache_off() -> Any:
    """Returns a context manager in which no compiled graph is taken from Inductor's cache."""
    import torch._inductor.config as config

    # Built C++ objects are still reused: the time of Python is measured, not a disk's memory.
    return config.patch(fx_graph_cache=False, fx_graph_remote_cache=False)


def rewrite_joint(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Runs Inductor's passes over a joint forward and backward graph."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    symbols = symbols_of(module)
    if symbols:
        module = with_size_inputs(module, symbols, "last")
    first = input_nodes(module)[0].meta["val"]
    # A pass may put in nodes of its own: within a tracing context they get values of the graph's
    # fake mode. A cut that saves such a value could not be compiled otherwise.
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


class Layouts:
    """Remembers how values of a graph are laid out before Inductor's passes run over it.

    The passes take a product with one, a sum with zero and their like for the operand if shape and
    dtype agree, whatever the strides, and note the strides of the one for the other. Who reads it
    was traced with the strides of before: the types of the graph's results are fixed by then, and
    so is the meaning of ``as_strided``.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._values = {node: node.meta.get("val") for node in graph.nodes}
        self._read = {node: [_type(x) for x in _operands(node)] for node in graph.nodes}

    def restore(self, graph: torch.fx.Graph) -> None:
        """Copies what nodes read into the layouts that they read before, where these differ now."""
        for node in graph.nodes:  # a pass also hands the value of a node that goes to its operand
            if node in self._values and "val" in node.meta:
                node.meta["val"] = self._values[node]
        copies: dict[tuple[torch.fx.Node, TensorType], torch.fx.Node] = {}
        for node in list(graph.nodes):
            for operand, wanted in self._moved(node):
                if (operand, wanted) not in copies:
                    with graph.inserting_before(node):
                        copies[operand, wanted] = _copy(graph, operand, wanted)
                node.replace_input_with(operand, copies[operand, wanted])

    def _moved(self, node: torch.fx.Node) -> list[tuple[torch.fx.Node, TensorType]]:
        """Returns the operands that lie in other layouts than the node read before, and these."""
        operands, types = _operands(node), self._read.get(node, [])
        if len(operands) != len(types):
            return []  # a pass gave it other operands
        pairs = zip(operands, types, strict=True)
        return [(x, wanted) for x, wanted in pairs if wanted and _differs_in_strides(x, wanted)]


def _operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    operands: list[torch.fx.Node] = []
    map_arg((node.args, node.kwargs), operands.append)
    return operands


def _type(operand: torch.fx.Node) -> TensorType | None:
    value = operand.meta.get("val")
    return TensorType.of(value) if isinstance(value, torch.Tensor) else None


def _differs_in_strides(operand: torch.fx.Node, wanted: TensorType) -> bool:
    found = _type(operand)
    if found is None or (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return False
    strides = [strides_that_matter(t.shape, t.stride) for t in (found, wanted)]
    return wanted.is_dense and strides[0] != strides[1]


def _copy(graph: torch.fx.Graph, operand: torch.fx.Node, wanted: TensorType) -> torch.fx.Node:
    """Adds a copy of an operand in a dense layout: contiguous once its axes are in that order."""
    order = _order(wanted)
    back = sorted(range(len(order)), key=order.__getitem__)
    made = operand
    contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
    steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.permute.default, (order,), {}),
        (aten.clone.default, (), contiguous),
        (aten.permute.default, (back,), {}),
    ]
    for target, args, kwargs in steps:
        given = made.meta["val"]
        made = graph.call_function(target, (made, *args), kwargs)
        made.meta.update(operand.meta)
        made.meta["val"] = target(given, *args, **kwargs)
    return made


def _order(type_: TensorType) -> list[int]:
    """Returns the axes of a dense type, outermost first."""
    axes = [axis for axis, size in enumerate(type_.shape) if size != 1]
    order: list[int] = []
    expected = 1
    while axes:
        innermost = next(axis for axis in axes if type_.stride[axis] == expected)
        axes.remove(innermost)
        order.insert(0, innermost)
        expected *= type_.shape[innermost]
    return [axis for axis, size in enumerate(type_.shape) if size == 1] + order


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
        for place, wait in zip(asked, builds, strict=True):
            try:
                wait()
            except Exception as error:  # the compiler's, the loader's, a full disk's
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
    # In one thread of this process, where the patches are; tuning would need the device.
    plain = config.patch({"compile_threads": 1, "triton.autotune_at_compile_time": False})
    with settings(), plain, kernels_as_text(), drawn_in_order(), polynomials_expanded():
        for module in modules:
            written.append(_compile(copy_graph(module)))  # its passes change what they get
            on_written()
    return written


def with_unaligned_inputs(
    module: torch.fx.GraphModule, positions: Collection[int]
) -> torch.fx.GraphModule:
    """Returns a graph whose kernels take some inputs at any address."""
    copied = copy_graph(module)
    for position in positions:
        # Inductor goes by the offset of an input's fake tensor: where that is no multiple of 16
        # bytes, it does not load several elements at once.
        input_nodes(copied)[position].meta["unaligned"] = True
    return copied


def _example(node: torch.fx.Node) -> Any:
    value = node.meta["val"]
    if not node.meta.get("unaligned"):
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

"""Adapter: a function of tensors traced into a graph, on fake tensors of given types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from ...reuse.ir.torch_symbols import environment_of, size_in, sizes_as_literals
from ...reuse.ir.types import TensorType
from ...reuse.process import ProcessLock
from ...reuse.torch_names import module_of
from .torch_lazy import PLAIN_ZEROS

Decompositions: TypeAlias = Mapping[Any, Callable[..., Any]]
"""By operator, the function that a trace calls in its place."""


def traced(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    sizes: Sequence[Any],
    decompositions: Decompositions,
) -> torch.fx.GraphModule:
    """Traces a function into a graph that takes its tensors as positional arguments, one each.

    Args:
        function: takes the inputs.
        inputs: tensors, or lists of them.
        sizes: symbols that become literals in the graph; without them it computes its sizes.
        decompositions: of operators, as they are called.
    """
    table = {**decompositions, **PLAIN_ZEROS}
    # Sizes are inputs of the trace, or each reading of one would be a node of its own.
    run = make_fx(lambda *groups: function(*groups[:-1]), decomposition_table=table)
    module = run(*inputs, list(sizes))
    if sizes:
        sizes_as_literals(module.graph)
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    module.recompile()
    return module


def growing_graph() -> torch.fx.Graph:
    """Returns the graph of the trace that is under way."""
    proxy_mode = get_proxy_mode()
    assert proxy_mode is not None
    graph: torch.fx.Graph = proxy_mode.tracer.graph
    return graph


_LOCK = ProcessLock()  # one trace at a time replaces PyTorch's dropout
_OF_DROPOUT = (torch.DispatchKey.Autograd, torch.DispatchKey.CompositeImplicitAutograd)


def new_fake_mode(module: torch.fx.GraphModule | None = None) -> FakeTensorMode:
    """Returns a fake mode for one compilation (Inductor's passes bring real constants).

    Sizes of its tensors may be those of the module's shape environment.
    """
    environment = None if module is None else environment_of(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment, static_shapes=True)
    if environment is not None:
        # The mode's cache of results hardly ever fits where sizes are symbols.
        mode.cache_enabled = False
    return mode


def sizes_kept_open(mode: FakeTensorMode) -> AbstractContextManager[Any]:
    """Has operators that would read a size as a number leave it a symbol, if there are any.

    ``constant_pad_nd`` is one: in C++ it reads numbers, and PyTorch has it in Python beside.
    """
    return nullcontext() if mode.shape_env is None else _in_python()


@contextmanager
def _in_python() -> Iterator[None]:
    """Has operators run in Python; dropout of everything draws nothing there, as in C++."""
    dropout: Any = torch.ops.aten.dropout.default
    kernels = dropout.py_kernels
    with _LOCK:
        before = {key: kernels[key] for key in _OF_DROPOUT if key in kernels}
        kernels.update({key: _drawing_as_eager(kernel) for key, kernel in before.items()})
        dropout._dispatch_cache.clear()
        try:
            with enable_python_dispatcher():
                yield
        finally:
            kernels.update(before)
            dropout._dispatch_cache.clear()


def _drawing_as_eager(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(input: torch.Tensor, p: float, train: bool) -> Any:
        if train and p == 1:
            return input * torch.zeros((), dtype=input.dtype, device=input.device)
        return kernel(input, p, train)

    return dropout


def fake_tensor(mode: FakeTensorMode, type_: TensorType) -> torch.Tensor:
    """Returns a fake tensor of a type."""
    shape, stride = ([size_in(mode.shape_env, n) for n in ns] for ns in (type_.shape, type_.stride))
    with mode:
        return torch.empty_strided(shape, stride, dtype=type_.dtype, device=type_.device)


def traced_copy(type_: TensorType, device: torch.device) -> torch.fx.GraphModule:
    """Returns the graph of a copy of a tensor to a device."""
    mode, graph = new_fake_mode(), torch.fx.Graph()
    given = graph.placeholder("a0")
    copy = torch.ops.aten._to_copy.default
    node = graph.call_function(copy, (given,), {"device": device})
    graph.output((node,))
    given.meta["val"] = fake_tensor(mode, type_)
    node.meta["val"] = fake_tensor(mode, replace(type_, device=device))
    return module_of(graph)

"""Adapter: the backend that PyTorch finds by its name, ``torch.compile(backend="lazyinline")``.

Dynamo calls :func:`compile_graph` with each graph it captured, and runs what it returns. Graph
breaks are Dynamo's, and so is the question whether a graph fits a call; what a program relies on
besides is asked at each run, as for any compiled module. A graph that no program can stand for is
handed on, with a warning that says why: to Inductor as PyTorch has it, or to PyTorch's own kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch._dynamo import lookup_backend
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor

from ...reuse.errors import LazyInlineError, PlanError
from ..calls.calls import Calls
from ..options import Options
from ..report import CompileReport
from .outline import outlined
from .torch_dynamo_graph import DynamoGraph, HandedOnError, read_graph

Run = Callable[..., Any]

_OPTIONS = ("backend", "recompute", "reuse")


class HandedOnWarning(UserWarning):
    """A graph of Dynamo's is left to another compiler."""


class CompiledGraph:
    """What Dynamo runs in place of a graph."""

    def __init__(self, graph: DynamoGraph, options: Options) -> None:
        module = graph.module if options.reuse == "off" else outlined(graph.module, graph.calls)
        self._calls = Calls(module, options, names=graph.names)
        self._inputs = graph.inputs

    @property
    def last_report(self) -> CompileReport | None:
        """What the newest compile did."""
        return self._calls.last_report

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Compiles for inputs of a layout.

        Raises:
            LazyInlineError: if there can be no program.
        """
        self._calls.prepare(*self._taken(inputs))

    def __call__(self, *inputs: Any) -> Any:
        """Runs the program."""
        return self._calls(*self._taken(inputs))

    def _taken(self, inputs: Sequence[Any]) -> list[Any]:
        return [inputs[index] for index in self._inputs]


def compile_graph(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Run:
    """Compiles a graph that Dynamo captured. PyTorch calls it; see ``torch.compile``.

    Args:
        module: the graph.
        inputs: what it was captured for.
        options: ``backend``, ``recompute`` and ``reuse``, as :func:`compile` takes them.
        mode: none is known.

    Raises:
        PlanError, ReuseError: for options that do not exist.

    Example:
        >>> model = torch.compile(model, backend="lazyinline", options={"recompute": "full"})
    """
    chosen = _checked(options or {}, mode)
    try:
        with tracing(None):
            graph = CompiledGraph(read_graph(module), chosen)
            if not any(isinstance(x, FakeTensor) for x in inputs):
                graph.prepare(inputs)
        return graph
    except (HandedOnError, LazyInlineError) as error:
        return _handed_on(module, inputs, chosen, str(error))


def _checked(options: Mapping[str, Any], mode: str | None) -> Options:
    unknown = [*(f"options[{name!r}]" for name in options if name not in _OPTIONS)]
    if mode not in (None, "default"):
        unknown.append(f"mode={mode!r}")
    if unknown:
        raise PlanError(
            f"backend='lazyinline' does not know {', '.join(unknown)}. It takes options= with "
            f"{', '.join(_OPTIONS)}."
        )
    return Options(**{"cache": "disk", **options})


def _handed_on(
    module: torch.fx.GraphModule, inputs: Sequence[Any], options: Options, reason: str
) -> Run:
    other = "PyTorch's own kernels" if options.backend == "eager" else "TorchInductor"
    warnings.warn(
        f"A graph that torch.compile captured is left to {other}: {reason}",
        HandedOnWarning,
        stacklevel=2,
    )
    if options.backend == "eager":
        return module.forward
    run: Run = lookup_backend("inductor")(module, list(inputs))  # type: ignore[arg-type]
    return run

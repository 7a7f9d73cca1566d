"""Adapter: interpreters that run a leaf while it is traced, for gradients of any order.

They record which call of the user's each operator comes from, and where gradients stop: below
autograd ``detach`` is the identity, and a trace is full of those that autograd adds for what it
saves. If gradients are differentiated again, the user's own ``detach`` must stay, and operators
without a derivative are decomposed into some that have one.
"""

from __future__ import annotations

import bisect
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
import torch.fx

from ...reuse.errors import CaptureError
from ...reuse.ir.leaf import ModalInterpreter, Relayout, stamp_of, without_autocast
from ...reuse.ir.program import outputs_of
from ...reuse.ir.types import TensorType
from . import torch_make_fx
from .torch_user_rules import DATA_DEPENDENT_ERRORS, dense_as


@dataclass(frozen=True, slots=True)
class Origin:
    """Names the operator of the user's code, or its derivative, that an operator was traced for."""

    operator: str
    source: str
    is_backward: bool

    def __str__(self) -> str:
        return f"the backward of {self.operator}" if self.is_backward else self.operator


def origin_of(node: torch.fx.Node) -> Origin | None:
    """Returns the origin of an operator of a joint graph, or of one of its halves."""
    origin = node.meta.get("origin")
    return origin if isinstance(origin, Origin) else None


class NotingInterpreter(ModalInterpreter):
    """Runs a leaf body in a trace, and records the origin of each operator of its ``graph``."""

    def __init__(
        self, module: torch.fx.GraphModule, graph: torch.fx.Graph, relayout: Relayout | None = None
    ) -> None:
        super().__init__(module, relayout)
        self._graph = graph
        self._marks: list[tuple[int, Origin]] = []
        self._functions: set[Any] = set()

    def run_node(self, n: torch.fx.Node) -> Any:
        """Runs a node and records the operators that it is traced as, later its backward's, too."""
        if n.op != "call_function":
            return super().run_node(n)
        stamp = stamp_of(n)
        # A node of an earlier trace keeps its origin.
        origin = origin_of(n) or Origin(str(n.target), stamp.source, is_backward=False)
        self._mark(origin)
        with self.errors_located():
            result = super().run_node(n)
        if not stamp.grad_enabled:  # no backward; asking a view for its function may be an error
            return result
        results = result if isinstance(result, (tuple, list)) else (result,)
        functions = (r.grad_fn for r in results if isinstance(r, torch.Tensor))
        self._watch(functions, replace(origin, is_backward=True))
        return result

    @contextmanager
    def errors_located(self) -> Iterator[None]:
        """Raises CaptureError, with the line, where PyTorch needs a value or lacks a derivative."""
        try:
            yield
        except DATA_DEPENDENT_ERRORS as error:  # of ``istft``, which looks at its window
            origin = self._marks[-1][1]
            raise CaptureError(
                f"{origin} at {origin.source} asks for the value of a tensor ({error}), and a "
                "program has no values yet."
            ) from error
        except RuntimeError as error:  # of ``x // 2``: eager PyTorch raises it in backward
            if not re.match(r"derivative for \S+ is not implemented", str(error)):
                raise
            raise CaptureError(f"The {error}, at {self._marks[-1][1].source}.") from error

    def _mark(self, origin: Origin) -> None:
        self._marks.append((len(self._graph.nodes), origin))

    def _watch(self, functions: Iterable[Any], origin: Origin) -> None:
        """Hooks new autograd functions, to record when each runs."""
        todo = list(functions)
        # Python finds no cycle that leads through autograd: a strong reference would keep all this.
        noting = weakref.proxy(self)
        while todo:
            function = todo.pop()
            if function is None or function in self._functions:
                continue
            self._functions.add(function)
            if hasattr(function, "variable"):  # AccumulateGrad, of which nothing is traced
                continue
            # The engine runs a node's prehooks right before the node, whose operators come next.
            function.register_prehook(lambda _, origin=origin: noting._mark(origin))
            todo += [f for f, _ in function.next_functions]

    def write(self) -> None:
        """Writes the origins to the nodes of the graph."""
        starts = [start for start, _ in self._marks]
        for index, node in enumerate(self._graph.nodes):
            place = bisect.bisect_right(starts, index)
            if node.op == "call_function" and place:
                node.meta["origin"] = self._marks[place - 1][1]


_STOP = "stops a gradient"


def is_stop(node: torch.fx.Node) -> bool:
    """Returns whether a detach in a joint graph comes from the user's code."""
    return _STOP in node.meta


class StoppingInterpreter(NotingInterpreter):
    """Adds a marked detach after each result that the user's code detaches."""

    def run_node(self, n: torch.fx.Node) -> Any:
        """Runs a node; detaches results of ``detach`` and of nodes under ``no_grad``, marked."""
        result = super().run_node(n)
        if n.op != "call_function":
            return result
        # Under no_grad a result is a constant to autograd, but a trace does not show that.
        if n.target is torch.ops.aten.detach.default or not stamp_of(n).grad_enabled:
            return stopped(result, self._graph)
        return result


def stopped(result: Any, graph: torch.fx.Graph) -> Any:
    """Detaches an operator's results, and marks the detach nodes in the graph of the trace."""
    if isinstance(result, (tuple, list)):
        return type(result)(stopped(part, graph) for part in result)
    if not isinstance(result, torch.Tensor):
        return result
    detached = result.detach()
    next(iter(reversed(graph.nodes))).meta[_STOP] = True
    return detached


def stop_in_trace(tensor: torch.Tensor) -> torch.Tensor:
    """Detaches a tensor in a trace, by a marked detach that is never removed."""
    detached: torch.Tensor = stopped(tensor, torch_make_fx.growing_graph())
    return detached


NOT_DIFFERENTIABLE = "is not differentiable with respect to argument"
"""PyTorch's error for a gradient with respect to an operand that cannot have one."""


@without_autocast()
def stop_what_has_no_gradient(
    module: torch.fx.GraphModule, types: Sequence[TensorType], active: Sequence[int]
) -> None:
    """Detaches the results of a functional graph without a gradient, such as a norm's statistics.

    Another graph that takes them must not request their gradients. Inputs that are not ``active``
    now may require a gradient at another order.
    """
    flags = _with_gradients(module, types, active)
    output = module.graph.output_node()
    new = list(outputs_of(module))
    with module.graph.inserting_before(output):
        for index, (node, has_gradient) in enumerate(zip(new, flags, strict=True)):
            if not has_gradient:
                new[index] = module.graph.call_function(torch.ops.aten.detach.default, (node,))
                new[index].meta["val"] = node.meta["val"]
    output.args = (tuple(new),)
    module.recompile()


def _with_gradients(
    module: torch.fx.GraphModule, types: Sequence[TensorType], active: Sequence[int]
) -> list[bool]:
    """Says for each result whether autograd gives it a gradient if every input requires one.

    Some inputs cannot require one (a norm's running statistics): PyTorch raises an error then.
    """
    mode = torch_make_fx.new_fake_mode(module)

    def run(wanting: Collection[int]) -> list[bool]:
        inputs = [
            torch_make_fx.fake_tensor(mode, t).requires_grad_(i in wanting)
            for i, t in enumerate(types)
        ]
        with mode, torch_make_fx.sizes_kept_open(mode), torch.enable_grad():
            results = ModalInterpreter(module).run_flat(inputs)
        return [not isinstance(x, torch.Tensor) or x.requires_grad for x in results]

    wanting = {i for i, type_ in enumerate(types) if type_.is_differentiable}
    try:
        return run(wanting)
    except RuntimeError as error:
        if NOT_DIFFERENTIABLE not in str(error):
            raise
    for index in wanting - set(active):
        try:
            run({*active, index})
        except RuntimeError:
            wanting.discard(index)
    return run(wanting)


Gradients: TypeAlias = Literal["final", "differentiated"]
"""Whether gradients are the last derivative, or are differentiated again."""


def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    """Decomposes ``copy``, which has no derivative; the result has the same layout."""
    return dense_as(source.to(target.dtype).expand(target.shape), target.stride())


DIFFERENTIABLE: torch_make_fx.Decompositions = {torch.ops.aten.copy.default: copied}
"""Decompositions of operators without a derivative into operators that have one."""


def _determinant(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes a determinant by its logarithm.

    PyTorch chooses the derivative of ``det`` by the values of the matrix. A trace has none and uses
    the formula for singular matrices, whose own derivative is nan where singular values are equal
    (from 2.15 on it computes both formulas and selects). By the logarithm, a singular matrix is an
    error.
    """
    # With factors and pivots, since captured graphs hold the operator with all its results.
    sign, logarithm, factors, pivots = torch.ops.aten._linalg_slogdet.default(matrix)
    return sign * logarithm.exp(), factors, pivots


def _random_relu(
    x: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> torch.Tensor:
    """Computes ``rrelu`` as a product with the slopes that it draws.

    A trace holds the functional variant, whose derivative does not read the drawn slopes but the
    buffer that they would have been written to: it would be wrong.
    """
    if not training:
        return torch.ops.aten.leaky_relu.default(x, (lower + upper) / 2)
    _, slopes = torch.ops.aten.rrelu_with_noise_functional.default(
        x, torch.ones_like(x), lower, upper, training, generator
    )
    return x * slopes


_FORMS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._linalg_det.default: _determinant,
    torch.ops.aten.linalg_det.default: lambda matrix: _determinant(matrix)[0],
    torch.ops.aten.det.default: lambda matrix: _determinant(matrix)[0],
    torch.ops.aten.rrelu.default: _random_relu,
    torch.ops.aten.rrelu_.default: lambda x, *more: x.copy_(_random_relu(x, *more)),
}
"""Decompositions of operators whose second derivative is wrong in a trace."""


class DifferentiableInterpreter(StoppingInterpreter):
    """Runs a leaf body by operators whose derivatives can be differentiated."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator, or its decomposition."""
        return super().call_function(_FORMS.get(target, target), args, kwargs)

"""A loss with derivatives in it, in each way that JAX has to take them; runs without PyTorch.

:func:`serve` is a process of its own, on one core with one thread: XLA reads how many threads it
may have once, before it is imported, and the threads of two frameworks stay apart. It takes turns
with its parent, which asks for one step at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy

FORMS = ("rev-rev", "sum-rev-rev", "fwd-rev", "fwd-fwd", "jet")
"""Ways to a derivative of one point's number along a line, but for ``sum-rev-rev``: gradients of
sums over all points, as one writes it for `torch.autograd.grad`."""
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


class Problem(NamedTuple):
    """What a step is of: arrays, and which derivatives the residual has.

    Attributes:
        kind: ``laplace`` (the sum of second derivatives) or ``beam`` (the fourth derivative less
            the load of one).
        parameters: weight and bias of each layer in turn.
        inputs: points, points on the edge, and the values there.
    """

    kind: str
    parameters: Sequence[numpy.ndarray]
    inputs: Sequence[numpy.ndarray]

    @property
    def order(self) -> int:
        """How often the network is differentiated."""
        return 2 if self.kind == "laplace" else 4


class Turn(NamedTuple):
    """One step: seconds of all threads, seconds of the clock, and the loss with every gradient."""

    cpu_s: float
    wall_s: float
    found: Sequence[numpy.ndarray]


def serve(pipe: Connection, problem: Problem) -> None:
    """Runs a step of a form as often as its name is received, and sends a :class:`Turn`."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ |= {"XLA_FLAGS": _ONE_THREAD, "JAX_PLATFORMS": "cpu"}
    steps = {form: step_of(form, problem) for form in FORMS}
    import numpy

    while True:
        try:
            form = pipe.recv()
        except EOFError:
            return
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        loss, gradients = steps[form]()
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        pipe.send(Turn(cpu_s, wall_s, [numpy.asarray(a) for a in (loss, *gradients)]))


def step_of(form: str, problem: Problem) -> Callable[[], Any]:
    """Returns what runs one step, under ``jax.jit``: the loss, and every gradient."""
    import jax
    import jax.numpy as np

    parameters = [np.asarray(p) for p in problem.parameters]
    points, edge, values = (np.asarray(a) for a in problem.inputs)

    def loss(parameters: Sequence[Any], points: Any, edge: Any, values: Any) -> Any:
        inside = residual(form, problem, parameters, points)
        outside = jax.vmap(lambda x: network(parameters, x))(edge) - values
        return (inside**2).mean() + (outside**2).mean()

    compiled = jax.jit(jax.value_and_grad(loss))
    return lambda: jax.block_until_ready(compiled(parameters, points, edge, values))


def network(parameters: Sequence[Any], x: Any) -> Any:
    """Returns the number of one point."""
    import jax.numpy as np

    for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
        x = np.tanh(x @ weight.T + bias)
    return (x @ parameters[-2].T + parameters[-1])[0]


def residual(form: str, problem: Problem, parameters: Sequence[Any], points: Any) -> Any:
    """Returns what the equation leaves at each point."""
    import jax
    import jax.numpy as np

    def at(x: Any) -> Any:
        return network(parameters, x)

    directions = np.eye(points.shape[1])
    if form == "sum-rev-rev":
        along = (gradients_of_sums(jax.vmap(at), points, d, problem.order) for d in directions)
        total = sum(along)
    else:

        def of_one(x: Any) -> Any:
            along = jax.vmap(lambda d: derivative(form, at, x, d, problem.order))
            return along(directions).sum()

        total = jax.vmap(of_one)(points)
    return total if problem.kind == "laplace" else total - 1


def gradients_of_sums(function: Callable[[Any], Any], points: Any, d: Any, order: int) -> Any:
    """Returns a derivative of every point's number along ``d``: reverse mode over all at once."""
    import jax

    for _ in range(order):
        function = lambda x, f=function: jax.grad(lambda x: f(x).sum())(x) @ d  # noqa: E731
    return function(points)


def derivative(form: str, function: Callable[[Any], Any], x: Any, d: Any, order: int) -> Any:
    """Returns a derivative of a point's number along ``d``."""
    import jax
    from jax.experimental import jet

    def forward(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: jax.jvp(f, (x,), (d,))[1]

    def reverse(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: jax.grad(f)(x) @ d

    if form == "jet":
        series = [d] + [0 * d] * (order - 1)
        return jet.jet(function, (x,), (series,))[1][-1]
    first = forward if form == "fwd-fwd" else reverse
    further = reverse if form == "rev-rev" else forward
    for index in range(order):
        function = (further if index else first)(function)
    return function(x)

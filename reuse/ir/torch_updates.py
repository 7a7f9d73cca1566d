"""Adapter: an optimizer's update as an operator of a program, by PyTorch's fused kernels.

A program is pure, so the operators return new tensors. A planned program launches the same kernel
in place: each result reuses the memory of an operand, as with donated buffers in JAX.
``results_in_place`` says which; link lets nothing read those operands later.

A schedule changes the learning rate from step to step, so the settings of an optimizer are an
operand, too: one tensor, whose entries are named by ``ADAM_SETTINGS`` and ``SGD_SETTINGS``. On a
GPU, where reading it back would synchronize, it holds the learning rate alone, which PyTorch's
kernels read on the device: a CUDA graph replays them with its present value. The other settings are
part of the closure there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor

from ..torch_names import module_of
from .program import Leaf
from .types import TensorType

ADAM_SETTINGS = ("lr", "beta1", "beta2", "eps", "weight_decay")
SGD_SETTINGS = ("lr", "momentum", "weight_decay")
ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")
SGD_STATE = ("momentum_buffer",)


def adam_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    settings: Tensor,
    decoupled: bool,
    maximize: bool,
    fixed: Sequence[float] = (),
) -> None:
    """Updates parameters and their state in place, as ``torch.optim.Adam(fused=True)`` does."""
    numbers = _numbers(ADAM_SETTINGS, settings, fixed)
    torch._foreach_add_(steps, 1)
    fused: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    state: Any = (exp_avgs, exp_avg_sqs, [], steps)
    fused(params, grads, *state, amsgrad=False, maximize=maximize, **numbers)


def sgd_(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    settings: Tensor,
    nesterov: bool,
    maximize: bool,
    fixed: Sequence[float] = (),
) -> None:
    """Updates parameters in place, as ``torch.optim.SGD(fused=True)`` does."""
    numbers = _numbers(SGD_SETTINGS, settings, fixed)
    # Without dampening, a buffer of zeros gives the same first step as PyTorch's.
    flags: Any = {
        "dampening": 0.0,
        "nesterov": nesterov,
        "maximize": maximize,
        "is_first_step": False,
    }
    torch._fused_sgd_(params, grads, momentum_buffers, **flags, **numbers)


def _numbers(names: Sequence[str], settings: Tensor, fixed: Sequence[float]) -> dict[str, Any]:
    """Returns an optimizer's settings by name; on a GPU the learning rate stays a tensor."""
    values = (settings, *fixed) if fixed else settings.tolist()
    return dict(zip(names, values, strict=True))


@torch.library.custom_op(
    "lazyinline::adam",
    mutates_args=(),
    schema="(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, "
    "Tensor[] steps, Tensor settings, bool decoupled, bool maximize, float[] fixed) -> Tensor[]",
)
def _adam(
    params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, steps: Any, *settings: Any
) -> list[Tensor]:
    changed = [[t.clone() for t in part] for part in (params, exp_avgs, exp_avg_sqs, steps)]
    new_params, *state = changed
    adam_(new_params, list(grads), *state, *settings)  # type: ignore[arg-type]
    return [t for part in changed for t in part]


@torch.library.custom_op(
    "lazyinline::sgd",
    mutates_args=(),
    schema="(Tensor[] params, Tensor[] grads, Tensor[] momentum_buffers, Tensor settings, "
    "bool nesterov, bool maximize, float[] fixed) -> Tensor[]",
)
def _sgd(params: Any, grads: Any, momentum_buffers: Any, *settings: Any) -> list[Tensor]:
    changed = [[t.clone() for t in part] for part in (params, momentum_buffers)]
    sgd_(changed[0], list(grads), changed[1], *settings)
    return [t for part in changed for t in part]


@_adam.register_fake
def _(params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, steps: Any, *_: Any) -> Any:
    return [torch.empty_like(t) for t in (*params, *exp_avgs, *exp_avg_sqs, *steps)]


@_sgd.register_fake
def _(params: Any, grads: Any, momentum_buffers: Any, *_: Any) -> Any:
    return [torch.empty_like(t) for t in (*params, *momentum_buffers)]


ADAM = torch.ops.lazyinline.adam.default
SGD = torch.ops.lazyinline.sgd.default
IN_PLACE: dict[Any, Callable[..., None]] = {ADAM: adam_, SGD: sgd_}
STATE = {ADAM: ADAM_STATE, SGD: SGD_STATE}
_OPTIONS = ("flag", "maximize", "fixed")  # the arguments after the tensors, of both operators


def update_leaf(
    target: Any, types: Sequence[Sequence[TensorType]], settings: TensorType, flags: Sequence[Any]
) -> Leaf:
    """Builds the closure of one update by ``ADAM`` or ``SGD``.

    ``types`` has a row for the parameters, their gradients, and each kind of state; ``flags`` are
    the operator's arguments after the settings.
    """
    graph = torch.fx.Graph()
    rows = [
        [graph.placeholder(f"a{i}_{j}") for j in range(len(row))] for i, row in enumerate(types)
    ]
    numbers = graph.placeholder("settings")
    node = graph.call_function(target, (*rows, numbers, *flags))
    changed = [row for i, row in enumerate(types) if i != 1]
    flat = [one for row in changed for one in row]
    results = [graph.call_function(operator.getitem, (node, i)) for i in range(len(flat))]
    graph.output(tuple(results))
    given = [one for row in types for one in row]
    return Leaf(
        target.name().partition("::")[2].partition(".")[0],
        module_of(graph),
        (*given, settings),
        tuple(flat),
        level="aten",
        kernels="eager",
    )


def is_update(leaf: Leaf) -> bool:
    """Whether a closure updates parameters."""
    return leaf.first_target in IN_PLACE


def results_in_place(leaf: Leaf) -> list[int]:
    """Returns, for each result of an update, the operand whose memory it reuses."""
    if not is_update(leaf):
        return []
    position = {entry: i for i, entry in enumerate(leaf.entries)}
    tensors = leaf.nodes[0].args[: -len(_OPTIONS)]
    rows = [row for i, row in enumerate(tensors) if isinstance(row, (list, tuple)) and i != 1]
    return [position[entry] for row in rows for entry in row]  # type: ignore[index, union-attr]

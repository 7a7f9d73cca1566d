"""Weights that hold several projections, as queries, keys and values in one Linear.

Split by rows as a style says, a rank would have queries and half of the keys. Each projection is
split by itself instead, so that a rank has its heads of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch.fx
from torch.distributed.tensor import Shard

from ...autodiff.training_program import StepProgram
from ...reuse.ir.costs import tensors_of
from ...reuse.torch_names import RESHAPES
from .given import TENSOR
from .layouts import split
from .plan import MeshPlan
from .planner import folded_step
from .sharded import result_of_weight
from .torch_sharding_rules import placement


def with_joint_projections(
    plan: MeshPlan, make_step: Callable[[], StepProgram], names_of: Callable[[str], Sequence[str]]
) -> MeshPlan:
    """Returns a plan in which weights that hold several projections are split in each of them.

    Args:
        plan: as styles and marks say.
        make_step: makes the step, of global shapes.
        names_of: gives all names of a parameter of the step in the model.
    """
    parameters, rows = dict(plan.parameters), Shard(0)
    axis = next((i for i, (name, _) in enumerate(plan.axes) if name in TENSOR), None)
    if axis is None or all(lies[axis] != rows for lies in parameters.values()):
        return plan
    folded = folded_step(make_step())
    weights = (
        (folded.roles[role].leaf.entries[place], folded.slots[slot].names)
        for (role, is_output, place), slot in folded.slot_of.items()
        if not is_output and folded.slots[slot].names
    )
    for weight, names in weights:
        for parts in _projections(weight, plan.axes[axis][1]):
            paths = [n.removesuffix("weight") for name in names for n in names_of(name)]
            for name in (path + own for path in paths for own in ("weight", "bias")):
                lies = list(parameters.get(name, ()))
                if lies and lies[axis] == rows:
                    lies[axis] = placement(split(0, parts))
                    parameters[name] = tuple(lies)
    return replace(plan, parameters=parameters)


def _projections(weight: torch.fx.Node, size: int) -> Iterator[int]:
    """Yields how many projections a weight holds of which ranks can split heads alone."""
    made = result_of_weight(weight)
    for user in () if made is None else made.users:
        if made is not None and user.target in RESHAPES:
            parts = tensors_of(user)[0].shape[tensors_of(made)[0].dim() - 1 :]
            if len(parts) > 2 and parts[0] % size and not parts[1] % size:
                yield parts[0]

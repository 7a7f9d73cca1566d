"""Adapter: PyTorch's partitioners, which cut a joint graph into forward and backward."""

from __future__ import annotations

import operator
from typing import Literal, TypeAlias

import torch.fx

from ...reuse.ir.operators import is_draw, may_draw
from .joint_cut import cut_joint, late_draws, read_by_backward

PartitionPolicy: TypeAlias = Literal["save", "min_cut"]


def partition(
    joint: torch.fx.GraphModule, num_outputs: int, policy: PartitionPolicy
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Splits a joint graph into forward and backward.

    Args:
        joint: placeholders ``primals_*`` and ``tangents_*``; outputs, then gradients.
        num_outputs: how many of the outputs belong to the forward.
        policy: ``"save"`` keeps what autograd would; ``"min_cut"`` recomputes cheap operators to
            save fewer bytes. Random operators are never run twice. One whose backward draws itself
            is cut where autograd cuts it.
    """
    if late_draws(joint):  # both partitioners would draw them in the forward
        return cut_joint(joint, num_outputs, read_by_backward(joint, num_outputs))
    # Imported late: it brings in Inductor, which inference on eager kernels never needs.
    from torch._functorch.partitioners import (
        default_partition,
        min_cut_rematerialization_partition,
    )

    # The partitioners know what an operator of several results gives by its picks alone.
    _drop_unread_picks(joint)
    _pick_of_unread(joint)
    split = default_partition if policy == "save" else min_cut_rematerialization_partition
    forward, backward = split(joint, (), num_fwd_outputs=num_outputs)
    _drop_second_draws(backward)
    return forward, backward


def _drop_unread_picks(joint: torch.fx.GraphModule) -> None:
    """Removes picks that nobody reads: a gradient that was not asked for is no tensor."""
    for node in reversed(joint.graph.nodes):
        if node.target is operator.getitem and not node.users:
            joint.graph.erase_node(node)


def _pick_of_unread(joint: torch.fx.GraphModule) -> None:
    """Picks one result of each operator that gives several and whose results nobody reads.

    A mask that is drawn and not used is one. By its picks a partitioner knows that it is no tensor.
    """
    for node in list(joint.graph.nodes):
        value = node.meta.get("val")
        if node.users or not isinstance(value, (tuple, list)) or not value:
            continue
        with joint.graph.inserting_after(node):
            pick = joint.graph.call_function(operator.getitem, (node, 0))
        pick.meta.update({**node.meta, "val": value[0]})


def _drop_second_draws(backward: torch.fx.GraphModule) -> None:
    """Removes random operators that a partitioner copied into the backward.

    Nobody reads them there (what they drew is saved), but running them would move the generator on
    and every later mask would differ from eager's. One may feed another: all that leads to them
    goes as well, from the last to the first.
    """
    for node in reversed(backward.graph.nodes):
        if not node.users and (may_draw(node.target) or not node.is_impure()):
            backward.graph.erase_node(node)
        else:
            assert not is_draw(node), f"{node.target} would be drawn twice"
    backward.recompile()

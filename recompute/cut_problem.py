"""The question of one leaf: which forward values to save, and what that makes the backward redo."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.fx

from ..autodiff.traces.torch_make_fx import SizesAt
from ..autodiff.traces.torch_partition import ancestors, backward_nodes, late_draws
from ..reuse.ir.costs import OperatorCosts, flops, is_heavy, value_bytes
from ..reuse.ir.operators import is_draw, is_view, mutated_args
from ..reuse.ir.program import outputs_of
from ..reuse.ir.types import TensorType
from ..reuse.torch_names import operator_schema


@dataclass(frozen=True, slots=True)
class ForwardValue:
    """One forward value that the backward needs, itself or on the way to another.

    Attributes:
        name: of its node in the joint graph.
        num_bytes: what saving it holds.
        redo_s: seconds to compute it again from its parents.
        redo_flops: FLOPs of that.
        save_s: seconds that saving it costs.
        parents: positions of the values it is computed from (inputs of the closure left out).
        can_save: whether it is a tensor with memory of its own.
        can_redo: whether it may be computed again; what was drawn at random may not.
        is_heavy: whether it is a matrix product, a convolution or attention.
        is_wanted: whether the backward reads the value itself.
        changes: positions of values that computing this one changes in place (running statistics).
            A saved one has been changed by then, so those are computed again with it. (The backward
            of a batch norm reads them too and does not use them.)
        offload_s: seconds to copy it to the host and back; infinite where that cannot be.
    """

    name: str
    num_bytes: int
    redo_s: float
    redo_flops: int
    save_s: float
    parents: tuple[int, ...]
    can_save: bool
    can_redo: bool
    is_heavy: bool
    is_wanted: bool
    changes: tuple[int, ...] = ()
    offload_s: float = math.inf


@dataclass(frozen=True)
class CutPoint:
    """One way to cut, evaluated.

    Attributes:
        saved: names of the values saved.
        num_bytes: bytes they hold on the device.
        extra_s: seconds of what is computed again, of saving and of copies to the host and back.
        extra_flops: FLOPs of what is computed again.
        offloaded: which of them wait on the host.
    """

    saved: frozenset[str]
    num_bytes: int
    extra_s: float
    extra_flops: int
    offloaded: frozenset[str] = frozenset()


@dataclass(frozen=True)
class CutProblem:
    """All forward values of one leaf that matter to its backward, parents first."""

    values: tuple[ForwardValue, ...]

    @classmethod
    def of(
        cls,
        joint: torch.fx.GraphModule,
        num_outputs: int,
        costs: OperatorCosts,
        sizes: SizesAt,
    ) -> CutProblem:
        """Reads the problem from a joint graph.

        Args:
            joint: placeholders ``primals_*`` and ``tangents_*``; outputs, then gradients.
            num_outputs: how many of the outputs belong to the forward.
            costs: what computing and saving values costs.
            sizes: at which it costs that.
        """
        outputs = outputs_of(joint)
        late = set(late_draws(joint))  # they stay in the backward, with all that reads them
        backward = backward_nodes(joint)
        gradients = [g for g in outputs[num_outputs:] if isinstance(g, torch.fx.Node)]
        results = [n for n in outputs[:num_outputs] if isinstance(n, torch.fx.Node)]
        drawn = [n for n in joint.graph.nodes if is_draw(n) and n not in late]
        in_forward = ancestors((*results, *drawn))
        reached = ancestors((*gradients, *late))
        nodes = [
            n
            for n in joint.graph.nodes
            if n in reached and n not in backward and n.op == "call_function"
        ]
        place = {n: i for i, n in enumerate(nodes)}
        for node in nodes:
            if any(n in late for n in node.all_input_nodes):
                late.add(node)
        wanted = {p for n in reached & backward for p in n.all_input_nodes} | set(gradients) | late
        numbered = dict(zip(joint.graph.nodes, sizes.module(joint).graph.nodes, strict=True))
        return cls(
            tuple(
                _forward_value(
                    n, numbered[n], place, n in in_forward, n in wanted, n in late, costs
                )
                for n in nodes
            )
        )

    def evaluate(self, saved: Collection[str], offloaded: Collection[str] = ()) -> CutPoint | None:
        """Returns what a choice costs; None if it would redo what must not be redone."""
        keep = set(saved)
        wanted = [v.is_wanted for v in self.values]
        used: list[ForwardValue] = []
        redone: list[ForwardValue] = []
        again: set[int] = set()
        # Users first: what nobody computes again, and the backward does not read, is not needed.
        for index in reversed(range(len(self.values))):
            value = self.values[index]
            if not wanted[index]:
                continue
            if value.name in keep and value.can_save:
                used.append(value)
                continue
            if not value.can_redo:
                return None
            redone.append(value)
            again.add(index)
            for parent in value.parents:
                wanted[parent] = True
        for index, value in enumerate(self.values):
            # A saved value has been changed by then, and is no longer what this one read.
            if index in again and not again.issuperset(value.changes):
                return None
        copied = [v for v in used if v.name in offloaded]
        extra_s = sum(v.redo_s for v in redone) + sum(v.save_s for v in used)
        return CutPoint(
            frozenset(v.name for v in used),
            sum(v.num_bytes for v in used if v not in copied),
            extra_s + sum(v.offload_s for v in copied),
            sum(v.redo_flops for v in redone),
            frozenset(v.name for v in copied),
        )


def _forward_value(
    node: torch.fx.Node,
    numbered: torch.fx.Node,
    place: dict[torch.fx.Node, int],
    in_forward: bool,
    is_wanted: bool,
    is_late: bool,
    costs: OperatorCosts,
) -> ForwardValue:
    """Describes a node; ``numbered`` is the same with numbers for sizes."""
    value = node.meta.get("val")
    source = node.all_input_nodes[0] if node.all_input_nodes else node
    picks = operator_schema(node) is None
    shares = is_view(node) or (picks and is_view(source))
    dense = isinstance(value, torch.Tensor) and TensorType.of(value).is_dense
    # What only the backward computes is not extra.
    work = costs.redo_s(numbered) if in_forward else 0.0
    return ForwardValue(
        node.name,
        value_bytes(numbered),
        work,
        flops(numbered) if in_forward else 0,
        costs.save_s(numbered),
        tuple(place[n] for n in node.all_input_nodes if n in place),
        dense and not shares and not is_late,
        not (is_draw(node) and in_forward),
        in_forward and is_heavy(numbered),
        is_wanted,
        tuple(place[n] for n in mutated_args(node) if n in place),
        costs.offload_s(numbered),
    )

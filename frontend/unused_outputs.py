"""What is known of one derivative for losses that leave outputs unused. Sizes may be symbols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..autodiff.derivative import Derivative
from ..autodiff.undefined import FewerCotangents
from ..backend.link.link import link
from ..reuse.errors import PlanError
from ..reuse.ir.leaf import flat_types
from ..reuse.ir.program import Closure, Composite, Kernels, Program
from ..reuse.ir.rewrite import map_leaves
from .capture.surroundings import one_at_a_time


class UnusedOutputs:
    """Derivatives for some outputs unused, and what each output alone needs.

    Shapes of one program share it, and what it made.
    """

    def __init__(self, derivative: Derivative) -> None:
        self._full = derivative
        self._fewer = FewerCotangents(derivative)
        self._reads: dict[int, frozenset[int]] = {}
        self._eager: dict[Closure, Closure] = {}

    def without(self, unused: Sequence[int], kernels: Kernels = "backend") -> Derivative | None:
        """Returns the derivative for fewer cotangents; None where it cannot be had.

        Args:
            unused: positions of outputs that have none.
            kernels: ``"backend"``, or ``"eager"`` to have PyTorch's own in the backward.
        """
        derivative = self._fewer.without(unused)
        if derivative is None or kernels == "backend":
            return derivative
        backward = derivative.backward
        if backward not in self._eager:
            self._eager[backward] = _with_eager_kernels(backward)
        return replace(derivative, backward=self._eager[backward])

    @one_at_a_time
    def reads(self, output: int) -> frozenset[int]:
        """Returns which values that the forward computes the gradients of one output need."""
        if output not in self._reads:
            others = [i for i in self._full.cotangent_outputs if i != output]
            alone = self._fewer.without(others) if others else self._full
            self._reads[output] = _reads(alone or self._full)
        return self._reads[output]


def _with_eager_kernels(closure: Closure) -> Closure:
    assert isinstance(closure, Composite)
    program = map_leaves(closure.program, lambda leaf: replace(leaf, kernels="eager"))
    return Composite(closure.name, program)


def _reads(derivative: Derivative) -> frozenset[int]:
    """Returns which values of the forward a backward reads that were computed there."""
    assert isinstance(derivative.backward, Composite)
    flat = link(derivative.backward.program)
    num_saved, num_kept = len(flat_types([derivative.saved_type])), len(derivative.kept_inputs)
    num_read = num_saved + num_kept + len(derivative.kept_outputs)
    made = {
        slot: i
        for i, slot in enumerate(flat.inputs[:num_read])
        if not num_saved <= i < num_saved + num_kept
    }
    return frozenset(
        made[slot]
        for launch in flat.launches
        for slot, entry in zip(launch.operands, launch.leaf.entries, strict=True)
        if slot in made and entry.users
    )


def refuse_no_numbers(
    program: Program, unused: Sequence[int], gradients: Sequence[torch.Tensor]
) -> None:
    """Checks gradients that zeros took part in, where cotangents are undefined.

    Raises:
        PlanError: if one is no number, which it may have become by a zero times infinity.
    """
    if not any(bool(gradient.isnan().any()) for gradient in gradients):
        return
    tree = program.output_tree
    names = [
        name or "the result"
        for name, place in tree.named(list(range(len(tree.leaves))))
        if tree.leaves[place][0] == "output" and tree.leaves[place][1] in unused
    ]
    raise PlanError(
        f"A gradient is not a number, and {', '.join(names)} of the model's result took part with "
        "a cotangent of zeros although no loss used it: its derivative may be infinite, and there "
        "is no backward without it for these sizes. Detach it in the model, or compile with "
        "dynamic=False."
    )

"""What autograd gives back of saved tensors: hooks on them may have made something else of it."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from ...reuse.errors import PlanError
from ...reuse.ir.types import TensorType
from ...reuse.torch_names import is_lazy
from ..checks.torch_state import TensorLayouts, watching_class


class SavedTensors:
    """Gives saved tensors the layouts that a backward was compiled for.

    Args:
        types: what it was compiled for.
    """

    def __init__(self, types: Sequence[TensorType]) -> None:
        self._types = types
        self._known: TensorLayouts | None = None

    def as_saved(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns the tensors, those that are laid out in another way copied.

        Raises:
            PlanError: for one of another shape, type, device, or of a class that sees operators.
        """
        if self._known is not None and self._known.same(tensors):
            return tensors
        found = [_as_saved(t, type_) for t, type_ in zip(tensors, self._types, strict=True)]
        if all(map(operator.is_, found, tensors)):
            self._known = TensorLayouts(tensors)
        return found


def _as_saved(tensor: torch.Tensor, type_: TensorType) -> torch.Tensor:
    watching = watching_class((tensor,))
    same = (tensor.dtype, tensor.shape, tensor.device) == (type_.dtype, type_.shape, type_.device)
    if watching is not None or not same:
        given = f"a {watching.__name__}" if watching else f"{TensorType.of(tensor)}"
        raise PlanError(
            f"A hook on saved tensors gave back {given} on {tensor.device} for a saved {type_} on "
            f"{type_.device}, and a compiled backward reads memory as it was saved. Let unpack "
            "restore shape, type and device."
        )
    if tensor.stride() == type_.stride and not is_lazy(tensor):
        return tensor
    made = torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device=type_.device)
    return made.copy_(tensor)

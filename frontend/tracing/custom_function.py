"""A user's ``torch.autograd.Function`` as one operator of a captured graph."""

from __future__ import annotations

from typing import Any

from ...reuse.freeze import Freezer, Identity

TENSOR = object()  # stands for a tensor operand in a layout


class CustomFunction:
    """A ``torch.autograd.Function`` as one operator, which keeps its own derivative."""

    def __init__(self, function: type, layout: tuple[Any, ...]) -> None:
        self._function = function
        self._layout = layout
        self.__name__ = function.__name__

    def __call__(self, *tensors: Any) -> Any:
        """Applies the function; autograd sees its own backward."""
        rest = iter(tensors)
        args = [next(rest) if part is TENSOR else part for part in self._layout]
        return self._function.apply(*args)  # type: ignore[attr-defined]

    def _key(self) -> Any:
        constants = tuple(Freezer().freeze(p) for p in self._layout if p is not TENSOR)
        places = tuple(p is TENSOR for p in self._layout)
        return (Identity(self._function), places, constants)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomFunction) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._function)

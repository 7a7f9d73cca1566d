"""The operands of one operator, those that carry a series among them, and its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .jets import Coefficients, Jet, Lanes


@dataclass(frozen=True, eq=False)
class Operands:
    """What an operator is given.

    Attributes:
        args: by position; lists among them may hold jets, too.
        kwargs: by name.
        jets: those that carry a series, each place once, in order.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    jets: tuple[Jet, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operands:
        """Finds the jets among what an operator is given."""
        found: list[Jet] = []
        _mapped([*args, *kwargs.values()], lambda jet: found.append(jet))
        return cls(tuple(args), dict(kwargs), tuple(found))

    def option(self, name: str, place: int, default: Any) -> Any:
        """Returns an operand by its name, or by its place if it was given so."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def all_in(self, operands: Sequence[Any]) -> bool:
        """Whether there are no jets but among these."""
        found: list[Jet] = []
        _mapped(operands, lambda jet: found.append(jet))
        return len(found) == len(self.jets)

    def call(
        self, target: Any, tensors: Sequence[Any] | None = None, zeros_at: Sequence[int] = ()
    ) -> Any:
        """Calls an operator.

        Args:
            target: the operator.
            tensors: stand for the jets, in order; None takes their values.
            zeros_at: places where a constant counts as zero.
        """
        rest = iter([jet.primal for jet in self.jets] if tensors is None else tensors)
        args = [
            _mapped(_zero(a) if place in zeros_at else a, lambda _: next(rest))
            for place, a in enumerate(self.args)
        ]
        kwargs = {name: _mapped(a, lambda _: next(rest)) for name, a in self.kwargs.items()}
        return target(*args, **kwargs)


def _zero(operand: Any) -> Any:
    if isinstance(operand, (list, tuple)):
        return [_zero(part) for part in operand]
    if isinstance(operand, Tensor):
        return torch.zeros_like(operand)
    return operand if operand is None or isinstance(operand, Jet) else 0


def _mapped(operand: Any, of_jet: Callable[[Jet], Any]) -> Any:
    if isinstance(operand, Jet):
        return of_jet(operand)
    if isinstance(operand, (list, tuple)):
        return [_mapped(part, of_jet) for part in operand]
    return operand


def results_of(lanes: Lanes, results: Any, coefficients: Sequence[Coefficients]) -> Any:
    """Puts the results of an operator together with the coefficients of each."""
    if not isinstance(results, (list, tuple)):
        return lanes.conformed(results, coefficients[0]) if coefficients else results
    pairs = zip(results, coefficients, strict=True)
    return tuple(lanes.conformed(result, found) for result, found in pairs)


Rule: TypeAlias = Callable[[Lanes, Any, Operands], Any]
"""Returns an operator's results with their series, or NotImplemented for such operands."""

"""Integers that record how they are computed from sizes, to compute them again at other sizes.

Link computes with plain integers. Given a :class:`Size` for each symbol it does the same, and the
tape records every result and every comparison. At other sizes the linked program is valid if each
comparison has the same outcome, with the results computed again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from ..errors import PlanError
from .torch_symbols import Values


class Size(int):
    """An integer that is recorded on a tape; its ``repr`` is its name there."""

    tape: SizeTape
    place: int

    def __repr__(self) -> str:
        return f"n{self.place}"

    __hash__ = int.__hash__

    def __neg__(self) -> int:
        return 0 - self

    def __bool__(self) -> bool:
        return self.tape.compared("!=", operator.ne, self, 0)


def _arithmetic(symbol: str, function: Callable[[int, int], int]) -> tuple[Any, Any]:
    def forward(left: Size, right: Any) -> Any:
        if not isinstance(right, int):
            return NotImplemented
        return left.tape.computed(symbol, function, left, right)

    def reflected(right: Size, left: Any) -> Any:
        if not isinstance(left, int):
            return NotImplemented
        return right.tape.computed(symbol, function, left, right)

    return forward, reflected


def _comparison(symbol: str, function: Callable[[int, int], bool]) -> Any:
    def compare(left: Size, right: Any) -> Any:
        if not isinstance(right, int):
            return NotImplemented
        return left.tape.compared(symbol, function, left, right)

    return compare


def _refused(self: Size, *others: Any) -> NoReturn:
    raise PlanError("It computes something from a size that is not computed again for another.")


_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "pow": "**"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_REFUSED = ("truediv", "divmod", "and", "or", "xor", "lshift", "rshift")

for _name, _symbol in _ARITHMETIC.items():
    _forward, _reflected = _arithmetic(_symbol, getattr(operator, _name))
    setattr(Size, f"__{_name}__", _forward)
    setattr(Size, f"__r{_name}__", _reflected)
for _name, _symbol in _COMPARISONS.items():
    setattr(Size, f"__{_name}__", _comparison(_symbol, getattr(operator, _name)))
for _name in (*_REFUSED, *(f"r{name}" for name in _REFUSED), "float", "abs", "invert", "round"):
    setattr(Size, f"__{_name}__", _refused)


class SizeTape:
    """Records what is computed from the sizes of one shape; ``values`` has one for each symbol."""

    def __init__(self, numbers: Mapping[Any, int]) -> None:
        self._sizes: list[Size] = []
        self._computed: dict[str, Size] = {}
        self._compared: dict[str, bool] = {}
        self._lines: list[str] = []
        self.values = Values({symbol: self._new(number) for symbol, number in numbers.items()})

    def _new(self, number: int) -> Size:
        size = Size(number)
        size.tape, size.place = self, len(self._sizes)
        self._sizes.append(size)
        return size

    def computed(
        self, symbol: str, function: Callable[[int, int], int], left: int, right: int
    ) -> int:
        """Returns a result, and records how it is computed."""
        neutral = {"+": 0, "*": 1, "//": 1, "-": 0}.get(symbol)
        if type(right) is int and right == neutral:
            return left
        if type(left) is int and left == neutral and symbol in "+*":
            return right
        if symbol in "+*" and type(left) is int:  # a fixed order, so that equal results are one
            left, right = right, left
        text = f"{left!r} {symbol} {right!r}"
        if text not in self._computed:
            made = self._computed[text] = self._new(function(_plain(left), _plain(right)))
            self._lines.append(f"{made!r} = {text}")
        return self._computed[text]

    def compared(
        self, symbol: str, function: Callable[[int, int], bool], left: int, right: int
    ) -> bool:
        """Returns the outcome of a comparison; records it unless it is the same for all sizes."""
        outcome = function(_plain(left), _plain(right))
        text = f"{left!r} {symbol} {right!r}"
        if left is not right and text not in self._compared:
            self._compared[text] = outcome
            self._lines.append(f"if {'not ' * outcome}{text}: return None")
        return outcome

    def function(self) -> Callable[[Values], Numbers | None]:
        """Returns a function that computes all results at other sizes.

        It returns None if a comparison has another outcome there.
        """
        given = ", ".join(map(repr, self.values.values()))
        made = ", ".join(map(repr, self._sizes))
        lines = [f"def computed({given}):", *self._lines, f"return ({made},)"]
        scope: dict[str, Any] = {}
        exec("\n  ".join(lines), scope)
        known, symbols = self.values.known, tuple(self.values)

        def at(values: Values) -> Numbers | None:
            computed = scope["computed"](*(values[symbol] for symbol in symbols))
            if computed is None:
                return None
            numbers = Numbers(computed)
            values.known.update((e, numbers.of(size)) for e, size in known.items())
            return numbers

        return at


def _plain(number: int) -> int:
    return int.__int__(number)


@dataclass(frozen=True)
class Numbers:
    """The integers that were computed at the sizes of one shape."""

    computed: Sequence[int] = ()

    def of(self, size: Any) -> Any:
        """Returns the integer of a size; returns anything else unchanged."""
        return self.computed[size.place] if type(size) is Size and self.computed else size

    @cached_property
    def column(self) -> Any:
        """All of them as an array."""
        return np.array(self.computed, np.int64)


PLAIN = Numbers()  # for a program without symbolic sizes

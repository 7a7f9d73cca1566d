"""Numbers that remember how they were computed from sizes, to be computed again for other sizes.

What links a program computes with plain numbers. Given a :class:`Size` for each symbol it does just
the same, and its tape knows afterwards what was computed, and what was compared: for other sizes
the same program is right where each comparison has the same outcome, with other numbers in it.
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
    """A number that remembers its name on a tape; as text it is that name."""

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
    """Notes what is computed from the sizes of one shape.

    Args:
        numbers: of each symbol.

    Attributes:
        values: a size for each symbol.
    """

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
        """Returns a result, and notes how it is made."""
        neutral = {"+": 0, "*": 1, "//": 1, "-": 0}.get(symbol)
        if type(right) is int and right == neutral:
            return left
        if type(left) is int and left == neutral and symbol in "+*":
            return right
        if symbol in "+*" and type(left) is int:  # one order, so that equal results are one
            left, right = right, left
        text = f"{left!r} {symbol} {right!r}"
        if text not in self._computed:
            made = self._computed[text] = self._new(function(_plain(left), _plain(right)))
            self._lines.append(f"{made!r} = {text}")
        return self._computed[text]

    def compared(
        self, symbol: str, function: Callable[[int, int], bool], left: int, right: int
    ) -> bool:
        """Returns an outcome, and notes it unless it is the same for all sizes."""
        outcome = function(_plain(left), _plain(right))
        text = f"{left!r} {symbol} {right!r}"
        if left is not right and text not in self._compared:
            self._compared[text] = outcome
            self._lines.append(f"if {'not ' * outcome}{text}: return None")
        return outcome

    def function(self) -> Callable[[Values], Numbers | None]:
        """Returns what computes all of it for other sizes.

        What that returns is None where a comparison has another outcome.
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
    """Holds the numbers that were computed for the sizes of one shape."""

    computed: Sequence[int] = ()

    def of(self, size: Any) -> Any:
        """Returns the number of a size; anything else is itself."""
        return self.computed[size.place] if type(size) is Size and self.computed else size

    @cached_property
    def column(self) -> Any:
        """All of them as an array."""
        return np.array(self.computed, np.int64)


PLAIN = Numbers()
"""Of a program without symbols, whose numbers are those it has."""

"""A stand-in for a layer's index that notes how the layer's Python uses it.

A number that is only an index (which slot of a cache is a layer's) need not be equal for two blocks
to share a closure. So Python is handed an :class:`OpenIndex` in its place: it answers whatever it
is asked, and notes whether that revealed its value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any


class OpenIndex:
    """Represents a whole number that differs from one instance of a block to another.

    Comparisons are noted with their answers: another instance may share if its number answers the
    same. Anything else asked of it reveals its value; a watched list or dictionary does not need
    to ask, it takes the index as a key.
    """

    __slots__ = ("_tests", "_value", "_was_asked")

    def __init__(self, value: int) -> None:
        self._value = value
        self._tests: dict[tuple[str, int], bool] = {}
        self._was_asked = False

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":  # what isinstance asks
            return int
        if name in OpenIndex.__slots__:
            return object.__getattribute__(self, name)
        return getattr(reveal(self), name)


def is_index(value: Any) -> bool:
    """Whether a value is the stand-in of a layer's index."""
    return type(value) is OpenIndex


def reveal(value: Any) -> Any:
    """Returns the number of an index, which counts as read then; other values as they are."""
    if type(value) is not OpenIndex:
        return value
    value._was_asked = True
    return value._value


def peek(index: Any) -> int:
    """Returns the number of an index without revealing it: to find an item with."""
    value: int = index._value
    return value


def tests_of(index: Any) -> tuple[tuple[str, int, bool], ...] | None:
    """Returns what an index was compared with, and the answers; None if it was revealed."""
    if index._was_asked:
        return None
    return tuple((name, other, answer) for (name, other), answer in index._tests.items())


def answers_alike(value: Any, tests: Sequence[tuple[str, int, bool]]) -> bool:
    """Whether another whole number answers as an index did."""
    return type(value) is int and all(
        getattr(operator, name)(value, other) is answer for name, other, answer in tests
    )


def _tested(name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(operator, name)

    def test(index: Any, other: Any) -> Any:
        if type(other) is not int:
            return compare(reveal(index), reveal(other))
        answer = index._tests[name, other] = compare(index._value, other)
        return answer

    return test


def _telling(apply: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: apply(*map(reveal, values))


def _reflected(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda index, other: apply(reveal(other), reveal(index))


_TESTS = ("lt", "le", "gt", "ge", "eq", "ne")
_BINARY = ("add", "sub", "mul", "mod", "truediv", "floordiv", "and_", "or_", "xor", "lshift")
_LEFT_AS_IT_IS = frozenset(["__new__", *vars(OpenIndex)])

for _name in vars(int).keys() - _LEFT_AS_IT_IS:
    if callable(getattr(int, _name)):
        setattr(OpenIndex, _name, _telling(getattr(int, _name)))
for _name in _TESTS:
    setattr(OpenIndex, f"__{_name}__", _tested(_name))
for _apply in (*(getattr(operator, name) for name in _BINARY), operator.rshift, pow, divmod):
    _name = _apply.__name__.strip("_")
    setattr(OpenIndex, f"__{_name}__", _telling(_apply))
    setattr(OpenIndex, f"__r{_name}__", _reflected(_apply))
OpenIndex.__reduce_ex__ = lambda index, protocol: (int, (reveal(index),))  # type: ignore[method-assign,assignment]

"""Numbers that a model's Python is handed without their values: what they decide shows.

A float that varies from call to call can be an input of a program, if the model's Python does
nothing with it but arithmetic on tensors. So it is handed an :class:`OpenNumber`, which enters the
four operations with a tensor, and products and differences with Python numbers. Whatever asks for
its value (a comparison, ``int``, ``math.sqrt``, a format, numpy) is refused, because it is no
float; ``isinstance`` takes it for one.

A whole number that is only an index (which slot of a cache is a layer's) is an :class:`OpenIndex`:
it answers whatever it is asked, and notes that it was.

Left out, as Python or its library does more there than IEEE 754: sums of two numbers (``sum``
compensates from Python 3.12 on) and quotients (which raise at zero).
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from .errors import CaptureError
from .torch_names import is_known

Evaluate = Callable[[Sequence[Any]], float]
"""Computes a number from the flat arguments of a call, as Python does."""


class Opening:
    """Numbers that are open in one run of a model, and what stands for them in its graph.

    Args:
        leaves: the flat arguments.
        probe: returns what stands for the n-th number; None for the number's own value.

    Attributes:
        probes: each probe, and what computes the number that it stands for.
        was_asked: whether code asked for a value; it may have caught the error that it got.
        has_ended: whether the run is over; what is left of its numbers is of no use.
    """

    def __init__(self, leaves: Sequence[Any], probe: Callable[[int], float] | None) -> None:
        self._leaves = leaves
        self._probe = probe
        self.probes: dict[float, Evaluate] = {}
        self._numbers: dict[Any, Any] = {}
        self.was_asked = self.has_ended = False
        self._thread = threading.get_ident()

    def number(self, position: int) -> Any:
        """Returns the open number of one argument."""
        return self.made(position, operator.itemgetter(position))

    def made(self, key: Any, evaluate: Evaluate) -> Any:
        """Returns the open number of a key, which says how it is computed.

        Raises:
            Exception: what Python raises when it computes that.
        """
        if key not in self._numbers:
            evaluate(self._leaves)
            self._numbers[key] = OpenNumber(self, key, evaluate)
        return self._numbers[key]

    def shown(self, evaluate: Evaluate) -> float:
        """Returns what an operator is handed."""
        if self.has_ended:
            raise CaptureError("A number that varies was kept after the forward that was given it.")
        if threading.get_ident() != self._thread:  # operators are not traced there
            self.was_asked = True
            raise CaptureError("A number that varies is used in another thread.")
        if self._probe is None:
            return evaluate(self._leaves)
        probe = self._probe(len(self.probes))
        self.probes[probe] = evaluate
        return probe


class OpenNumber:
    """A number without a value."""

    __slots__ = ("_evaluate", "_key", "_opening", "_shown")

    def __init__(self, opening: Opening, key: Any, evaluate: Evaluate) -> None:
        self._opening = opening
        self._key = key
        self._evaluate = evaluate
        self._shown: float | None = None

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":  # what isinstance asks
            return float
        if name in OpenNumber.__slots__:
            return object.__getattribute__(self, name)
        if name != "__torch_function__":  # what PyTorch asks of an operand
            self._opening.was_asked = True
        if name == "__torch_function__" or not hasattr(float, name):
            raise AttributeError(name)
        raise _decides(self, name)


def shown(number: Any) -> float:
    """Returns what stands for an open number in a graph; the same each time."""
    if number._shown is None or number._opening.has_ended:
        number._shown = number._opening.shown(number._evaluate)
    value: float = number._shown
    return value


def is_open(value: Any) -> bool:
    """Whether a value is an open number."""
    return type(value) is OpenNumber


def _decides(number: Any, name: str) -> CaptureError:
    number._opening.was_asked = True
    return CaptureError(f"A number that varies decides something here (by {name}).")


def _with_tensors(name: str, number_first: Literal["yes", "no"]) -> Callable[[Any, Any], Any]:
    """Returns an operation on tensors; other numbers only where both give the bits of Python."""
    function = getattr(operator, name)
    among_numbers = name in ("mul", "sub")

    def apply(number: Any, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            if is_known(other):  # its shape may be asked for, as by ``nonzero``
                raise _decides(number, name)
            known = shown(number)
            return function(known, other) if number_first == "yes" else function(other, known)
        if not among_numbers or type(other) not in (int, float, OpenNumber):
            raise _decides(number, name)
        pair = (_part(number), _part(other))
        (key, first), (other_key, second) = pair if number_first == "yes" else pair[::-1]
        return number._opening.made(
            (name, key, other_key), lambda leaves: function(first(leaves), second(leaves))
        )

    return apply


def _part(number: Any) -> tuple[Any, Evaluate]:
    """Returns what tells a number from others, and what computes it."""
    if is_open(number):
        return number._key, number._evaluate
    return (type(number), number.hex() if type(number) is float else number), lambda _: number


def _refused(name: str) -> Callable[..., Any]:
    def refuse(number: Any, *args: Any) -> Any:
        raise _decides(number, name)

    return refuse


# What a float has; what it has not raises as it does with one.
_REFUSED = (
    *("bool", "float", "int", "complex", "hash", "repr", "str", "format", "reduce_ex", "reduce"),
    *("dir", "sizeof"),
    *("round", "trunc", "floor", "ceil", "abs", "pos", "neg", "pow", "rpow", "divmod", "rdivmod"),
    *("mod", "rmod", "floordiv", "rfloordiv", "lt", "le", "gt", "ge", "eq", "ne"),
)

for _name in ("add", "sub", "mul", "truediv"):
    setattr(OpenNumber, f"__{_name}__", _with_tensors(_name, "yes"))
    setattr(OpenNumber, f"__r{_name}__", _with_tensors(_name, "no"))
for _name in _REFUSED:
    setattr(OpenNumber, f"__{_name}__", _refused(_name))


class OpenIndex:
    """A whole number of one instance of a block, that others have otherwise; notes what it tells.

    What it is compared with is noted with the answer. Whatever else is asked of it tells its value,
    but for who knows it: what is watched takes it as an index.
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
        return getattr(told(self), name)


def is_index(value: Any) -> bool:
    """Whether a value is an index that notes what it tells."""
    return type(value) is OpenIndex


def told(value: Any) -> Any:
    """Returns a value as it is, and of an index its number, which is told by that."""
    if type(value) is not OpenIndex:
        return value
    value._was_asked = True
    return value._value


def untold(index: Any) -> int:
    """Returns the number of an index, to be used as that alone."""
    value: int = index._value
    return value


def tests_of(index: Any) -> tuple[tuple[str, int, bool], ...] | None:
    """Returns what an index was compared with, and the answers; None if its value was told."""
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
            return compare(told(index), told(other))
        answer = index._tests[name, other] = compare(index._value, other)
        return answer

    return test


def _telling(apply: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: apply(*map(told, values))


def _reflected(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda index, other: apply(told(other), told(index))


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
OpenIndex.__reduce_ex__ = lambda index, protocol: (int, (told(index),))  # type: ignore[method-assign,assignment]

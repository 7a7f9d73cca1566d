"""Adapter: the symbols of a program's inputs, and the conditions under which the program is valid.

The symbols come from a capture or from a file. For the inputs of a call, this computes the number
of each symbol, and evaluates the conditions: the guards on sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
import torch.fx

from ...reuse.errors import FileError, PlanError
from ...reuse.ir.parser import parse_size
from ...reuse.ir.size_tape import SizeTape
from ...reuse.ir.torch_symbols import (
    SIZE_FUNCTIONS,
    ReadSizes,
    Values,
    size_in,
    value_of,
)
from ...reuse.ir.types import TensorType, contiguous_stride
from ..capture.regions import shapes_of

Names = tuple[tuple[str, ...], ...]
"""For each dimension of each flat input, the name of its symbol; empty if it is a number.

``n0+2`` is larger by two than ``n0``. In a file it may be any expression: ``2*s0``.
"""
Shapes = tuple[tuple[int, ...], ...]
"""For each flat input its shape; ``(n,)`` for an int, ``()`` for anything else."""


def parted(name: str) -> tuple[str, int]:
    """Splits the name of a dimension, such as ``n0+2``, into symbol and offset."""
    symbol, _, offset = name.partition("+")
    return symbol, int(offset or 0)


def may_vary(leaf: Any) -> bool:
    """Whether sizes of an input may be symbolic: not those of a tensor that is not contiguous."""
    if not isinstance(leaf, torch.Tensor):
        return True
    return tuple(leaf.stride()) == contiguous_stride(tuple(leaf.shape))


def _strides_of(leaves: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(x.stride()) if isinstance(x, torch.Tensor) else () for x in leaves)


class KnownSizes:
    """The symbols of one program's inputs, and the conditions on them.

    They are in PyTorch's shape environment; ``names`` says which dimensions of the inputs have one.
    """

    def __init__(self, environment: Any, leaves: Sequence[Any], names: Names) -> None:
        self._env = environment
        self._specialized_at: dict[Any, str] = {}
        self._answers = _Answers()
        self._symbols: dict[str, Any] = {}
        self.shapes = shapes_of(leaves)  # of the inputs of the call that is captured
        self._strides = _strides_of(leaves)
        known = zip(names, self.shapes, strict=True)
        self._names = tuple(dims or ("",) * len(shape) for dims, shape in known)

    def told(self, further: Sequence[Any] = ()) -> tuple[Any, Any, Any]:
        """Returns, for JSON, the dimensions, the hints of symbols, and all conditions."""
        replacements = {symbol: self._replaced(symbol) for symbol in self._symbols.values()}
        names = [[self._text(*term) for term in terms] for terms in self._terms]
        open_ = {s: n for s, n in self.hints.items() if replacements[s] == s}
        conditions = [c.xreplace(replacements) for c in (*self.conditions, *further)]
        texts = dict.fromkeys(str(c) for c in conditions if c != True)  # noqa: E712
        return names, {str(symbol): number for symbol, number in open_.items()}, list(texts)

    def _text(self, size: Any, more: int) -> str:
        found = self._replaced(size + more)
        return "" if found.is_number else str(found).replace(" ", "")

    @cached_property
    def _terms(self) -> tuple[tuple[Any, ...], ...]:
        """For each dimension of each flat input, an expression or a number, and an offset."""
        known = (zip(*row, strict=True) for row in zip(self._names, self.shapes, strict=True))
        return tuple(
            tuple(self._term(name) if name else (sympy.Integer(n), 0) for name, n in row)
            for row in known
        )

    def _term(self, name: str) -> tuple[Any, int]:
        symbol, offset = parted(name)
        return self._symbols[symbol], offset

    def _replaced(self, size: Any) -> Any:
        """Returns an expression with symbols replaced that were unified or specialized."""
        return self._env.replace(size)

    @property
    def hints(self) -> Values:
        """The number that each symbol had when guards on it were evaluated."""
        symbols = self._symbols.values()
        return Values({s: int(size_in(self._env, s).node.hint) for s in symbols})

    @property
    def conditions(self) -> Sequence[Any]:
        """The conditions that other sizes must satisfy."""
        return list(dict.fromkeys(guard.expr for guard in self._env.guards))

    def type_of(self, index: int, leaf: torch.Tensor) -> TensorType:
        """Returns the type of an input, with symbolic sizes."""
        own = TensorType.of(leaf)
        if not any(self._names[index]):
            return own
        pairs = zip(self._names[index], self._terms[index], own.shape, strict=True)
        shape = tuple(sum(term) if name else n for name, term, n in pairs)
        return TensorType(own.dtype, shape, contiguous_stride(shape), own.device)

    @property
    def why_numbers(self) -> str:
        """Says which symbols were specialized to numbers, and where; "" if none was."""
        numbers = ((s, self._replaced(s)) for s in self._symbols.values())
        lines = self._specialized_at
        found = [
            f"a size of {n} is taken as a number{f' at {at}' if (at := lines.get(s)) else ''}"
            for s, n in numbers
            if n.is_number
        ]
        return ", ".join(found)

    def values(self, leaves: Sequence[Any]) -> Values | None:
        """Returns the number of each symbol for inputs that are known to differ in sizes only.

        None if the program is not valid for them.
        """
        found = self._numbers(leaves)
        return found if isinstance(found, Values) and self.are_right(found) else None

    def why_not(self, leaves: Sequence[Any]) -> str:
        """Says why the program is not valid for inputs of other sizes; "" if it is."""
        found = self._numbers(leaves)
        if not isinstance(found, Values):
            return found
        broken = [str(one) for one in self.conditions if not _holds(one, found)]
        numbers = ", ".join(f"{symbol} = {number}" for symbol, number in found.items())
        return f"{' and '.join(broken)} has to hold, and {numbers}" if broken else ""

    def _numbers(self, leaves: Sequence[Any]) -> Values | str:
        """Returns the number of each symbol, or why there is none."""
        found, computed = Values(), []
        shapes, strides = shapes_of(leaves), _strides_of(leaves)
        for index, (names, example) in enumerate(zip(self._names, self.shapes, strict=True)):
            # Kernels compute strides from symbols as those of a contiguous tensor.
            if any(names) and not may_vary(leaves[index]):
                return f"strides of input {index} are not those of contiguous memory"
            if not any(names) and strides[index] != self._strides[index]:
                # The strides of an input without symbols are constants of kernels.
                return f"strides of input {index} have to be {self._strides[index]}"
            for dim, (name, (term, more)) in enumerate(zip(names, self._terms[index], strict=True)):
                size = int(shapes[index][dim])
                place = f"dimension {dim} of input {index} is {size}"
                if not name and size != example[dim]:
                    return f"{place}, and has to be {example[dim]}"
                if name and not term.is_Symbol:
                    computed.append((place, size, term))
                    continue
                # Operators treat sizes 0 and 1 differently (broadcasting), unlike symbols.
                size -= more
                if name and size < 2:
                    return f"{place}, and has to be at least {2 + more}"
                if name and (first := found.setdefault(term, size)) != size:
                    return f"{place}, and by other sizes it has to be {first + more}"
        for place, size, term in computed:
            if size < 2 or _answer(term, found) != size:
                return f"{place}, and has to be {term}, and at least 2"
        return found

    @property
    def example(self) -> Values:
        """The number of each symbol in the call that is captured."""
        rows = zip(self._terms, self.shapes, strict=True)
        pairs = [pair for row in rows for pair in zip(*row, strict=True)]
        return Values({term: int(n) - more for (term, more), n in pairs if term.is_Symbol})

    @property
    def replacements(self) -> tuple[Any, ...]:
        """The value of each symbol: itself, another symbol, or a number."""
        return tuple(map(self._replaced, self._symbols.values()))

    @contextmanager
    def keeping_symbolic(self) -> Iterator[None]:
        """Removes guards on sizes added inside, if code there raises or specializes a size."""
        env, replacements = self._env, self.replacements
        before = {n: copy(v) for n, v in vars(env).items() if isinstance(v, (dict, list, set))}
        try:
            yield
            if self.replacements != replacements:
                raise PlanError("It specializes a size that varies.")
        except Exception:
            vars(env).update(before)
            for counter in ("_version_counter", "_replacements_version_counter"):
                if hasattr(env, counter):  # invalidates PyTorch's caches
                    setattr(env, counter, getattr(env, counter) + 1)
            raise

    def are_right(self, values: Values) -> bool:
        """Whether all conditions hold for these numbers."""
        asked: Sequence[Any] = list(self.conditions)
        known, is_plain = self._answers, int in map(type, values.values())
        is_known = is_plain and known.asked == asked and known.function(values) is not None
        open_ = known.others if is_known else asked
        right = all(_holds(condition, values) for condition in open_)
        if right and is_plain and not is_known:  # numbers being recorded on a tape are not plain
            self._answers = _Answers.of(asked, values)
        return right


def _answer(expression: Any, values: Values) -> Any:
    try:
        return value_of(expression, values)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None


def _holds(condition: Any, values: Values) -> bool:
    return bool(_answer(condition, values))


@dataclass(frozen=True)
class _Answers:
    """Conditions on sizes, most of them compiled into a function that returns None for False."""

    asked: Sequence[Any] = ()  # all conditions
    function: Callable[[Values], object] = lambda values: None
    others: Sequence[Any] = ()  # those that it does not evaluate

    @classmethod
    def of(cls, asked: Sequence[Any], values: Values) -> _Answers:
        """Compiles conditions that hold for some sizes."""
        tape = SizeTape(values)
        on_tape = [q for q in asked if all(_is_on_tape(x) for x in sympy.preorder_traversal(q))]
        right = all([bool(value_of(q, tape.values)) for q in on_tape])
        others = [q for q in asked if q not in on_tape]
        return cls(asked, tape.function(), others) if right else cls()


def _is_on_tape(part: Any) -> bool:
    """Whether a tape can record this expression; it cannot record rounding and maxima."""
    if isinstance(part, sympy.Pow):
        return bool(part.exp.is_Integer and part.exp.is_positive)
    return part.is_Symbol or part.is_Integer or part.func in _ON_TAPE


_ON_TAPE = frozenset(
    {sympy.Add, sympy.Mul, SIZE_FUNCTIONS["FloorDiv"], SIZE_FUNCTIONS["PythonMod"]}
    | {SIZE_FUNCTIONS["Mod"], sympy.Mod, sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge}
)


class ReadKnownSizes(KnownSizes):
    """The symbols of a program that is read from a file, as :meth:`KnownSizes.told` wrote them.

    The flat inputs are like those that it was compiled for. It raises FileError if names of sizes
    and conditions contradict each other.
    """

    def __init__(
        self, leaves: Sequence[Any], names: Sequence[Sequence[str]], sizes: ReadSizes
    ) -> None:
        if list(map(len, names)) != list(map(len, shapes_of(leaves))):
            raise FileError("sizes are named that no input has")
        super().__init__(None, leaves, tuple(map(tuple, names)))
        self._read = sizes
        self._symbols = {name: sizes.symbol(name) for name in sizes.examples}
        plain = {term for terms in self._terms for term, _ in terms if term.is_Symbol}
        if plain != set(self._symbols.values()):
            raise FileError("a size is named that no input has")
        if self.values(leaves) is None:
            raise FileError("its conditions do not hold for its own sizes")

    def _term(self, name: str) -> tuple[Any, int]:
        more, term = sympy.sympify(parse_size(name, self._read)).as_coeff_Add()
        if not term.is_integer or not term.free_symbols:
            raise FileError(f"{name[:20]} is no size")
        return (term, int(more)) if term.is_Symbol else (term + more, 0)

    # The shape environment is made only when operators are read, because it imports Dynamo.

    def _replaced(self, size: Any) -> Any:
        return self._read.environment.replace(size) if self._read.has_environment else size

    @property
    def hints(self) -> Values:
        """The number that each symbol had when guards on it were evaluated."""
        return Values({s: self._read.examples[name] for name, s in self._symbols.items()})

    @property
    def conditions(self) -> Sequence[Any]:
        """The conditions that other sizes must satisfy."""
        guards = self._read.environment.guards if self._read.has_environment else ()
        return list(dict.fromkeys([*self._read.required, *(guard.expr for guard in guards)]))

    @contextmanager
    def keeping_symbolic(self) -> Iterator[None]:
        """See the base class; this first reads the shape environment."""
        self._env = self._read.environment
        with super().keeping_symbolic():
            yield

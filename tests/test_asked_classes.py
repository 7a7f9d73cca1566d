"""What Python asks of the class of a tensor or a size has eager's answer, at every length."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import numbers
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import generic

import lazyinline

TABLE = {"3": 3.0, "5": 5.0, "torch.Size([5, 2])": 7.0, "7": 7.0}


@functools.singledispatch
def kind_of(value: Any) -> float:
    return 2.0


@kind_of.register
def _(value: int) -> float:
    return 3.0


@kind_of.register
def _(value: bool) -> float:
    return 4.0


def matched(value: Any) -> float:
    match value:
        case bool():
            return 2.0
        case int():
            return 3.0
        case float():
            return 4.0
    return 5.0


def same(first: Any, second: Any) -> bool:
    return first is second


def counted(sizes: Any) -> int:
    return sum(type(size) is int for size in sizes)


def kinds(*values: Any) -> Any:
    for value in values:
        yield type(value)


def first_kind(values: Any) -> Any:
    return next(kinds(*values))


def after_others(x: Tensor, n: Any) -> float:
    """Asks after calls of all kinds: of PyTorch's, C's, one that asks, one that raises."""
    lengths = sorted([len(str(x.dtype)), torch.relu(x).dim()], key=lambda value: -value)
    caught(lambda: [][lengths[0]])
    first_kind([lengths, None])
    if same(lengths, None) or first_kind(lengths) is float:
        return 4.0
    return 2.0 if type(n) is int else 3.0


def caught(action: Callable[[], Any]) -> float:
    try:
        action()
    except (TypeError, AttributeError, IndexError):
        return 2.0
    return 3.0


# What is asked of the length of the input, and whether one program is right for all lengths.
ASKED: dict[str, tuple[Callable[[Tensor, Any], Any], bool]] = {
    "isinstance int": (lambda x, n: 2.0 if isinstance(n, int) else 3.0, True),
    "isinstance of two": (lambda x, n: 2.0 if isinstance(n, (float, int)) else 3.0, True),
    "isinstance float": (lambda x, n: 2.0 if isinstance(n, float) else 3.0, True),
    "isinstance str": (lambda x, n: 2.0 if isinstance(n, str) else 3.0, True),
    "isinstance tensor": (lambda x, n: 2.0 if isinstance(n, Tensor) else 3.0, True),
    "is_tensor": (lambda x, n: 2.0 if torch.is_tensor(n) else 3.0, True),
    "is None": (lambda x, n: 2.0 if n is None else 3.0, True),
    "Integral": (lambda x, n: 2.0 if isinstance(n, numbers.Integral) else 3.0, True),
    "Number": (lambda x, n: 2.0 if isinstance(n, numbers.Number) else 3.0, True),
    "Iterable": (lambda x, n: 2.0 if isinstance(n, collections.abc.Iterable) else 3.0, True),
    "singledispatch": (lambda x, n: kind_of(n), True),
    "match": (lambda x, n: matched(n), True),
    "__class__": (lambda x, n: 2.0 if n.__class__ is int else 3.0, False),
    "of a quotient": (lambda x, n: 2.0 if isinstance(n / 2, float) else 3.0, True),
    "of a comparison": (lambda x, n: 2.0 if isinstance(n > 2, bool) else 3.0, True),
    "type is": (lambda x, n: 2.0 if type(n) is int else 3.0, False),
    "type ==": (lambda x, n: 2.0 if type(n) == int else 3.0, False),  # noqa: E721
    "type in": (lambda x, n: 2.0 if type(n) in (int, float) else 3.0, False),
    "type of a shape's": (lambda x, n: 2.0 if type(x.shape[0]) is int else 3.0, False),
    "name of type": (lambda x, n: len(type(n).__name__), False),
    "types": (lambda x, n: sum(2.0 for size in x.shape if type(size) is int), False),
    "types in a list": (lambda x, n: len([s for s in x.shape if type(s) is int]), False),
    "types of a list": (lambda x, n: counted([n, n]), False),
    "issubclass": (lambda x, n: 2.0 if issubclass(type(n), int) else 3.0, False),
    "is itself": (lambda x, n: 2.0 if x.shape[0] is x.shape[0] else 3.0, False),
    "is True": (lambda x, n: 2.0 if (n > 2) is True else 3.0, False),
    "is another": (lambda x, n: 2.0 if same(n, x.shape[0]) else 3.0, False),
    "after other calls": (after_others, False),
    "of a generator's": (lambda x, n: 2.0 if first_kind([n]) is int else 3.0, False),
    "of a function's result": (lambda x, n: 2.0 if first_kind([x.dtype]) is int else 3.0, False),
    "repr": (lambda x, n: TABLE.get(repr(n), 1.0), False),
    "str": (lambda x, n: TABLE.get(str(n), 1.0), False),
    "f-string": (lambda x, n: TABLE.get(f"{n}", 1.0), False),
    "f-string with width": (lambda x, n: len(f"{n:>4}"), False),
    "format": (lambda x, n: TABLE.get("{}".format(n), 1.0), False),  # noqa: UP032
    "percent": (lambda x, n: TABLE.get("%d" % n, 1.0), False),  # noqa: UP031
    "percent text": (lambda x, n: TABLE.get("%s" % n, 1.0), False),  # noqa: UP031
    "repr of shape": (lambda x, n: TABLE.get(repr(x.shape), 1.0), False),
    "str of a list": (lambda x, n: len(str([n, n])), False),
    "key": (lambda x, n: {3: 3.0, 5: 5.0}.get(n, 1.0), False),
    "hash": (lambda x, n: hash(n), False),
    "json": (lambda x, n: TABLE.get(json.dumps(n), 1.0), False),
    "json of a list": (lambda x, n: len(json.dumps([n], indent=1)), False),
    "bit_length": (lambda x, n: n.bit_length(), False),
    "hasattr": (lambda x, n: 2.0 if hasattr(n, "bit_length") else 3.0, False),
    "numerator": (lambda x, n: n.numerator, False),
    "real": (lambda x, n: n.real, False),
    "caught": (lambda x, n: caught(lambda: n.bit_length()), False),
    "index": (lambda x, n: operator.index(n), False),
}


class Asking(nn.Module):
    """Asks of the length in several ways."""

    def __init__(self, *asks: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x * ask(x, x.shape[0]) for ask in self.asks]


NUM_TOGETHER = 8
OF_ALL = [name for name, (_, is_one) in ASKED.items() if is_one]
OF_EACH = [name for name in ASKED if name not in OF_ALL]
GROUPS = [
    n[i : i + NUM_TOGETHER] for n in (OF_ALL, OF_EACH) for i in range(0, len(n), NUM_TOGETHER)
]


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_a_size_answers_as_a_number_at_every_length(names: list[str]) -> None:
    model = Asking(*(ASKED[name][0] for name in names))
    run = lazyinline.compile(model, backend="eager")
    for length in (3, 4, 300, 5):
        x = torch.ones(length, 2)
        for name, found, expected in zip(names, run(x), model(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=f"{name} at {length}")
    report = lazyinline.last_report(run)
    if report.ran_eagerly and len(names) > 1:  # which answers for all of them: ask each alone
        for name in names:
            test_a_size_answers_as_a_number_at_every_length([name])
    elif names[0] in OF_ALL:
        assert report.num_compiles == 2


def test_sizes_are_sizes_again_after_a_capture() -> None:
    run = lazyinline.compile(Asking(lambda x, n: n), backend="eager")
    for length in (3, 4):
        run(torch.ones(length, 2))
    for kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
        assert not {"__getattribute__", "__getattr__", "__format__"} & vars(kind).keys()


class Held(nn.Module):
    """Asks for the class of a tensor, in one of the ways that ask nobody."""

    def __init__(self, ask: Callable[[nn.Module, Tensor], bool]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.ask(self, x) else x * 3


def rebound(module: nn.Module, x: Any) -> bool:
    found = type(x) is Tensor
    x = x.shape
    return found


def among(module: nn.Module, x: Tensor) -> bool:
    return sum([type(value) is Tensor for value in (x, None)]) == 1


def looped(module: nn.Module, *values: Any) -> bool:
    return sum(type(value) is Tensor for value in (*values, None)) == 1


def in_a_loop(module: nn.Module, *values: Any) -> bool:
    found = False
    for value in [*values, None]:
        found = found or type(value) is Tensor
    return found


OF_TENSORS: dict[str, Callable[[nn.Module, Tensor], bool]] = {
    "is": lambda m, x: type(x) is Tensor,
    "in": lambda m, x: type(x) in (Tensor, nn.Parameter),
    "equals": lambda m, x: type(x) == Tensor,  # noqa: E721
    "name": lambda m, x: type(x).__name__ == "Tensor",
    "computed": lambda m, x: type(x + 1) is Tensor,
    "called": lambda m, x: type(torch.relu(x)) is Tensor,
    "item": lambda m, x: type(x[0]) is Tensor,
    "parameter": lambda m, x: type(m.weight) is nn.Parameter,
    "rebound": rebound,
    "in a list": among,
    "in a generator": looped,
    "in a loop": in_a_loop,
    "mapped": lambda m, x: next(map(type, [x])) is Tensor,
    "dictionary": lambda m, x: {Tensor: True}.get(type(x), False),
    "__class__": lambda m, x: x.__class__ is Tensor,
    "class of parameter": lambda m, x: m.weight.__class__ is nn.Parameter,
}


@pytest.mark.parametrize("way", OF_TENSORS)
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_the_class_of_a_tensor_is_eagers(way: str) -> None:
    model = Held(OF_TENSORS[way])
    x = torch.ones(3, 2)
    torch.testing.assert_close(lazyinline.compile(model, backend="eager")(x), model(x))


def refused(module: nn.Module, x: Tensor) -> bool:
    if not isinstance(x, Tensor):
        raise TypeError(f"not a tensor but a {type(x).__name__}, of {module.__class__}")
    return True


def first(*values: Any) -> bool:
    return values[0].__class__ is Held and type(values[0].__dict__) is dict


def made_again(module: nn.Module, *values: Any) -> bool:
    found = dict.fromkeys(values, 1)
    made = type(found)(found)
    return made.__class__(x=values[0]) == {"x": values[0]}


@dataclasses.dataclass
class Output(generic.ModelOutput):
    x: Any = None
    y: Any = None


def of_an_output(module: nn.Module, x: Tensor) -> bool:
    return Output(x=x).x is x


OF_OTHERS: dict[str, Callable[[nn.Module, Tensor], bool]] = {
    "module": lambda m, x: type(m).__name__ == "Held",
    "attribute": lambda m, x: type(m.training) is bool,
    "isinstance": lambda m, x: isinstance(m.weight, nn.Parameter) and isinstance(x, Tensor),
    "in an error that is not raised": refused,
    "one of several": first,
    "to make another": made_again,
    "by transformers, of the only result": of_an_output,
    "identity": lambda m, x: x is x and m.weight is not x,
}


@pytest.mark.parametrize("way", OF_OTHERS)
def test_the_class_of_anything_else_is_asked_in_a_compiled_model(way: str) -> None:
    model = Held(OF_OTHERS[way])
    x = torch.ones(3, 2)
    run = lazyinline.compile(model, backend="eager", fallback="error")
    torch.testing.assert_close(run(x), model(x))

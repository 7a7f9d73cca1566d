"""What Python asks of the class of a tensor or a size has eager's answer, at every length."""

from __future__ import annotations

import argparse  # noqa: F401, asked by text
import builtins  # noqa: F401, asked by text
import collections  # noqa: F401, asked by text
import copy  # noqa: F401, asked by text
import dataclasses
import functools
import inspect  # noqa: F401, asked by text
import json  # noqa: F401, asked by text
import numbers  # noqa: F401, asked by text
import operator  # noqa: F401, asked by text
import re
import sys  # noqa: F401, asked by text
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from models import Made
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.utils import generic

import lazyinline

CLASS_OF = type
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


# What is asked of the length ``n`` of the input ``x``, as text: truths and numbers. One program is
# right for all lengths where the first ones are asked.
OF_ALL = [
    *("isinstance(n, int)", "isinstance(n, (float, int))", "isinstance(n, float)"),
    *("isinstance(n, str)", "isinstance(n, Tensor)", "torch.is_tensor(n)", "n is None"),
    *("isinstance(n, numbers.Integral)", "isinstance(n, numbers.Number)"),
    *("isinstance(n, collections.abc.Iterable)", "kind_of(n)", "matched(n)"),
    *("isinstance(n / 2, float)", "isinstance(n > 2, bool)"),
    *("x.sum(0, keepdim=n > 2).dim()", "x.sum(0, keepdim=n / 2 == 1 or n != 1).dim()"),
]
OF_EACH = [
    *("n.__class__ is int", "type(n) is int", "type(x.shape[0]) is int"),
    *("sum(2.0 for size in x.shape if type(size) is int)", "counted([n, n])"),
    *("x.shape[0] is x.shape[0]", "(n > 2) is True", "same(n, x.shape[0])", "after_others(x, n)"),
    *("first_kind([n]) is int", "TABLE.get(repr(n), 1.0)", "TABLE.get(str(n), 1.0)"),
    *("len(f'{n:>4}')", "TABLE.get('%s' % n, 1.0)", "len(str([n, n]))"),
    *("{3: 3.0, 5: 5.0}.get(n, 1.0)", "hash(n)", "TABLE.get(json.dumps(n), 1.0)"),
    *("n.bit_length()", "n.numerator", "caught(lambda: n.bit_length())", "operator.index(n)"),
]


def asked(text: str) -> Callable[[Tensor, Any], Any]:
    """Returns a function that asks; a truth is 2.0 or 3.0."""
    function = eval(f"lambda x, n: {text}", globals())
    truth = eval(f"lambda x, n: 2.0 if {text} else 3.0", globals())
    return truth if isinstance(function(torch.ones(3, 2), 3), bool) else function


def asking(self: Any, x: Tensor) -> list[Tensor]:
    """Asks of the length in several ways."""
    return [x * ask(x, x.shape[0]) for ask in self.asks]


NUM_TOGETHER = 8
GROUPS = [
    n[i : i + NUM_TOGETHER] for n in (OF_ALL, OF_EACH) for i in range(0, len(n), NUM_TOGETHER)
]


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_a_size_answers_as_a_number_at_every_length(names: list[str]) -> None:
    model = Made(asking, asks=tuple(map(asked, names)))
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


class Weight(nn.Parameter):
    """A parameter of a class of its own, whose operators are PyTorch's."""


class Held(nn.Module):
    """Asks for the class of a tensor, in one of the ways that ask nobody."""

    held_by_class: ClassVar[dict[str, Any]] = {"t": type}

    def __init__(self, ask: Callable[[nn.Module, Tensor], bool]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.own = Weight(torch.ones(2))
        self.ask = ask
        self.held, self.partial = type, functools.partial(type)

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.ask(self, x) else x * 3


def rebound(module: nn.Module, x: Any) -> bool:
    found = type(x) is Tensor
    x = x.shape
    return found


def looped(module: nn.Module, *values: Any) -> bool:
    return sum(type(value) is Tensor for value in (*values, None)) == 1


def in_a_loop(module: nn.Module, *values: Any) -> bool:
    found = False
    for value in [*values, None]:
        found = found or type(value) is Tensor
    return found


def deferred(module: nn.Module, x: Tensor) -> bool:
    """Asks by a ``type`` that is kept first."""
    ask = type
    return ask(x) is Tensor


def returned() -> Any:
    return type


def by_default(module: nn.Module, x: Tensor, ask: Any = type) -> bool:
    return ask(x) is Tensor


def closing(ask: Any) -> Callable[[nn.Module, Tensor], bool]:
    return lambda module, x: ask(x) is Tensor


closed = closing(type)


# What is asked of a module ``m`` and a tensor ``x``.
OF_TENSORS = [
    *("type(x) is Tensor", "type(x) in (Tensor, nn.Parameter)", "type(torch.relu(x)) is Tensor"),
    *("type(x).__name__ == 'Tensor'", "rebound(m, x)", "looped(m, x)", "in_a_loop(m, x)"),
    *("{Tensor: True}.get(type(x), False)", "type(m.weight) is Tensor", "x.__class__ is Tensor"),
    *("m.weight.__class__ is nn.Parameter", "type(m.weight.float()) is nn.Parameter"),
    *("type(m.own) is Weight", "type(m.own * 1) is Tensor"),
    *("type(nn.Parameter(x)) is nn.Parameter", "next(map(type, [x])) is Tensor"),
    *("deferred(m, x)", "returned()(x) is Tensor", "functools.partial(type, x)() is Tensor"),
    *("operator.attrgetter('__class__')(x) is Tensor", "inspect.getmro(type(x))[0] is Tensor"),
    *("isinstance(Tensor, type) and type(x) != type", "type(vars(m)) is dict"),
]
OTHERWISE = [
    *("CLASS_OF(x) is Tensor", "builtins.type(x) is Tensor", "by_default(m, x)", "closed(m, x)"),
    *("m.held(x) is Tensor", "m.held_by_class['t'](x) is Tensor", "m.partial(x) is Tensor"),
    *("getattr(builtins, 'type')(x) is Tensor", "m.__class__.__class__(x) is Tensor"),
    *("__import__('builtins').type(x) is Tensor", "sys.modules['builtins'].type(x) is Tensor"),
    *("object.__getattribute__(x, '__class__') is Tensor", "type(m).__class__(x) is Tensor"),
    *("type(Held)(x) is Tensor", "getattr(Held, '__class__')(x) is Tensor"),
    *("int.__class__(x) is Tensor", "type(Held) == type and type(Held) in (int, type)"),
]


def refused(module: nn.Module, x: Tensor) -> bool:
    if not isinstance(x, Tensor):
        raise TypeError(f"not a tensor but a {type(x).__name__}, of {module.__class__}")
    return True


def first(*values: Any) -> bool:
    return values[0].__class__ is Held and type(values[0].training) is bool


def made_again(module: nn.Module, *values: Any) -> bool:
    found = dict.fromkeys(values, 1)
    made = type(found)(found)
    return made.__class__(x=values[0]) == {"x": values[0]}


@dataclasses.dataclass
class Output(generic.ModelOutput):
    x: Any = None
    y: Any = None


OF_OTHERS = [
    *("type(m).__name__ == 'Held'", "type(m.training) is bool", "refused(m, x)", "first(m, x)"),
    *("isinstance(m.weight, nn.Parameter) and isinstance(x, Tensor)", "made_again(m, x)"),
    *("Output(x=x).x is x", "x is x and m.weight is not x"),
    "copy.deepcopy(argparse.Namespace(x=1)).x",  # which copies the object's class, too
]


@pytest.mark.parametrize("way", [*OF_TENSORS, *OF_OTHERS])
def test_the_class_of_a_tensor_or_of_anything_else_is_eagers(way: str) -> None:
    model = Held(eval(f"lambda m, x: {way}", globals()))
    x = torch.ones(3, 2)
    run = lazyinline.compile(model, backend="eager", fallback="error")
    torch.testing.assert_close(run(x), model(x), rtol=0, atol=0)
    assert "type" not in globals() and FakeTensor.__bases__ == (Tensor,)


@pytest.mark.parametrize("way", OTHERWISE)
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_type_by_another_way_is_asked_eagerly(way: str) -> None:
    model = Held(eval(f"lambda m, x: type(m) is Held and {way}", globals()))
    x = torch.ones(3, 2)
    run = lazyinline.compile(model, backend="eager")
    torch.testing.assert_close(run(x), model(x), rtol=0, atol=0)
    report = lazyinline.last_report(run)
    assert report.ran_eagerly and re.search(
        "type|builtins|__getattribute__|class of a class", str(report)
    )


@pytest.mark.parametrize("way", ["type(x) is nn.Parameter", "isinstance(x, nn.Parameter)"])
def test_the_class_of_an_input_is_asked_at_each_call(way: str) -> None:
    model = Held(eval(f"lambda m, x: {way}", globals()))
    run = lazyinline.compile(model, backend="eager", fallback="error")
    x = torch.ones(3, 2)
    for given in (x, nn.Parameter(x), x, Weight(x)):
        torch.testing.assert_close(run(given), model(given), rtol=0, atol=0)

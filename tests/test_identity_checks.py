"""The one check that a guard makes of many, and what it reads out of compiled code."""

import types
from collections import OrderedDict
from collections.abc import Callable
from types import CellType, MappingProxyType  # noqa: F401, cases name them
from typing import Any

import pytest
import torch

from lazyinline.backend.launches.torch_native import native_library
from lazyinline.reuse.evidence.functions import (
    globals_read,
    globals_used,
    modules_imported,
    texts_of,
)
from lazyinline.reuse.evidence.root_evidence import IdentityChecks


class Slotted:
    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = [1]


class Odd(dict[str, Any]):
    """Its own methods say nothing about what it holds."""

    def __getitem__(self, name: str) -> Any:
        return "always the same"

    def __contains__(self, name: object) -> bool:
        return False

    def values(self) -> Any:
        return ()


Function = Callable[[IdentityChecks], Callable[[], bool]]


@pytest.fixture(params=["python", "native"])
def function(request: pytest.FixtureRequest) -> Function:
    """Makes the function of some checks."""
    if request.param == "python":
        return IdentityChecks.function
    assert native_library().hold is not None, "Python's headers are missing here"
    return lambda checks: checks.function(native_library().hold)


# What there is, what is checked of it (``c``), and what happens then, step by step: "+" where the
# checks hold after it, "-" where not. Tables are of each class below.
IN_A_TABLE = {
    "an entry": (
        "t = Table(a=[1]); kept = dict.get(t, 'a')",
        "c.entry(t, 'a', kept)",
        ["- t['a'] = [1]", "+ t['a'] = kept", "- del t['a']"],
    ),
    "all of it in order": (
        "t = Table(a=1, b=2)",
        "c.values(t)",
        ["- a = t.pop('a')", "- t['a'] = a", "+ t['b'] = t.pop('b')", "- t['c'] = 3"],
    ),
    "no entry": (
        "t = Table(a=None)",
        "c.entry(t, 'a', None); c.absent(t, 'b')",
        ["- del t['a']", "+ t['a'] = None", "- t['b'] = None"],
    ),
    "an empty one": ("t = Table()", "c.values(t)", ["- t[0] = print"]),
}
ELSEWHERE = {
    "behind a proxy": (
        "t = {'x': [1]}; p = MappingProxyType(t)",
        "c.entry(p, 'x', p['x'])",
        ["- t['x'] = [1]"],
    ),
    "the order of hooks": (
        "t = OrderedDict(a=[1], b=[2])",
        "c.values(t)",
        ["- t.move_to_end('a')"],
    ),
    "a slot": ("s = Slotted()", "c.attribute(s, 'size', s.size)", ["- s.size = [1]"]),
    "a cell": (
        "s = CellType([1])",
        "c.attribute(s, 'cell_contents', s.cell_contents)",
        ["- s.cell_contents = [1]", "- del s.cell_contents"],
    ),
    "a class": ("m = torch.nn.ReLU()", "c.kind(m, type(m))", ["- m.__class__ = torch.nn.Tanh"]),
    "where a function is found": (
        "class Base: forward = lambda self: 1\n"
        "class Other: forward = lambda self: 2\n"
        "class Middle(Base): pass\n"
        "class Last(Middle): pass",
        "c.attribute(Last, 'forward', Last.forward)",
        [
            *("+ Middle.extra = 1", "- Middle.forward = Other.forward", "+ del Middle.forward"),
            *("- Last.__bases__ = (Other,)", "+ Last.__bases__ = (Middle,)"),
            "- Base.forward = Other.forward",
        ],
    ),
}
TABLES = {"dict": dict, "OrderedDict": OrderedDict, "Odd": Odd}
CASES = [
    *((name, row, table) for name, row in IN_A_TABLE.items() for table in TABLES),
    *((name, row, "") for name, row in ELSEWHERE.items()),
]


@pytest.mark.parametrize(
    ("row", "table"),
    [pytest.param(row, table, id=f"{name} {table}".strip()) for name, row, table in CASES],
)
def test_each_kind_of_change_is_noticed(row: Any, table: str, function: Function) -> None:
    setup, checked, steps = row
    own = {"Table": TABLES.get(table), "c": IdentityChecks(), "torch": torch}
    scope: dict[str, Any] = {**globals(), **own}
    exec(setup, scope)
    exec(checked, scope)
    unchanged = function(scope["c"])
    assert unchanged()
    for step in steps:
        exec(step[2:], scope)
        assert unchanged() == (step[0] == "+"), step


class Holder:
    """Its attributes lie in the object itself until somebody asks for its dictionary."""

    shared: Any = (0,)

    def __init__(self) -> None:
        self.kept: Any = [1]
        self.other: Any = [2]


WRITES: dict[str, Callable[[Holder], Any]] = {
    "assignment": lambda h: setattr(h, "kept", [1]),
    "an attribute that hides the class's": lambda h: vars(h).update(shared=(1,)),
    "another dictionary": lambda h: setattr(h, "__dict__", dict(vars(h))),
    "no dictionary": lambda h: delattr(h, "__dict__"),
    "another class": lambda h: setattr(h, "__class__", type("Other", (Holder,), {})),
    "the class": lambda h: setattr(type(h), "shared", (0,)),
    "a base": lambda h: setattr(Holder, "shared", (0,)),
    "a class between": lambda h: setattr(type(h).__bases__[0], "shared", (0,)),
    "the bases": lambda h: setattr(type(h), "__bases__", (type("Other", (Holder,), {}),)),
}


@pytest.mark.parametrize("way", WRITES)
def test_an_attribute_that_is_written_wherever_it_is_found_is_noticed(
    way: str, function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Holder, "shared", (1,))
    holder = type("Last", (type("Middle", (Holder,), {}),), {})()
    checks = IdentityChecks()
    checks.held_in(holder, type(holder), vars(holder))
    checks.entry(vars(holder), "kept", holder.kept)
    checks.absent(vars(holder), "shared")
    checks.attribute(type(holder), "shared", holder.shared)
    checks.bases(type(holder))
    unchanged = function(checks)
    holder.other = [3]
    assert unchanged()
    WRITES[way](holder)
    assert not unchanged()


class Raising:
    def __init__(self, error: type[BaseException]) -> None:
        self.error: type[BaseException] | None = error

    @property
    def value(self) -> None:
        if self.error:
            raise self.error


def test_an_error_does_not_hold_but_an_interruption_ends_the_call(function: Function) -> None:
    owner, checks = Raising(ValueError), IdentityChecks()
    checks.attribute(owner, "value", None)
    unchanged = function(checks)
    assert not unchanged()
    owner.error = None
    assert unchanged()
    owner.error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        unchanged()


@pytest.mark.parametrize("facts", [(), ((),) * 5, ([],) * 6, ((1,), *((),) * 5)])
def test_the_native_comparison_refuses_what_is_no_table_of_facts(facts: Any) -> None:
    hold = native_library().hold
    assert hold is not None
    with pytest.raises(TypeError):
        hold(*facts)


def test_no_check_at_all_holds(function: Function) -> None:
    assert function(IdentityChecks())()


pytestmark = pytest.mark.smoke


def test_what_code_names_is_found_wherever_the_compiler_put_it() -> None:
    scope: dict[str, types.FunctionType] = {}
    text = """
def function(x):
    import os.path
    global written
    written = first(x, ("a", ("b",)), {"c": 1, "d": 2})
    class Inner:
        second: third
        fourth = fifth
    return [sixth for _ in x if _ in {"e", "f"}]
"""
    exec(text, scope)
    code = scope["function"].__code__
    assert {"a", "b", "c", "d", "e", "f"} <= {t for c in _codes(code) for t in texts_of(c)}
    read = {name for c in _codes(code) for name in globals_read(c)}
    assert {"first", "fifth", "sixth"} <= read and "written" not in read
    assert "written" in globals_used(code)
    assert modules_imported(code) == ("os.path",)


def _codes(code: types.CodeType) -> list[types.CodeType]:
    inside = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [code, *(found for c in inside for found in _codes(c))]

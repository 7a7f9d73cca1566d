"""The one check that a guard makes of many: every kind of change is noticed, nothing else is."""

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from decoders import llama
from torch import nn

import lazyinline
from lazyinline.backend.launches.torch_native import native_library
from lazyinline.reuse.evidence.identity_checks import IdentityChecks


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


def cell_of(value: Any) -> Any:
    def read() -> Any:
        return value

    assert read.__closure__
    return read.__closure__[0]


TABLES: list[Any] = [{"a": [1], "b": [2]}, OrderedDict(a=[1], b=[2]), Odd(a=[1], b=[2])]


@pytest.mark.parametrize("table", TABLES, ids=["dict", "ordered", "own-subscript"])
def test_an_entry_that_is_replaced_or_removed_is_noticed(table: Any, function: Function) -> None:
    table, checks = copy.copy(table), IdentityChecks()
    kept = dict.get(table, "a")
    checks.entry(table, "a", kept)
    unchanged = function(checks)
    assert unchanged()
    table["a"] = list(kept)  # equal, and another object
    assert not unchanged()
    table["a"] = kept
    assert unchanged()
    del table["a"]
    assert not unchanged()


WHOLE_TABLES: list[Any] = [{"a": 1, "b": 2}, OrderedDict(a=1, b=2), Odd(a=1, b=2)]


@pytest.mark.parametrize("table", WHOLE_TABLES, ids=["dict", "ordered", "own-methods"])
def test_a_table_is_compared_in_order_and_as_a_whole(table: Any, function: Function) -> None:
    table, checks = copy.copy(table), IdentityChecks()
    checks.values(table)
    unchanged = function(checks)
    assert unchanged()
    first = table.pop("a")
    assert not unchanged()
    table["a"] = first  # now last
    assert not unchanged()
    last = table.pop("b")
    table["b"] = last
    assert unchanged()
    table["c"] = 3
    assert not unchanged()


@pytest.mark.parametrize("table", [{"a": None}, Odd(a=None)], ids=["dict", "own-methods"])
def test_nothing_under_a_name_is_not_none(table: Any, function: Function) -> None:
    table, checks = copy.copy(table), IdentityChecks()
    checks.entry(table, "a", None)
    checks.absent(table, "b")
    unchanged = function(checks)
    assert unchanged()
    del table["a"]
    assert not unchanged()
    table["a"] = None
    assert unchanged()
    table["b"] = None
    assert not unchanged()


def change_absent(found: dict[str, Any]) -> None:
    found["table"]["forward"] = len


def change_slot(found: dict[str, Any]) -> None:
    found["slotted"].size = [1]


def change_cell(found: dict[str, Any]) -> None:
    found["cell"].cell_contents = [1]


def empty_cell(found: dict[str, Any]) -> None:
    del found["cell"].cell_contents


def change_kind(found: dict[str, Any]) -> None:
    found["module"].__class__ = nn.Tanh


def fill_empty(found: dict[str, Any]) -> None:
    found["hooks"][0] = print


def change_behind_proxy(found: dict[str, Any]) -> None:
    found["behind"]["x"] = [1]


@pytest.mark.parametrize(
    "change",
    [
        change_absent,
        change_slot,
        change_cell,
        empty_cell,
        change_kind,
        fill_empty,
        change_behind_proxy,
    ],
)
def test_each_kind_of_change_is_noticed(
    change: Callable[[dict[str, Any]], None], function: Function
) -> None:
    behind = {"x": [1]}
    found: dict[str, Any] = {
        "table": {},
        "slotted": Slotted(),
        "cell": cell_of([1]),
        "module": nn.ReLU(),
        "hooks": OrderedDict(),
        "behind": behind,
    }
    proxy = MappingProxyType(behind)
    checks = IdentityChecks()
    checks.absent(found["table"], "forward")
    checks.attribute(found["slotted"], "size", found["slotted"].size)
    checks.captured(found["cell"], found["cell"].cell_contents)
    checks.kind(found["module"], nn.ReLU)
    checks.values(found["hooks"])
    checks.entry(proxy, "x", proxy["x"])
    unchanged = function(checks)
    assert unchanged()
    change(found)
    assert not unchanged()


def test_a_new_name_in_a_table_read_as_a_whole_is_noticed(function: Function) -> None:
    table: dict[str, Any] = {"a": 1}
    checks = IdentityChecks()
    checks.names(table)
    unchanged = function(checks)
    table["a"] = 2
    assert unchanged()
    table["b"] = 3
    assert not unchanged()


def test_where_functions_are_found_is_watched(function: Function) -> None:
    base = type("Base", (), {"forward": lambda self: 1})
    other = type("Other", (), {"forward": lambda self: 2})
    middle = type("Middle", (base,), {})
    last = type("Last", (middle,), {})
    checks = IdentityChecks()
    checks.attribute(last, "forward", last.forward)
    unchanged = function(checks)
    assert unchanged()
    middle.extra = 1  # nobody asked
    assert unchanged()
    middle.forward = other.forward
    assert not unchanged()
    del middle.forward
    assert unchanged()
    last.__bases__ = (other,)
    assert not unchanged()
    last.__bases__ = (middle,)
    assert unchanged()
    base.forward = other.forward
    assert not unchanged()


def test_reordering_hooks_is_noticed(function: Function) -> None:
    hooks = OrderedDict(a=[1], b=[2])
    checks = IdentityChecks()
    checks.values(hooks)
    unchanged = function(checks)
    assert unchanged()
    hooks.move_to_end("a")
    assert not unchanged()


def test_what_is_written_beside_is_no_change_and_hides_none(function: Function) -> None:
    tables: list[dict[str, Any]] = [{"a": [1]}, {"a": [1]}]
    checks = IdentityChecks()
    for table in tables:
        checks.entry(table, "a", table["a"])
    unchanged = function(checks)
    for step in range(5):
        tables[0]["step"] = step
        assert unchanged()
        assert unchanged()
    for table in tables:
        kept = table["a"]
        table["a"] = list(kept)
        for _ in range(2):
            assert not unchanged()
            table["step"] = -1
        table["a"] = kept
        assert unchanged()


class Holder:
    """Its attributes lie in the object itself until somebody asks for its dictionary."""

    shared: Any = (0,)

    def __init__(self) -> None:
        self.kept: Any = [1]
        self.other: Any = [2]


WRITES: dict[str, Callable[[Holder], Any]] = {
    "assignment": lambda h: setattr(h, "kept", [1]),
    "past the class": lambda h: object.__setattr__(h, "kept", [1]),
    "deletion": lambda h: delattr(h, "kept"),
    "subscript": lambda h: vars(h).__setitem__("kept", [1]),
    "update": lambda h: vars(h).update(kept=[1]),
    "union": lambda h: vars(h).__ior__({"kept": [1]}),
    "initialization": lambda h: vars(h).__init__(kept=[1]),  # type: ignore[misc]
    "pop and set default": lambda h: (vars(h).pop("kept"), vars(h).setdefault("kept", [1])),
    "last item": lambda h: (vars(h).popitem(), vars(h).popitem()),
    "clear": lambda h: vars(h).clear(),
    "another dictionary": lambda h: setattr(h, "__dict__", dict(vars(h))),
    "no dictionary": lambda h: delattr(h, "__dict__"),
    "another class": lambda h: setattr(h, "__class__", type("Other", (Holder,), {})),
    "the class": lambda h: setattr(type(h), "shared", (0,)),
    "a base": lambda h: setattr(Holder, "shared", (0,)),
    "a class between": lambda h: setattr(type(h).__bases__[0], "shared", (0,)),
    "the bases": lambda h: setattr(type(h), "__bases__", (type("Other", (Holder,), {}),)),
}


@pytest.mark.parametrize("num_before", [0, 40], ids=["first", "specialized"])
@pytest.mark.parametrize("way", WRITES)
def test_every_way_to_write_an_attribute_is_noticed(
    way: str, num_before: int, function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Holder, "shared", (1,))
    holder = type("Last", (type("Middle", (Holder,), {}),), {})()
    for _ in range(num_before):  # the interpreter has specialized its instructions then
        WRITES["assignment"](holder)
    checks = IdentityChecks()
    checks.held_in(holder, type(holder), vars(holder))
    checks.entry(vars(holder), "kept", holder.kept)
    checks.absent(vars(holder), "shared")
    checks.attribute(type(holder), "shared", holder.shared)
    checks.bases(type(holder))
    unchanged = function(checks)
    for step in range(num_before):
        holder.other = [step]
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


def test_what_raises_an_error_does_not_hold_but_an_interruption_ends_the_call(
    function: Function,
) -> None:
    owner, checks = Raising(ValueError), IdentityChecks()
    checks.attribute(owner, "value", None)
    unchanged = function(checks)
    assert not unchanged()
    owner.error = None
    assert unchanged()
    owner.error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        unchanged()


@pytest.mark.sweep
def test_checks_kept_by_what_they_check_go_with_it(function: Function) -> None:
    holder, checks = Holder(), IdentityChecks()
    checks.held_in(holder, Holder, vars(holder))
    holder.other = function(checks)
    gone = weakref.ref(holder)
    del holder, checks
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("facts", [(), ((),) * 5, ([],) * 6, ((1,), *((),) * 5)])
def test_the_native_comparison_refuses_what_is_no_table_of_facts(facts: Any) -> None:
    hold = native_library().hold
    assert hold is not None
    with pytest.raises(TypeError):
        hold(*facts)


def test_no_check_at_all_holds(function: Function) -> None:
    assert function(IdentityChecks())()


@pytest.mark.sweep
def test_an_equal_number_in_a_new_object_is_no_new_compile() -> None:
    model, args = llama(2, hidden=32, num_heads=4, vocab=50, seq=8)
    for block in model.modules():
        if hasattr(block, "eps"):
            block.eps = 1e-5
    compiled = lazyinline.compile(model, backend="eager")
    expected = compiled(*args)
    report = compiled.last_report
    for _ in range(4):  # learnt at the first, second and fourth time; by value at the third
        for block in model.modules():
            if hasattr(block, "eps"):
                block.eps = float("1e-5")
        assert torch.equal(compiled(*args), expected)
        assert compiled.last_report is report
    for block in model.modules():
        if hasattr(block, "eps"):
            block.eps = 1e-3
    assert not torch.equal(compiled(*args), expected)
    assert compiled.last_report is not report

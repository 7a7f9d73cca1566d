"""The generated check of a guard: every kind of change is noticed, nothing else is."""

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

import lazyinline
from lazyinline.backend.launches.torch_native import replay_function
from lazyinline.frontend.measure.models import llama
from lazyinline.reuse.evidence import python_words
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


@pytest.fixture(params=["by-contents", "by-words"])
def function(request: pytest.FixtureRequest) -> Function:
    """Makes the function of some checks: one that looks at everything, or at what changed."""
    if request.param == "by-contents":
        return IdentityChecks.function
    return lambda checks: checks.function(replay_function().same_words, [0, 8, 2**40])


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


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="dictionaries have no versions there")
def test_unchanged_tables_are_not_looked_at() -> None:
    table, runs = {"a": [1]}, []
    checks = IdentityChecks()
    checks.entry(table, "a", table["a"])
    compared = replay_function().same_words

    def spying(*args: int) -> int:
        runs.append(compared(*args))
        return runs[-1]

    unchanged = checks.function(spying)
    assert python_words.tells_versions()
    assert unchanged()
    assert unchanged()
    table["b"] = 1
    assert unchanged()
    assert unchanged()
    assert runs == [1, 1, 0, 1]


def test_no_check_at_all_holds(function: Function) -> None:
    assert function(IdentityChecks())()


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

"""Graphs of PyG as arguments: objects with a store, which are made here without the package."""

from __future__ import annotations

import copy
import copyreg
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comparing import assert_equals_eager
from models import Made
from torch import Tensor, nn

import lazyinline


class Store:
    """Holds the entries of a graph, and by private names what it is made of."""

    def __init__(self) -> None:
        self._mapping: dict[str, Any] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_parent":
            value = weakref.ref(value)
        table = vars(self) if name.startswith("_") else self._mapping
        table[name] = value


class Data:
    """A graph whose entries are attributes."""

    def __init__(self, **entries: Any) -> None:
        vars(self)["_store"] = Store()
        self._store._parent = self
        for name, value in entries.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        store = vars(self)["_store"]
        try:
            return vars(store)[name] if name.startswith("_") else store._mapping[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._store, name, value)

    def copy(self) -> Data:
        made = type(self)(**self._store._mapping)
        made._slices = self._slices
        return made


class Batch(Data):
    """Several graphs in one."""


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = types.ModuleType("torch_geometric.data.data")
    module.Data = Data  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield


def batch(num_edges: int) -> Batch:
    generator = torch.Generator().manual_seed(num_edges)
    edges = torch.randint(0, 7, (2, num_edges), generator=generator)
    made = Batch(x=torch.randn(7, 4, generator=generator), edges=edges, name="two", cell=None)
    made._slices = {"x": torch.tensor([0, 3, 7])}
    return made


def convolve(self: Any, graph: Any) -> Tensor:
    """Sets an entry of a copy, as potentials do, or of what it is given."""
    graph = graph.copy() if self.is_copied else graph
    graph.messages = self.linear(graph.x)[graph.edges[1]]
    received = torch.zeros_like(graph.x).index_add(0, graph.edges[0], graph.messages)
    return received.tanh() * graph._slices["x"][1]  # type: ignore[no-any-return]


def convolution(*, is_copied: bool) -> nn.Module:
    return Made(convolve, linear=nn.Linear(4, 4), is_copied=is_copied)


@pytest.mark.parametrize("dynamic", [True, None])
def test_graphs_are_taken_apart_and_any_number_of_edges_compiled_once(dynamic: Any) -> None:
    given = [(batch(num),) for num in (9, 11, 13, 10)]
    run = assert_equals_eager(convolution(is_copied=True), batches=given, dynamic=dynamic)
    assert run.told.num_compiles == (1 if dynamic else 2)


def test_an_entry_that_a_forward_sets_is_there_as_in_eager() -> None:
    model = convolution(is_copied=False)
    compiled = lazyinline.compile(model, backend="eager")
    for num in (9, 11, 9):
        graph = batch(num)
        torch.testing.assert_close(compiled(graph), model(batch(num)))
        assert graph.messages.shape == (num, 4)
    told = compiled.last_report
    assert told is not None
    assert "changes a list, dictionary or object among its arguments" in told.ran_eagerly


def copying(self: Any, x: Tensor) -> Tensor:
    """Computes on a copy, which Python makes by a table where classes are entered."""
    found = copy.copy(types.SimpleNamespace(x=x))
    return self.linear(found.x).tanh().sum()


def test_a_class_that_an_import_enters_for_pickling_is_no_reason_to_compile_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Inductor's imports do, in the first compile of a process."""
    step = lazyinline.compile_step(Made(copying, linear=nn.Linear(4, 4)), backend="eager")
    for kind in (Store, Data):
        step(torch.ones(2, 4))
        monkeypatch.setitem(copyreg.dispatch_table, kind, lambda one: (type(one), ()))
    step(torch.ones(2, 4))
    assert step.last_report is not None and step.last_report.num_compiles == 1

"""Python reads a value, reached in some way, and the value changes: one grid of all three.

Whatever a cell of the grid holds, results are eager's: by the program that there is, by a new
trace, or by an eager run with its reason. ``values.py`` has the kinds of values, ``ways.py`` the
ways to them. Beside the grid stand the cases that were once wrong and that no cell shows.
"""

import decimal
import os
import sys
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pytest
from values import COUNTING, HELPERS, MOVING, ROWS, TENSORS, USUAL, Row
from ways import ANYWHERE, AROUND, ASKED, HOLDING, INSIDE, OF_TENSORS, OUTSIDE, Way
from worlds import Outcome, assert_as_eager, assert_refused

from lazyinline import CaptureError
from lazyinline.backend.launches.torch_native import native_library
from lazyinline.backend.run.planned import Runtime

NUMBER = Row("1.0", "2.0", "v")
# Kinds take turns; how each is frozen, and a change of it undone, is in test_comparing.py.
OFTEN = [*USUAL[::2], *[kind for kind in ROWS if kind not in USUAL][::40]]
KINDS = ROWS | TENSORS
WAYS = INSIDE | OF_TENSORS


@pytest.fixture(autouse=True)
def natively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager kernels need no native library; guards compare by it all the same, as with others."""
    monkeypatch.setattr(Runtime, "hold", native_library().hold)


@pytest.fixture
def restored() -> Iterator[None]:
    """What the interpreter holds for all is put back."""
    limit, arguments, folder = sys.getrecursionlimit(), sys.argv[:], os.getcwd()
    errors, context = np.geterr(), decimal.getcontext().copy()
    yield
    sys.setrecursionlimit(limit)
    sys.argv[:] = arguments
    os.chdir(folder)
    np.seterr(**errors)
    decimal.setcontext(context)
    os.environ.pop("LAZYINLINE_TEST", None)


NUM_WAYS = 4  # of each kind in a sweep


def paired(kinds: Collection[str], ways: Collection[str], usual: Collection[str] = ()) -> list[Any]:
    """Returns kinds with some of the ways, which take turns; all but the first are left to a sweep.

    Args:
        kinds: names of rows.
        ways: names of ways.
        usual: the kinds that are not all left to the sweep; all unless given.
    """
    pairs = []
    for turn, kind in enumerate(sorted(kinds, key=lambda kind: kind not in (usual or kinds))):
        for place in range(NUM_WAYS):
            way = [*ways][(turn + place * (len(ways) // NUM_WAYS)) % len(ways)]
            is_swept = bool(place or (usual and kind not in usual))
            marks = (pytest.mark.sweep,) if is_swept else ()
            pairs.append(pytest.param(kind, way, id=f"{kind}, {way}", marks=marks))
    return pairs


OF_BLOCKS, OF_ALL = paired(ROWS, HOLDING, OFTEN), paired(KINDS, ANYWHERE, USUAL[1::2])


LIKE_OTHERS = (
    "attribute by text",
    "attributes replaced",
    "object in a list",
    "private slot",
    "item",
)
LIKE_OTHERS += ("base class", "import", "captured class", "globals()", "default")


def not_in(pairs: list[Any], ways: Collection[str], *first: str) -> list[str]:
    """Names the ways, as cases, that no pair takes which is not left to a sweep."""
    taken = {pair.values[1] for pair in pairs if not pair.marks}
    return [f"[{way}]" for way in ways if way in first or way not in (*taken, *LIKE_OTHERS)]


HELD = """
def read(v): return {row.read}
def find(self): return {way.get}
def put(h, V):
    {way.put}
    return h
B = block(lambda self, x: torch.tanh(self.linear(x)) * read({way.get}))
"""


def changed(row: Row, way: Way, **options: Any) -> Outcome:
    """Three blocks, of which the last holds another value; then two of them change.

    What changes in place is held by the second, whose Python need not have run; the first is
    given another.
    """
    values = [row.value, row.value, *([row.other] if row.other else [])]
    model = f"model = Beside({', '.join(f'put(B(), {value})' for value in values)})"
    scene = [""]
    if row.change:
        scene.append(f"v = find(model.layers[1])\n{row.change}")
    if row.other:
        scene.append(f"put(model.layers[0], {row.other})")
    text = HELD.format(row=row, way=way)
    return assert_as_eager(HELPERS, AROUND, text, model, scene=scene, **options)


@pytest.mark.parametrize("way", INSIDE)
@pytest.mark.sweep(keep=not_in(OF_BLOCKS, INSIDE, "attribute"))
def test_a_number_that_a_block_reaches_tells_it_apart_and_is_noticed(way: str) -> None:
    outcome = changed(NUMBER, INSIDE[way], grad=way == "attribute")
    decisions = {d.path: d.shared for d in outcome.reports[0].decisions}
    assert not decisions.get("layers.2")
    assert way not in HOLDING or decisions["layers.1"]


@pytest.mark.parametrize(("kind", "way"), OF_BLOCKS)
def test_a_value_of_any_kind_that_a_block_reaches_is_eagers(kind: str, way: str) -> None:
    outcome = changed(ROWS[kind], HOLDING[way], grad=False)
    if kind in USUAL:
        assert not outcome.eagerly
        assert "layers.1" in {d.path for d in outcome.reports[0].decisions if d.shared}


ALIKE = ("size", "contiguous", "attribute or", "number, v.", "number, (t", "number, float(v.")


@pytest.mark.parametrize(
    ("kind", "way"),
    paired(TENSORS, [*OF_TENSORS, *HOLDING], [k for k in TENSORS if not k.startswith(ALIKE)]),
)
def test_what_is_asked_of_a_tensor_that_a_block_reaches_is_eagers(kind: str, way: str) -> None:
    outcome = changed(TENSORS[kind], WAYS[way], grad=False)
    assert bool(outcome.eagerly) == kind.startswith("number")


SHARED = """
def read(v): return {row.read}
def put(V): {way.put}
put({row.value})
"""


def changed_outside(row: Row, way: Way, **options: Any) -> Outcome:
    """Two blocks; the value is changed between calls, for another and in place."""
    model = f"B = block(lambda self, x: torch.tanh(self.linear(x)) * read({way.get}))"
    scene = ["", *(["put(" + row.other + ")", f"put({row.value})"] if row.other else [])]
    if row.change:
        scene.append(f"v = {way.get}\n{row.change}")
    text = SHARED.format(row=row, way=way)
    texts = HELPERS, AROUND, text, model, "model = Beside(B(), B())"
    return assert_as_eager(*texts, scene=scene, **options)


def assert_shared(outcome: Outcome) -> None:
    if not outcome.eagerly:
        reasons = [d.reason for d in outcome.reports[0].decisions]
        # What `singledispatch` has found it keeps in a weak dictionary.
        assert not [reason for reason in reasons if reason and "weak references" not in reason]


@pytest.mark.parametrize("way", OUTSIDE | ASKED)
@pytest.mark.sweep(keep=not_in(OF_ALL, OUTSIDE | ASKED, "global"))
def test_blocks_that_reach_one_number_share_and_notice_a_change(way: str, restored: None) -> None:
    number = NUMBER._replace(value="2.0", other="3.0")
    outcome = changed_outside(number, (OUTSIDE | ASKED)[way], grad=way == "global")
    assert_shared(outcome)


@pytest.mark.parametrize(("kind", "way"), OF_ALL)
def test_a_value_of_any_kind_that_all_blocks_reach_is_eagers(kind: str, way: str) -> None:
    outcome = changed_outside(KINDS[kind], ANYWHERE[way], grad=False)
    if kind in USUAL:
        assert_shared(outcome)


# What the model does before each of its blocks runs, or before the first; what a block does.
WRITERS = {
    "between blocks": ("put(index + 1.0)", "torch.tanh(self.linear(x)) * get()"),
    "by the forward": (
        "index or put(1.0)",
        "(put(get() + 1.0), torch.tanh(self.linear(x)) * get())[1]",
    ),
}
WRITING = """
def get(): return {way.get}
def put(V): {way.put}
put(2.0)
def body(layers, x):
    for index, layer in enumerate(layers):
        {writer[0]}
        x = layer(x)
    return x
B = block(lambda self, x: {writer[1]})
model = Around(body, B(), B())
"""


def written(way: str, writer: str) -> Outcome:
    text = WRITING.format(way=(OUTSIDE | ASKED)[way], writer=WRITERS[writer])
    scene = ["", "", "put(7.0)", "put(7.0)"]
    return assert_as_eager(HELPERS, AROUND, text, scene=scene, state="get()", grad=way == "global")


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("way", OUTSIDE)
@pytest.mark.smoke
@pytest.mark.sweep(
    keep=[
        *("[global-", "[context variable-by", "[attribute of a class-between", "[default-between"),
        *("[number of a class-by", "[class of a class-by", "[object of C-between"),
    ]
)
def test_a_number_that_changes_while_blocks_run_keeps_them_apart(
    way: str, writer: str, restored: None
) -> None:
    """What is left there is eager's, whoever writes between the calls."""
    outcome = written(way, writer)
    if not outcome.eagerly:
        assert outcome.shared == 0
    if OUTSIDE[way].said:
        wanted = {"between blocks": f"{OUTSIDE[way].said} changed between the calls"}
        assert all(wanted.get(writer, "its forward changes") in r for r in outcome.reasons)


def test_a_registry_that_a_forward_writes_to_is_an_error_that_names_it() -> None:
    """What is registered cannot be taken out again, so the forward may not be run a second time."""
    with pytest.raises(CaptureError, match="changes a mappingproxy"):
        written("registered", "between blocks")


DOING = """
def read(v): return {row.read}
def change(v):
    {row.change}
def put(h, V):
    {way.put}
    return h
B = block(
    lambda self, x: (change({way.get}), torch.tanh(self.linear(x)) * read({way.get}))[1],
    mark={marked}
)
ONE = {row.value}
model = Stack(*(put(B(), ONE) for _ in range(3)))
"""
CHANGED = {kind: row for kind, row in KINDS.items() if row.change}
DONE = ["list", "slot", "context variable", "event"]


@pytest.mark.parametrize("marked", [True, pytest.param(False, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("kind", "way"), paired(CHANGED, HOLDING, DONE))
def test_a_change_by_the_forward_is_left_as_eager_does(kind: str, way: str, marked: bool) -> None:
    """Three blocks that hold one value; then they are given one anew."""
    row = CHANGED[kind]
    texts = HELPERS, AROUND, DOING.format(row=row, way=HOLDING[way], marked=marked)
    anew = f"ONE = {row.value}\nfor layer in model.layers: put(layer, ONE)"
    try:
        assert_as_eager(*texts, scene=["", "", anew, ""], state="ONE", grad=kind == "list")
    except CaptureError as error:  # it would be made twice
        assert "cannot be restored" in str(error) and kind not in USUAL


def one_block(value: str, statement: str, read: str) -> tuple[str, ...]:
    """A block that changes the value it holds, and reads it."""
    row = Row(value, "", read, statement)
    text = DOING.format(row=row, way=HOLDING["attribute"], marked=True)
    return HELPERS, AROUND, text, "model = model.layers[0]"


@pytest.mark.parametrize(
    "kind",
    [
        *("list", "tuple in a list", "dictionary", "set", "deque", "default dictionary"),
        *("array of numpy", "data", "in data", "namespace"),
    ],
)
@pytest.mark.sweep(keep=["[list]", "[tuple in a list]", "[data]"])
def test_an_equal_value_in_its_place_is_as_good_until_it_changes(kind: str) -> None:
    row = ROWS[kind]
    scene = ["", *(f"model.v = {row.value}",) * 2, f"v = model.v\n{row.change}"]
    texts = one_block(row.value, "pass", row.read)
    reports = assert_as_eager(*texts, scene=scene, grad=kind == "list").reports
    assert reports[0] is reports[2] is not reports[3]


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.sweep(keep=["[list]", "[tensor", "[random"])
def test_what_counts_has_counted_each_call_once(name: str) -> None:
    texts = one_block(*COUNTING[name], "1.0")
    outcome = assert_as_eager(*texts, scene=[""] * 4, state="model.v", grad=name == "list")
    if "tensor" not in name:  # a program writes to tensors itself
        assert len(outcome.eagerly) == 4
        assert "forward" in assert_refused(*texts, state="model.v")


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.sweep(keep=["[count]", "[generator", "in an object", "random"])
def test_what_each_use_moves_on_is_refused_before_it_does(name: str) -> None:
    value, read = MOVING[name]
    texts = one_block(value, "pass", read)
    for reason in assert_as_eager(*texts, scene=[""] * 3, grad=name == "count").eagerly:
        assert "can be neither compared nor put back" in reason
    assert "can be neither compared nor put back" in assert_refused(*texts)


# How a block looks for itself in what it stands in (``o``).
LOOKS = {
    "named_modules": "at([m for _, m in o.named_modules()], self)",
    "children": "at(o.children(), self)",
    "_modules": "at(o._modules.values(), self)",
    "items": "at(o, self)",
    "index": "list(o).index(self)",
    "get_submodule": "int(o.get_submodule('1') is self)",
    "parameters": "at(o.parameters(), self.linear.weight)",
    "state_dict": "at(o.state_dict(keep_vars=True).values(), self.linear.weight)",
    "generator": "next(i for i, m in enumerate(m for m in o.modules()) if m is self)",
    "paths": "{m: len(n) * int(n[:1] or 0) for n, m in o.named_modules()}[self]",
}
AS_A_MODULE = ("vars", "getattr")  # what an attribute holds is a module inside
REACHED = {
    **{
        name: way
        for name, way in HOLDING.items()
        if way.put[:6] == "h.v = " and name not in AS_A_MODULE
    },
    "attribute": Way("object.__setattr__(h, 'v', V)", "self.v"),
    "reference": Way("h.v = weakref.ref(V)", "self.v()"),
    "proxy": Way("h.v = [weakref.proxy(V)]", "self.v[0]"),
    "bound method": Way("h.v = V.register_buffer", "self.v.__self__"),
    "list in a cell": Way("h.v = captured([V])", "self.v()[0]"),
    **{f"outside, {name}": way for name, way in ANYWHERE.items()},
}


def looking(way: Way, look: str, stands_in: str = "model.layers") -> Outcome:
    text = f"""
def at(modules, own): return [found is own for found in modules].index(True)
def look(self, o): return {look}
def put(h, V):
    {way.put}
B = block(lambda self, x: self.linear(x) * (1 + look(self, {way.get})))
BESIDE, model = nn.ModuleList([linear()]), Stack(B(), B(), B())
for layer in model.layers: put(layer, {stands_in})
"""
    return assert_as_eager(HELPERS, AROUND, text, scene=[""], grad=look == "parameters")


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("way", REACHED)
@pytest.mark.sweep(
    keep=[
        *("outside, global-named_m", "[attribute-named_m", "[proxy-named_m", "[closure-named_m"),
        *("[list-_modules", "[list-items", "[list-get_s", "[list-par", "[list-state", "[list-gen"),
    ]
)
def test_a_block_that_finds_its_own_place_is_as_eager(way: str, look: str) -> None:
    looking(REACHED[way], LOOKS[look])


def test_blocks_that_reach_a_module_beside_them_share() -> None:
    assert looking(HOLDING["list"], "len(list(o.modules()))", "BESIDE").shared == 2

"""Every kind of value, asked every question: does another share, is a change noticed and undone?

A change in place must be seen in the object, or the forward that reads it must run eagerly; another
value must keep two blocks apart; what a forward changes must be left as eager leaves it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from values import COUNTING, HELPERS, HIDDEN, MOVING, RARE, ROWS, SHOWN, USUAL
from worlds import Outcome, World, assert_as_eager, assert_refused

from lazyinline import CaptureError
from lazyinline.backend.launches.torch_native import native_library
from lazyinline.backend.run.runtime import ClosureRuntime
from lazyinline.reuse.evidence.snapshot import Snapshot, same_value
from lazyinline.reuse.freeze import Freezer, describe
from lazyinline.reuse.kinds import WHOLE_FUNCTION, is_unrepeatable

NUM_TOGETHER = 12
HELD = {"itself": lambda v: v, "in a list": lambda v: [v], "deeper": lambda v: {"a": (v,)}}
# Who runs is watched where it runs: its code, its defaults and what it captured.
OF_FUNCTIONS = ("code", "captured", "default", "default by name", "in what is captured")


@pytest.fixture(autouse=True)
def natively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager kernels need no native library; guards compare by it all the same, as with others."""
    monkeypatch.setattr(ClosureRuntime, "hold", native_library().hold)


def freeze(value: Any) -> Any:
    return Freezer().freeze(value)


def together() -> list[Any]:
    """Parts the rows into groups, each of which one model holds."""
    parts = [[*SHOWN], [*RARE], [*HIDDEN]]
    groups = [p[i : i + NUM_TOGETHER] for p in parts for i in range(0, len(p), NUM_TOGETHER)]
    return [pytest.param(group, id=group[0]) for group in groups]


# ---- asked of freezing and of a snapshot ---------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name].other])
def test_another_value_is_another(name: str) -> None:
    world, row = World(HELPERS), ROWS[name]
    value, other = world.value(row.value), world.value(row.other)
    readings = [world.value(f"(lambda v: {row.read})")(held) for held in (value, other)]
    assert readings[0] != readings[1], "the row tells nothing apart"
    for wrap in HELD.values():
        assert freeze(wrap(value)) != freeze(wrap(other))
        assert not same_value(wrap(value), wrap(other))
        assert freeze(wrap(value)) == freeze(wrap(value)) or is_unrepeatable(value)


@pytest.mark.parametrize("name", USUAL)
def test_an_equal_value_is_as_good(name: str) -> None:
    world = World(HELPERS)
    first, again = (world.value(f"[{ROWS[name].value}]") for _ in range(2))
    assert freeze(first) == freeze(again)
    assert hash(freeze(first)) == hash(freeze(again))


@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name].change])
def test_a_change_in_place_is_seen_and_undone(name: str) -> None:
    world, row = World(HELPERS), ROWS[name]
    value = world.scope["v"] = world.value(row.value)
    before, reading = freeze(value), world.value(row.read)
    whole, held = Snapshot(WHOLE_FUNCTION), Snapshot()
    trusted = whole.covers(value)
    held.look_into(value)
    assert whole.same() and held.same() and held.what_changed() == ("", [])
    world.run(row.change)
    assert world.value(row.read) != reading, "the row changes nothing"
    changed = freeze(value)
    if name not in HIDDEN:
        assert not (changed != before and trusted and whole.same()), "freezing sees more than it"
    if name in USUAL:
        assert changed != before
    if held.same():  # code that reads it runs eagerly, or is watched where it runs
        assert name not in USUAL or name in OF_FUNCTIONS
        return
    assert held.what_changed()[0]
    held.undo()
    if held.lasting:
        assert name not in USUAL
        with pytest.raises(CaptureError, match="cannot be restored"):
            held.refuse_lasting()
        return
    assert held.same()
    assert freeze(value) == before or is_unrepeatable(value)


def test_nothing_there_is_a_value_of_its_own() -> None:
    world = World(HELPERS)
    world.run("v = [types.CellType(), slotted := made(Slotted(), 'del v.value')]")
    unset, snapshot = world.scope["v"], Snapshot()
    snapshot.look_into(unset)
    assert freeze(unset[1]) != freeze(world.value("Slotted(None)"))
    world.run("v[0].cell_contents = v[1].value = 1")
    assert not snapshot.same()
    snapshot.undo()
    assert not hasattr(unset[1], "value")


@pytest.mark.parametrize(
    "value",
    [torch.ones(2), nn.Linear(1, 1), [torch.ones(2)], {"m": nn.ReLU()}, iter([1])],
    ids=lambda value: type(value).__name__,
)
def test_tensors_modules_and_iterators_are_never_trusted(value: Any) -> None:
    """What they freeze to depends on where they sit, or changes in place."""
    assert not Snapshot(WHOLE_FUNCTION).covers(value)


@pytest.mark.parametrize("name", MOVING)
def test_what_each_use_moves_on_equals_nothing(name: str) -> None:
    value = World(HELPERS).value(MOVING[name][0])
    assert freeze([value]) != freeze([value])


def test_cycles_and_depths_end() -> None:
    first: list[Any] = [1]
    first.append(first)
    second: list[Any] = [1]
    second.append(second)
    third: list[Any] = [1, [1]]
    third[1].append(third)
    assert freeze(first) == freeze(second) != freeze(third)
    held = Snapshot(WHOLE_FUNCTION)
    assert held.covers(first)
    first[0] = 2
    assert not held.same()
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    assert Snapshot(WHOLE_FUNCTION).covers(deep)
    assert freeze(deep) == freeze(deep)
    wide = [[i] for i in range(20_000)]  # further items count as the very objects they are
    assert freeze(wide) == freeze(wide) != freeze([[i] for i in range(20_000)])


def test_objects_at_one_address_are_two() -> None:
    """Addresses repeat once an object is gone; a frozen one is kept alive."""
    frozen = [freeze(object()) for _ in range(100)]
    assert all(a != b for i, a in enumerate(frozen) for b in frozen[:i])


def test_a_module_freezes_to_its_path_and_a_tensor_to_what_is_said_of_it() -> None:
    trees = [nn.Sequential(nn.ReLU(), nn.ReLU()) for _ in range(2)]
    paths = [{id(m): path for path, m in tree.named_modules()} for tree in trees]
    own, other = (Freezer(p) for p in paths)
    assert own.freeze([trees[0][0]]) == other.freeze([trees[1][0]])
    assert own.freeze([trees[0][0]]) != other.freeze([trees[1][1]])
    seen: list[Any] = []
    freezer = Freezer(on_tensor=lambda tensor, keys: seen.append(keys) or tuple(tensor.shape))
    found = [freezer.freeze({"a": [0, (torch.full((1,), x),)]}, ("", "n")) for x in (0.0, 1.0)]
    assert found[0] == found[1]
    assert seen == [("", "n", ("item", "a"), ("item", 1), ("item", 0))] * 2


def test_a_frozen_value_is_described_for_people() -> None:
    found = [describe(freeze(v)) for v in (3, "a", 0.1, [1], World(HELPERS).value("Value()"))]
    assert found == ["3", "'a'", "0.1", "<list>", "<Value>"]
    assert describe(None) == "<missing>"
    assert "0x" not in describe(freeze(object()))


# ---- asked of compiled models --------------------------------------------------------------------


def readers(names: Sequence[str]) -> str:
    return "\n".join(f"def read_{i}(v): return {ROWS[n].read}" for i, n in enumerate(names))


def noticed(names: Sequence[str]) -> Outcome:
    """Changes what one model holds, value by value: in place, and for another."""
    places = range(len(names))
    model = [
        *(f"first_{i} = {ROWS[n].value}" for i, n in enumerate(names)),
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        self.v_{i} = first_{i}" for i in places),
        "    def forward(self, x):",
        f"        return [{', '.join(f'x * read_{i}(self.v_{i})' for i in places)}]",
        "model = Model()",
    ]
    scene = ["", ""]
    for i, name in enumerate(names):
        if ROWS[name].change:
            scene.append(f"v = model.v_{i}\n{ROWS[name].change}")
        if ROWS[name].other:
            scene += [f"model.v_{i} = {ROWS[name].other}", f"model.v_{i} = first_{i}"]
    return assert_as_eager(HELPERS, readers(names), "\n".join(model), scene=scene, grad=False)


def kept_apart(names: Sequence[str]) -> Outcome:
    """Blocks that hold two values of a kind, one after another, in a model of all kinds."""
    forward = "lambda self, x: torch.tanh(self.linear(x)) * read_{0}(self.v)"
    kinds = [f"B_{i} = block({forward.format(i)})" for i in range(len(names))]
    rows = [(i, value) for i, n in enumerate(names) for value in (ROWS[n].value, ROWS[n].other)]
    model = f"model = Beside({', '.join(f'B_{i}(v={value})' for i, value in rows)})"
    return assert_as_eager(HELPERS, readers(names), "\n".join([*kinds, model]), scene=[""])


def noticed_in_shared(names: Sequence[str]) -> Outcome:
    """Changes in place what the second of two blocks holds, whose Python may never have run."""
    forward = "lambda self, x: torch.tanh(self.linear(x)) * read_{0}(self.v)"
    kinds = [f"B_{i} = block({forward.format(i)})" for i in range(len(names))]
    pairs = [f"B_{i}(v={ROWS[n].value})" for i, n in enumerate(names) for _ in range(2)]
    scene = [f"v = model.layers[{2 * i + 1}].v\n{ROWS[n].change}" for i, n in enumerate(names)]
    model = f"model = Beside({', '.join(pairs)})"
    texts = HELPERS, readers(names), "\n".join([*kinds, model])
    outcome = assert_as_eager(*texts, scene=["", *scene])
    if not outcome.reports[0].ran_eagerly:
        shared = {d.path for d in outcome.reports[0].decisions if d.shared}
        assert shared >= {f"layers.{2 * i + 1}" for i, n in enumerate(names) if n in USUAL}
    return outcome


def of_each(question: Callable[[Sequence[str]], Outcome], names: Sequence[str]) -> None:
    """Asks of all at once, and of halves where one of them makes all run eagerly."""
    outcome = question(names)
    if outcome.eagerly and len(names) > 1:
        half = len(names) // 2
        of_each(question, names[:half])
        of_each(question, names[half:])


@pytest.mark.parametrize("names", together())
def test_a_change_of_what_a_model_holds_is_noticed(names: list[str]) -> None:
    of_each(noticed, names)


@pytest.mark.parametrize("names", together())
@pytest.mark.sweep(keep="[template]")
def test_a_change_of_what_a_block_that_shares_holds_is_noticed(names: list[str]) -> None:
    of_each(noticed_in_shared, [name for name in names if ROWS[name].change])


@pytest.mark.parametrize("names", together())
@pytest.mark.sweep(keep=["[number]", "[class]"])
def test_blocks_that_hold_other_values_are_apart(names: list[str]) -> None:
    of_each(kept_apart, [name for name in names if ROWS[name].other])


WRITING = """
model = block(lambda self, x: (change(self.{0}), self.linear(x) * read(self.{0}))[1])(v={1})
"""


def writes(value: str, statement: str, read: str) -> tuple[str, ...]:
    """A model whose forward changes a value that it holds, and reads it."""
    functions = f"def change(v):\n    {statement}\ndef read(v): return {read}"
    return HELPERS, functions, WRITING.format("v", value)


@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name].change])
@pytest.mark.sweep(keep=["[list]", "[object]", "[slot]", "[array of numpy]", "[context", "[event]"])
def test_a_change_by_the_forward_itself_is_left_as_eager_leaves_it(name: str) -> None:
    row = ROWS[name]
    try:
        assert_as_eager(
            *writes(row.value, row.change, row.read),
            scene=["", "", f"model.v = {row.value}", ""],
            state="model.v",
        )
    except CaptureError as error:  # it would be made twice
        assert "cannot be restored" in str(error) and name not in USUAL


@pytest.mark.parametrize(
    "name",
    [
        *("list", "tuple in a list", "dictionary", "set", "deque", "default dictionary"),
        *("array of numpy", "data", "in data", "namespace"),
    ],
)
@pytest.mark.sweep(keep=["[list]", "[tuple in a list]", "[data]"])
def test_an_equal_value_in_its_place_is_as_good_until_it_changes(name: str) -> None:
    row = ROWS[name]
    scene = ["", *(f"model.v = {row.value}",) * 2, f"v = model.v\n{row.change}"]
    reports = assert_as_eager(*writes(row.value, "pass", row.read), scene=scene).reports
    assert reports[0] is reports[2] is not reports[3]


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.sweep(keep=["[list]", "[slot]", "[tensor", "[deque]", "[random"])
def test_what_counts_has_counted_each_call_once(name: str) -> None:
    value, statement = COUNTING[name]
    texts = writes(value, statement, "1.0")
    outcome = assert_as_eager(*texts, scene=[""] * 4, state="model.v")
    if "tensor" not in name:  # a program writes to tensors itself
        assert len(outcome.eagerly) == 4
        assert "forward" in assert_refused(*texts, state="model.v")


@pytest.mark.parametrize("name", MOVING)
def test_what_each_use_moves_on_is_refused_before_it_does(name: str) -> None:
    value, read = MOVING[name]
    texts = writes(value, "pass", read)
    for reason in assert_as_eager(*texts, scene=[""] * 3).eagerly:
        assert "can be neither compared nor put back" in reason
    assert "can be neither compared nor put back" in assert_refused(*texts)

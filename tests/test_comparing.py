"""What tests stand on: the comparison with eager, and the table of values that Python can hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import DOORS, Door, assert_equals_eager, sgd
from models import BatchNormBlock, Block, Net, batch
from torch import Tensor, nn
from values import HELPERS, HIDDEN, MOVING, ROWS, USUAL
from worlds import World

from lazyinline import CaptureError
from lazyinline.reuse.freeze import Freezer, Snapshot, describe, same_value
from lazyinline.reuse.kinds import WHOLE_FUNCTION, is_unrepeatable


@pytest.mark.smoke
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.sweep(keep="eager")
def test_dropout_and_running_statistics_are_eagers_by_every_door(door: Door, backend: str) -> None:
    model = Net(lambda: nn.Sequential(Block(8, norm=True, dropout=0.1), BatchNormBlock(8)), width=8)
    data = [(batch(5, 8, seed=seed),) for seed in range(3)]
    assert_equals_eager(model, batches=data, door=door, backend=backend, optimizer=sgd)
    if door == "compile":
        model.zero_grad()  # a copy has no gradients
        assert_equals_eager(model.eval(), (batch(5, 8),), backend=backend)


class Differs(nn.Module):
    """Another function in its copy."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.is_copy = what, False
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = Differs(self.what)
        other.load_state_dict(self.state_dict())
        other.is_copy = True
        return other

    def forward(self, x: Tensor) -> Any:
        if self.is_copy and self.what == "inputs":
            x.detach().add_(1)
            x = x - 1
        y = self.linear(x)
        if not self.is_copy:
            return y
        if self.what == "buffers":
            self.calls.add_(1)
        if self.what == "generators":
            torch.rand(1)
        if self.what == "gradients":
            return y.detach() + (y - y.detach()) * 2
        return {"numbers": y + 1e-3, "layout": y.t().contiguous().t(), "type": (y,)}.get(
            self.what, y
        )


@pytest.mark.parametrize(
    "what", ["numbers", "layout", "type", "gradients", "buffers", "generators", "inputs"]
)
def test_what_differs_from_eager_is_seen(what: str) -> None:
    with pytest.raises(AssertionError):
        assert_equals_eager(Differs(what), (batch(),))
    assert_equals_eager(Differs(""), (batch(),))


@pytest.fixture
def only_when_comparing(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        pytest.skip("writing golden texts")


@pytest.mark.usefixtures("only_when_comparing")
def test_same_text_passes_and_other_shows_what_differs(golden: Callable[[str, str], None]) -> None:
    golden("golden_fixture", "first line\nsecond line")
    with pytest.raises(pytest.fail.Exception, match=r"\n first line\n-second line\n\+third line"):
        golden("golden_fixture", "first line\nthird line")


@pytest.mark.usefixtures("only_when_comparing")
def test_missing_text_says_how_to_write_it(golden: Callable[[str, str], None]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"never\.txt does not exist.*--update-golden"):
        golden("never", "text")


HELD = {"itself": lambda v: v, "in a list": lambda v: [v], "deeper": lambda v: {"a": (v,)}}
# Who runs is watched where it runs: its code, its defaults and what it captured.
OF_FUNCTIONS = ("code", "captured", "default", "default by name", "in what is captured")


def freeze(value: Any) -> Any:
    return Freezer().freeze(value)


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

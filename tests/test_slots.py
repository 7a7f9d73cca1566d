"""Blocks that are given a cache: what each does to its own part of it is shared, or traced anew."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_gradients
from torch import Tensor, nn
from transformers import JambaConfig, JambaForCausalLM
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

import lazyinline
from lazyinline.frontend.capture.regions import SharingDecision
from lazyinline.frontend.reuse_table import not_shared_lines
from lazyinline.reuse import open_index
from lazyinline.reuse.evidence.slots import OpenIndex, is_index

LAYERS = 4
SIZE = 6
TABLE = (1.0, 1.0, 2.0, 2.0)
Act = Callable[["Layer", Tensor, Cache], Any]


class Layer(nn.Module):
    """Adds to its input what an act makes of a cache."""

    def __init__(self, act: Act, layer_idx: int) -> None:
        super().__init__()
        self.act = act
        self.layer_idx = layer_idx
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        hidden = torch.tanh(self.linear(x)).sin() * 0.5 + x.cos()
        return x + self.act(self, hidden, cache)


class Model(nn.Module):
    def __init__(self, act: Act) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(act, i) for i in range(LAYERS))

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        for layer in self.layers:
            x = layer(x, cache)
        return x


def updates(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    keys, values = cache.update(x, x * 2, layer.layer_idx)
    return keys.mean() + values.sum(-2, keepdim=True)


def slot_of(cache: Cache, index: Any) -> Any:
    return cache.layers[index]


def reads_the_first(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    return updates(layer, x, cache) * (1 + cache.get_seq_length())


def reads_the_one_before(layer: Layer, x: Tensor, cache: Cache) -> Any:
    result = updates(layer, x, cache)
    if layer.layer_idx > 0:
        result = result + slot_of(cache, layer.layer_idx - 1).keys.mean()
    return result


def reads_all(layer: Layer, x: Tensor, cache: Cache) -> Any:
    result = updates(layer, x, cache)
    return result + sum(one.keys.sum() for one in cache.layers if one.is_initialized)


def writes_the_next(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    result = updates(layer, x, cache)
    following = slot_of(cache, (layer.layer_idx + 1) % LAYERS)
    if following.is_initialized:
        following.values = following.values + 1
    return result


def counts_in_the_first(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    first: Any = cache.layers[0]
    first.count = getattr(first, "count", 0) + 1
    return updates(layer, x, cache) * first.count


def scales_by_index(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    return updates(layer, x, cache) * (layer.layer_idx + 1)


def takes_from_a_table(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    return updates(layer, x, cache) * TABLE[layer.layer_idx]


def is_the_first(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    return updates(layer, x, cache) * (2 if layer.layer_idx == 0 else 1)


def is_odd(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    return updates(layer, x, cache) * (2 if layer.layer_idx % 2 else 1)


def names_itself(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    return updates(layer, x, cache) * len(f"{'x' * 3}{layer.layer_idx * 7}")


def indexes_a_tensor(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    return updates(layer, x, cache) * x[..., layer.layer_idx : layer.layer_idx + 1]


def makes_a_tensor(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    return updates(layer, x, cache) * torch.tensor(float(layer.layer_idx))


def fills_with_the_index(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    """No operator takes what stands for the index."""
    return updates(layer, x, cache) + torch.full((1,), layer.layer_idx)


def keeps_the_index(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    slot: Any = slot_of(cache, layer.layer_idx)
    slot.number = layer.layer_idx
    return updates(layer, x, cache)


def reads_a_dictionary(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    slot = slot_of(cache, layer.layer_idx)
    return updates(layer, x, cache) * (
        1 + len(vars(slot)["values"].shape if slot.is_initialized else ())
    )


def writes_a_dictionary(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    result = updates(layer, x, cache)
    vars(slot_of(cache, layer.layer_idx))["keys"] = slot_of(cache, layer.layer_idx).keys * 2
    return result


def copies_a_slot(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    result = updates(layer, x, cache)
    return result + copy.copy(slot_of(cache, layer.layer_idx)).values.mean()


def deletes(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    slot: Any = slot_of(cache, layer.layer_idx)
    slot.extra = 1
    del slot.extra
    return updates(layer, x, cache)


def swaps_slots(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    result = updates(layer, x, cache)
    if layer.layer_idx == 1:
        cache.layers[0], cache.layers[1] = cache.layers[1], cache.layers[0]
    return result


def replaces_its_slot(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    cache.layers[layer.layer_idx] = DynamicLayer()
    return updates(layer, x, cache)


def appends_a_slot(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    result = updates(layer, x, cache)
    cache.layers.append(DynamicLayer())
    return result * len(cache.layers)


def counts_slots(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    return updates(layer, x, cache) * sum(one.is_initialized for one in list(cache.layers))


def keeps_its_input(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    slot: Any = slot_of(cache, layer.layer_idx)
    result = x * 2 if getattr(slot, "last", None) is None else x + slot.last
    slot.last = x
    return result


def writes_in_place(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    slot = slot_of(cache, layer.layer_idx)
    if not slot.is_initialized:
        return updates(layer, x, cache)
    slot.values.mul_(2).add_(x.detach().mean())
    return x + slot.values.sum() + slot.keys.mean()


def adds_in_place(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    slot = slot_of(cache, layer.layer_idx)
    slot.lazy_initialization(x, x)
    slot.keys = slot.values = torch.zeros_like(x)
    slot.values.add_(x)
    return x + slot.keys


def shares_memory(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    slot = slot_of(cache, layer.layer_idx)
    if not slot.is_initialized:
        return updates(layer, x, cache)
    slot.values = slot.keys[..., :1, :]
    return x + slot.values.sum()


def reads_by_two_ways(layer: Layer, x: Tensor, cache: Cache) -> Tensor:
    first, own = slot_of(cache, 0), slot_of(cache, layer.layer_idx)
    result = updates(layer, x, cache)
    first.values = first.values * 3
    return result + own.values.sum()


ACTS: dict[Act, bool] = {
    updates: True,
    keeps_its_input: True,
    writes_in_place: True,
    adds_in_place: False,
    is_the_first: False,
    reads_the_first: False,
    reads_the_one_before: False,
    reads_all: False,
    writes_the_next: False,
    counts_in_the_first: False,
    scales_by_index: False,
    takes_from_a_table: False,
    is_odd: False,
    names_itself: False,
    indexes_a_tensor: False,
    makes_a_tensor: False,
    fills_with_the_index: False,
    keeps_the_index: False,
    reads_a_dictionary: False,
    writes_a_dictionary: False,
    copies_a_slot: False,
    deletes: False,
    swaps_slots: False,
    replaces_its_slot: False,
    appends_a_slot: False,
    counts_slots: False,
    shares_memory: False,
    reads_by_two_ways: False,
}


def a_cache(kind: str) -> Cache:
    if kind == "static":
        return Cache(layers=[StaticLayer(max_cache_len=8) for _ in range(LAYERS)])
    return Cache(layers=[DynamicLayer() for _ in range(LAYERS)])


USUAL = ["updates", "in_place", "the_first", "names_itself", "deletes", "shares", "replaces"]


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
@pytest.mark.sweep(keep=USUAL)
def test_what_blocks_do_to_a_cache_is_what_eager_does(act: Act) -> None:
    model = Model(act)
    expected = copy.deepcopy(model)
    run: Any = lazyinline.compile(model, backend="eager", reuse="auto")
    caches = a_cache("dynamic"), a_cache("dynamic")
    for step in range(3):
        x = torch.randn(2, 1, 3, SIZE, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            assert_close(run(x, caches[0]), expected(x, caches[1]))
        for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
            assert vars(one).keys() == vars(other).keys()
            for name in vars(one):
                if isinstance(vars(one)[name], (Tensor, int)):
                    assert_close(vars(one)[name], vars(other)[name])
    if ACTS[act]:
        assert run.last_report.num_closures == 1


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(
    "act", [updates, writes_in_place, adds_in_place], ids=lambda act: act.__name__
)
def test_gradients_through_a_cache_that_is_shared_are_those_of_eager(act: Act, kind: str) -> None:
    model = Model(act)
    expected = copy.deepcopy(model)
    run: Any = lazyinline.compile(model, backend="eager", reuse="auto")
    results = []
    for module in (run, expected):
        cache, x = a_cache(kind), torch.ones(2, 1, 3, SIZE)
        (module(x, cache).square().mean() + cache.layers[2].values.sum()).backward()
        results.append([p.grad for p in module.parameters()])
    assert_close(*results)


class SharesSlots(Model):
    """Puts one tensor into several places before its layers run."""

    def __init__(self, together: tuple[int, ...]) -> None:
        super().__init__(writes_in_place)
        self.together = together

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        for number, slot in enumerate(cache.layers):
            held: Any = x * 2 + number
            slot.lazy_initialization(held, held)
            slot.keys = held
            slot.values = held if number in self.together else x * 3
        return super().forward(x, cache)


@pytest.mark.parametrize("together", [(0,), (3,), (0, 1, 2, 3)])
def test_slots_that_are_one_tensor_are_told_from_slots_that_are_not(
    together: tuple[int, ...],
) -> None:
    model = SharesSlots(together)
    run: Any = lazyinline.compile(model, backend="eager", reuse="auto")
    x = torch.ones(2, 1, 3, SIZE)
    with torch.no_grad():
        assert_close(run(x, a_cache("dynamic")), model(x, a_cache("dynamic")))


WHOLE_NUMBERS = [name for name in vars(int) if callable(getattr(int, name)) and name[:2] == "__"]


@pytest.mark.parametrize("name", sorted({*WHOLE_NUMBERS} - {"__new__", "__getattribute__"}))
def test_an_index_answers_as_a_number_and_notes_it(name: str) -> None:
    method: Any = getattr(int, name)
    for others in ((), (2,), (2.5,), ("d",)):
        index = OpenIndex(3)
        try:
            want = method(3, *others)
        except (TypeError, ValueError):
            continue
        if want is not NotImplemented:
            assert getattr(OpenIndex, name)(index, *others) == want
            assert open_index.tests_of(index) != ()


def test_an_index_that_is_compared_notes_the_answer_alone() -> None:
    index: Any = OpenIndex(3)
    assert isinstance(index, int)
    assert is_index(index)
    assert index < 4
    assert open_index.tests_of(index) == (("lt", 4, True),)
    assert index + 1.5 == 4.5
    assert open_index.tests_of(index) is None


def test_layers_with_states_of_their_own_are_captured_whole_and_share() -> None:
    """A state that is filled in place, in a dictionary of the layer's part of the cache."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = JambaConfig(
        vocab_size=32,
        num_hidden_layers=4,
        num_key_value_heads=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        pad_token_id=0,
        **sizes,
    )
    torch.manual_seed(0)
    model = JambaForCausalLM(config)
    expected = copy.deepcopy(model)
    run: Any = lazyinline.compile(model, backend="eager", reuse="auto")
    ids = torch.randint(3, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    for module in (expected, run):  # transformers warns once that it has no kernels for states
        module(ids, labels=ids).loss.backward()
    assert_same_gradients(model, expected)
    assert not run.last_report.ran_eagerly
    assert run.last_report.not_shared() == []
    assert any(decision.shared for decision in run.last_report.decisions)


def test_blocks_that_are_apart_for_one_reason_are_told_of_together() -> None:
    paths = ["layers.0", "layers.1", "layers.2", "layers.1.mlp", "head", "a.0.b.1", "a.1.b.2"]
    told = [SharingDecision(path, "Layer", shared=False, reason="r") for path in paths]
    told.append(SharingDecision("layers.7", "Layer", shared=False, reason="s"))
    assert not_shared_lines(told) == [
        "layers.0..2: not shared, r",
        "layers.1.mlp: not shared, r",
        "head: not shared, r",
        "a.0.b.1: not shared, r",
        "a.1.b.2: not shared, r",
        "layers.7: not shared, s",
    ]

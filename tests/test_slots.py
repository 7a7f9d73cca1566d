"""Blocks that are given a cache: what each does to its own part of it is shared, or traced anew."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_equals_eager, assert_same_gradients
from models import Around, Stack
from torch import Tensor, nn
from transformers import JambaConfig, JambaForCausalLM
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

import lazyinline
from lazyinline.frontend.capture.regions import SharingDecision
from lazyinline.frontend.compile_record import not_shared_lines
from lazyinline.reuse.evidence import slots
from lazyinline.reuse.evidence.slots import OpenIndex, is_index

LAYERS = 3
SIZE = 6
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


def stack(act: Act) -> Stack:
    torch.manual_seed(0)
    return Stack(*(Layer(act, i) for i in range(LAYERS)))


# What a layer makes of its input and its own part of a cache, as text: ``out`` is what it returns,
# ``i`` its number, ``slot(n)`` a part of the cache. Of the first ones all layers share a closure.
UPDATES = (
    "keys, values = cache.update(x, x * 2, i); out = keys.mean() + values.sum(-2, keepdim=True)"
)
SHARED = {
    "updates": UPDATES,
    "keeps its input": """
out = x * 2 if getattr(slot(i), "last", None) is None else x + slot(i).last
slot(i).last = x
""",
    "writes in place": """
if slot(i).is_initialized:
    slot(i).values.mul_(2).add_(x.detach().mean())
    out = x + slot(i).values.sum() + slot(i).keys.mean()
else:
    UPDATES
""",
}
ACTS = SHARED | {
    "adds in place": """
slot(i).lazy_initialization(x, x)
slot(i).keys = slot(i).values = torch.zeros_like(x)
slot(i).values.add_(x)
out = x + slot(i).keys
""",
    "is the first": "UPDATES; out = out * (2 if i == 0 else 1)",
    "reads the first": "UPDATES; out = out * (1 + cache.get_seq_length())",
    "reads all": "UPDATES; out = out + sum(s.keys.sum() for s in cache.layers if s.is_initialized)",
    "writes the next": """
UPDATES
after = slot((i + 1) % LAYERS)
if after.is_initialized: after.values = after.values + 1
""",
    "counts in the first": """
slot(0).count = getattr(slot(0), "count", 0) + 1
UPDATES; out = out * slot(0).count
""",
    "scales by index": "UPDATES; out = out * (i + 1)",
    "names itself": "UPDATES; out = out * len(f\"{'x' * 3}{i * 7}\")",
    "indexes a tensor": "UPDATES; out = out * x[..., i : i + 1]",
    "fills with the index": "UPDATES; out = out + torch.full((1,), i)",  # no operator takes it
    "keeps the index": "slot(i).number = i; UPDATES",
    "writes a dictionary": "UPDATES; vars(slot(i))['keys'] = slot(i).keys * 2",
    "copies a slot": "UPDATES; out = out + copy.copy(slot(i)).values.mean()",
    "deletes": "slot(i).extra = 1; del slot(i).extra; UPDATES",
    "swaps slots": """
UPDATES
if i == 1: cache.layers[0], cache.layers[1] = cache.layers[1], cache.layers[0]
""",
    "replaces its slot": "cache.layers[i] = DynamicLayer(); UPDATES",
    "appends a slot": "UPDATES; cache.layers.append(DynamicLayer()); out = out * len(cache.layers)",
    "shares memory": """
if slot(i).is_initialized:
    slot(i).values = slot(i).keys[..., :1, :]
    out = x + slot(i).values.sum()
else:
    UPDATES
""",
    "reads by two ways": """
first, own = slot(0), slot(i)
UPDATES; first.values = first.values * 3; out = out + own.values.sum()
""",
}


def act_of(name: str) -> Act:
    """Returns the function of an act."""
    lines = ACTS[name].strip().replace("UPDATES", UPDATES).split("\n")
    head = ["def act(layer, x, cache):", "i = layer.layer_idx", "slot = lambda n: cache.layers[n]"]
    scope: dict[str, Any] = {**globals()}
    exec("\n    ".join([*head, *lines, "return out"]), scope)
    act: Act = scope["act"]
    return act


def a_cache(kind: str) -> Cache:
    if kind == "static":
        return Cache(layers=[StaticLayer(max_cache_len=8) for _ in range(LAYERS)])
    return Cache(layers=[DynamicLayer() for _ in range(LAYERS)])


USUAL = ["updates", "writes in place"]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.sweep(keep=USUAL)
def test_what_blocks_do_to_a_cache_is_what_eager_does(act: str) -> None:
    model = stack(act_of(act))
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
    if act in SHARED:
        assert run.last_report.num_closures == 1


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("act", ["updates", "writes in place", "adds in place"])
@pytest.mark.sweep(keep=["updates-dynamic", "writes in place-static", "adds in place-dynamic"])
def test_gradients_through_a_cache_that_is_shared_are_those_of_eager(act: str, kind: str) -> None:
    def loss(run: Any, x: Tensor) -> Tensor:
        cache = a_cache(kind)
        return run(x, cache).square().mean() + cache.layers[2].values.sum()  # type: ignore[union-attr]

    args = (torch.ones(2, 1, 3, SIZE),)
    assert_equals_eager(stack(act_of(act)), args, calls=1, use=loss, reuse="auto")


@pytest.mark.parametrize("together", [(2,), (0, 1, 2)])
def test_slots_that_are_one_tensor_are_told_from_others(together: tuple[int, ...]) -> None:
    """One tensor is put into several places before the layers run."""

    def forward(layers: Any, x: Tensor, cache: Cache) -> Tensor:
        for number, slot in enumerate(cache.layers):
            held: Any = x * 2 + number
            slot.lazy_initialization(held, held)
            slot.keys = held
            slot.values = held if number in together else x * 3
        for layer in layers:
            x = layer(x, cache)
        return x

    model = Around(forward, *stack(act_of("writes in place")).layers)
    args, use = (torch.ones(2, 1, 3, SIZE),), lambda run, x: run(x, a_cache("dynamic"))
    with torch.no_grad():
        assert_equals_eager(model, args, calls=1, use=use, reuse="auto")


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
            assert slots.tests_of(index) != ()


def test_an_index_that_is_compared_notes_the_answer_alone() -> None:
    index: Any = OpenIndex(3)
    assert isinstance(index, int)
    assert is_index(index)
    assert index < 4
    assert slots.tests_of(index) == (("lt", 4, True),)
    assert index + 1.5 == 4.5
    assert slots.tests_of(index) is None


def test_layers_with_states_of_their_own_are_captured_whole_and_share() -> None:
    """A state that is filled in place, in a dictionary of the layer's part of the cache."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    sizes |= {"vocab_size": 32, "num_hidden_layers": 3, "num_key_value_heads": 1}
    sizes |= {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
    sizes |= {"mamba_d_state": 4, "mamba_dt_rank": 4, "pad_token_id": 0}
    torch.manual_seed(0)
    model = JambaForCausalLM(JambaConfig(**sizes))
    expected = copy.deepcopy(model)
    run: Any = lazyinline.compile(model, backend="eager", reuse="auto")
    ids = torch.randint(3, 32, (2, 4), generator=torch.Generator().manual_seed(0))
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

"""Caches of keys and values: made, filled and returned as in eager; ``generate`` with them."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from comparing import assert_close, assert_equals_eager, assert_same_gradients, twin
from hugging_face import VOCABULARY, build
from models import Made
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, cache_utils
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache, StaticCache
from transformers.modeling_outputs import (
    BaseModelOutputWithNoAttention,
    CausalLMOutputWithCrossAttentions,
)
from transformers.utils import generic

import lazyinline
from lazyinline.reuse import torch_pytree
from lazyinline.reuse.errors import PlanError
from lazyinline.reuse.torch_pytree import cache_classes, is_count, is_set_of_outputs

Build = Callable[[], Any]
gpt2, llama, t5 = (partial(build, kind, 1) for kind in ("gpt2", "llama", "t5"))
gemma2 = partial(build, "gemma2", sliding_window=6)  # in every other layer, whose cache counts


def tokens(length: int, *, batch: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def compiled(model: nn.Module) -> Any:
    return lazyinline.compile(model, backend="eager", reuse="auto")


def pair(build: Build) -> tuple[nn.Module, nn.Module, Any]:
    """Returns a model, a copy for eager, and the model compiled."""
    model = build().eval()
    return model, twin(model), compiled(model)


@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
@pytest.mark.sweep(keep="llama")
def test_training_with_the_default_config_equals_eager_through_the_cache_too(build: Build) -> None:
    model, expected, run = pair(build)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, expected)]
    for step in range(3):
        ids = tokens(8, seed=step)
        output, want = run(ids, labels=ids), expected(ids, labels=ids)
        assert type(output.past_key_values) is DynamicCache
        assert_close(output, want)
        for result in (output, want):
            loss = result.loss
            if step == 1:  # a loss may come through what was cached
                loss = loss + result.past_key_values.layers[0].values.square().mean()
            loss.backward()
        assert_same_gradients(model, expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


CACHES: dict[str, tuple[Build, Callable[[nn.Module], Cache]]] = {
    "dynamic": (gpt2, lambda model: DynamicCache()),
    "dynamic, by config": (llama, lambda model: DynamicCache(config=model.config)),
    "window": (gemma2, lambda model: DynamicCache(config=model.config)),
    "static": (llama, lambda model: StaticCache(config=model.config, max_cache_len=16)),
    "static, window": (gemma2, lambda model: StaticCache(config=model.config, max_cache_len=16)),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.sweep(keep="[dynamic]")
def test_a_cache_is_filled_in_place_as_in_eager(kind: str) -> None:
    """The caller's own objects, down to the layers, are what eager would leave."""
    build, make = CACHES[kind]
    model, expected, run = pair(build)
    cache, wanted = make(model), make(expected)
    layers, held = cache.layers, list(cache.layers)
    with torch.no_grad():
        for step, length in enumerate((5, 1)):
            ids = tokens(length, seed=step)
            output = run(input_ids=ids, past_key_values=cache)
            want = expected(input_ids=ids, past_key_values=wanted)
            assert output.past_key_values is cache
            assert cache.layers is layers
            assert all(a is b for a, b in zip(cache.layers, held, strict=bool(held)))
            assert_close(output, want)
            held = list(cache.layers)
    assert not run.last_report.ran_eagerly


def test_a_static_cache_is_written_in_its_own_tensors() -> None:
    model, _, run = pair(llama)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        run(tokens(4), past_key_values=cache)
        own = [(layer.keys, layer.values) for layer in cache.layers]
        for step in range(3):
            run(tokens(1, seed=step), past_key_values=cache)
        compiles = run.last_report.num_compiles
    for layer, (keys, values) in zip(cache.layers, own, strict=True):
        assert layer.keys is keys and layer.values is values
    assert compiles == 2  # one for the prompt, one for every token


def filled(run: Any, cache: Cache) -> list[Tensor]:
    """Fills a cache by a prompt and a token; returns the last logits and the first keys."""
    with torch.no_grad():
        run(tokens(4), past_key_values=cache)
        logits = run(tokens(1), past_key_values=cache).logits
    return [logits, cache.layers[0].keys]


def test_a_cache_that_is_more_than_tensors_and_numbers_runs_the_model_itself() -> None:
    model, expected, run = pair(llama)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        cache.note = nn.Linear(1, 1)
    assert_close(filled(run, caches[0]), filled(expected, caches[1]))
    assert "DynamicCache" in run.last_report.ran_eagerly


@pytest.mark.sweep
def test_a_quantized_cache_is_filled_as_in_eager() -> None:
    model, expected, run = pair(llama)
    ours, theirs = (QuantizedCache("fp8", config=model.config) for _ in range(2))
    assert_close(filled(run, ours)[0], filled(expected, theirs)[0])


def remembers(self: Any, x: Tensor, cache: Cache) -> Tensor:
    """Holds a cache that it may be given, too."""
    cache.update(x, x, 0)
    return x * self.own.get_seq_length() + cache.layers[0].keys.sum()


def test_a_model_that_holds_the_cache_that_it_is_given_runs_eagerly() -> None:
    model, expected, run = pair(lambda: Made(remembers, own=DynamicCache()))
    x = torch.randn(1, 1, 2, 4)
    for _ in range(2):
        assert_close(run(x, model.own), expected(x, expected.own))
    assert_close(run(x, DynamicCache()), expected(x, DynamicCache()))
    assert "its own" in run.last_report.ran_eagerly


def test_a_tensor_appended_to_an_empty_one_is_laid_out_as_in_eager() -> None:
    def starts_empty(_: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        keys = (x * 2 + 1).view(2, 3, 4, 8).transpose(1, 2)
        return torch.cat([torch.tensor([]), keys], dim=-2), keys.sum()

    args = (torch.randn(2, 3, 32),)
    assert_equals_eager(Made(starts_empty), args, calls=1, backend="inductor")


def test_a_cache_passed_twice_is_one() -> None:
    def two(_: Any, x: Tensor, a: Cache, b: Cache) -> tuple[Tensor, Cache]:
        a.update(x, x, 0)
        return b.layers[0].keys * 2, b

    run = compiled(Made(two))
    x = torch.randn(1, 1, 2, 4)
    for make in (lambda: [DynamicCache()] * 2, lambda: [DynamicCache(), DynamicCache()]):
        a, b = make()
        if a is not b:
            b.update(x, x, 0)
        c, d = copy.deepcopy((a, b))
        result, want = run(x, a, b), two(None, x, c, d)
        assert_close(result, want)
        assert result[1] is b
        assert_close((a, b), (c, d))


def test_a_step_refuses_a_cache_among_its_inputs() -> None:
    step = lazyinline.compile_step(llama(), loss_fn=lambda out: out.logits.sum(), backend="eager")
    with pytest.raises(PlanError, match="DynamicCache"):
        step(tokens(4), past_key_values=DynamicCache())


def test_contract_caches_and_their_layers_derive_from_known_bases() -> None:
    """The adapter names these; a transformers without them would have its caches unknown."""
    known = cache_classes()
    found = [c for c in vars(cache_utils).values() if isinstance(c, type)]
    named = [c for c in found if c.__name__.endswith(("Cache", "Layer"))]
    assert {cache_utils.Cache, cache_utils.DynamicLayer, cache_utils.StaticLayer} <= set(named)
    assert all(issubclass(c, known) for c in named)


def test_contract_layers_with_a_window_count_in_a_whole_number() -> None:
    """The adapter names it; under another name there would be a compile for each token."""
    dynamic = cache_utils.DynamicSlidingWindowLayer(sliding_window=4)
    static = cache_utils.StaticSlidingWindowLayer(max_cache_len=8, sliding_window=4)
    for layer, name in ((dynamic, "cumulative_length"), (static, "cumulative_length_int")):
        assert is_count(type(layer), name) and type(getattr(layer, name)) is int


def test_what_a_cache_holds_is_named() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    names = [name for name, _ in torch_pytree.flatten_with_names({"cache": cache, "x": 1})]
    assert names == ["cache.layers.0.keys", "cache.layers.0.values", "x"]


def generated(module: Any, ids: Tensor, num_tokens: int = 6, **options: Any) -> Tensor:
    torch.manual_seed(3)
    result: Tensor = module.generate(
        ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, **options
    )
    return result


class Case(NamedTuple):
    """A model that generates after prompts of these lengths, with so many compiles and links."""

    model: Callable[[], nn.Module]
    options: dict[str, Any]
    prompts: Sequence[int] = (5,)
    made: tuple[int, int] = (2, 4)  # the prompt, and every token after it
    in_place: bool = False


STATIC = {"cache_implementation": "static"}
CASES = {
    "greedy": Case(gpt2, {}),
    "sampling": Case(gpt2, {"do_sample": True, "top_k": 20, "temperature": 0.8}),
    "beams": Case(gpt2, {"num_beams": 2}),
    "static cache": Case(gpt2, STATIC, made=(2, 0)),
    "in place": Case(llama, {}, in_place=True),
    "a second prompt": Case(llama, {"num_tokens": 4}, (5, 7), made=(3, 4)),
    # What layers with a window of six count is a size: one program below, one for each edge, one
    # beyond.
    "a window that fills up": Case(gemma2, {"num_tokens": 10}, (4, 4), (4, 6)),
    "a window in a static cache": Case(gemma2, {"num_tokens": 10, **STATIC}, (4, 4), (4, 6)),
    "an encoder and its decoder": Case(t5, {"num_tokens": 4}, (6,), made=(3, 1)),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.sweep(keep=["second prompt", "encoder"])
def test_generate_runs_the_program_and_gives_eagers_tokens(kind: str) -> None:
    make, options, prompts, made, in_place = CASES[kind]
    model = make().eval()
    expected = twin(model)
    run: Any = lazyinline.compile(model, backend="eager", reuse="auto", in_place=in_place)  # type: ignore[call-overload]
    before = set(vars(model))
    for length in prompts:
        ids = tokens(length, seed=length)
        mask = torch.ones_like(ids)
        mask[1, :2] = 0  # a batch padded on the left
        more = {"do_sample": False, "attention_mask": mask, **options}
        assert torch.equal(generated(run, ids, **more), generated(expected, ids, **more))
    report: Any = lazyinline.last_report(run)
    assert not report.ran_eagerly
    assert (report.num_compiles, report.num_links) == made, report.why_static
    assert run.generate.__name__ == "generate"
    with pytest.raises(ValueError, match="max_new_tokens"):
        run.generate(ids, max_new_tokens=-1)
    left = "methods leave behind in the model what eager does not"
    assert set(vars(model)) == before | vars(expected).keys(), left


class Called(GPT2LMHeadModel):
    """Does something of its own around each call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def test_a_model_whose_calls_go_past_what_is_compiled_generates_as_in_eager_and_says_so() -> None:
    model = gpt2().eval()
    model.__class__ = Called
    run = compiled(model)
    with pytest.warns(UserWarning, match=r"runs Called eagerly.*__call__ of its own") as warned:
        found = [generated(run, tokens(4)) for _ in range(2)]
    assert torch.equal(found[0], generated(twin(model), tokens(4)))
    assert len(warned) == 1 and torch.equal(*found)
    assert "Called has a __call__ of its own" in run.last_report.ran_eagerly
    run(tokens(4))
    assert not run.last_report.ran_eagerly


def test_classes_of_outputs_of_other_models_are_not_looked_into() -> None:
    assert is_set_of_outputs(generic._registered_model_output_types)
    run = compiled(gpt2().eval())
    with torch.no_grad():
        run(tokens(4))
    contents = vars(run)["_lazyinline_calls"].entries.first.guard._evidence.contents
    assert contents.has_met(CausalLMOutputWithCrossAttentions)
    assert not contents.has_met(BaseModelOutputWithNoAttention)

"""``generate`` on a compiled model: eager's tokens, from two compiles."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from comparing import twin
from test_caches import compiled, gemma2, gpt2, llama, t5, tokens
from torch import Tensor, nn
from transformers import GPT2LMHeadModel
from transformers.modeling_outputs import (
    BaseModelOutputWithNoAttention,
    CausalLMOutputWithCrossAttentions,
)
from transformers.utils import generic

import lazyinline
from lazyinline.reuse.torch_pytree import is_set_of_outputs


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
    "a second prompt": Case(llama, {}, (5, 7), made=(3, 6)),
    # What layers with a window of six count is a size: one program below, one for each edge, one
    # beyond.
    "a window that fills up": Case(gemma2, {"num_tokens": 10}, (4, 4), (4, 6)),
    "a window in a static cache": Case(gemma2, {"num_tokens": 10, **STATIC}, (4, 4), (4, 6)),
    "an encoder and its decoder": Case(t5, {}, (6,), made=(3, 3)),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.sweep(keep=["greedy", "second prompt", "encoder"])
def test_generate_runs_the_program_and_gives_eagers_tokens(kind: str) -> None:
    make, options, prompts, made, in_place = CASES[kind]
    model = make().eval()
    expected = twin(model)
    run: Any = lazyinline.compile(model, backend="eager", reuse="auto", in_place=in_place)  # type: ignore[call-overload]
    for length in prompts:
        ids = tokens(length, seed=length)
        mask = torch.ones_like(ids)
        mask[1, :2] = 0  # a batch padded on the left
        more = {"do_sample": False, "attention_mask": mask, **options}
        assert torch.equal(generated(run, ids, **more), generated(expected, ids, **more))
    report: Any = lazyinline.last_report(run)
    assert not report.ran_eagerly
    assert (report.num_compiles, report.num_links) == made, report.why_static


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


def test_methods_of_the_model_leave_nothing_behind_in_it() -> None:
    model = gpt2().eval()
    run = compiled(model)
    before = set(vars(model))
    generated(run, tokens(4))
    assert set(vars(model)) == before
    assert run.generate.__name__ == "generate"
    with pytest.raises(ValueError, match="max_new_tokens"):
        run.generate(tokens(4), max_new_tokens=-1)
    assert set(vars(model)) == before


@pytest.mark.sweep
def test_lengths_of_a_text_keep_their_small_arenas() -> None:
    model = gpt2().eval()
    run = lazyinline.compile(model, reuse="auto")
    more = {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False}
    for _ in range(2):
        tokens_of = run.generate(tokens(3), **more)
    assert torch.equal(tokens_of, model.generate(tokens(3), **more))
    entries = vars(run)["_lazyinline_calls"].entries
    assert len(entries) == 14
    assert all(entry.is_small for entry in entries)
    programs = [entry._compiled.runtime.program for entry in entries]
    assert all(program._arenas.idle for program in programs)
    assert not any("native_layer_norm" in program.foreign_launches() for program in programs)


def test_classes_of_outputs_of_other_models_are_not_looked_into() -> None:
    assert is_set_of_outputs(generic._registered_model_output_types)
    run = compiled(gpt2().eval())
    with torch.no_grad():
        run(tokens(4))
    contents = vars(run)["_lazyinline_calls"].entries.first.guard._evidence.contents
    assert contents.has_met(CausalLMOutputWithCrossAttentions)
    assert not contents.has_met(BaseModelOutputWithNoAttention)

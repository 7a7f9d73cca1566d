"""``generate`` on a compiled model: eager's tokens, from two compiles."""

from typing import Any

import pytest
import torch
from comparing import assert_close, twin
from test_caches import compiled, gemma2, gpt2, llama, t5, tokens
from torch import Tensor
from transformers import GPT2LMHeadModel
from transformers.modeling_outputs import (
    BaseModelOutputWithNoAttention,
    CausalLMOutputWithCrossAttentions,
)
from transformers.utils import generic

import lazyinline
from lazyinline.reuse.torch_pytree import is_set_of_outputs

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "beams": {"num_beams": 2},
    "static cache": {"cache_implementation": "static"},
}


def generated(module: Any, ids: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(3)
    result: Tensor = module.generate(ids, max_new_tokens=6, min_new_tokens=6, **options)
    return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sweep(keep="greedy")
def test_generate_runs_the_program_and_gives_eagers_tokens(mode: str) -> None:
    model = gpt2().eval()
    expected = twin(model)
    run = compiled(model)
    ids = tokens(5)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0  # a batch padded on the left
    options = {"attention_mask": mask, **MODES[mode]}
    assert torch.equal(generated(run, ids, **options), generated(expected, ids, **options))
    report = run.last_report
    assert not report.ran_eagerly
    assert report.num_compiles == 2, report.why_static  # the prompt, and every token after it
    assert report.num_links == (0 if mode == "static cache" else 4)


@pytest.mark.sweep
def test_generate_on_a_model_compiled_in_place_runs_the_program() -> None:
    model = llama().eval()
    expected = twin(model)
    assert lazyinline.compile(model, backend="eager", reuse="auto", in_place=True) is model
    ids = tokens(5)
    assert torch.equal(generated(model, ids), generated(expected, ids))
    report = lazyinline.last_report(model)
    assert not report.ran_eagerly
    assert (report.num_compiles, report.num_links) == (2, 4)


@pytest.mark.sweep
def test_generate_returns_states_attentions_and_cache_as_eager_does() -> None:
    model = gpt2().eval()
    model.set_attn_implementation("eager")  # the one that has attentions to return
    expected = twin(model)
    run = compiled(model)
    more = {
        "return_dict_in_generate": True,
        "output_hidden_states": True,
        "output_attentions": True,
        "output_logits": True,
    }
    found, wanted = (generated(m, tokens(4), do_sample=False, **more) for m in (run, expected))
    assert_close(dict(found), dict(wanted))
    assert not run.last_report.ran_eagerly


def test_a_second_prompt_costs_no_compile_per_token() -> None:
    model = llama().eval()
    expected = twin(model)
    run = compiled(model)
    for length in (5, 7):
        ids = tokens(length, seed=length)
        assert torch.equal(generated(run, ids), generated(expected, ids))
    assert run.last_report.num_compiles <= 3


@pytest.mark.parametrize("mode", ["greedy", "static cache"])
@pytest.mark.sweep
def test_a_window_that_fills_up_costs_no_compile_per_token(mode: str) -> None:
    """What its layers count is a size: one program below, one for each edge, one beyond."""
    model = gemma2().eval()  # a window of six
    expected = twin(model)
    run = compiled(model)
    more = {**MODES[mode], "max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    for _ in range(2):
        ids = tokens(4)
        assert torch.equal(run.generate(ids, **more), expected.generate(ids, **more))
    report = run.last_report
    assert not report.ran_eagerly
    assert report.num_compiles == 4, report.why_static
    assert report.num_links == 6


@pytest.mark.sweep
def test_an_encoder_and_its_decoder_generate_eagers_tokens() -> None:
    model = t5().eval()
    expected = twin(model)
    run = compiled(model)
    assert torch.equal(generated(run, tokens(6)), generated(expected, tokens(6)))


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
    assert all(program._pool for program in programs)
    assert not any("native_layer_norm" in program.foreign_launches() for program in programs)


def test_classes_of_outputs_of_other_models_are_not_looked_into() -> None:
    assert is_set_of_outputs(generic._registered_model_output_types)
    run = compiled(gpt2().eval())
    with torch.no_grad():
        run(tokens(4))
    contents = vars(run)["_lazyinline_calls"].entries.first.guard._evidence.contents
    assert contents.has_met(CausalLMOutputWithCrossAttentions)
    assert not contents.has_met(BaseModelOutputWithNoAttention)

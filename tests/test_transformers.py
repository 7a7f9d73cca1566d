"""Hugging Face models, unmodified: their layer class is marked from outside."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_gradients, gradients, relative_error, twin
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import (
    CausalLMOutputWithCrossAttentions,
    CausalLMOutputWithPast,
)
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

import lazyinline
from lazyinline import CompileReport, lazy_inline
from lazyinline.reuse.ir.program import count_calls

for layer in (GPT2Block, LlamaDecoderLayer, BertLayer, T5Block):
    lazy_inline(layer)

VOCABULARY = 67


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER: dict[str, Any] = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "use_cache": False}


def gpt2(dropout: float = 0.0, layers: int = 3) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": layers, "n_head": 4}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, **tokens, use_cache=False)).train()


def llama(layers: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**DECODER, num_hidden_layers=layers)).train()


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (2, 8), generator=generator)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    labels = ids.clone()
    labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.fixture(params=["eager", "inductor"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def train(run: Callable[..., Any], model: nn.Module, steps: int) -> list[tuple[Tensor, Any]]:
    """Returns loss and gradients before each step and after the last.

    These weights start at 0.02, so AdamW's first steps, which are lr times the sign of the
    gradient even where that is rounding, show sooner than in test_compile: at lr=1e-4 the kernels
    of torch.compile are 1.6e-5 from eager after one step of GPT-2, at 1e-5 they are 1.7e-6.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    history = []
    torch.manual_seed(11)
    for step in range(steps + 1):
        optimizer.zero_grad()
        loss = run(**batch(step % 2)).loss
        loss.backward()
        grads = {name: g.clone() for name, g in gradients(model).items() if g is not None}
        history.append((loss.detach(), grads))
        optimizer.step()
    return history


def assert_same_training(model: nn.Module, backend: str, layer_class: str) -> CompileReport:
    expected = twin(model)
    compiled = lazyinline.compile(model, backend=backend)
    found, wanted = train(compiled, model, 5), train(expected, expected, 5)
    for (loss, _), (want, _) in zip(found, wanted, strict=True):
        assert relative_error(loss, want) <= 1e-5
    for step in (0, 1, 5):
        grads, want_grads = found[step][1], wanted[step][1]
        assert grads.keys() == want_grads.keys() and grads
        errors = {name: relative_error(grads[name], g) for name, g in want_grads.items()}
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] <= 1e-5, f"{worst} after {step} steps: {errors[worst]:.1e}"
    report = compiled.last_report
    assert [c.num_calls for c in report.closures if c.name == layer_class] == [3]
    assert not report.not_shared()
    return report


@pytest.mark.parametrize(
    ("model", "layer_class"), [(gpt2(), "GPT2Block"), (llama(), "LlamaDecoderLayer")]
)
@pytest.mark.sweep(keep="eager-model0")
def test_training_equals_eager_after_1_and_5_adamw_steps(
    model: nn.Module, layer_class: str, backend: str
) -> None:
    # The layers of GPT-2 know their index and those of Llama hold the configuration: neither is in
    # the way of sharing.
    assert_same_training(twin(model), backend, layer_class)


@pytest.mark.sweep
def test_gpt2_with_dropout_draws_eagers_masks_under_one_seed(backend: str) -> None:
    assert_same_training(gpt2(dropout=0.1), backend, "GPT2Block")


@pytest.mark.sweep
def test_attention_dropout_of_one_block_equals_eager_with_generated_kernels() -> None:
    """Inductor once fused a reader of a mask, drawn in place, into a kernel before the draw."""
    model = gpt2(dropout=0.3, layers=1).transformer.h[0]
    expected = twin(model)
    compiled = lazyinline.compile(model, backend="inductor")
    x = torch.randn(2, 8, 32)
    for run in (compiled, expected):
        torch.manual_seed(2)
        for _ in range(3):
            out = run(x)
            (out if isinstance(out, Tensor) else out[0]).square().mean().backward()
    assert_same_gradients(model, expected)


@pytest.mark.parametrize(
    ("build", "output_class"),
    [(gpt2, CausalLMOutputWithCrossAttentions), (llama, CausalLMOutputWithPast)],
)
@pytest.mark.sweep(keep="eager-llama")
def test_inference_keeps_the_output_class_and_equals_eager(
    build: Callable[[], nn.Module], output_class: type, backend: str
) -> None:
    model = build().eval()
    compiled = lazyinline.compile(model, backend=backend)
    inputs = batch()
    ids = inputs["input_ids"]
    with torch.no_grad():
        for kwargs in (inputs, {"input_ids": ids}):
            out, want = compiled(**kwargs), model(**kwargs)
            assert type(out) is output_class
            assert list(out) == list(want)
            assert_close(out.to_tuple(), want.to_tuple())
        assert_close(compiled(ids).logits, model(ids).logits)
        assert type(compiled(ids, return_dict=False)) is tuple


@pytest.mark.sweep
def test_options_of_the_configuration_count_at_the_next_call() -> None:
    model = gpt2().eval()
    compiled = lazyinline.compile(model, backend="eager")
    ids = batch()["input_ids"]
    with torch.no_grad():
        assert compiled(ids).hidden_states is None
        model.config.output_hidden_states = True
        want = model(ids).hidden_states
        assert len(want) == 4
        # transformers collects these in hooks on the layers, so each layer has to be run.
        assert_close(compiled(ids).hidden_states, want)
        hidden = compiled(ids, output_hidden_states=False).hidden_states
        assert hidden is None


@pytest.mark.sweep
def test_gradient_checkpointing_changes_no_number() -> None:
    model = llama()
    expected = twin(model)
    model.gradient_checkpointing_enable()
    compiled = lazyinline.compile(model, backend="eager")
    compiled(**batch()).loss.backward()
    expected(**batch()).loss.backward()
    assert_same_gradients(model, expected)


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.sweep
def test_generation_goes_on_working_and_agrees(build: Callable[[], nn.Module]) -> None:
    model: Any = build().eval()
    compiled: Any = lazyinline.compile(model, backend="eager")
    ids = batch()["input_ids"][:1]
    with torch.no_grad():
        for _ in range(3):
            token = compiled(ids).logits[:, -1:].argmax(-1)
            ids = torch.cat((ids, token), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generated = compiled.generate(
            ids[:, :8], max_new_tokens=3, do_sample=False, eos_token_id=-1
        )
    assert torch.equal(generated, ids)


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**SMALL, num_hidden_layers=3))


def t5() -> nn.Module:
    layers = {"num_layers": 3, "num_decoder_layers": 3, "use_cache": False}
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    tokens = {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **layers, **tokens))


@pytest.mark.parametrize(("build", "layer_class"), [(bert, "BertLayer"), (t5, "T5Block")])
@pytest.mark.sweep(keep="bert")
def test_encoders_train_as_in_eager(build: Callable[[], nn.Module], layer_class: str) -> None:
    torch.manual_seed(0)
    model, inputs = build().train(), batch()
    expected = twin(model)
    compiled = lazyinline.compile(model, backend="eager")
    for run in (compiled, expected):
        torch.manual_seed(4)  # both have dropout
        for _ in range(2):
            run(**inputs).loss.backward()
    # Biases of keys have no gradient but rounding: adding one to all scores of a row changes
    # nothing that softmax sees.
    real = {n: p for n, p in model.named_parameters() if not n.endswith("key.bias")}
    wanted = dict(expected.named_parameters())
    for name, parameter in real.items():
        assert relative_error(parameter.grad, wanted[name].grad) <= 1e-5, name
    calls = count_calls(lazyinline.capture(model, (), inputs, train=True))
    layers = [number for closure, number in calls.items() if closure.name == layer_class]
    assert sum(layers) == (3 if build is bert else 6)
    # T5's first layer computes the position bias that the others receive, on either side.
    assert len(layers) <= (1 if build is bert else 4)


@pytest.mark.sweep
def test_reuse_off_gives_the_same_numbers() -> None:
    models = [llama() for _ in range(2)]
    for model, reuse in zip(models, ("marked", "off"), strict=True):
        lazyinline.compile(model, backend="eager", reuse=reuse)(**batch()).loss.backward()
    assert_same_gradients(*models, 1e-6)


def gemma2() -> nn.Module:
    config = Gemma2Config(**DECODER, num_hidden_layers=4, sliding_window=4)
    return Gemma2ForCausalLM(config)


def mixtral() -> nn.Module:
    config = MixtralConfig(**DECODER, num_hidden_layers=3, num_local_experts=4)
    return MixtralForCausalLM(config)


def llama4() -> nn.Module:
    """Its rotary embedding is in complex numbers; its experts' weights start uninitialized."""
    config = Llama4TextConfig(
        **DECODER, num_hidden_layers=2, intermediate_size_mlp=48, num_local_experts=4
    )
    model = Llama4ForCausalLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def albert() -> nn.Module:
    return AlbertForMaskedLM(AlbertConfig(**SMALL, num_hidden_layers=3, embedding_size=16))


@pytest.mark.parametrize("build", [gemma2, mixtral, albert, llama4])
@pytest.mark.sweep(keep="mixtral")
def test_families_train_as_in_eager_without_a_mark(build: Callable[[], nn.Module]) -> None:
    """Alternating windows, products of experts, a layer that runs repeatedly, complex numbers."""
    torch.manual_seed(0)
    model = build().train()
    expected = twin(model)
    compiled = lazyinline.compile(model, backend="eager", reuse="auto")
    for run in (compiled, expected):
        torch.manual_seed(4)
        run(**batch()).loss.backward()
    assert_same_gradients(model, expected, 1e-5)
    report = compiled.last_report
    assert report.num_nodes < report.num_nodes_if_inlined
    assert any(decision.shared for decision in report.decisions)


def test_a_training_step_of_llama4_equals_eager() -> None:
    torch.manual_seed(0)
    model = llama4().train()
    expected = twin(model)
    step = lazyinline.compile_step(model, backend="eager", reuse="auto")
    loss, want = step(**batch()), expected(**batch()).loss
    want.backward()
    assert relative_error(loss, want) <= 1e-5
    assert_same_gradients(model, expected, 1e-5)

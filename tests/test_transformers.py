"""Hugging Face models, unmodified: their layer class is marked from outside."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import Outcome, assert_close, assert_equals_eager
from hugging_face import VOCABULARY, build
from torch import Tensor, nn

import lazyinline
from lazyinline.reuse.ir.program import count_calls

DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def made(kind: str, layers: int = 3, **options: Any) -> Any:
    return build(kind, layers, **{"use_cache": False, **options})


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (2, 8), generator=generator)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Loss(nn.Module):
    """The loss of a model alone, as a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Tensor:
        return self.model(**kwargs).loss


# These weights start at 0.02, so AdamW's first steps, which are lr times the sign of the gradient
# even where that is rounding, show sooner than in test_compile: at lr=1e-4 the kernels of
# torch.compile are 1.6e-5 from eager after one step of GPT-2, at 1e-5 they are 1.7e-6.
adamw = functools.partial(torch.optim.AdamW, lr=1e-5)


def assert_trains_like_eager(model: nn.Module, calls: int, **options: Any) -> Outcome:
    return assert_equals_eager(Loss(model), (), batch(), calls=calls, **options)


@pytest.mark.parametrize(
    ("kind", "options", "layer_class"),
    [
        ("gpt2", DROPOUT, "GPT2Block"),
        ("gpt2", {}, "GPT2Block"),
        ("llama", {}, "LlamaDecoderLayer"),
    ],
    ids=["gpt2", "gpt2 with dropout", "llama"],
)
@pytest.mark.sweep(keep="eager-llama")
def test_training_equals_eager_in_steps_of_adamw(
    kind: str, options: dict[str, float], layer_class: str, backend: str
) -> None:
    # The layers of GPT-2 know their index and those of Llama hold the configuration: neither is in
    # the way of sharing.
    model = made(kind, **options)
    report = assert_trains_like_eager(model, 6, backend=backend, optimizer=adamw).told
    assert [c.num_calls for c in report.closures if c.name == layer_class] == [3]
    assert not report.not_shared()


@pytest.mark.sweep
def test_attention_dropout_of_one_block_equals_eager_with_generated_kernels() -> None:
    # Inductor once fused a reader of a mask, drawn in place, into a kernel before the draw.
    block = made("gpt2", 1, **dict.fromkeys(DROPOUT, 0.3)).transformer.h[0]
    assert_equals_eager(block, (torch.randn(2, 8, 32),), calls=3, backend="inductor")


@pytest.mark.sweep
def test_options_of_the_configuration_count_at_the_next_call() -> None:
    model = made("gpt2").eval()
    compiled: Any = lazyinline.compile(model, backend="eager")
    ids = batch()["input_ids"]
    with torch.no_grad():
        assert compiled(ids).hidden_states is None
        model.config.output_hidden_states = True
        want = model(ids).hidden_states
        assert len(want) == 4
        # transformers collects these in hooks on the layers, so each layer has to be run.
        assert_close(compiled(ids).hidden_states, want)
        assert compiled(ids, output_hidden_states=False).hidden_states is None


@pytest.mark.parametrize(("kind", "layer_class"), [("bert", "BertLayer"), ("t5", "T5Block")])
@pytest.mark.sweep(keep="bert")
def test_encoders_train_as_in_eager(kind: str, layer_class: str) -> None:
    model = made(kind)
    # Biases of keys have no gradient but rounding: adding one to all scores of a row changes
    # nothing that softmax sees.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("key.bias"))
    assert_equals_eager(Loss(model), (), batch())
    calls = count_calls(lazyinline.capture(model, (), batch(), train=True))
    layers = [number for closure, number in calls.items() if closure.name == layer_class]
    assert sum(layers) == (3 if kind == "bert" else 6)
    # T5's first layer computes the position bias that the others receive, on either side.
    assert len(layers) <= (1 if kind == "bert" else 4)


def with_complex_numbers() -> nn.Module:
    """Llama 4: its rotary embedding is in them; its experts' weights start uninitialized."""
    model: nn.Module = made("llama4_text", 2, intermediate_size_mlp=48, num_local_experts=4)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "alternating windows": lambda: made("gemma2", 4, sliding_window=4),
    "products of experts": lambda: made("mixtral", 2, num_local_experts=4),
    "a layer that runs repeatedly": lambda: made("albert"),
    "complex numbers": with_complex_numbers,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sweep(keep="experts")
def test_families_train_as_in_eager_without_a_mark(family: str) -> None:
    report = assert_trains_like_eager(FAMILIES[family](), 1, reuse="auto").told
    assert report.num_nodes < report.num_nodes_if_inlined
    assert any(decision.shared for decision in report.decisions)


def test_a_training_step_with_complex_numbers_equals_eager() -> None:
    assert_trains_like_eager(with_complex_numbers(), 1, door="step", reuse="auto")

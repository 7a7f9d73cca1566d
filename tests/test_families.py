"""Hugging Face families, unmodified: with default kernels in a sweep, and marked from outside.

``benchmarks/families.py`` compares all families with PyTorch's own kernels; swept here are some
that differ in kind, at sequences past their window and with images that lie channels last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import hugging_face
import pytest
import torch
import zoo
from comparing import Outcome, assert_close, assert_equals_eager, gradients, relative_error, twin
from contracts import values_compared
from hugging_face import VOCABULARY
from models import Made
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import lazyinline
from lazyinline.reuse.ir.program import count_calls

WINDOW, LENGTH = 8, 24
# Eager's own gradients of Swin and SigLIP in float32 are up to this far from those in float64; a
# wrong one differs by 1e-2 and more.
GRADIENT_TOLERANCE = 1e-4

# A family of each kind, with options of its configuration.
KINDS: dict[str, dict[str, Any]] = {
    "GPT-2": {},  # learned positions, dropout
    "Mistral": {"sliding_window": WINDOW},
    "Gemma 2": {"sliding_window": WINDOW},  # every second layer has the window
    "Gemma 4": {  # keys and values of another size where there is no window
        "sliding_window": WINDOW,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
    },
    "GPT-OSS": {"sliding_window": WINDOW},  # sinks, experts
    "Cohere2": {"sliding_window": WINDOW},
    "DeepSeek-V3": {},  # latent attention, experts
    "Mamba": {},
    "ModernBERT": {},  # no cache, two kinds of layers
    "T5": {},
    "Whisper": {},
    "SigLIP": {},  # images and texts
    "Swin": {},
    "ConvNeXt": {},
    "ResNet": {},
}
WITH_WINDOW = [name for name, options in KINDS.items() if "sliding_window" in options]


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """Returns a model and inputs: texts are longer than the window, images lie channels last."""
    family = next((f for f in (*zoo.ASKED, *zoo.FURTHER) if f.name == name), None)
    if family is None:
        prefix = name.replace(" ", "")
        pytest.importorskip(f"transformers.models.{prefix.lower()}")
        config = f"{prefix}TextConfig" if name == "Gemma 4" else f"{prefix}Config"
        family = zoo.Family(name, f"{prefix}ForCausalLM", config, zoo.text, KINDS[name])
    model, inputs = family.build()
    window = KINDS[name].get("sliding_window")
    assert window is None or model.config.sliding_window == window
    if family.inputs is zoo.text and not model.config.is_encoder_decoder:
        inputs = {"input_ids": ids(LENGTH), "labels": ids(LENGTH)}
    elif "pixel_values" in inputs:
        last = {"memory_format": torch.channels_last}
        model, inputs["pixel_values"] = model.to(**last), inputs["pixel_values"].to(**last)
    return model, inputs


def ids(length: int) -> Tensor:
    return torch.randint(3, zoo.VOCAB, (2, length), generator=torch.Generator().manual_seed(3))


def worst_gradient(model: nn.Module, expected: nn.Module) -> tuple[float, str]:
    """Returns the largest relative error; what is zero but for rounding counts as its others do."""
    wanted = {name: g for name, g in gradients(expected).items() if g is not None}
    found = {name: g for name, g in gradients(model).items() if g is not None}
    assert found.keys() == wanted.keys() and wanted
    largest = max(g.norm().item() / math.sqrt(g.numel()) for g in wanted.values())

    def error(name: str) -> float:
        floor = 1e-2 * largest * math.sqrt(wanted[name].numel())
        size = wanted[name].norm().item()
        return relative_error(found[name], wanted[name]) * size / max(size, floor, 1e-300)

    return max((error(name), name) for name in wanted)


@pytest.mark.sweep
@pytest.mark.parametrize("name", KINDS)
def test_an_inference_and_three_steps_of_adamw_are_eagers(name: str) -> None:
    model, inputs = build(name)
    expected = twin(model)
    compiled = lazyinline.compile(model, reuse="auto")
    with torch.no_grad():
        for _ in range(2):  # what is done at a first call alone (a warning) makes that one eager
            assert_same_tensors(compiled.eval()(**inputs), expected.eval()(**inputs))
    assert not compiled.last_report.ran_eagerly
    runs = {compiled: model, expected: expected}
    steps = {run: torch.optim.AdamW(run.train().parameters(), lr=1e-5) for run in runs}
    for seed in range(3):
        losses = [stepped(run, steps[run], inputs, seed) for run in runs]
        assert_close(*losses)
        error, parameter = worst_gradient(model, expected)
        assert error <= GRADIENT_TOLERANCE, f"{parameter} in step {seed}: {error:.1e}"
    assert not compiled.last_report.ran_eagerly


def stepped(
    run: nn.Module, optimizer: torch.optim.Optimizer, inputs: Mapping[str, Any], seed: int
) -> Tensor:
    """Returns the loss of a training step, whose gradients stay."""
    optimizer.zero_grad()
    torch.manual_seed(seed)
    loss: Tensor = zoo.scalar(run(**inputs))
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_same_tensors(found: Any, expected: Any) -> None:
    results = [pytree.tree_leaves(output) for output in (found, expected)]
    assert_close(*([x for x in leaves if isinstance(x, Tensor)] for leaves in results))


@pytest.mark.sweep
@pytest.mark.parametrize("name", WITH_WINDOW)
@pytest.mark.parametrize("prompt", [WINDOW - 3, WINDOW + 3])
def test_generate_gives_eagers_tokens_past_the_window(name: str, prompt: int) -> None:
    model, _ = build(name)
    compiled = lazyinline.compile(model, reuse="auto")
    more = {"max_new_tokens": WINDOW, "min_new_tokens": WINDOW, "do_sample": False}
    runs = (compiled, twin(model))
    found, expected = (run.eval().generate(ids(prompt), **more) for run in runs)
    assert torch.equal(found, expected)
    assert not compiled.last_report.ran_eagerly


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("family", [*zoo.ASKED, *zoo.FURTHER], ids=lambda family: family.name)
def test_values_of_traces_are_those_of_inductor(family: zoo.Family, dynamic: bool | None) -> None:
    model, inputs = family.build()
    model(
        **inputs
    )  # transformers looks for libraries in Mamba's first forward, which is not compiled
    with values_compared() as taken:
        compiled = lazyinline.compile(model.train(), dynamic=dynamic)
        zoo.scalar(compiled(**inputs)).backward()
    assert any(taken)


DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def made(kind: str, layers: int = 3, **options: Any) -> Any:
    return hugging_face.build(kind, layers, **{"use_cache": False, **options})


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (2, 8), generator=generator)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_of(model: nn.Module) -> nn.Module:
    """Returns the loss of a model alone, as a model."""
    return Made(lambda self, **kwargs: self.model(**kwargs).loss, model=model)


# These weights start at 0.02, so AdamW's first steps, which are lr times the sign of the gradient
# even where that is rounding, show sooner than in test_compile: at lr=1e-4 the kernels of
# torch.compile are 1.6e-5 from eager after one step of GPT-2, at 1e-5 they are 1.7e-6.
adamw = functools.partial(torch.optim.AdamW, lr=1e-5)


def assert_trains_like_eager(model: nn.Module, calls: int, **options: Any) -> Outcome:
    return assert_equals_eager(loss_of(model), (), batch(), calls=calls, **options)


@pytest.mark.parametrize(
    ("kind", "options", "layer_class"),
    [("gpt2", DROPOUT, "GPT2Block"), ("gpt2", {}, "GPT2Block"), ("llama", {}, "LlamaDecoderLayer")],
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


@pytest.mark.parametrize(("kind", "layer_class"), [("bert", "BertLayer"), ("t5", "T5Block")])
@pytest.mark.sweep
def test_encoders_train_as_in_eager(kind: str, layer_class: str) -> None:
    model = made(kind)
    # Biases of keys have no gradient but rounding: adding one to all scores of a row changes
    # nothing that softmax sees.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("key.bias"))
    assert_equals_eager(loss_of(model), (), batch())
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


@pytest.mark.sweep
def test_a_training_step_with_complex_numbers_equals_eager() -> None:
    assert_trains_like_eager(with_complex_numbers(), 1, door="step", reuse="auto")

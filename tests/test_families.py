"""Hugging Face families with the kernels of the default backend, where layouts and windows matter.

``benchmarks/families.py`` compares all families with PyTorch's own kernels; here are some that
differ in kind, at sequences past their window and with images that lie channels last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import zoo
from comparing import assert_close, gradients, relative_error, twin
from contracts import values_compared
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import lazyinline

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

pytestmark = pytest.mark.sweep


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


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("family", [*zoo.ASKED, *zoo.FURTHER], ids=lambda family: family.name)
def test_values_of_a_trace_are_those_that_inductor_finds(
    family: zoo.Family, dynamic: bool | None
) -> None:
    model, inputs = family.build()
    with values_compared() as taken:
        compiled = lazyinline.compile(model.train(), dynamic=dynamic)
        zoo.scalar(compiled(**inputs)).backward()
    assert any(taken)

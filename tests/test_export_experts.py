"""Models whose experts are one grouped product, as transformers writes them, in onnxruntime."""

from __future__ import annotations

import pathlib
from typing import Any

import hugging_face
import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

import lazyinline
from lazyinline import lazy_inline

lazy_inline(MixtralDecoderLayer)

TOLERANCE = 1e-5


def run(path: pathlib.Path, *inputs: Tensor) -> list[Any]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    return list(session.run(None, {n: v.numpy() for n, v in zip(names, inputs, strict=True)}))


def assert_close(found: Any, expected: Tensor) -> None:
    wanted = expected.detach().numpy()
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()


class Grouped(nn.Module):
    def forward(self, left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(left, right, offs=ends)


@pytest.mark.parametrize(
    ("left", "right"),
    [((12, 8), (3, 8, 4)), ((4, 12), (12, 8)), ((3, 4, 8), (8, 12))],
    ids=["groups of rows", "groups of the sum", "groups of columns"],
)
def test_a_grouped_product_follows_the_offsets(
    left: tuple[int, ...], right: tuple[int, ...], tmp_path: pathlib.Path
) -> None:
    a, b = torch.randn(left), torch.randn(right)
    ends = [torch.tensor(e, dtype=torch.int32) for e in ([4, 8, 12], [0, 12, 12], [3, 3, 12])]
    path = tmp_path / "model.onnx"
    lazyinline.export_onnx(Grouped(), (a, b, ends[0]), path)
    for end in ends:  # groups of no rows too
        assert_close(run(path, a, b, end)[0], Grouped()(a, b, end))


def test_rows_behind_the_last_group_are_there(tmp_path: pathlib.Path) -> None:
    path, end = tmp_path / "model.onnx", torch.tensor([4, 8, 12], dtype=torch.int32)
    a, b = torch.randn(12, 8), torch.randn(3, 8, 4)
    lazyinline.export_onnx(Grouped(), (a, b, end), path)
    short = torch.tensor([4, 6, 9], dtype=torch.int32)
    (found,) = run(path, a, b, short)
    assert found.shape == (12, 4)
    assert_close(found[:9], Grouped()(a, b, short)[:9])
    assert not found[9:].any()


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {**hugging_face.SIZES, **hugging_face.TOKENS}
    config = MixtralConfig(
        num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4, use_cache=False, **sizes
    )
    return MixtralForCausalLM(config)


@pytest.mark.sweep
def test_a_mixture_of_experts_runs_at_every_length(tmp_path: pathlib.Path) -> None:
    path, model = tmp_path / "model.onnx", mixtral().eval()
    ids = torch.randint(1, hugging_face.VOCABULARY, (2, 12))
    shapes = {"input_ids": {1: "seq"}}
    report = lazyinline.export_onnx(model, (ids,), path, dynamic_shapes=shapes)
    assert report.functions.keys() == {"glue", "MixtralDecoderLayer", "glue_1"}
    for length in (5, 12, 31):
        ids = torch.randint(1, hugging_face.VOCABULARY, (2, length))
        assert_close(run(path, ids)[0], model(ids).logits)


@pytest.mark.sweep
def test_a_mixture_of_experts_gives_every_gradient(tmp_path: pathlib.Path) -> None:
    path, model = tmp_path / "model.onnx", mixtral().train()
    ids = torch.randint(1, hugging_face.VOCABULARY, (2, 12))
    report = lazyinline.export_onnx(model, (ids,), path, kwargs={"labels": ids}, train=True)
    other = torch.randint(1, hugging_face.VOCABULARY, (2, 12))
    model(other, labels=other).loss.backward()
    found = dict(zip(report.outputs, run(path, other, other), strict=True))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_close(found[f"grad.{name}"], parameter.grad)

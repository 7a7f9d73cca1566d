"""Blocks: the key that shows their constructor's arguments, and blocks in blocks, to any depth."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_equals_eager
from models import Stack, example, linear
from torch import Tensor, nn
from transformers import T5Config, T5Model

import lazyinline
from lazyinline import lazy_inline
from lazyinline.frontend.capture.regions import InitKeys, text_of_keys


class Norm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


class Base(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads


class Block(Base):
    def __init__(
        self, width: int, heads: int, act: Any = nn.ReLU, p: float = 0.0, index: int = 0, **_: Any
    ) -> None:
        super().__init__(heads)
        self.norm = Norm(width)
        self.net = nn.Sequential(nn.Linear(width, width), act(), nn.Dropout(p))
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(self.norm(x)) / self.heads


def key(module: nn.Module) -> str:
    return str(InitKeys().key(module))


def test_arguments_are_found_wherever_the_instance_keeps_them() -> None:
    assert key(Norm(4)) == "Norm(width=4)"  # its own attribute; what is the default is left out
    assert key(Norm(4, eps=0.1)) == "Norm(width=4, eps=0.1)"
    assert key(Block(4, 2)) == "Block(width=4, heads=2)"  # a sub-module's, the base class's
    assert key(Block(4, 2, nn.GELU, 0.5)) == "Block(width=4, heads=2, p=0.5)"  # a list's item
    assert key(nn.Linear(3, 5)) == "Linear(in_features=3, out_features=5)"
    assert key(nn.ReLU()) == "ReLU()"
    changed = Norm(4)
    changed.width = 6
    assert key(changed) == "Norm(width=6)"


def test_keys_of_hugging_face_layers_are_found_in_the_modules_inside() -> None:
    config = T5Config(d_model=8, d_kv=4, num_heads=2, d_ff=8, num_layers=3, vocab_size=8)
    keys = [InitKeys().key(block) for block in T5Model(config).encoder.block]
    assert str(keys[0]) == (
        "T5Block(config=T5Config, has_relative_attention_bias=True, layer_idx=0)"
    )
    assert keys[1].differing(keys[2]) == ["layer_idx"]
    assert text_of_keys(keys[1:]) == "T5Block(config=T5Config, layer_idx=1..2)"


def test_the_mark_leaves_the_constructor_and_the_instance_alone() -> None:
    class Layer(Norm):
        pass

    before, init = Layer(4), Layer.__init__
    assert lazyinline.lazy_inline(Layer) is Layer
    assert Layer.__init__ is init
    assert vars(before).keys() == vars(Layer(4)).keys() == vars(Norm(4)).keys()
    assert key(before) == "Layer(width=4)"
    with pytest.raises(TypeError, match="width"):
        Layer()


def table(model: nn.Module) -> str:
    lazyinline.lazy_inline(Block)
    compiled = lazyinline.compile(model, backend="eager")
    x = torch.ones(2, 4, requires_grad=True)  # as what the blocks hand on
    torch.testing.assert_close(compiled(x), model(x))
    text = str(compiled.last_report)
    return text[text.index("  block") :]


def same_key_other_norm() -> nn.Module:
    model = nn.Sequential(Block(4, 2), Block(4, 2))
    model[1].norm.extra = model[1].net[0].bias.requires_grad_(False)  # type: ignore[union-attr]
    return model


def same_key_other_number() -> nn.Module:
    model = nn.Sequential(Block(4, 2), Block(4, 2))
    model[1].norm.eps = 1  # type: ignore[union-attr, assignment]
    return model


TABLES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "equal keys share": (
        lambda: nn.Sequential(Block(4, 2), Block(4, 2), Block(4, 2)),
        ["Block(width=4, heads=2)      3"],
    ),
    "unequal keys share": (
        lambda: nn.Sequential(*(Block(4, 2, index=i) for i in range(3))),
        ["Block(width=4, heads=2, index=0..2)      3  one closure although index differs"],
    ),
    "equal keys are kept apart": (
        same_key_other_norm,
        [
            "Block(width=4, heads=2)      1",
            "Block(width=4, heads=2)      1  kept apart from 0 although the key is equal",
        ],
    ),
    "equal keys share but for a number": (
        same_key_other_number,
        ["Block(width=4, heads=2)      1", "Block(width=4, heads=2)      1"],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_report_shows_keys_calls_and_where_evidence_said_otherwise(name: str) -> None:
    make, rows = TABLES[name]
    lines = [line.strip() for line in table(make()).splitlines()]
    assert lines[1 : 1 + len(rows)] == rows


def test_calls_of_a_nested_block_are_those_of_the_block_around_it() -> None:
    lazyinline.lazy_inline(Norm)
    text = table(nn.Sequential(Block(4, 2), Block(4, 2)))
    assert [" ".join(line.split()) for line in text.splitlines()[1:3]] == [
        "Norm(width=4) 2",
        "Block(width=4, heads=2) 2",
    ]


@lazy_inline
class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


@lazy_inline
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = linear()

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(-1, -2)).softmax(-1) @ self.project(x)


@lazy_inline
class Layer(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.attention = Attention()
        self.gate = nn.Linear(4, num_experts, dtype=torch.float64)
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        weights = self.gate(x).softmax(-1)
        for index, expert in enumerate(self.experts):
            x = x + expert(x) * weights[..., index : index + 1]
        return x


@lazy_inline
class Encoder(Stack):
    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__(*(Layer(num_experts) for _ in range(num_layers)))


class Towers(Stack):
    """Two encoders of one class, and a loss."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__(*(Encoder(num_layers, num_experts) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def test_nested_blocks_and_micro_batches_equal_eager() -> None:
    torch.manual_seed(0)
    x, kernels = example(4, 4, grad=False), []
    options: dict[str, Any] = {"door": "step", "micro_batches": 2, "tolerance": 1e-12}
    for num_experts in (3, 6):
        outcome = assert_equals_eager(Towers(2, num_experts), (x,), calls=1, **options)
        kernels.append(outcome.told.num_kernels)
    assert kernels[0] <= kernels[1] <= kernels[0] + 8  # the slices of the gate's weights differ

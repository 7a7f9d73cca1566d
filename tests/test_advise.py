"""``advise``: which classes to mark, and what exactly keeps near-identical blocks apart."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Around, Stack, example, linear
from torch import Tensor, nn

import lazyinline
from lazyinline import Advice


class Layer(nn.Module):
    def __init__(self, width: int = 4, scale: float = 1.0, causal: bool = True) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.power = width - 2
        self.causal = causal
        self.scale = scale

    def forward(self, x: Tensor, offset: Tensor | None = None) -> Tensor:
        h = self.a(x).sin().mul(self.scale)
        h = h.tril() if self.causal else h.exp()
        h = h if offset is None else h + offset
        h = h.reshape(3, self.power, -1).sum((1, 2)).unsqueeze(1)
        return x + self.b(h.cos() * x.tanh())


class Shifted(nn.Module):
    """Rolls by a number."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        h = torch.roll(self.a(x).sin(), self.shift, 1)
        return x + self.b(h.exp().cos() * x.tanh())


def advise(model: nn.Module, *args: Tensor) -> Advice:
    """Returns the advice with seconds that do not depend on the machine."""
    advice = lazyinline.advise(model, args or (example(),), backend="eager")
    assert advice.seconds_per_node > 0
    classes = [dataclasses.replace(c, seconds_saved=0.01 * c.nodes_saved) for c in advice.classes]
    return dataclasses.replace(advice, seconds_per_node=0.01, classes=tuple(classes))


def without_lines(text: str) -> str:
    return re.sub(r"\.py:\d+", ".py:N", text)


def test_the_report_names_class_and_what_keeps_apart(golden: Callable[[str, str], None]) -> None:
    model = Stack(Layer(), Layer(), Layer(causal=False), Layer())
    golden("advice", without_lines(f"{advise(model)}\n"))


def test_a_model_without_repetition_gets_no_advice() -> None:
    advice = advise(nn.Sequential(linear(), nn.Tanh(), nn.LayerNorm(4).double()))
    assert not advice.classes
    assert not advice.kept_apart
    assert "nothing repeats" in str(advice)
    assert advice.num_nodes_if_inlined == 3


def test_savings_are_those_that_sharing_brings() -> None:
    model = Stack(*(Layer() for _ in range(5)))
    advice = advise(model)
    (only,) = advice.classes
    assert only.name == "Layer"
    assert only.instances == tuple(f"layers.{i}" for i in range(5))
    assert only.nodes_saved == 4 * only.num_nodes
    num_calls = 5
    assert only.nodes_saved == advice.num_nodes_if_inlined - (advice.num_nodes - num_calls)


@pytest.mark.parametrize(
    ("make", "usual", "other", "cause", "change"),
    [
        (Layer, {}, {"causal": False}, "causal is False, not True", "same causal. .*torch.where"),
        (Layer, {}, {"width": 3}, "power is 1, not 2", "same power. "),
        (Shifted, {"shift": 1}, {"shift": 0}, "shift is 0, not 1", "same shift. .*a tensor in its"),
        (Layer, {}, {"scale": 3.0}, "scale is 3.0, not 1.0", "nothing.*3.0 as an input"),
    ],
    ids=["chooses operators", "is a size", "is an option", "is in arithmetic"],
)
def test_the_attribute_that_keeps_a_layer_apart_is_named(
    make: Callable[..., nn.Module], usual: Any, other: Any, cause: str, change: str
) -> None:
    model = Stack(make(**usual), make(**usual), make(**other))
    apart = next(k for k in advise(model).kept_apart if "attribute" in k.cause)
    assert apart.cause == f"attribute {cause}"
    assert re.match(f"(give all of them the )?{change}", apart.change)


def test_an_argument_is_named() -> None:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        return layers[2](layers[1](layers[0](x)), x)

    (apart,) = advise(Around(forward, *(Layer() for _ in range(3)))).kept_apart
    assert "argument offset is f64[3,4], not None" in apart.cause
    assert apart.paths == ("layers.2", "layers.0")
    assert "one way" in apart.change


def test_frozen_parameters_and_modes_are_named() -> None:
    layers = [Layer() for _ in range(3)]
    layers[1].a.weight.requires_grad_(False)
    layers[2].eval()
    found = advise(Stack(*layers)).kept_apart
    assert [a.cause.partition(" (")[2] for a in found] == [
        "weight: requires_grad)",
        "training is False, not True)",
    ]
    assert [a.change for a in found] == [
        "freeze all of them, or none",
        "put all of them in one mode",
    ]

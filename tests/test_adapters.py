"""Adapters as PEFT has them (LoRA): injected, switched, merged and saved, around a frozen base."""

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_gradients
from torch import Tensor, nn

import lazyinline
from lazyinline import lazy_inline


class Lora(nn.Module):
    """A frozen layer, and products of low rank that are added to what it gives."""

    def __init__(self, base: nn.Linear, names: tuple[str, ...] = ("a", "b")) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        size, rank = base.in_features, 2
        self.down = nn.ModuleDict({n: nn.Linear(size, rank, bias=False) for n in names})
        self.up = nn.ModuleDict({n: nn.Linear(rank, size, bias=False) for n in names})
        self.scaling = dict.fromkeys(names, 2.0)
        self.active = ["a"]
        self.merged: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x)
        for name in self.active if not self.merged else ():
            result = result + self.up[name](self.down[name](x)) * self.scaling[name]
        return result

    def switch(self, name: str) -> None:
        """Makes one adapter active, with a new list and dict, as ``set_adapter`` does."""
        self.active, self.scaling = [name], dict(self.scaling)
        for table in (self.down, self.up):
            for key, layer in table.items():
                layer.requires_grad_(key == name)

    def merge(self, sign: int = 1) -> None:
        for name in self.active:
            change = self.up[name].weight @ self.down[name].weight * self.scaling[name]
            self.base.weight.data += sign * change.detach()
        self.merged = list(self.active) if sign > 0 else []


@lazy_inline
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.proj(x))


def inject(model: Any) -> list[Lora]:
    for block in model:
        block.proj = Lora(block.proj)
    return [block.proj for block in model]


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def num_compiles(model: Any) -> int:
    report = lazyinline.last_report(model)
    assert report is not None and not report.ran_eagerly
    return report.num_compiles


def trains_alike(model: Any, expected: Any, steps: int = 2) -> None:
    for run in (model, expected):
        optimizer = torch.optim.AdamW([p for p in run.parameters() if p.requires_grad], lr=0.05)
        for step in range(steps):
            optimizer.zero_grad()
            loss = run(torch.full((3, 4), 0.1 + step)).square().mean()
            if loss.requires_grad:  # with adapters merged, only what is frozen is used
                loss.backward()
            optimizer.step()
    assert_same_gradients(model, expected)
    x = torch.ones(2, 4)
    assert_close(model(x), expected(x))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.sweep(keep="after")
def test_adapters_train_switch_and_merge_as_in_eager(when: str) -> None:
    model = net()
    if when == "before":
        layers = inject(model)
    lazyinline.compile(model, backend="eager", in_place=True)
    if when == "after":
        model(torch.ones(3, 4))
        layers = inject(model)
    for layer in layers:
        layer.switch("a")
    expected = copy.deepcopy(model)  # a copy of it is plain
    for act in _ACTS:
        for run in (model, expected):
            for block in run:
                act(block.proj)
        trains_alike(model, expected)
    assert_close(dict(model.state_dict()), dict(expected.state_dict()))


_ACTS: tuple[Callable[[Lora], None], ...] = (
    lambda layer: layer.switch("a"),
    lambda layer: layer.switch("b"),
    lambda layer: layer.switch("a"),
    lambda layer: layer.merge(),
    lambda layer: layer.merge(sign=-1),
)


def test_switching_back_costs_nothing_and_equal_lists_and_dicts_are_equal() -> None:
    model = net()
    layers = inject(model)
    lazyinline.compile(model, backend="eager", in_place=True)
    for name in "aaabababbb":
        for layer in layers:
            layer.switch(name)
        model(torch.ones(3, 4)).sum().backward()
    assert num_compiles(model) == 2


def test_adapters_are_saved_and_loaded_into_another_compiled_model(tmp_path: pathlib.Path) -> None:
    models = [net(), net()]
    for model in models:
        for layer in inject(model):
            layer.switch("b")
        lazyinline.compile(model, backend="eager", in_place=True)
    x = torch.ones(2, 4)
    one, two = models
    two(x)
    assert not torch.equal(one(x), two(x))
    adapters = {n: t for n, t in one.state_dict().items() if ".up." in n or ".down." in n}
    torch.save(adapters, tmp_path / "adapters")
    two.load_state_dict(torch.load(tmp_path / "adapters"), strict=False)
    assert_close(two(x), one(x))
    assert num_compiles(two) == 1

"""A block that finds its own name or place, by whatever way, is not another block."""

from __future__ import annotations

import contextvars
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from blocks import example, linear
from equality import assert_equals_eager
from torch import Tensor, nn

import lazyinline
from lazyinline import lazy_inline

Find = Callable[[nn.Module], nn.Module]


def by_identity(modules: Any, module: Any) -> int:
    return [found is module for found in modules].index(True)


LOOKS: dict[str, Callable[[nn.Module, nn.Module], int]] = {
    "named_modules": lambda owner, own: by_identity([m for _, m in owner.named_modules()], own),
    "modules": lambda owner, own: by_identity(owner.modules(), own),
    "named_children": lambda owner, own: by_identity([m for _, m in owner.named_children()], own),
    "children": lambda owner, own: by_identity(owner.children(), own),
    "_modules": lambda owner, own: by_identity(owner._modules.values(), own),
    "items": lambda owner, own: by_identity(owner, own),
    "get_submodule": lambda owner, own: int(owner.get_submodule("1") is own),
    "named_parameters": lambda owner, own: by_identity(
        [p for _, p in owner.named_parameters()], own.linear.weight
    ),
    "parameters": lambda owner, own: by_identity(owner.parameters(), own.linear.weight),
    "state_dict": lambda owner, own: by_identity(
        owner.state_dict(keep_vars=True).values(), own.linear.weight
    ),
    "names": lambda owner, own: int(next(name for name, m in owner.named_modules() if m is own)),
    "generator": lambda owner, own: next(
        place for place, m in enumerate(m for m in owner.modules()) if m is own
    ),
    "paths": lambda owner, own: {m: len(n) * int(n[:1] or 0) for n, m in owner.named_modules()}[
        own
    ],
}

OWNERS: dict[str, nn.Module] = {}
LIST: list[Any] = [None]
GLOBAL: Any = None
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE")


class Registry:
    owner: Any = None


def at_list(block: nn.Module, owner: nn.Module) -> Find:
    block.held = [owner]
    return lambda own: own.held[0]


def at_table(block: nn.Module, owner: nn.Module) -> Find:
    block.held = {"owner": (owner,)}
    return lambda own: own.held["owner"][0]


def at_namespace(block: nn.Module, owner: nn.Module) -> Find:
    block.held = types.SimpleNamespace(owner=owner)
    return lambda own: own.held.owner


def at_attribute(block: nn.Module, owner: nn.Module) -> Find:
    object.__setattr__(block, "held", owner)
    return lambda own: own.held


def at_reference(block: nn.Module, owner: nn.Module) -> Find:
    block.held = weakref.ref(owner)
    return lambda own: own.held()


def at_proxy(block: nn.Module, owner: nn.Module) -> Find:
    block.held = [weakref.proxy(owner)]
    return lambda own: own.held[0]


def at_method(block: nn.Module, owner: nn.Module) -> Find:
    block.held = owner.register_buffer
    return lambda own: own.held.__self__


def at_partial(block: nn.Module, owner: nn.Module) -> Find:
    block.held = functools.partial(lambda found: found, owner)
    return lambda own: own.held()


def at_cell(block: nn.Module, owner: nn.Module) -> Find:
    return lambda own: owner


def at_inner_cell(block: nn.Module, owner: nn.Module) -> Find:
    held = [owner]
    block.held = lambda: held[0]
    return lambda own: own.held()


def at_default(block: nn.Module, owner: nn.Module) -> Find:
    return lambda own, held=owner: held  # type: ignore[misc]


def at_function(block: nn.Module, owner: nn.Module) -> Find:
    def find(own: nn.Module) -> nn.Module:
        return own.find.owner

    find.owner = owner  # type: ignore[attr-defined]
    return find


def at_global(block: nn.Module, owner: nn.Module) -> Find:
    global GLOBAL
    GLOBAL = owner
    return lambda own: GLOBAL


def at_global_list(block: nn.Module, owner: nn.Module) -> Find:
    LIST[0] = owner
    return lambda own: LIST[0]


def at_global_table(block: nn.Module, owner: nn.Module) -> Find:
    OWNERS["owner"] = owner
    return lambda own: OWNERS["owner"]


def at_class(block: nn.Module, owner: nn.Module) -> Find:
    Registry.owner = owner
    return lambda own: Registry.owner


def at_variable(block: nn.Module, owner: nn.Module) -> Find:
    VARIABLE.set(owner)
    return lambda own: VARIABLE.get()


REACHED: list[Callable[[nn.Module, nn.Module], Find]] = [
    *(at_list, at_table, at_namespace, at_attribute, at_reference, at_proxy, at_method, at_partial),
    *(at_cell, at_inner_cell, at_default, at_function),
    *(at_global, at_global_list, at_global_table, at_class, at_variable),
]


@lazy_inline
class Block(nn.Module):
    def __init__(self, look: Callable[[nn.Module, nn.Module], int]) -> None:
        super().__init__()
        self.linear = linear()
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 + self.look(self.find(self), self))


class Model(nn.Module):
    def __init__(
        self,
        look: Callable[[nn.Module, nn.Module], int],
        reached: Callable[[nn.Module, nn.Module], Find],
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(look) for _ in range(3))
        for layer, find in [(x, reached(x, self.layers)) for x in self.layers]:
            layer.find = find

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def pairs() -> Iterator[Any]:
    """Every way to reach it, and every way to look; all of both where time is no matter."""
    for reached in REACHED:
        for look in LOOKS:
            is_usual = look == "named_modules" or reached in (at_list, at_global)
            marks = () if is_usual else (pytest.mark.sweep,)
            yield pytest.param(reached, look, marks=marks, id=f"{reached.__name__}-{look}")


@pytest.mark.parametrize(("reached", "look"), pairs())
def test_a_block_that_finds_its_own_place_is_as_eager(
    reached: Callable[[nn.Module, nn.Module], Find], look: str
) -> None:
    model, x = Model(LOOKS[look], reached), example()
    expected = model(x)
    found = lazyinline.compile(model, backend="eager")(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_blocks_that_reach_a_module_beside_them_share() -> None:
    beside = nn.ModuleList([linear()])
    model, x = Model(lambda owner, own: len(list(owner.modules())), at_list), example()
    for layer in model.layers:
        layer.held = [beside]
    assert assert_equals_eager(model, [x]).shared == 2

"""Adapter: the slot of a module where its own calls look first for something compiled.

``nn.Module.compile`` fills it, too. A copied or saved module leaves it behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...reuse.evidence.module_state import module_state
from ...reuse.torch_names import CALL_SLOT


def in_slot(module: nn.Module) -> Callable[..., Any] | None:
    """Returns what a module's slot holds."""
    held: Callable[..., Any] | None = module_state(module).get(CALL_SLOT)
    return held


def fill_slot(module: nn.Module, call: Callable[..., Any]) -> None:
    """Makes calls of a module go there, hooks and all, in place of what was there."""
    module_state(module)[CALL_SLOT] = call


def empty_slot(module: nn.Module) -> None:
    """Takes out what was filled in."""
    module_state(module).pop(CALL_SLOT, None)


def asks_slot(module: nn.Module) -> bool:
    """Whether calls of a module look into the slot: its class has no ``__call__`` of its own."""
    return type(module).__call__ is nn.Module.__call__


def call_past_slot(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls the module itself, hooks and all."""
    if in_slot(module) is None:
        return module(*args, **kwargs)
    return module._call_impl(*args, **kwargs)


@contextmanager
def slots_empty(model: nn.Module) -> Iterator[None]:
    """Inside, a model and its sub-modules run their own Python."""
    states = [module_state(module) for module in model.modules()]
    held = [(state, state.pop(CALL_SLOT)) for state in states if CALL_SLOT in state]
    try:
        yield
    finally:
        for state, call in held:
            state[CALL_SLOT] = call

"""Adapter: the slot of a module where its own calls look first for something compiled.

``nn.Module.compile`` fills it, too. A copied or saved module leaves it behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...reuse.errors import PlanError
from ...reuse.evidence.module_state import HOOK_TABLES, module_state
from ...reuse.torch_names import CALL_SLOT

_CALL_HOOKS = tuple(name for name in HOOK_TABLES if name.startswith(("_forward", "_backward")))


def in_slot(module: nn.Module) -> Callable[..., Any] | None:
    """Returns what a module's slot holds."""
    held: Callable[..., Any] | None = module_state(module).get(CALL_SLOT)
    return held


def fill_slot(module: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Sends calls of a module there, hooks and all; returns what puts back what was there."""
    state, before = module_state(module), in_slot(module)
    state[CALL_SLOT] = call

    def put_back() -> None:
        if before is None:
            state.pop(CALL_SLOT, None)
        else:
            state[CALL_SLOT] = before

    return put_back


def empty_slot(module: nn.Module) -> None:
    """Lets calls of a module run its own Python again."""
    module_state(module).pop(CALL_SLOT, None)


def asks_slot(module: nn.Module) -> bool:
    """Whether calls of a module look into the slot: its class has no ``__call__`` of its own."""
    return type(module).__call__ is nn.Module.__call__


def check_asks_slot(module: nn.Module) -> None:
    """Raises PlanError if calls of a module do not look into the slot."""
    if not asks_slot(module):
        raise PlanError(
            f"{type(module).__name__} overrides __call__, so it cannot be compiled in place "
            "(in_place=True, or inside a wrapper such as DistributedDataParallel). Use "
            "compile(model, in_place=False) and wrap the result."
        )


def call_past_slot(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a module eagerly, hooks and all."""
    if in_slot(module) is None:
        return module(*args, **kwargs)
    # Hooks and all, past the slot that ``__call__`` looks into first.
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


@contextmanager
def slot_filled(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Inside, calls of a module go there."""
    put_back = fill_slot(module, call)
    try:
        yield
    finally:
        put_back()


def call_with_hooks_around(
    module: nn.Module,
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls a module, its own hooks and all, with something else for its ``forward``.

    While that runs, with the arguments as they are, the module has no hooks.
    """
    state = module_state(module)
    own = {"forward": state["forward"]} if "forward" in state else {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        tables = [(state[name], dict(state[name])) for name in _CALL_HOOKS if state.get(name)]
        for table, _ in tables:
            table.clear()
        del state["forward"]
        state.update(own)
        try:
            return run(args, kwargs)
        finally:
            for table, hooks in tables:
                table.update(hooks)

    state["forward"] = forward
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        state.pop("forward", None)
        state.update(own)

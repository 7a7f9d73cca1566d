"""Adapter: the slot of a module, an attribute in which ``__call__`` looks for a compiled call.

``nn.Module.compile`` fills it too. PyTorch leaves it out of copies and pickles.
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
    """Returns the content of a module's slot."""
    return module_state(module).get(CALL_SLOT)


def fill_slot(module: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Makes ``call`` run a module's calls, including its hooks; returns what undoes it."""
    state, before = module_state(module), in_slot(module)
    state[CALL_SLOT] = call

    def put_back() -> None:
        if before is None:
            state.pop(CALL_SLOT, None)
        else:
            state[CALL_SLOT] = before

    return put_back


def empty_slot(module: nn.Module) -> None:
    """Makes calls of a module run its own Python again."""
    module_state(module).pop(CALL_SLOT, None)


def asks_slot(module: nn.Module) -> bool:
    """Whether calls of a module use the slot: its class does not override ``__call__``."""
    return type(module).__call__ is nn.Module.__call__


def check_asks_slot(module: nn.Module) -> None:
    """Raises PlanError if calls of a module do not use the slot."""
    if not asks_slot(module):
        raise PlanError(
            f"{type(module).__name__} overrides __call__, so it cannot be compiled in place "
            "(in_place=True, or inside a wrapper such as DistributedDataParallel). Use "
            "compile(model, in_place=False) and wrap the result."
        )


def call_past_slot(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a module eagerly, with its hooks."""
    if in_slot(module) is None:
        return module(*args, **kwargs)
    return module._call_impl(*args, **kwargs)  # runs the hooks, and does not look into the slot


@contextmanager
def slots_empty(model: nn.Module) -> Iterator[None]:
    """Empties the slots of a model and its sub-modules inside, so that they run eagerly."""
    states = [module_state(module) for module in model.modules()]
    held = [(state, state.pop(CALL_SLOT)) for state in states if CALL_SLOT in state]
    try:
        yield
    finally:
        for state, call in held:
            state[CALL_SLOT] = call


@contextmanager
def slot_filled(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Fills the slot of a module inside."""
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
    """Calls a module with its hooks, but with ``run`` in place of its ``forward``.

    While ``run`` runs, on the arguments that the hooks leave, the module has no hooks.
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

"""A model's own methods, which call the compiled one in its place.

``compiled.generate(...)`` is the model's method, and calls the model once per token. While it runs,
such calls reach the compiled model, through the slot that PyTorch has for them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ...reuse.evidence.module_state import module_state
from .model_calls import ModelCalls
from .torch_slot import asks_slot, empty_slot, fill_slot, in_slot

_OWN_COMPILER = "get_compiled_call"  # transformers' generate asks it, for the caches that it knows


def calling(compiled: nn.Module, calls: ModelCalls, found: Any) -> Any:
    """Returns what was found on a model; a method of it calls the compiled model inside."""
    model = calls.model
    if not isinstance(found, types.MethodType) or found.__self__ is not model:
        return found
    is_generate = found.__name__ == "generate"
    if not asks_slot(model) and not is_generate:
        return found

    @functools.wraps(found)
    def method(*args: Any, **kwargs: Any) -> Any:
        if is_generate:
            calls.note_generate()
        generating = calls.look_for_generating()
        with ExitStack() as routes:
            if asks_slot(model):
                routes.enter_context(_routed(model, compiled))
            if generating is not None:
                routes.enter_context(_routed(generating.model, generating))
            return found(*args, **kwargs)

    return method


@contextmanager
def _routed(model: nn.Module, compiled: Callable[..., Any]) -> Iterator[None]:
    """Calls of the model inside run the compiled one."""
    state, slot = module_state(model), in_slot(model)
    asked = hasattr(model, _OWN_COMPILER) and _OWN_COMPILER not in state
    fill_slot(model, compiled)
    if asked:
        state[_OWN_COMPILER] = lambda *_: model.__call__
    try:
        yield
    finally:
        if slot is None:
            empty_slot(model)
        else:
            fill_slot(model, slot)
        if asked:
            state.pop(_OWN_COMPILER, None)

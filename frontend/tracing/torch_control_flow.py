"""Adapter: PyTorch's control-flow operators, seen while a model is captured.

Outside of a compile ``torch.cond`` and its like have Dynamo compile the function that calls the
operator. While a model is captured that function is called as it is, and the operator, in place of
tracing the bodies on its own, hands them to who watches.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op

_OPERATORS: dict[str, Any] = {
    "cond": cond_op,
    "scan": scan_op,
    "map": map_impl,
    "while_loop": while_loop_op,
}
CONTROL_FLOW = frozenset(_OPERATORS.values())
"""The operators that a capture records."""
_FOLDER = str(Path(inspect.getfile(type(cond_op))).parent)


class _Watcher(Protocol):
    def control_flow(self, name: str, args: tuple[Any, ...]) -> Any: ...


def patch_control_flow(
    watcher: _Watcher, thread: int, replace: Callable[[Any, dict[str, Any]], Callable[[], None]]
) -> Callable[[], None]:
    """Lets ``watcher`` see control flow of a thread; returns what puts everything back."""
    compile_ = torch.compile

    def compiled(*args: Any, **kwargs: Any) -> Any:
        is_theirs = sys._getframe(1).f_code.co_filename.startswith(_FOLDER)
        if threading.get_ident() == thread and is_theirs:
            return args[0]
        return compile_(*args, **kwargs)

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(self, *args, **kwargs)
            return watcher.control_flow(name, args)

        return call

    with ExitStack() as undo:
        undo.callback(replace(torch, {"compile": compiled}))
        for name, operator in _OPERATORS.items():
            kind = type(operator)
            undo.callback(replace(kind, {"__call__": watched(name, kind.__call__)}))
        return undo.pop_all().close

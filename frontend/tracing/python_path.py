"""The way that a model's Python takes: its instructions in order, and what they raise.

Two runs that went the same way made the same decisions, those within a line among them, and caught
the same errors.
"""

from __future__ import annotations

import builtins
import dis
import itertools
import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from ...reuse.errors import CaptureError
from ...reuse.evidence.bytecode import globals_read

_OWN = __name__.partition(".")[0]
_NOT_FOLLOWED = frozenset({"torch", _OWN, "weakref"})
_FOLLOWED = frozenset({"torch.nn.functional"})

# What tells objects apart without asking them.
_BUILTINS = ("id", "type", "issubclass")
_FUNCTIONS = [getattr(builtins, name) for name in _BUILTINS]
_FUNCTIONS += [operator.is_, operator.is_not, sys.getsizeof]
_NAMES = frozenset(("id", "is_", "is_not", "getsizeof", "builtins", "__builtins__"))
# Ways to other threads, whose instructions are not seen.
_THREADS = ("threading", "queue", "concurrent", "multiprocessing", "asyncio", "subprocess")
_HANDS_OVER = frozenset(("start_new_thread", "put", "put_nowait", "submit", "send"))


class PythonPath:
    """The instructions that ran outside PyTorch and this package, as one number.

    Those of Python's own library and of generated methods count where code that is followed called
    them.
    """

    def __init__(self) -> None:
        self.digest = 0
        self._codes: set[CodeType] = set()
        self._has_asked = self._has_left = False

    def asks_identity(self) -> bool:
        """Whether code that ran asks which object or class something is (not only ``is None``)."""
        return self._has_asked or any(map(_asks_identity, self._codes))

    def leaves_thread(self) -> bool:
        """Whether code that ran hands something to another thread."""
        return self._has_left or any(not _HANDS_OVER.isdisjoint(c.co_names) for c in self._codes)

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        name = frame.f_globals.get("__name__") or ""
        package = name.partition(".")[0]
        if name not in _FOLLOWED and package in _NOT_FOLLOWED:
            return None
        is_helper = package in sys.stdlib_module_names or not package or "namedtuple_" in package
        if is_helper and frame.f_back.f_trace != self._step:
            return None
        frame.f_trace_opcodes = True
        code, scope = frame.f_code, frame.f_globals
        found = [*frame.f_locals.values(), *(scope.get(n) for n in globals_read(code))]
        self._codes.add(code)
        self._has_asked |= any(value is f for value in found for f in _FUNCTIONS)
        self._has_left |= package in _THREADS
        return self._step

    def _step(self, frame: Any, event: str, arg: Any) -> Any:
        code = frame.f_code
        place = (code.co_filename, code.co_name, code.co_firstlineno, frame.f_lasti, event)
        self.digest = hash((self.digest, place))
        return self._step


def _asks_identity(code: CodeType) -> bool:
    names = {*code.co_names, *code.co_varnames}
    if not set(_BUILTINS).isdisjoint(globals_read(code)):
        return True
    steps = list(dis.get_instructions(code))
    constant = ("LOAD_CONST", "LOAD_COMMON_CONSTANT")
    return not names.isdisjoint(_NAMES) or any(
        step.opname == "IS_OP" and (before.opname not in constant or type(before.argval) is float)
        for before, step in itertools.pairwise(steps)
    )


@contextmanager
def followed() -> Iterator[PythonPath]:
    """Follows what runs in this thread inside.

    Raises:
        CaptureError: if a debugger or a coverage tool follows it already.
    """
    if sys.gettrace() is not None:
        raise CaptureError("What runs here is being traced (sys.settrace).")
    path = PythonPath()
    sys._getframe().f_trace_opcodes = True  # or Python 3.12 begins with the next tracer
    sys.settrace(path._call)
    try:
        yield path
    finally:
        sys.settrace(None)

"""Tells whose code a frame runs: the user's, PyTorch's, Python's or ours; names models and lines.

Capture watches the model's Python with ``sys.setprofile``. Frames are classified by the folder of
their file, so that calls by PyTorch for its own purposes do not count as the model's.
"""

from __future__ import annotations

import dis
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...reuse.kinds import is_of_library
from ...reuse.process import own_places
from .torch_state import ASKED_IN_PYTHON, may_ask, python_getter, settings

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_LIBRARY_FOLDERS = (_TORCH_FOLDER, *own_places())
_ACTING_FOLDERS = tuple(_TORCH_FOLDER + name + os.sep for name in ("nn", "optim"))
_STANDARD_FOLDER = os.path.dirname(os.__file__) + os.sep
_GENERATED = "<string>"
# Modules whose functions serve imports, decorators and loggers; none has a setting that a model
# would read.
_MACHINERY = frozenset(
    (
        *("abc", "collections", "contextlib", "dataclasses", "enum", "functools", "importlib"),
        *("inspect", "mpmath", "re", "sympy", "typing", "typing_extensions"),
    )
)
WHOLE = "model"  # the path of the user's model in the module that computes its loss

_USERS, _PYTORCHS = "the user's", "PyTorch's"
_PLACES = (type, types.ModuleType)


def own_model(model: nn.Module) -> Any:
    """Returns the user's model, unwrapped from the module that computes the loss of a step."""
    return model.model if _wraps_a_model(model) else model


def model_name(model: nn.Module) -> str:
    """Returns the class name of the user's model."""
    return type(own_model(model)).__name__


def _wraps_a_model(model: nn.Module) -> bool:
    return getattr(type(model), "is_around_a_model", False)


def user_path(model: nn.Module, path: str) -> str:
    """Returns a module's path in the user's model, given its path in the module around that.

    The path of the user's model itself is then :data:`WHOLE`; the module around it has ``""``.
    """
    return path.removeprefix(f"{WHOLE}.") if _wraps_a_model(model) else path


def user_frame(frame: Any) -> Any:
    """Returns the innermost frame that is neither PyTorch's nor ours, or None."""
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_LIBRARY_FOLDERS) and filename[0] != "<":
            return frame
        frame = frame.f_back
    return None


def is_library_frame(frame: Any) -> bool:
    """Whether a frame runs PyTorch's code or ours."""
    return str(frame.f_code.co_filename).startswith(_LIBRARY_FOLDERS)


def frames_from(frame: Any) -> Iterator[Any]:
    """Yields a frame and those that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def may_catch(frame: Any) -> bool:
    """Whether the user's Python in a frame is within a ``try`` or ``with``, and so may go on."""
    if is_library_frame(frame):
        return False
    code = dis.Bytecode(frame.f_code)
    ranges = getattr(code, "exception_entries", None)
    if ranges is None:  # before Python 3.11, which does not tell where
        return any(one.opname in ("SETUP_FINALLY", "SETUP_WITH") for one in code)
    return any(one.start <= frame.f_lasti < one.end for one in ranges)


def is_user_frame(frame: Any) -> bool:
    """Whether a frame runs neither PyTorch's code nor ours, nor Python's for one of them."""
    return not (is_library_frame(frame) or _serves_pytorch(frame))


def acts_on_modules(frame: Any) -> bool:
    """Whether a frame runs ``torch.nn`` or ``torch.optim`` code that the user called."""
    filename = str(frame.f_code.co_filename)
    if not filename.startswith(_ACTING_FOLDERS):
        return False
    while filename.startswith(_ACTING_FOLDERS) and frame.f_back is not None:
        frame = frame.f_back
        filename = str(frame.f_code.co_filename)
    return not is_library_frame(frame)


def is_torch_frame(frame: Any) -> bool:
    """Whether a frame runs PyTorch's code."""
    return str(frame.f_code.co_filename).startswith(_TORCH_FOLDER)


def frame_text(frame: Any) -> str:
    """Returns ``file.py:31 Block.forward`` of a frame."""
    code = frame.f_code
    name = getattr(code, "co_qualname", "") or _qualified_name(frame)
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {name}"


def _qualified_name(frame: Any) -> str:
    """Returns ``Block.forward`` on Python 3.10, whose code objects have no ``co_qualname``."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    for owner in type(first).__mro__:
        method: Any = vars(owner).get(code.co_name)
        if getattr(method, "__code__", None) is code:
            return str(method.__qualname__)
    return str(code.co_name)


def user_line() -> str:
    """Returns where the running user code is, such as ``file.py:31 Block.forward``."""
    frame = nearest = user_frame(sys._getframe(1))
    # For code of Python's own library or of numpy, the line that called it is shown.
    while frame is not None and is_of_library(frame.f_globals):
        frame = user_frame(frame.f_back)
    shown = nearest if frame is None else frame
    return "an unknown line" if shown is None else frame_text(shown)


def warn_user(text: str, kind: type[Warning] = UserWarning) -> None:
    """Warns at the user's line."""
    frame = user_frame(sys._getframe(1))
    place = (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)
    warnings.warn_explicit(text, kind, *place)


def is_standard_frame(frame: Any) -> bool:
    """Whether a frame runs code of Python's own library."""
    filename = str(frame.f_code.co_filename)
    return filename.startswith(_STANDARD_FOLDER) and "site-packages" not in filename


def _is_of_user(frame: Any) -> bool:
    """Whether a frame runs user code: not PyTorch's, not ours, not one of ``_MACHINERY``."""
    name, filename = _top_name(frame), frame.f_code.co_filename
    if filename == _GENERATED:  # generated code, as by @dataclass, belongs to its module
        filename = str(frame.f_globals.get("__file__"))
    is_machinery = name in _MACHINERY or name.startswith("namedtuple_")
    return not (is_machinery or filename.startswith(_LIBRARY_FOLDERS))


def _serves_pytorch(frame: Any) -> bool:
    """Whether a frame runs because PyTorch called Python's library (to log, to format a stack)."""
    while frame is not None and not is_library_frame(frame):
        if _top_name(frame) not in sys.stdlib_module_names:
            # A user's handler of a record that PyTorch logs, or code that runs while a module of
            # PyTorch is imported, is not the model's.
            frame = _logging_or_import(frame)
        else:
            frame = frame.f_back
    return frame is not None


def _logging_or_import(frame: Any) -> Any:
    """Returns the nearest caller that logs, or PyTorch's module that is being imported, or None."""
    while frame is not None and not is_library_frame(frame):
        if _top_name(frame) == "logging":
            return frame
        frame = frame.f_back
    # A module's body is run by an import.
    return frame if frame is not None and frame.f_code.co_name == "<module>" else None


def _top_name(frame: Any) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _role_of(frame: Any) -> Any:
    """Returns whose code a frame runs (None: ignored); for a function that reads a setting, it."""
    if frame.f_code in ASKED_IN_PYTHON:
        return (ASKED_IN_PYTHON[frame.f_code],)
    if _is_of_user(frame):
        return _USERS
    return (python_getter(frame) or _PYTORCHS) if may_ask(frame) else None


@contextmanager
def profiled_calls(
    on_call: Callable[[Any], None],
    on_builtin: Callable[[Any, Any], None],
    on_reading: Callable[[Any], None],
    is_allowed: Callable[[Any], bool],
) -> Iterator[None]:
    """Reports the calls of user functions (not PyTorch's, not ours), and calls of C by them.

    ``on_call`` gets the frame of each user function that begins; ``on_builtin`` that of a user
    function and the C function that it is about to call, unless that is allowed, and those of
    PyTorch's own calls that read or change a setting; ``on_reading`` the getter of a PyTorch
    setting that is being read.
    """
    known: dict[int, tuple[Any, Any]] = {}  # by id, because hashing a code object is slower
    allowed: dict[Any, Any] = {}
    of_settings = settings().names

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event != "call" and event != "c_call":
            return
        code = frame.f_code
        found = known.get(id(code))
        if found is None:
            found = known[id(code)] = (_role_of(frame), code)
        role = found[0]
        if role is None:
            return
        if event == "call":
            if role is _USERS:
                if not _serves_pytorch(frame):
                    on_call(frame)
            elif type(role) is tuple:
                if not _serves_pytorch(frame):
                    on_reading(role[0](**frame.f_locals))
            elif role is not _PYTORCHS:
                on_reading(role)
        elif role is not _USERS:
            if argument.__name__ in of_settings:
                on_builtin(frame, argument)
        else:
            place = argument.__self__
            if not isinstance(place, _PLACES):
                place = type(place)
            key = argument if argument.__module__ else (id(place), argument.__name__)
            if key not in allowed:
                if is_allowed(argument):
                    allowed[key] = place  # kept alive, so that no other object gets its id
                elif not _serves_pytorch(frame):
                    on_builtin(frame, argument)

    previous: Any = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(previous if callable(previous) else None)
        if hasattr(previous, "enable"):  # cProfile cannot be restored by setprofile
            previous.enable()


@contextmanager
def unprofiled() -> Iterator[None]:
    """Turns off :func:`profiled_calls` inside, because our own functions need not be watched."""
    profile: Any = sys.getprofile()
    if not callable(profile):
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profile)

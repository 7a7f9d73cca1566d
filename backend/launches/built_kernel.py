"""A C++ kernel inside a shared object that holds several: where it is, and a way to call it.

The native loop calls kernels at their address. A wrapper that runs as Python calls them by name;
Inductor would compile a Python binding of each for that, here ``ctypes`` does it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .present_memory import address_in

CHECKED = "_checked"
_MESSAGE_BYTES = 1024
_SCALARS: dict[str, Any] = {
    "int64_t": ctypes.c_int64,
    "uintptr_t": ctypes.c_void_p,
    "float": ctypes.c_float,
}


def is_known_type(name: str) -> bool:
    """Whether an argument of this C++ type can be passed."""
    return name.endswith("*") or _plain(name) in _SCALARS


def _plain(name: str) -> str:
    return name.removeprefix("const ")


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel of a shared object.

    Called with tensors, numbers where a parameter is one; it writes into its tensors. The
    interpreter's lock is held meanwhile, as in Inductor's own bindings.

    Attributes:
        path: the shared object.
        symbol: name of the function in it. ``<symbol>_checked`` catches what the function throws.
        argument_types: C++ types of its parameters.
    """

    path: Path
    symbol: str
    argument_types: tuple[str, ...]

    @property
    def address(self) -> int:
        """The address of the function.

        Raises:
            OSError: if the object does not load.
            AttributeError: if it is another one.
        """
        found = ctypes.cast(getattr(_library(str(self.path)), self.symbol), ctypes.c_void_p).value
        assert found is not None
        return found

    def __call__(self, *args: Any) -> None:
        """Runs the kernel.

        Raises:
            RuntimeError: if the number of arguments is wrong, a tensor's memory was freed, or with
                what the kernel throws.
            IndexError: if an index was out of range.
        """
        if len(args) != len(self.argument_types):
            raise RuntimeError(f"requires {len(self.argument_types)} args")
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        given = [address_in(a) if isinstance(a, torch.Tensor) else a for a in args]
        if _checked(self)(*given, message, _MESSAGE_BYTES):
            text = message.value.decode(errors="replace")
            raise IndexError(text) if "out of bounds" in text else RuntimeError(text)


def loaded_kernel(path: Path, symbol: str, argument_types: Sequence[str]) -> BuiltKernel:
    """Returns a kernel of a shared object.

    Raises:
        OSError: if the object does not load.
        AttributeError: if the kernel is not in it.
        ValueError: if this is no kernel's description.
    """
    described = [symbol, *argument_types]
    if not all(isinstance(text, str) for text in described) or not symbol.isidentifier():
        raise ValueError(f"{symbol!r} is no kernel")
    if not all(map(is_known_type, argument_types)):
        raise ValueError(f"{argument_types} are no types of a kernel's parameters")
    kernel = BuiltKernel(path, symbol, tuple(argument_types))
    # Both are looked up now, so that an object that lacks one is noticed before a program needs it.
    _checked(kernel)
    assert kernel.address
    return kernel


@functools.cache
def _library(path: str) -> Any:
    return ctypes.PyDLL(path)


@functools.cache
def _checked(kernel: BuiltKernel) -> Any:
    function = getattr(_library(str(kernel.path)), kernel.symbol + CHECKED)
    types = [_SCALARS.get(_plain(name), ctypes.c_void_p) for name in kernel.argument_types]
    function.argtypes = [*types, ctypes.c_char_p, ctypes.c_int64]
    function.restype = ctypes.c_int
    return function

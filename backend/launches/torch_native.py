"""Adapter: what is C++ of ours (the native loop, first fit), and the addresses of what it calls.

It is built by the compiler that Inductor uses for its own kernels and kept where it keeps them. The
loop calls Inductor's kernels at their address, and the BLAS inside PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...reuse.errors import PlanError
from ...reuse.torch_names import matmul_precision
from ..arena.live_ranges import Buffers, IntArray
from ..files.torch_folder import DamagedObjectError, own_folder, sound_code
from .built_kernel import BuiltKernel
from .torch_facts import for_this_cpu

_SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in (
        "native_products.cpp",
        "native_loop.cpp",
        "native_packing.cpp",
        "native_checks.cpp",
        "native_python.cpp",
    )
)
_MODULE = "lazyinline_native"
_KERNEL = "kernel"  # what Inductor calls every C++ kernel's entry point


Hold = Callable[..., bool]
Move = Callable[[int, int, int], object]


@dataclass(frozen=True)
class NativeLibrary:
    """The native loop, and the other native functions.

    Attributes:
        run: ``run(program, count, table)``, three addresses or counts, runs so many operations.
        hold: ``hold(entries, absent, values, attributes, own_attributes, classes)`` tells whether
            Python's objects hold what they held; None where Python's headers are missing.
        move: ``move(to, start, num_bytes)`` copies memory.
    """

    run: Callable[[int, int, int], int]
    hold: Hold | None
    move: Move


class NotBuiltError(PlanError):
    """Our own C++ cannot be built here: a full disk, a compiler that fails."""


def check_cpp_compiler() -> None:
    """Looks for what builds kernels for a CPU, before anything is prepared for it.

    Raises:
        PlanError: if there is none; it says what to install.
    """
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        wanted = config.cpp.cxx if isinstance(config.cpp.cxx, (list, tuple)) else [config.cpp.cxx]
        names = " or ".join(str(name) for name in wanted if name)
        raise PlanError(
            f"There is no C++ compiler here (looked for {names}), and Inductor needs one for "
            "kernels on a CPU. Install it (Debian, Ubuntu: apt install g++; Fedora: dnf install "
            'gcc-c++), name yours in the environment variable CXX, or use backend="eager", which '
            "generates no code."
        ) from None


@functools.cache
def _library() -> Any:
    """Builds and loads all of our C++, as one library."""
    return built_library(native_source(), _SOURCES)


def built_library(source: str, files: Sequence[Path], libraries: Sequence[str] = ()) -> Any:
    """Builds C++ and loads it; what was built before is loaded.

    Args:
        source: its text.
        files: where it stands, for an error.
        libraries: of PyTorch, that it calls by name.

    Raises:
        NotBuiltError: if it cannot be built.
    """
    from torch._inductor.codecache import CppCodeCache

    own_folder()
    check_cpp_compiler()
    place = Path(torch.__file__).with_name("lib")
    flags = [f"-L{place}", *(f"-l{name}" for name in libraries)] if libraries else []
    sound = sound_code(CppCodeCache, ctypes.CDLL)
    try:
        try:
            return sound.load(source, extra_flags=flags)
        except DamagedObjectError:  # it is gone now, so that the second try builds it
            return sound.load(source, extra_flags=flags)
    except Exception as error:
        raise NotBuiltError(f"{[str(file) for file in files]} cannot be built: {error}") from error


def native_library() -> NativeLibrary:
    """Builds the loop.

    Raises:
        NotBuiltError: if it cannot be built.
    """
    return _native_of(_library())


def native_source() -> str:
    """Returns the source of all of our C++, for this CPU."""
    return for_this_cpu("\n".join(source.read_text() for source in _SOURCES))


def native_file() -> Path | None:
    """Returns the shared object that :func:`native_library` built."""
    name = getattr(_library(), "_name", None)
    return Path(name) if name else None


def loaded_native(path: Path) -> NativeLibrary:
    """Loads the loop from a copy of that shared object.

    Raises:
        OSError: if it does not load.
        AttributeError: if it is another library.
    """
    return _native_of(ctypes.CDLL(str(path)))


def _native_of(library: ctypes.CDLL) -> NativeLibrary:
    if not hasattr(library, f"PyInit_{_MODULE}"):  # built without Python's headers: by ctypes
        function = library.lazyinline_run
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        function.restype = ctypes.c_int
        return NativeLibrary(function, None, ctypes.memmove)
    loader = ExtensionFileLoader(_MODULE, library._name)
    spec = spec_from_file_location(_MODULE, library._name, loader=loader)
    assert spec is not None
    native: Any = module_from_spec(spec)
    loader.exec_module(native)
    return NativeLibrary(native.run, native.hold, native.move)


def first_fit(buffers: Buffers, order: IntArray) -> IntArray:
    """Does what :func:`..arena.live_ranges.first_fit` does, some ten times faster.

    Raises:
        NotBuiltError: if the library cannot be built.
    """
    function = _library().lazyinline_first_fit
    function.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 5]
    function.restype = None
    offsets = np.zeros(len(buffers), np.int64)
    given = (buffers.birth, buffers.death, buffers.size, order)
    arrays = [np.ascontiguousarray(array, np.int64) for array in given]
    function(len(buffers), *(array.ctypes.data for array in (*arrays, offsets)))
    return offsets


def exact_search(buffers: Buffers, enough: int, peak: int, steps: int) -> IntArray | None:
    """Looks for a plan of fewer than ``peak`` bytes: an :data:`..arena.live_ranges.ExactSearch`.

    Raises:
        NotBuiltError: if the library cannot be built.
    """
    function = _library().lazyinline_exact_search
    function.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 4]
    function.restype = ctypes.c_int64
    offsets = np.zeros(len(buffers), np.int64)
    columns = (buffers.birth, buffers.death, buffers.size, offsets)
    found = function(*(c.ctypes.data for c in columns), len(buffers), enough, peak, steps)
    return offsets if found < peak else None


def kernel_address(function: Callable[..., Any]) -> int | None:
    """Returns where an Inductor C++ kernel is, or None if ``function`` is something else."""
    if isinstance(function, BuiltKernel):
        return function.address
    path = getattr(getattr(function, "__self__", None), "__file__", None)
    if getattr(function, "__name__", "") != _KERNEL or not path:
        return None
    return _address(path, _KERNEL)


def blas_address(name: str) -> int | None:
    """Returns where a BLAS routine of PyTorch is, or None if its BLAS is not visible."""
    for path in Path(torch.__file__).with_name("lib").glob("libtorch_cpu.*"):
        if address := _address(str(path), name):
            return address
    return None


def blas_is_exact() -> bool:
    """Whether PyTorch multiplies matrices by plain BLAS calls, in full precision."""
    _, precision = matmul_precision()
    return torch.backends.mkl.is_available() and precision == "ieee"


@functools.cache
def _address(path: str, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(ctypes.CDLL(path), name), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None

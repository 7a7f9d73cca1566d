"""Adapter: what runs by address: our C++ (the native loop, first fit), kernels, BLAS, and operands.

Our C++ is built by the compiler that Inductor uses for its own kernels and kept where it keeps
them. The loop calls a kernel at its address in a shared object that holds several, and the BLAS
inside PyTorch. A wrapper that runs as Python calls kernels by name; Inductor would compile a Python
binding of each for that, here ``ctypes`` does it.

Kernels get addresses of tensors, and crash on address 0. ``tensor.untyped_storage().resize_(0)``
frees memory but leaves the tensor's sizes as they are, as sharding and offloading do between steps:
such tensors are refused.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...reuse.errors import PlanError
from ...reuse.ir.types import reach
from ...reuse.torch_names import matmul_precision
from ..arena import Buffers, IntArray
from ..files.torch_store import DamagedObjectError, own_folder, sound_code
from .torch_facts import for_this_cpu

_address_of = torch.Tensor.data_ptr


def check_memory(tensors: Iterable[torch.Tensor], names: Sequence[str] = ()) -> None:
    """Raises RuntimeError for the first tensor without all the memory that its sizes need."""
    for position, tensor in enumerate(tensors):
        held = tensor.untyped_storage().nbytes() if tensor.numel() and tensor.data_ptr() else 0
        if tensor.numel() and held < _needed_bytes(tensor):
            name = names[position] if position < len(names) else ""
            raise RuntimeError(_message(tensor, name))


def check_addresses(tensors: Sequence[torch.Tensor]) -> None:
    """Checks operands of PyTorch's own kernels, some of which do not check addresses either."""
    if 0 in map(_address_of, tensors):
        check_memory(tensors)


def address_in(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's data, 0 without elements; RuntimeError without memory."""
    return tensor.data_ptr() or no_address(tensor)


def no_address(tensor: torch.Tensor) -> int:
    """Returns 0, the address of a tensor without elements; raises RuntimeError for any other."""
    check_memory((tensor,))
    return 0


def _needed_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of memory up to the last element."""
    num_elements = tensor.storage_offset() + reach(tensor.shape, tensor.stride())
    return int(num_elements * tensor.element_size())


def _message(tensor: torch.Tensor, name: str) -> str:
    what = f"The tensor {name!r}" if name else "A tensor that the compiled program is given"
    if tensor.is_meta:
        return f"{what}, of shape {tuple(tensor.shape)}, is on the meta device and has no numbers."
    held = tensor.untyped_storage().nbytes()
    return (
        f"{what}, of shape {tuple(tensor.shape)} and {tensor.dtype}, needs "
        f"{_needed_bytes(tensor)} bytes, and its storage holds {held}: somebody freed or shrank it "
        "(untyped_storage().resize_, as sharding and offloading do). Bring its memory back before "
        "the call; nothing needs to be compiled again."
    )


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

    Its call takes tensors and numbers, as its parameters say, and writes into the tensors. The GIL
    is held meanwhile, as in Inductor's own bindings.
    """

    path: Path  # the shared object
    # Name of the function in it. ``<symbol>_checked`` catches what the function throws.
    symbol: str
    argument_types: tuple[str, ...]  # C++ types of its parameters

    @property
    def address(self) -> int:
        """The address of the function; OSError or AttributeError if the object does not have it."""
        found = ctypes.cast(getattr(_opened(str(self.path)), self.symbol), ctypes.c_void_p).value
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
    """Returns a kernel of a shared object; an error if it is not in there, or is no kernel."""
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
def _opened(path: str) -> Any:
    return ctypes.PyDLL(path)


@functools.cache
def _checked(kernel: BuiltKernel) -> Any:
    function = getattr(_opened(str(kernel.path)), kernel.symbol + CHECKED)
    types = [_SCALARS.get(_plain(name), ctypes.c_void_p) for name in kernel.argument_types]
    function.argtypes = [*types, ctypes.c_char_p, ctypes.c_int64]
    function.restype = ctypes.c_int
    return function


# ---- the native loop -----------------------------------------------------------------------------


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
_PLAIN_FLAGS = ["-std=c++17"]  # the standard headers of C++20 take half as long again to compile
_KERNEL = "kernel"  # what Inductor calls every C++ kernel's entry point


Hold = Callable[..., bool]
Move = Callable[[int, int, int], object]


@dataclass(frozen=True)
class NativeLibrary:
    """The native loop, and the other native functions."""

    # ``run(program, count, table)``, three addresses or counts, runs so many operations.
    run: Callable[[int, int, int], int]
    # ``hold(entries, absent, values, attributes, own_attributes, classes)`` tells whether Python's
    # objects hold what they held; None where Python's headers are missing.
    hold: Hold | None
    move: Move  # ``move(to, start, num_bytes)`` copies memory
    functions: ctypes.CDLL  # those of the library that are called by ctypes


class NotBuiltError(PlanError):
    """Our own C++ cannot be built here: a full disk, a compiler that fails."""


def check_cpp_compiler() -> None:
    """Raises PlanError, with what to install, if there is no C++ compiler for CPU kernels."""
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
    """Builds C++ and loads it, or only loads it if it was built; raises NotBuiltError.

    ``files`` are named in the error; ``libraries`` of PyTorch are those that it calls by name.
    """
    from torch._inductor.codecache import CppCodeCache

    own_folder()
    check_cpp_compiler()
    place = Path(torch.__file__).with_name("lib")
    flags = [f"-L{place}", *(f"-l{name}" for name in libraries)] if libraries else _PLAIN_FLAGS
    sound = sound_code(CppCodeCache, ctypes.CDLL)
    load = functools.partial(sound.load, source, extra_flags=flags)
    if "needs_vec_isa" in inspect.signature(CppCodeCache.load_async).parameters:
        # Not before torch 2.14. Inductor then need not find out which vectors work here, which
        # takes three times as long as this build; the compiler is told to use this CPU anyway.
        load = functools.partial(load, needs_vec_isa=False)
    try:
        try:
            return load()
        except DamagedObjectError:  # it is gone now, so that the second try builds it
            return load()
    except Exception as error:
        raise NotBuiltError(f"{[str(file) for file in files]} cannot be built: {error}") from error


def native_library() -> NativeLibrary:
    """Builds the loop; raises NotBuiltError."""
    return _native_of(_library())


def native_source() -> str:
    """Returns the source of all of our C++, for this CPU."""
    return for_this_cpu("\n".join(source.read_text() for source in _SOURCES))


def native_file() -> Path | None:
    """Returns the shared object that :func:`native_library` built."""
    name = getattr(_library(), "_name", None)
    return Path(name) if name else None


def loaded_native(path: Path) -> NativeLibrary:
    """Loads the loop from a copy of that object; OSError or AttributeError if it is another one."""
    return _native_of(ctypes.CDLL(str(path)))


def _native_of(library: ctypes.CDLL) -> NativeLibrary:
    if not hasattr(library, f"PyInit_{_MODULE}"):  # built without Python's headers: by ctypes
        function = library.lazyinline_run
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        function.restype = ctypes.c_int
        return NativeLibrary(function, None, ctypes.memmove, library)
    loader = ExtensionFileLoader(_MODULE, library._name)
    spec = spec_from_file_location(_MODULE, library._name, loader=loader)
    assert spec is not None
    native: Any = module_from_spec(spec)
    loader.exec_module(native)
    return NativeLibrary(native.run, native.hold, native.move, library)


def first_fit(
    buffers: Buffers, order: IntArray, library: Callable[[], ctypes.CDLL] = _library
) -> IntArray:
    """Places buffers in an order, each at the lowest address that is free during its life.

    ``library`` returns our C++, where it need not be built.
    """
    function = library().lazyinline_first_fit
    function.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 5]
    function.restype = None
    offsets = np.zeros(len(buffers), np.int64)
    given = (buffers.birth, buffers.death, buffers.size, order)
    arrays = [np.ascontiguousarray(array, np.int64) for array in given]
    function(len(buffers), *(array.ctypes.data for array in (*arrays, offsets)))
    return offsets


def exact_search(
    buffers: Buffers,
    enough: int,
    peak: int,
    steps: int,
    library: Callable[[], ctypes.CDLL] = _library,
) -> IntArray | None:
    """Looks for a plan of fewer than ``peak`` bytes: an :data:`..arena.ExactSearch`."""
    function = library().lazyinline_exact_search
    function.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 4]
    function.restype = ctypes.c_int64
    offsets = np.zeros(len(buffers), np.int64)
    columns = (buffers.birth, buffers.death, buffers.size, offsets)
    found = function(*(c.ctypes.data for c in columns), len(buffers), enough, peak, steps)
    return offsets if found < peak else None


def kernel_address(function: Callable[..., Any]) -> int | None:
    """Returns the address of an Inductor C++ kernel, or None if ``function`` is something else."""
    if isinstance(function, BuiltKernel):
        return function.address
    path = getattr(getattr(function, "__self__", None), "__file__", None)
    if getattr(function, "__name__", "") != _KERNEL or not path:
        return None
    return _address(path, _KERNEL)


def blas_address(name: str) -> int | None:
    """Returns the address of a BLAS routine of PyTorch, or None if its BLAS is not visible."""
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

"""Adapter: how Inductor has its C++ built. Its private names for that live here.

Inductor builds a shared object per CPU kernel, with a Python binding in each. Within
:func:`deferred_builds` its kernels are collected instead and built many at a time
(:mod:`.bundles`), with Inductor's own flags and headers, so that each gives the same
numbers. A kernel that is not the one plain function that is expected goes Inductor's own way.
Either way it is made safe first (:func:`.bundles.guarded`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ..files.disk import open_store
from ..files.torch_folder import DamagedObjectError, own_folder, sound_code, sound_object
from ..launches.torch_facts import cpu_kind, for_this_cpu
from ..launches.torch_native import native_library
from .bundles import HEADER, BuiltKernels, Bundles, Promise, guarded, kept, kernel_source

_STORE = "lazyinline"  # in Inductor's folder, so that a clear of results builds nothing again
_FORMAT = 1


@contextmanager
def deferred_builds() -> Iterator[list[Callable[[], None]]]:
    """Postpones waiting for the C++ compiler.

    Yields what waits for the kernels of one wrapper each, and raises what failed in making them.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import parallel_num_threads

    own_folder()
    num_threads = parallel_num_threads()
    wait, build_one = AsyncCompile.wait, AsyncCompile.cpp_pybinding
    bundles = _bundles()

    def collect(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        source_code = guarded(source_code, num_threads)
        source = kernel_source(argtypes, source_code)
        if source is None:
            return build_one(self, argtypes, for_this_cpu(source_code))
        bundles.beside(native_library)
        return bundles.ask(source)

    def postpone(self: AsyncCompile, scope: dict[str, Any]) -> None:
        builds.append(functools.partial(finish, self, scope))
        bundles.start()

    def finish(waiting: AsyncCompile, scope: dict[str, Any]) -> None:
        bundles.finish()
        promised = {n: value for n, value in scope.items() if isinstance(value, Promise)}
        scope.update({name: kept(value) for name, value in promised.items()})
        wait(waiting, scope)

    builds: list[Callable[[], None]] = []
    collecting = mock.patch.object(AsyncCompile, "cpp_pybinding", collect)
    with mock.patch.object(AsyncCompile, "wait", postpone), collecting:
        try:
            yield builds
        finally:
            bundles.close()


def _bundles() -> Bundles:
    from torch._inductor.async_compile import get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return Bundles(
        lambda: BuiltKernels(open_store(own_folder() / _STORE), build_setting()),
        build_file,
        lambda types, source: CppPythonBindingsCodeCache.load_pybinding(
            list(types), for_this_cpu(source)
        ),
        max(1, get_compile_threads()),
    )


def build_file(text: str) -> Path:
    """Builds a C++ file as Inductor builds a kernel; returns the shared object.

    Raises:
        Exception: Inductor's, with what the compiler says.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return Path(sound_code(CppPythonBindingsCodeCache, ctypes.PyDLL).load(text)._name)


def build_setting() -> str:
    """Returns all facts, besides the source, that decide how a kernel is built."""
    from torch._inductor import config
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpp_builder import (
        CppBuilder,
        CppTorchDeviceOptions,
        get_compiler_version_info,
        get_cpp_compiler,
    )
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchDeviceOptions(
        vec_isa=pick_vec_isa(),
        device_type="cpu",
        use_relative_path=config.is_fbcode(),
        **CppPythonBindingsCodeCache.cpp_compile_command_flags,
    )
    command = CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
    compiler = get_compiler_version_info(get_cpp_compiler())
    versions = f"{torch.__version__} {torch.version.git_version}"
    return "\n".join([str(_FORMAT), versions, cpu_kind(), compiler, command])


@contextmanager
def vector_units_probed_here() -> Iterator[None]:
    """Asks for vector instructions no more than is needed, and in this process."""
    from torch._inductor import config, cpu_vec_isa

    # Half of the first compile's time went to these probes, where nothing was built before:
    # Inductor builds an object per instruction set of the CPU, starts a Python process for each to
    # see whether it loads, and takes the best. Here they are tried from the best on until one is
    # good, in this process, which loads the kernels a moment later. An object that is not whole
    # (its writer was killed) is built again.
    own_folder()
    with ExitStack() as stack:
        if hasattr(cpu_vec_isa.VecISA, "_probe_load"):
            built = _built_as_kernels(cpu_vec_isa.VecISA.check_build)
            stack.enter_context(mock.patch.object(cpu_vec_isa.VecISA, "_probe_load", _loads_here))
            stack.enter_context(mock.patch.object(cpu_vec_isa.VecISA, "check_build", built))
        if takes_the_first(config.cpp.simdlen):
            best = mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", best_vector_units)
            stack.enter_context(best)
        yield


def takes_the_first(vector_bits: int | None) -> bool:
    """Whether Inductor takes the first good instruction set of its list, as it does unasked."""
    unasked = vector_bits is None and not os.environ.get("ATEN_CPU_CAPABILITY")
    return unasked and sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def best_vector_units() -> list[Any]:
    """Returns the first of Inductor's list of good instruction sets, without asking the others."""
    from torch._inductor import cpu_vec_isa

    has = cpu_vec_isa.x86_isa_checker()
    known = (s for s in cpu_vec_isa.supported_vec_isa_list if set(str(s).split()) <= set(has))
    return list(itertools.islice(filter(bool, known), 1))


def _loads_here(isa: Any, path: str) -> bool:
    """Whether a shared object loads into this process.

    Raises:
        DamagedObjectError: if it must not be tried; it is gone then.
    """
    path = str(sound_object(Path(path)))
    try:
        ctypes.CDLL(path)
    except OSError:
        return False
    return True


def _built_as_kernels(check_build: Callable[[Any, str], bool]) -> Callable[[Any, str], bool]:
    from torch._inductor import config

    def check(isa: Any, code: str) -> bool:
        for _ in range(2):
            with contextlib.suppress(DamagedObjectError):
                # With the header of kernels, which is precompiled, before it a probe costs less. Of
                # code without vectors in it Inductor builds a file for no instruction set.
                is_short = config.cpp_cache_precompile_headers and "at::vec::" in code
                return _builds(isa, code) if is_short else check_build(isa, code)
        return False

    return check


def _builds(isa: Any, code: str) -> bool:
    """Whether a kernel for an instruction set can be built, and loads into this process.

    Raises:
        DamagedObjectError: if what was built before must not be loaded; it is gone then.
    """
    from torch._inductor import codecache

    with mock.patch.object(codecache, "pick_vec_isa", lambda: isa):
        try:
            build_file(f"{HEADER}\n{for_this_cpu(code)}")
        except DamagedObjectError:
            raise
        except Exception:  # what the compiler says, or the loader: not this one, then
            return False
    return True

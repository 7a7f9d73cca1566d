"""Adapter: Triton kernels as text, as machine code, and as something to launch."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest import mock

import torch

from ...reuse.errors import PlanError


def triton_version() -> str:
    """Returns which Triton is installed; "" without one."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_interpreting() -> bool:
    """Whether this process interprets kernels; Triton's compiler is off then."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def machine_code(kernels: Iterable[TritonKernel]) -> dict[str, bytes]:
    """Compiles each different kernel for the GPU that it was written for, several at a time.

    A kernel that Triton has compiled before comes from its cache on disk. Of several launch configs
    only Inductor's first one is compiled: to choose among them takes the device. What was made is
    returned by the kernels' contents. Raises PlanError if Triton cannot compile one.
    """
    different = {kernel.content: kernel for kernel in kernels}
    # Threads do: the time goes to C++, and to NVIDIA's assembler, a process of its own.
    with _compiling_without_driver(), ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(different, pool.map(_compiled, different.values()), strict=True))


@contextmanager
def _compiling_without_driver() -> Iterator[None]:
    """Keeps Triton and Inductor from asking the driver for a GPU."""
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    static = triton_heuristics.StaticTritonCompileResult
    with ExitStack() as stack:
        no_driver = mock.patch.object(triton_helpers, "set_driver_to_gpu", _nothing)
        stack.enter_context(no_driver)
        # Its launcher is loaded onto the device, and keeps no machine code.
        stack.enter_context(mock.patch.object(static, "can_statically_launch", _nothing))
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _compiled(kernel: TritonKernel) -> bytes:
    tuner = _tuner_of(kernel)
    try:
        made = tuner._precompile_config(tuner.configs[0]).kernel
    except Exception as error:
        raise PlanError(f"Triton cannot compile {kernel.name}: {error}") from error
    return bytes(made.asm["cubin"])


class LoadedKernel:
    """A Triton kernel on a GPU of this machine, launched on the current stream.

    Its first launch autotunes: it tries all configs on copies and keeps one, as Inductor does.
    """

    def __init__(self, kernel: TritonKernel) -> None:
        self._tuner = _tuner_of(kernel)
        self._stream_of = torch._C._cuda_getCurrentRawStream  # type: ignore[attr-defined]

    def __call__(self, *args: Any) -> None:
        """Launches it on the device of its first tensor."""
        device = next(a for a in args if isinstance(a, torch.Tensor)).device
        # A kernel is loaded onto the current device, and only streams of that can launch it.
        is_there = device.index == torch.cuda.current_device()
        with nullcontext() if is_there else torch.cuda.device(device):
            self._tuner.run(*args, stream=self._stream_of(device.index))


def _tuner_of(kernel: TritonKernel) -> Any:
    """Returns what Inductor launches a kernel by: made once per text in a process."""
    from torch._inductor.codecache import PyCodeCache

    return getattr(PyCodeCache.load(kernel.source), kernel.name)


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """A kernel by its text, a Python module that also says how Inductor would launch it."""

    name: str
    source: str

    def __call__(self, *args: Any) -> NoReturn:
        """Raises PlanError: a launch holds only the text, to be loaded before a program runs."""
        raise PlanError(f"The GPU kernel {self.name} was compiled, and is not loaded here.")

    @property
    def argument_names(self) -> list[str]:
        """The names of its parameters, in order; what Inductor calls them says what they are."""
        found = re.search(rf"\bdef {re.escape(self.name)}\(([^)]*)\)", self.source)
        names = found.group(1).split(",") if found else []
        return [name.split(":")[0].split("=")[0].strip() for name in names]

    @property
    def aligned_arguments(self) -> frozenset[int]:
        """Which parameters it loads several elements of at once; all, if that is not known.

        Inductor notes which of them are multiples of 16, addresses or numbers.
        """
        known = re.search(r"'configs': \[\{(.*?)\}\]", self.source)
        if known is None:
            return frozenset(range(len(self.argument_names)))
        return frozenset(int(n) for n in re.findall(r"\((\d+),\): ", known.group(1)))

    @property
    def content(self) -> str:
        """Its text without its name, which tells only where in a closure it stood."""
        return self.source.replace(self.name, "triton_")

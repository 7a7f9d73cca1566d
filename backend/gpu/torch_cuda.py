"""Adapter: what runs on a GPU: Triton kernels, and what is launched as one CUDA graph.

A kernel is text, machine code, or something to launch. A capture of a graph that fails leaves the
stream, the generator of random numbers and the allocator as they were: PyTorch's own context puts
none of them back if the end of the capture raises.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias
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


# ---- one CUDA graph ------------------------------------------------------------------------------


Run: TypeAlias = Callable[[], list[torch.Tensor]]
Capture: TypeAlias = Callable[[Run, torch.device], Run]
"""Returns a function that runs the same and writes the results anew; runs nothing itself."""


def capture_graph(run: Run, device: torch.device) -> Run:
    """Captures what ``run`` launches as a CUDA graph: the CPU issues each launch only once.

    ``run`` must launch on this device only, and read nothing back. A capture executes no kernel;
    ``run`` has run before, so that libraries have set up what they keep.
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs)

    Raises:
        RuntimeError: if it does what a graph cannot hold; nothing has changed then.
    """
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.clone_state()
        torch.cuda.synchronize()
        # cuBLAS allocates new workspaces in the graph's own pool. Otherwise others, Inductor's
        # graphs among them, would free them while our replays write to them.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        try:
            # On a new stream: one whose capture failed may be unusable.
            with torch.cuda.stream(torch.cuda.Stream(device)):
                results = _captured(graph, run)
        except BaseException:
            generator.graphsafe_set_state(state)  # the other may still be in a capture
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def replay() -> list[torch.Tensor]:
        with torch.cuda.device(device):
            graph.replay()
        return results

    return replay


def captured_once(
    run: Run, capture: Capture, device: torch.device, note: Callable[[str], None]
) -> Run:
    """Returns a function that captures ``run`` at its second call, and replays it from then on.

    All memory has fixed addresses. The first call runs as usual and initializes libraries; there is
    no extra warm-up, since a run may update parameters. ``note`` gets why there is no graph, or "".
    """

    @functools.cache
    def captured() -> Run:
        try:
            replay = capture(run, device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            note(str(error))
            warnings.warn(
                f"A step is not one CUDA graph, so its launches run one by one: {error}",
                stacklevel=2,
            )
            return run
        note("")
        return replay

    runs = itertools.chain[Run]([run], itertools.repeat(lambda: captured()()))
    return lambda: next(runs)()


def _captured(graph: torch.cuda.CUDAGraph, run: Run) -> list[torch.Tensor]:
    # For this thread only: otherwise another thread that pins memory, such as a data loader's,
    # would fail and end the capture.
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        results = run()
    except BaseException:
        with suppress(RuntimeError):  # the reason is what was raised first
            _end(graph)
        raise
    _end(graph)
    return results


def _end(graph: torch.cuda.CUDAGraph) -> None:
    """Ends a capture; if that fails, what is allocated later does not come from its pool."""
    try:
        graph.capture_end()
    except RuntimeError:
        device, pool = torch.cuda.current_device(), graph.pool()
        for give_back in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with suppress(RuntimeError):  # done, if the capture failed after it
                give_back(device, pool)
        raise

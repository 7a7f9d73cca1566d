"""Adapter: what is launched as one CUDA graph.

A capture that fails leaves the stream, the generator of random numbers and the allocator as they
were: PyTorch's own context puts none of them back if the end of the capture raises.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import torch

Run: TypeAlias = Callable[[], list[torch.Tensor]]
Capture: TypeAlias = Callable[[Run, torch.device], Run]
"""Returns what runs the same and writes its results anew; runs nothing itself."""


def capture_graph(run: Run, device: torch.device) -> Run:
    """Captures what ``run`` launches as a CUDA graph: the CPU names each launch but once.

    It must launch on this device alone, and read nothing back; it does not run here. It has run
    before, so that libraries have set up what they keep.
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs)

    Raises:
        RuntimeError: if it does what a graph cannot hold. All is as it was then.
    """
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.clone_state()
        torch.cuda.synchronize()
        # What cuBLAS works in is made anew in the graph's own pool. Otherwise others, Inductor's
        # graphs among them, would free it while our replays write to it.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        try:
            # A stream of its own: one whose capture failed may be of no more use.
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
    """Returns what runs the same: captured at the second run, and replayed from then on.

    All has its place. The first run is the one in which libraries are set up: none is run besides,
    for it may update parameters. ``note`` takes why there is no graph, which is "" where one is.
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
    # Of this thread alone: a data loader that pins memory meanwhile, in a thread of its own, would
    # end the capture, and fail.
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

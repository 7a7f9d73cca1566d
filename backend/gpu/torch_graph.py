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

"""One CUDA graph of many launches: the GPU runs them again without the CPU naming each.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from ...reuse.ir.program import Leaf
from ..link.link import FlatProgram

Run = Callable[[], list[torch.Tensor]]
Capture = Callable[[Run, torch.device], tuple[Callable[[], None], list[torch.Tensor]]]
"""Returns what runs it again, and the results, which are written anew each time."""


def capture(run: Run, device: torch.device) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """Captures what ``run`` launches; see :data:`Capture`.

    It must launch on this device alone, and read nothing back. What PyTorch and its libraries set
    up at a first call happens in one before, which leaves the device's random numbers as they were.
    Both are on one stream, the same for all captures: for each PyTorch keeps memory for cuBLAS.

    Raises:
        RuntimeError: if it does what a graph cannot hold.
    """
    with torch.cuda.device(device):
        stream = _capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.random.fork_rng([device]), torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = run()

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay, results


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def device_of(flat: FlatProgram) -> torch.device:
    """Returns the GPU that a program runs on, all of it.

    Raises:
        RuntimeError: if there is none. What else ran while a graph was captured would run just
            then, and not again.
    """
    leaves = dict.fromkeys(launch.leaf for launch in flat.launches)
    found = {t.device for t in flat.slot_types} | {d for leaf in leaves for d in _devices_in(leaf)}
    names = sorted(map(str, found))
    if len(found) != 1 or next(iter(found)).type != "cuda":
        raise RuntimeError(f"a graph is for one GPU, and the program uses {', '.join(names)}")
    return next(iter(found))


def _devices_in(leaf: Leaf) -> Iterable[torch.device]:
    for node in leaf.module.graph.nodes:
        made = node.meta.get("val")
        for value in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(value, torch.Tensor):
                yield value.device
        if isinstance(node.kwargs.get("device"), torch.device):
            yield node.kwargs["device"]

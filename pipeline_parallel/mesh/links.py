"""Measures how fast the ranks of a mesh communicate, for plans, and keeps that in a file."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ...reuse.errors import PlanError, door
from .layouts import AxisRates

Links: TypeAlias = "Mapping[str, AxisRates] | str | os.PathLike[str]"
"""Rates by the name of a mesh dimension, or the path of a file that holds them."""

# A small gather shows the latency of a collective, a large one the bandwidth.
_SMALL_BYTES, _LARGE_BYTES = 2**12, 2**25
_TIMES = 5


@door
def measure_links(mesh: Any, path: str | os.PathLike[str] | None = None) -> dict[str, AxisRates]:
    """Measures latency and bandwidth along each dimension of a mesh; call it on every rank.

    All groups of a dimension gather at once, as they do in a step. A gather takes as long as on its
    slowest rank, and the fastest of several gathers counts.

    Args:
        mesh: a ``DeviceMesh``; dimensions of one rank are left out.
        path: a file to write, for ``parallelize(plan="auto", links=path)`` and
            ``lazyinline fit --links``; rank 0 writes it.

    Returns:
        For each dimension, the bytes per second that a rank sends, and the seconds of an empty
        collective; the same on every rank.

    Example:
        >>> lazyinline.measure_links(mesh, "links.json")
        >>> parallel = lazyinline.parallelize(
        ...     model, (ids, targets), mesh=mesh, plan="auto", links="links.json"
        ... )
    """
    # Imported late: DTensor takes as long to import as all of lazyinline.
    from .given import check_mesh
    from .torch_collectives import collectives_over, groups_of

    mesh = check_mesh(mesh, any_names=True)
    names = mesh.mesh_dim_names or ()
    sizes = {name: mesh.size(i) for i, name in enumerate(names) if mesh.size(i) > 1}
    with collectives_over(groups_of(mesh)):
        found = {name: _measured(mesh.device_type, name, size) for name, size in sizes.items()}
    if path is not None and dist.get_rank() == 0:
        text = json.dumps({name: asdict(rates) for name, rates in found.items()}, indent=1)
        pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
    return found


def _measured(device: str, name: str, size: int) -> AxisRates:
    small_s, large_s = (
        _gather_s(device, name, size, num_bytes) for num_bytes in (_SMALL_BYTES, _LARGE_BYTES)
    )
    sent_bytes = (_LARGE_BYTES - _SMALL_BYTES) * (size - 1) / size
    return AxisRates(sent_bytes / max(large_s - small_s, 1e-9), small_s)


def _gather_s(device: str, name: str, size: int, num_bytes: int) -> float:
    """Returns the seconds of an all-gather of so many bytes in all, on the slowest rank."""
    from .torch_collectives import WAIT

    own = torch.ones(num_bytes // size, dtype=torch.uint8, device=device)
    best = torch.full((), float("inf"), device=device)
    for _ in range(_TIMES + 1):  # the first one also connects the ranks
        dist.barrier()
        start = time.perf_counter()
        made = WAIT(torch.ops.lazyinline.all_gather(own, size, name), own)
        made[-1].item()  # waits until the device is done, too
        taken = torch.full((), time.perf_counter() - start, device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        best = torch.minimum(best, taken)
    return float(best)


def links_from(links: Links, names: Sequence[str], sizes: Sequence[int]) -> Mapping[str, AxisRates]:
    """Returns rates of the dimensions of a mesh, read from a file if ``links`` is a path."""
    if isinstance(links, (str, os.PathLike)):
        try:
            read = json.loads(pathlib.Path(links).read_text(encoding="utf-8"))
            links = {name: AxisRates(**rates) for name, rates in read.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise PlanError(
                f"links={str(links)!r} is no file of lazyinline.measure_links: {error}."
            ) from error
    if missing := [n for n, size in zip(names, sizes, strict=True) if size > 1 and n not in links]:
        raise PlanError(
            f"links= has rates of {', '.join(links) or 'nothing'}, and the mesh has the dimension "
            f"{missing[0]!r}. Measure this mesh: lazyinline.measure_links(mesh, path)."
        )
    return links

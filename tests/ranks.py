"""Runs functions of test modules on the ranks of a real gloo group, each in its own process."""

import contextlib
import datetime
import importlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import Forked

LIMIT_S = 300


def worker(rank: int, world: int, folder: Path, task: str) -> None:
    """Runs ``module.function`` on one rank; what it returns goes to a file.

    Of several tasks, with commas between, what each function returned is there by its name.
    """
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=timeout)
    found = {}
    for one in filter(None, task.split(",")):
        module, name = one.split(".")
        found[name] = getattr(importlib.import_module(module), name)(rank, folder)
    torch.save(found if "," in task else found[name], folder / f"rank{rank}")
    dist.destroy_process_group()


@contextlib.contextmanager
def started(
    folder: Path, task: str, world: int = 2, cache: Path | None = None
) -> Iterator[list[Forked]]:
    """Starts the ranks and ends them whatever happens."""
    environment = {**os.environ, "LAZYINLINE_CACHE_DIR": str(cache or folder / "cache")}
    call = "ranks.worker(int(argv[1]), int(argv[2]), pathlib.Path(argv[3]), argv[4])"
    code = f"import pathlib, ranks; from sys import argv; {call}"
    common = (str(world), str(folder), task)
    ranks = [Forked(code, str(rank), *common, environment=environment) for rank in range(world)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


def said_by_survivors(
    folder: Path,
    task: str,
    limit_s: float,
    world: int = 2,
    ended_by: signal.Signals = signal.SIGKILL,
) -> list[str]:
    """Ends the last rank once all are ready; returns the outputs of the others, which fail."""
    with started(folder, task, world) as ranks:
        deadline = time.monotonic() + LIMIT_S
        while len(list(folder.glob("ready*"))) < world:
            assert time.monotonic() < deadline
            ended = [rank.wait() for rank in ranks if rank.returncode is not None]
            assert not ended, ended
            time.sleep(0.2)
        ranks[-1].send_signal(ended_by)
        deadline = time.monotonic() + limit_s
        outputs = [rank.wait(deadline - time.monotonic()) for rank in ranks[:-1]]
    assert [rank.returncode for rank in ranks[:-1]] == [1] * (world - 1), outputs
    return outputs


def two_replicas() -> Any:
    """The mesh of two replicas of a pipeline that has half of the ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (2, dist.get_world_size() // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "pipeline"))


def run_ranks(folder: Path, task: str, world: int = 2, cache: Path | None = None) -> list[Any]:
    """Returns what a function returned on each rank."""
    deadline = time.monotonic() + LIMIT_S
    with started(folder, task, world, cache) as ranks:
        for number, process in enumerate(ranks):
            try:
                output = process.wait(max(1.0, deadline - time.monotonic()))
            except TimeoutError:
                pytest.fail(f"rank {number} did not end within {LIMIT_S} s")
            assert process.returncode == 0, f"rank {number}:\n{output[-4000:]}"
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(world)]

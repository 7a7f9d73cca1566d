"""All ranks in one process: each in a thread, by the process group of PyTorch's own tests."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

LIMIT_S = 120


def run_in_threads(world: int, function: Callable[[int], Any]) -> list[Any]:
    """Returns what a function returned for each rank; raises what one of them raised.

    Threads share PyTorch's random generator, so what draws numbers needs processes.
    """
    found: dict[int, Any] = {}
    errors: list[BaseException] = []
    store = dist.HashStore()

    def work(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            found[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    with _threads_as_ranks():
        threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), f"a rank did not end within {LIMIT_S} s"
    for error in errors:
        if not isinstance(error, SystemExit):  # which ends those that wait for one that failed
            raise error
    return [found[rank] for rank in range(world)]


@contextlib.contextmanager
def _threads_as_ranks() -> Iterator[None]:
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    threaded._install_threaded_pg()
    threaded.ProcessLocalGroup.reset()
    try:
        with same_excepthook():
            yield
    finally:
        threaded._uninstall_threaded_pg()
        isolate(False)


@contextlib.contextmanager
def same_excepthook() -> Iterator[None]:
    """Takes out what each init_process_group wraps around ``sys.excepthook``."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook


@contextlib.contextmanager
def one_of_many(world: int = 4, rank: int = 0) -> Iterator[None]:
    """Makes this process a rank of a group whose collectives do nothing, for what moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with same_excepthook():
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()

"""Adapter: the memory that a run takes from PyTorch's allocator, told by PyTorch's profiler.

The profiler's trace has an event for each block that the CPU allocator hands out or takes back,
with its address and bytes.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...backend.launches.torch_profiler import profiler_runs

_STDERR = 2
_OWN_LINE = re.compile(
    rb"[A-Z]+:\d{4}-\d\d-\d\d [\d:]+ "
    rb"|\[W[^]]*CPUAllocator\.cpp:\d+\] Memory block of unknown size"  # from before the run
)
_EVENT, _ADDRESS, _BYTES = "[memory]", "Addr", "Bytes"


def taken_bytes(run: Callable[[], object], devices: set[torch.device]) -> int | None:
    """Returns the most bytes at once that a run takes and has not given back.

    What it returns is kept until it has ended. What was there before, such as an arena that is kept
    from run to run, is not counted.

    Args:
        run: what to run once.
        devices: those on which it works.

    Returns:
        The bytes; None where only a GPU's allocator could tell, or a profiler runs already.
    """
    if profiler_runs() or any(device.type != "cpu" for device in devices):
        return None
    activities = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=activities, profile_memory=True)
    with _unsaid():
        profile.start()
        try:
            result = run()
        finally:
            profile.stop()
    del result
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return _largest_sum([event for event in events if event.get("name") == _EVENT])


@contextmanager
def _unsaid() -> Iterator[None]:
    """Keeps from stderr what the profiler's library says of itself; lets everything else through.

    It writes to the descriptor, from C++, so that nothing in Python could leave it out.
    """
    sys.stderr.flush()
    try:
        kept = os.dup(_STDERR)
    except OSError:  # there is no stderr
        yield
        return
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(kept, _STDERR)
            os.close(kept)
            said.seek(0)
            for line in said:
                if not _OWN_LINE.match(line):
                    os.write(_STDERR, line)


def _largest_sum(events: list[dict[str, Any]]) -> int:
    live: dict[int, int] = {}
    held = most = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        address, num_bytes = event["args"][_ADDRESS], event["args"][_BYTES]
        if num_bytes > 0:
            live[address] = num_bytes
            held += num_bytes
            most = max(most, held)
        else:  # what was there before the run is none of its own
            held -= live.pop(address, 0)
    return most

"""Adapter: what a run tells ``torch.profiler``, if one runs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

PROFILER: ModuleType = torch.autograd.profiler
IF_IT_RUNS = "profiler._is_profiler_enabled"
"""Asks, in a generated function where ``profiler`` is :data:`PROFILER`, whether one runs."""


def profiler_runs() -> bool:
    """Says whether a profiler runs."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def begin_range(name: str) -> Any:
    """Begins a range that a profiler shows under a name; returns it."""
    shown = torch.profiler.record_function(name)
    shown.__enter__()
    return shown


def end_range(shown: Any) -> None:
    """Ends a range. One that is dropped, after an error, ends as well."""
    shown.__exit__(None, None, None)

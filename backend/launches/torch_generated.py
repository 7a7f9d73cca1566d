"""Adapter: what generated functions ask of PyTorch: a profiler's ranges, the layouts of results.

A launch that allocates its result is the one thing that no plan can prove: its layout is what the
operator's fake kernel said, which for an operator of somebody else may be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ...reuse.errors import PlanError
from ...reuse.ir.types import TensorType

PROFILER: ModuleType = torch.autograd.profiler
IF_IT_RUNS = "profiler._is_profiler_enabled"
"""Asks, in a generated function where ``profiler`` is :data:`PROFILER`, whether one runs."""
check_layout = torch._C._dynamo.guards.assert_size_stride
"""Raises AssertionError if a tensor has another shape, or other strides that matter."""


def as_predicted(
    result: Any,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    operator: str,
    *,
    device: torch.device,
) -> torch.Tensor:
    """Returns a result in the layout in which later launches read it.

    Raises:
        PlanError: if it holds something else than was predicted.
    """
    predicted = TensorType(dtype, tuple(shape), tuple(stride), device)
    if not isinstance(result, torch.Tensor):
        found = f"a {type(result).__name__}"
    elif (result.dtype, tuple(result.shape), result.device) != (dtype, tuple(shape), device):
        found = f"{TensorType.of(result)} on {result.device}"
    else:
        with torch.no_grad():
            return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(result)
    raise PlanError(
        f"The operator {operator} returned {found}, and its fake kernel says {predicted} on "
        f"{device}. "
        "Programs are laid out by the fake kernel: mend it (torch.library.register_fake)."
    )


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

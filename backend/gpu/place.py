"""Where a program runs: its memory, and who launches its kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch

from ...reuse.errors import PlanError
from .targets import Target
from .triton_kernel import TritonKernel

Loader: TypeAlias = Callable[[TritonKernel], Callable[..., Any]]
"""Makes a kernel something that takes tensors and sizes, and launches it."""


@dataclass(frozen=True)
class Place:
    """Where a program runs: its memory, and who launches its kernels.

    Attributes:
        device: of the memory.
        load: makes GPU kernels something to launch.
        graphs: whether a step is captured as one CUDA graph, or its launches run one by one.
        missing: the device that it is not, where a program only is compiled for that; or "".
        target: what is known of the GPU; None on a CPU, and on a GPU that the table does not have.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    load: Loader = lambda kernel: kernel
    graphs: Literal["captured", "none"] = "none"
    missing: str = ""
    target: Target | None = None

    @property
    def launches(self) -> Literal["native", "python"]:
        """Whether the native loop, which is of the CPU, may run launches there."""
        return "python" if self.missing or self.device.type != "cpu" else "native"

    def check_is_here(self) -> None:
        """Raises PlanError if there is nothing to run on."""
        if self.missing:
            raise PlanError(
                f"This was compiled for {self.missing}, which is not here, so nothing was run. "
                "last_report has the plan; without target= it runs on what is here."
            )


def streams_on(device: torch.device) -> dict[str, Any]:
    """Returns what a generated function calls for two streams; a CPU has one, which is both."""
    if device.type == "cpu":
        return {"current_stream": _InOrder, "second": _InOrder(), "beside": nullcontext}
    return {
        "current_stream": partial(torch.cuda.current_stream, device),
        "second": _second_stream(device),
        "beside": torch.cuda.stream,
    }


@functools.cache
def _second_stream(device: torch.device) -> Any:
    """One for all programs: for each stream PyTorch keeps memory that cuBLAS works in."""
    return torch.cuda.Stream(device)


class _InOrder:
    """Stands for a stream where launches run as they are called."""

    def record_event(self) -> None:
        """What ran, ran."""

    def wait_event(self, event: None) -> None:
        """There is nothing to wait for."""


HERE = Place()
"""The CPU, where everything can run."""

"""Where a program runs: its memory, and who launches its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from ...reuse.errors import PlanError
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
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    load: Loader = lambda kernel: kernel
    graphs: Literal["captured", "none"] = "none"
    missing: str = ""

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


HERE = Place()
"""The CPU, where everything can run."""

"""The options of a compile, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..autodiff.training_program import ORDERS, SUMS, Order, Sums
from ..backend.kernels.lower import BackendName, backend_named
from ..recompute.planner import POLICIES, Policy, check_policy
from ..reuse.errors import PlanError, ReuseError
from .batch import check_count
from .capture.blocks import REUSE_CHOICES, Reuse

Boundaries = Literal["kept", "fused"]
BOUNDARY_CHOICES: tuple[str, ...] = get_args(Boundaries)

Fallback = Literal["eager", "error"]
FALLBACK_CHOICES: tuple[str, ...] = get_args(Fallback)


@dataclass(frozen=True)
class Options:
    """The options of one compiled module, checked."""

    reuse: Reuse = "auto"
    backend: BackendName = "inductor"
    recompute: Policy = None
    cache: Literal["off", "disk"] = "off"
    """``"disk"`` uses results of earlier processes; measurements use ``"off"``."""

    fallback: Fallback = "eager"
    """``"eager"`` runs modules that cannot be captured eagerly, between compiled ones."""

    target: str | None = None
    """A GPU to compile for, which need not be here; None for the model's device."""

    boundaries: Boundaries = "kept"
    """``"fused"`` lets kernels fuse from the end of a block into the start of the next."""

    def __post_init__(self) -> None:
        if self.fallback not in FALLBACK_CHOICES:
            raise PlanError(f"fallback={self.fallback!r} is unknown; there are {FALLBACK_CHOICES}.")
        if self.boundaries not in BOUNDARY_CHOICES:
            raise PlanError(
                f"boundaries={self.boundaries!r} is unknown; there are {BOUNDARY_CHOICES}."
            )
        check_policy(self.recompute)
        if self.reuse not in REUSE_CHOICES:
            raise ReuseError(f"reuse={self.reuse!r} is unknown; there are {REUSE_CHOICES}.")
        backend_named(self.backend, self.target)
        if self.recompute in POLICIES and self.boundaries == "fused":
            raise PlanError(
                f"recompute={self.recompute!r} is decided for each block, and boundaries='fused' "
                "leaves none whole: leave boundaries as they are, or use a Budget."
            )
        if self.recompute in POLICIES and self.reuse == "off":
            raise PlanError(
                f"recompute={self.recompute!r} is decided for each block, and reuse='off' leaves "
                "none: leave reuse as it is, or use a Budget."
            )


@dataclass(frozen=True)
class Batching:
    """How a step's batch is split, and in which order the parts run."""

    micro_batches: int = 1
    order: Order = "forward_first"
    sums: Sums = "as_gradients"

    def __post_init__(self) -> None:
        check_count(self.micro_batches)
        if self.order not in ORDERS:
            raise PlanError(f"order={self.order!r} is unknown; there are {ORDERS}.")
        if self.sums not in SUMS:
            raise PlanError(f"sums={self.sums!r} is unknown; there are {SUMS}.")

    @property
    def loss_bytes(self) -> int:
        """Most bytes that a step allocates for the losses: one per part, and their mean."""
        return 8 * (self.micro_batches + 1)

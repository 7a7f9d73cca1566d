"""What is exported, and what its parts are called in the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ...reuse.ir.program import Program

if TYPE_CHECKING:
    from ..sizes.torch_declared_sizes import DeclaredSizes


@dataclass(frozen=True)
class Subject:
    """What is exported: a program, and the model it was captured from, if it is known."""

    program: Program
    model: nn.Module | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    gradients: tuple[int, ...] = ()  # program inputs that have a gradient among the outputs
    sizes: DeclaredSizes | None = None

    @property
    def conditions(self) -> tuple[str, ...]:
        """What must hold of the sizes."""
        return () if self.sizes is None else self.sizes.conditions()


@dataclass(frozen=True)
class Names:
    """What the inputs and outputs of a file are called.

    Attributes:
        inputs: a name for each program input.
        outputs: a name for each program output.
        results: for each leaf of the model's result that is a tensor, its position among the
            leaves and its name in the file.
        gradients: name of the gradient of each program input that has one.
    """

    inputs: list[str]
    outputs: list[str | None]
    results: list[tuple[int, str]]
    gradients: dict[int, str]

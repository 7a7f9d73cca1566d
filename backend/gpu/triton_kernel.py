"""One Triton kernel, as Inductor wrote it. It is text until something loads it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

from ...reuse.errors import PlanError


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """A kernel by its text; equal texts are one kernel.

    Attributes:
        name: of the function in it.
        source: a Python module that holds it, and how Inductor would launch it.
    """

    name: str
    source: str

    def __call__(self, *args: Any) -> NoReturn:
        """Is what a launch of it holds; what runs a program loads it first."""
        raise PlanError(f"The GPU kernel {self.name} was compiled, and is not loaded here.")

    @property
    def argument_names(self) -> list[str]:
        """The names of its parameters, in order; what Inductor calls them says what they are."""
        found = re.search(rf"\bdef {re.escape(self.name)}\(([^)]*)\)", self.source)
        names = found.group(1).split(",") if found else []
        return [name.split(":")[0].split("=")[0].strip() for name in names]

    @property
    def aligned_arguments(self) -> frozenset[int]:
        """Which parameters it is compiled for at multiples of 16; all, if that is not known."""
        known = re.search(r"'configs': \[\{(.*?)\}\]", self.source)
        if known is None:
            return frozenset(range(len(self.argument_names)))
        return frozenset(int(n) for n in re.findall(r"\((\d+),\): ", known.group(1)))

    @property
    def content(self) -> str:
        """Its text without its name, which tells only where in a closure it stood."""
        return self.source.replace(self.name, "triton_")

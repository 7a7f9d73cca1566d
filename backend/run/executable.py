"""Execute: a flat program as one Python function with no frame and no lookup per block.

The function is generated once: each launch is one line on local variables, and a value's variable
is dropped after its last use, so memory goes back at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...reuse.ir.program import Leaf
from ..kernels.lower import Kernel
from ..link.link import FlatProgram, Launch, Slots


class Executable:
    """A linked program, ready to run.

    Args:
        flat: the launches.
        kernels: a kernel for each leaf in it.
    """

    def __init__(self, flat: FlatProgram, kernels: Mapping[Leaf, Kernel]) -> None:
        self.flat = flat
        self.source, scope = _generate(flat, kernels)
        exec(compile(self.source, "<lazyinline program>", "exec"), scope)
        self._function: Callable[[list[Any]], list[Any]] = scope.pop("program")

    def run(self, inputs: list[Any]) -> list[Any]:
        """Runs on flat inputs; empties the list, so that inputs are freed when used up."""
        return self._function(inputs)

    @property
    def num_launches(self) -> int:
        """Kernel launches in one run."""
        return len(self.flat.launches)


def _generate(flat: FlatProgram, kernels: Mapping[Leaf, Kernel]) -> tuple[str, dict[str, Any]]:
    names: dict[Leaf, str] = {}
    scope: dict[str, Any] = {}
    for leaf in dict.fromkeys(launch.leaf for launch in flat.launches):
        names[leaf] = f"k{len(names)}"
        scope[names[leaf]] = kernels[leaf].function
    lines = ["def program(inputs):"]
    if flat.inputs:
        lines.append(f"  {_targets(flat.inputs)} = inputs")
    lines.append("  inputs.clear()")
    lines += [_line(launch, names[launch.leaf], kernels[launch.leaf]) for launch in flat.launches]
    lines.append(f"  return [{', '.join(f's{s}' for s in flat.outputs)}]")
    return "\n".join(lines) + "\n", scope


def _targets(slots: Slots) -> str:
    return ", ".join(f"s{s}" for s in slots) + ","


def _line(launch: Launch, name: str, kernel: Kernel) -> str:
    operands = ", ".join([*map(str, kernel.sizes), *(f"s{s}" for s in launch.operands)])
    if kernel.convention == "boxed":
        operands = f"[{operands}]"
    line = (
        f"  {_targets(launch.results)} = {name}({operands})"
        if launch.results
        else f"  {name}({operands})"
    )
    if launch.frees:
        line += f"; del {', '.join(f's{s}' for s in launch.frees)}"
    return line

"""Execute: a flat program as one Python function with no frame and no lookup per block.

The function is generated once: each launch is one line on local variables, and a value's variable
is dropped after its last use, so memory goes back at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...reuse.ir.program import Leaf
from ..kernels.lower import Kernel
from ..launches.torch_generated import begin_range, end_range, profiler_runs
from ..link.link import FlatProgram, Launch, Slots
from ..link.program_writer import Ranges

Runner = Callable[[list[Any]], list[Any]]


class Executable:
    """A linked program, ready to run.

    Args:
        flat: the launches.
        kernels: a kernel for each leaf in it.
    """

    def __init__(self, flat: FlatProgram, kernels: Mapping[Leaf, Kernel]) -> None:
        self.flat = flat
        self._kernels = kernels
        self.source = _source(flat, kernels, "none")
        self._function = _function(flat, kernels, self.source)
        self._profiled: Runner | None = None

    def run(self, inputs: list[Any]) -> list[Any]:
        """Runs on flat inputs; empties the list, so that inputs are freed when used up."""
        if profiler_runs():
            return self._run_profiled(inputs)
        return self._function(inputs)

    def _run_profiled(self, inputs: list[Any]) -> list[Any]:
        """Runs with a range around each launch, which is a call of a block here."""
        if self._profiled is None:
            source = _source(self.flat, self._kernels, "shown")
            self._profiled = _function(self.flat, self._kernels, source)
        return self._profiled(inputs)

    @property
    def num_launches(self) -> int:
        """Kernel launches in one run."""
        return len(self.flat.launches)


def _function(flat: FlatProgram, kernels: Mapping[Leaf, Kernel], source: str) -> Runner:
    scope: dict[str, Any] = {"begin": begin_range, "end": end_range}
    scope.update((name, kernels[leaf].function) for leaf, name in _names(flat).items())
    exec(compile(source, "<lazyinline program>", "exec"), scope)
    program: Runner = scope.pop("program")
    return program


def _names(flat: FlatProgram) -> dict[Leaf, str]:
    leaves = dict.fromkeys(launch.leaf for launch in flat.launches)
    return {leaf: f"k{number}" for number, leaf in enumerate(leaves)}


def _source(flat: FlatProgram, kernels: Mapping[Leaf, Kernel], ranges: Ranges) -> str:
    names = _names(flat)
    lines = ["def program(inputs):"]
    if flat.inputs:
        lines.append(f"  {_targets(flat.inputs)} = inputs")
    lines.append("  inputs.clear()")
    for launch in flat.launches:
        line = _line(launch, names[launch.leaf], kernels[launch.leaf])
        shown = [f"  block = begin({launch.block!r})", line, "  end(block)"]
        lines += [line] if ranges == "none" else shown
    lines.append(f"  return [{', '.join(f's{s}' for s in flat.outputs)}]")
    return "\n".join(lines) + "\n"


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

"""Which inputs a gradient can come back to, from which outputs.

Autograd leaves ``.grad`` alone where no path leads, and an optimizer then skips that parameter; a
zero gradient would make it decay. So a backward has to know which zeros are no gradients at all.
"""

from __future__ import annotations

from ..reuse.ir.leaf import flat_types, is_active
from ..reuse.ir.program import Closure, Composite, Leaf, Program


class Dependence:
    """Answers for whole programs; each closure is looked at once."""

    def __init__(self) -> None:
        self._closures: dict[Closure, tuple[int, ...]] = {}

    def of_program(self, program: Program) -> tuple[int, ...]:
        """Returns, for each output, the set of inputs it may carry a gradient back to, as bits."""
        reach = {value: 1 << index for index, value in enumerate(program.inputs)}
        for call in program.calls:
            for value, bits in zip(call.results, self._of_closure(call.closure), strict=True):
                parts = (reach[arg] for i, arg in enumerate(call.args) if bits >> i & 1)
                reach[value] = 0
                for part in parts:
                    reach[value] |= part
        return tuple(reach[value] for value in program.outputs)

    def _of_closure(self, closure: Closure) -> tuple[int, ...]:
        if closure not in self._closures:
            if isinstance(closure, Composite):
                self._closures[closure] = self.of_program(closure.program)
            else:
                assert isinstance(closure, Leaf), "pack and unpack appear only in derivatives"
                self._closures[closure] = _of_leaf(closure)
        return self._closures[closure]


def _of_leaf(leaf: Leaf) -> tuple[int, ...]:
    number = len(flat_types(leaf.input_types))
    found = [0] * len(flat_types(leaf.output_types))
    for index in range(number):
        flags = is_active(leaf, [i == index for i in range(number)])
        found = [bits | flag << index for bits, flag in zip(found, flags, strict=True)]
    return tuple(found)

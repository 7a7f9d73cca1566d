"""A captured program of symbolic sizes, with numbers in place of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx

from ...autodiff.traces.torch_make_fx import fake_tensor, new_fake_mode
from ...recompute.sizes_at import SizesAt
from ...reuse.ir.leaf import ModalInterpreter, flat_types, without_autocast
from ...reuse.ir.program import Call, Closure, Composite, Leaf, Program, Value
from ...reuse.ir.torch_symbols import Values


class AtNumbers:
    """Puts numbers in place of sizes, once per closure.

    Args:
        values: of the symbols.
    """

    def __init__(self, values: Values) -> None:
        self._sizes = SizesAt(values)
        self._closures: dict[Closure, Closure] = {}

    def program(self, program: Program) -> Program:
        """Returns the program for these sizes; as captured, not differentiated."""
        new: dict[Value, Value] = {}

        def of(values: tuple[Value, ...]) -> tuple[Value, ...]:
            for value in values:
                if value not in new:
                    new[value] = Value(self._sizes.type(value.type), value.hint)
            return tuple(new[value] for value in values)

        inputs = of(program.inputs)
        calls = tuple(
            Call(self._closure(c.closure), of(c.args), of(c.results), c.path, c.recompute)
            for c in program.calls
        )
        return replace(program, inputs=inputs, calls=calls, outputs=of(program.outputs))

    def _closure(self, closure: Closure) -> Closure:
        if closure not in self._closures:
            if isinstance(closure, Composite):
                made: Closure = replace(closure, program=self.program(closure.program))
            else:
                assert isinstance(closure, Leaf)
                made = self._leaf(closure)
            self._closures[closure] = made
        return self._closures[closure]

    @without_autocast
    def _leaf(self, leaf: Leaf) -> Leaf:
        made = self._sizes.leaf(leaf)
        if made is not leaf:
            mode = new_fake_mode()
            inputs = [fake_tensor(mode, t) for t in flat_types(made.input_types)]
            with mode, torch.no_grad():
                _Refreshing(made.module).run_flat(inputs)
        return made


class _Refreshing(ModalInterpreter):
    """Notes on each operator what it gives, so that views share the memory they are of."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            n.meta["val"] = result
        return result

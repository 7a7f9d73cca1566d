"""Which closures draw random numbers, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch.fx

from ..reuse.ir.operators import is_draw
from ..reuse.ir.program import Call, Closure, Composite, Leaf, Program, walk_closures


class Draws:
    """How often closures draw random numbers, by device; looks at each different one once."""

    def __init__(self) -> None:
        self._closures: dict[Closure, Counter[str]] = {}

    def of(self, calls: Iterable[Call]) -> Counter[str]:
        """Returns how often some calls do."""
        total: Counter[str] = Counter()
        for call in calls:
            total.update(self.of_closure(call.closure))
        return total

    def of_closure(self, closure: Closure) -> Counter[str]:
        """Returns how often one call of a closure does."""
        if closure not in self._closures:
            nodes = closure.nodes if isinstance(closure, Leaf) else ()
            inside = closure.program.calls if isinstance(closure, Composite) else ()
            own = Counter(_device_of(node) for node in nodes if is_draw(node))
            self._closures[closure] = own + self.of(inside)
        return self._closures[closure]


def _device_of(node: torch.fx.Node) -> str:
    value = node.meta["val"]
    first = next(iter(value)) if isinstance(value, (tuple, list)) else value
    return str(first.device.type)


def drawing_leaf(program: Program) -> Leaf | None:
    """Returns a leaf that draws random numbers, if a program has one."""
    leaves = (c for c in walk_closures(program) if isinstance(c, Leaf))
    return next((leaf for leaf in leaves if any(map(is_draw, leaf.nodes))), None)

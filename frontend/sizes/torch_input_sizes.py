"""Adapter: which dimensions of the inputs are symbols, and what a compile took for granted of them.

Dimensions that were equal in every call so far share a symbol. Whatever a trace, a derivative or a
kernel asks of a size is kept by PyTorch's shape environment, and answered again for other sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ...reuse.ir.torch_symbols import Values, value_of
from ...reuse.ir.types import contiguous_stride
from ..capture.regions import Region
from ..capture.signatures import shapes_of
from .region_sizes import make_sizes_literal
from .torch_sizes import TracedSizes

Names = tuple[tuple[str, ...], ...]
"""For each flat input, for each dimension the name of its symbol; empty where it is a number."""
Shapes = tuple[tuple[int, ...], ...]
"""For each flat input its shape; empty for what is no tensor."""


def learned_names(leaves: Sequence[Any], earlier: Sequence[Shapes], *, every: bool) -> Names:
    """Returns which dimensions are symbols.

    A dimension is one if it varied. Sizes 0 and 1 stay numbers, because operators treat them in
    ways of their own, and so do sizes of inputs that are not contiguous.

    Args:
        leaves: the flat inputs.
        earlier: the shapes of calls that differ in sizes only.
        every: take every dimension, whether it varied or not.
    """
    history = [*earlier, shapes_of(leaves)]
    known: dict[tuple[int, ...], str] = {}
    found: list[tuple[str, ...]] = []
    first = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves)))}
    for index, leaf in enumerate(leaves):
        if first[id(leaf)] != index:  # one tensor passed twice has one shape
            found.append(found[first[id(leaf)]])
            continue
        names = []
        for dim, size in enumerate(history[-1][index]):
            sizes = tuple(shapes[index][dim] for shapes in history)
            varies = every or len(set(sizes)) > 1
            is_symbol = varies and size > 1 and _is_contiguous(leaf)
            names.append(known.setdefault(sizes, f"n{len(known)}") if is_symbol else "")
        found.append(tuple(names))
    return tuple(found)


def _is_contiguous(tensor: torch.Tensor) -> bool:
    return tuple(tensor.stride()) == contiguous_stride(tuple(tensor.shape))


class InputSizes(TracedSizes):
    """The symbols of one capture, named by what calls taught.

    Args:
        leaves: the flat inputs of the call that is captured.
        names: which of their dimensions are symbols.
        hints: sizes that a symbol's example moves away from; None takes the call's sizes as they
            are.
    """

    def __init__(
        self, leaves: Sequence[Any], names: Names, hints: frozenset[int] | None = frozenset()
    ) -> None:
        env = ShapeEnv(allow_dynamic_output_shape_ops=False, allow_scalar_outputs=False)
        super().__init__(env, hints or ())
        self._names = names
        self._example = shapes_of(leaves)
        self._moves = hints is not None
        self._symbols: dict[str, Any] = {}
        for leaf, dims, shape in zip(leaves, names, self._example, strict=True):
            if any(dims):
                pairs = zip(dims, shape, strict=True)
                self._sizes[id(leaf)] = [self._size(name, n) if name else n for name, n in pairs]

    def _size(self, name: str, example: int) -> Any:
        if name not in self._symbols:
            hint = self._free(example) if self._moves else example
            self._symbols[name] = self._new_symbol(name, example, hint)
        return self._size_of(self._symbols[name])

    def settle(self, root: Region, sources: Any) -> None:
        """Makes the sizes in a recorded run literals."""
        make_sizes_literal(root)

    def without_fixed(self, names: Names) -> Names:
        """Leaves out of other names the dimensions whose symbols turned out to be numbers."""
        fixed = {n for n, s in self._symbols.items() if self._env.replace(s).is_number}
        pairs = zip(names, self._names, strict=True)
        return tuple(
            tuple("" if own in fixed else name for name, own in zip(others, mine, strict=True))
            for others, mine in pairs
        )

    def values(self, leaves: Sequence[Any]) -> Values | None:
        """Returns the number of each symbol for inputs that are known to differ in sizes only.

        None if what was compiled is not right for them.
        """
        found = Values()
        for leaf, names, example in zip(leaves, self._names, self._example, strict=True):
            if any(names) and not _is_contiguous(leaf):
                return None
            for dim, name in enumerate(names):
                size = int(leaf.shape[dim])
                if not name and size != example[dim]:
                    return None
                if name and (size < 2 or found.setdefault(self._symbols[name], size) != size):
                    return None
        return found if self.are_right(found) else None

    @property
    def settled(self) -> tuple[Any, ...]:
        """What each symbol turned out to be by now: itself, another one, or a number."""
        return tuple(map(self._env.replace, self._symbols.values()))

    def are_right(self, values: Values) -> bool:
        """Whether every question about sizes gets the answer that the compile relied on."""
        questions = {guard.expr: None for guard in self._env.guards}
        try:
            return all(bool(value_of(q, values)) for q in questions)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            return False

"""Adapter: which dimensions of the inputs are symbols, and what a compile took for granted of them.

Dimensions that were equal in every call so far share a symbol. Whatever a trace, a derivative or a
kernel asks of a size is kept by PyTorch's shape environment, and answered again for other sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ...reuse.ir.torch_symbols import Values, size_in, value_of
from ...reuse.ir.types import contiguous_stride
from ..capture.regions import Region
from ..capture.signatures import shapes_of
from ..tracing.torch_tracing import TracingFakeMode
from .region_sizes import make_sizes_literal

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


class InputSizes:
    """The symbols of one capture.

    Args:
        leaves: the flat inputs of the call that is captured.
        names: which of their dimensions are symbols.
        hints: sizes that a symbol's example moves away from, so that no question the trace asks
            merges the symbol with a number that it equals in this call only; None takes the
            call's sizes as they are.
    """

    def __init__(
        self, leaves: Sequence[Any], names: Names, hints: frozenset[int] | None = frozenset()
    ) -> None:
        self._names = names
        self._example = shapes_of(leaves)
        self._env = ShapeEnv(allow_dynamic_output_shape_ops=False, allow_scalar_outputs=False)
        self.mode: FakeTensorMode = TracingFakeMode(
            allow_non_fake_inputs=True, shape_env=self._env, static_shapes=True
        )
        # Its cache of results hardly ever fits where sizes are symbols, and filling it takes
        # longer than the operators.
        self.mode.cache_enabled = False
        self._symbols: dict[str, Any] = {}
        self._sizes: dict[int, list[Any]] = {}
        self._taken = None if hints is None else set(hints)
        self.moved = False
        for leaf, dims, shape in zip(leaves, names, self._example, strict=True):
            if any(dims):
                pairs = zip(dims, shape, strict=True)
                self._sizes[id(leaf)] = [self._size(name, n) if name else n for name, n in pairs]

    def _size(self, name: str, example: int) -> Any:
        if name not in self._symbols:
            self._symbols[name] = self._env.create_symbol(
                self._hint(example), ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC
            )
        return size_in(self._env, self._symbols[name])

    def _hint(self, example: int) -> int:
        if self._taken is None:
            return example
        below, above = range(example, 1, -1), range(example + 1, example + len(self._taken) + 2)
        hint = next(n for n in (*below, *above) if n not in self._taken)
        self._taken.add(hint)
        self.moved = self.moved or hint != example
        return hint

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a fake of an input."""
        sizes = self._sizes.get(id(tensor))
        if sizes is None:
            return self.mode.from_tensor(tensor.detach())
        with self.mode:
            return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)

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

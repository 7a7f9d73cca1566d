"""Adapter: symbols in place of some sizes of a call's inputs, while that call is captured.

The base of both sources of such symbols: what calls taught, and what the user declares.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ...reuse.ir.torch_symbols import size_in
from ..tracing.torch_tracing import TracingFakeMode


class TracedSizes:
    """The symbols of one capture.

    Args:
        environment: keeps the symbols, and what the trace asks of them.
        taken: sizes that no symbol's example may have: a question that the trace asks must not
            merge it with a number that it equals in this call only.

    Attributes:
        mode: makes the fakes of the inputs.
        moved: whether a symbol's example is another than the call's size.
    """

    def __init__(self, environment: ShapeEnv, taken: Iterable[int] = ()) -> None:
        self.mode = TracingFakeMode(
            allow_non_fake_inputs=True, shape_env=environment, static_shapes=True
        )
        # Its cache of results hardly ever fits where sizes are symbols, and filling it takes
        # longer than the operators.
        self.mode.cache_enabled = False
        self.moved = False
        self._env = environment
        self._taken = set(taken)
        self._sizes: dict[int, list[Any]] = {}  # of inputs that have symbols

    def _new_symbol(self, name: str, size: int, hint: int) -> Any:
        """Makes a symbol for a size of this call, with a hint as its example."""
        self._taken.add(hint)
        self.moved = self.moved or hint != size
        return self._env.create_symbol(hint, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)

    def _size_of(self, symbol: Any) -> Any:
        return size_in(self._env, symbol)

    def _free(self, wanted: int, low: int = 2, high: float = float("inf")) -> int:
        """Returns a size in the range that no symbol has yet: the wanted one, or one beside it."""
        below, above = range(wanted, low - 1, -1), range(wanted + 1, wanted + len(self._taken) + 2)
        free = (n for n in (*below, *above) if n not in self._taken and n <= high)
        return next(free, wanted)

    def given(self, index: int, leaf: Any) -> Any:
        """Returns what the model is given in place of one of its flat inputs that is no tensor."""
        return leaf

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a fake of an input; dimensions without a symbol keep their size."""
        sizes = self._sizes.get(id(tensor), [])
        if all(isinstance(n, int) for n in sizes):
            return self.mode.from_tensor(tensor.detach())
        with self.mode:
            return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)

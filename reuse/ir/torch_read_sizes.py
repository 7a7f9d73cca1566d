"""Adapter: sizes that are read from text, and the fake tensors that have them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy import functions

from .torch_symbols import as_literal, size_in
from .types import TensorType

SIZE_FUNCTIONS = {n: f for n, f in vars(functions).items() if getattr(f, "is_Function", False)}
"""Functions by which PyTorch computes sizes, besides the operators of Python."""


class _NamedSymbols(ShapeEnv):
    """Gives a symbol the number that is in its name; PyTorch would make one of the name's hash."""

    def _generate_unique_id(self, source_name: str) -> int:
        return int(source_name.removeprefix("s"))


class ReadSizes:
    """The sizes of a program that is read from text: each symbol is a size of at least two."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._environment: Any = None
        self._symbols: dict[str, Any] = {}

    def symbol(self, name: str) -> Any:
        """Returns the symbol of a name, such as ``s0``."""
        if self._environment is None:
            self._environment = _NamedSymbols()
            self._mode = FakeTensorMode(shape_env=self._environment, static_shapes=True)
            self._mode.cache_enabled = False  # it hardly ever fits where sizes are symbols
        if name not in self._symbols:
            # An example that a view may divide, and that equals no other symbol's small multiple.
            example = 5040 * (101 + 2 * len(self._symbols))
            self._symbols[name] = self._environment.create_symbol(
                example, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC
            )
        return self._symbols[name]

    def literal(self, expression: Any) -> Any:
        """Returns a size as it stands among an operator's operands."""
        if isinstance(expression, int) or expression.is_integer:
            return as_literal(size_in(self._environment, expression))
        return as_literal(self._environment.create_symfloatnode(expression, hint=None))

    def fake(self, type_: TensorType) -> torch.Tensor:
        """Returns a fake tensor of a type."""
        layout = [[size_in(self._environment, n) for n in t] for t in (type_.shape, type_.stride)]
        with self._mode:
            return torch.empty_strided(*layout, dtype=type_.dtype, device=type_.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it operators run on fake tensors, and keep the symbols in their sizes."""
        # In C++ some operators read sizes as numbers; PyTorch has these in Python too.
        python = nullcontext() if self._environment is None else enable_python_dispatcher()
        with self._mode, python:
            yield

"""Adapter: symbolic sizes, as torch.export has them. Their private names are named here.

Each dynamic dimension is a symbol. Symbols never meet by chance: two dimensions that happen to be
equal in the example get different hints, so that no question the trace asks merges them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx
from torch import nn
from torch.export.dynamic_shapes import _combine_args, _DimHint, _tree_map_with_path
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ...reuse.errors import ExportError
from ...reuse.ir.program import Source
from ...reuse.ir.torch_symbols import size_in
from ..capture.regions import Region
from .torch_sizes import TracedSizes, make_sizes_local


@dataclass(frozen=True)
class _Declared:
    """One dynamic dimension of the user's: a name for all tensors that share it."""

    name: str
    symbol: Any
    size: Any
    example: int
    low: float
    high: float
    strict: bool


class DeclaredSizes(TracedSizes):
    """The symbols of one capture, named by the user.

    Args:
        model: its forward's signature says what ``dynamic_shapes`` names.
        args: example positional inputs.
        kwargs: example keyword inputs.
        dynamic_shapes: as ``torch.export.export`` takes it: by argument name or position, per
            tensor a dictionary or sequence of ``Dim``, ``Dim.DYNAMIC``, ``Dim.AUTO``, None, int, or
            a name, which is short for a ``Dim`` of that name.
        hints: ``"distinct"`` moves hints apart where example sizes coincide; ``"example"`` takes
            the example's, which keeps relations between dimensions.

    Raises:
        ExportError: if ``dynamic_shapes`` does not fit the inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dynamic_shapes: Any,
        *,
        hints: str = "distinct",
    ) -> None:
        super().__init__(ShapeEnv())
        self._hints = hints
        self._declared: dict[str, _Declared] = {}
        for name, tensor, dims in _pairs(model, args, kwargs, dynamic_shapes):
            wanted = [dims.get(i) for i in range(tensor.dim())]
            self._sizes[id(tensor)] = [
                self._size(dim, int(length), f"{name}_{i}")
                for i, (dim, length) in enumerate(zip(wanted, tensor.shape, strict=True))
            ]

    def _size(self, dim: Any, example: int, name: str) -> Any:
        if dim is None or isinstance(dim, int) or getattr(dim, "value", None) == example:
            return example
        if isinstance(dim, _DimHint):
            if dim.type.name == "STATIC":
                return example
            return self._symbol(name, example, dim.min, dim.max, strict=False)
        if isinstance(dim, str):  # as torch.onnx.export takes it
            return self._symbol(dim, example, None, None, strict=True)
        if not hasattr(dim, "__name__") or not hasattr(dim, "min"):
            raise ExportError(
                f"dynamic_shapes: {name} is {dim!r}; a dimension is a name, a torch.export.Dim, "
                "Dim.DYNAMIC, Dim.AUTO, None or its size."
            )
        root = getattr(dim, "root", None)
        if root is None:
            return self._symbol(dim.__name__, example, dim.min, dim.max, strict=True)
        base = next(
            (n for n in range(example + 1) if int(dim.fn(sympy.Integer(n))) == example), None
        )
        if base is None:
            raise ExportError(f"dynamic_shapes: {dim.__name__} cannot be {example} ({name}).")
        return dim.fn(self._symbol(root.__name__, base, root.min, root.max, strict=True))

    def _symbol(self, name: str, example: int, low: Any, high: Any, *, strict: bool) -> Any:
        known = self._declared.get(name)
        if known is not None:
            if known.example != example:
                raise ExportError(
                    f"dynamic_shapes: {name} is {known.example} in one example input and "
                    f"{example} in another."
                )
            return known.size
        low = 0 if low is None else int(low)
        high = high if isinstance(high, int) else float("inf")
        if not low <= example <= high:
            raise ExportError(f"dynamic_shapes: {name} is {example}, not from {low} to {high}.")
        hint = max(example, 2)
        if self._hints == "distinct":
            hint = self._free(hint, max(low, 2), high)
        symbol = self._new_symbol(name, example, hint)
        size = size_in(self._env, symbol)
        self._declared[name] = _Declared(name, symbol, size, example, low, high, strict)
        return size

    def settle(self, root: Region, sources: Mapping[torch.fx.Node, Source]) -> None:
        """Makes each region compute the sizes it uses."""
        make_sizes_local(root, sources)

    @property
    def names(self) -> dict[str, str]:
        """The user's name of each symbol."""
        return {str(d.symbol): d.name for d in self._declared.values()}

    @property
    def examples(self) -> dict[Any, int]:
        """The size of each symbol in the example inputs."""
        return {d.symbol: d.example for d in self._declared.values()}

    def others(self) -> list[dict[Any, int]]:
        """Returns sizes besides the example's, in the declared ranges: one more, and one less."""
        found = []
        for step in (1, -1):
            sizes = {
                d.symbol: int(min(max(d.example + step, d.low, 1), d.high))
                for d in self._declared.values()
            }
            if sizes != self.examples:
                found.append(sizes)
        return found

    def conditions(self) -> tuple[str, ...]:
        """Returns what the trace took for granted about sizes, beyond their declared ranges.

        Raises:
            ExportError: if a dimension that was declared dynamic is not, or two are one.
        """
        for dim in self._declared.values():
            self._check(dim)
        found: dict[str, None] = {}
        for guard in self._env.guards:
            expression = self._env.simplify(guard.expr)
            if expression.free_symbols and expression not in (True, False):
                found[self._text(expression)] = None
        return tuple(found)

    def _check(self, dim: _Declared) -> None:
        value = self._env.replace(dim.symbol)
        if value.is_number:
            raise ExportError(
                f"dynamic_shapes: {dim.name} is declared dynamic, but the model works only with "
                f"{dim.name} = {value} ({self._why(dim.symbol)})."
            )
        if dim.strict and value != dim.symbol:
            raise ExportError(
                f"dynamic_shapes: the model works only with {dim.name} = {self._text(value)} "
                f"({self._why(dim.symbol)}). Give them one Dim, or declare Dim.AUTO."
            )
        known = self._env.var_to_range[dim.symbol] if value == dim.symbol else None
        if dim.strict and known is not None:
            low, high = known.lower, known.upper
            if low > max(dim.low, 2) or (isinstance(high, sympy.Integer) and high < dim.high):
                raise ExportError(
                    f"dynamic_shapes: {dim.name} may be {dim.low} to {dim.high}, but the model "
                    f"works only from {low} to {high}. Declare Dim({dim.name!r}, min=..., max=...)."
                )

    def _why(self, symbol: Any) -> str:
        for guard in self._env.guards:
            if symbol in guard.expr.free_symbols:
                place = getattr(getattr(guard, "sloc", None), "maybe_user_loc", None)
                return f"{self._text(guard.expr)}" + (f", asked at {place}" if place else "")
        return "it is used as a fixed number"

    def _text(self, expression: Any) -> str:
        names = self.names
        return re.sub(r"\w+", lambda m: names.get(m[0], m[0]), str(expression))


def _pairs(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> list[tuple[str, torch.Tensor, dict[int, Any]]]:
    """Returns each tensor input with its name and its dimensions' declarations."""
    found: list[tuple[str, torch.Tensor, dict[int, Any]]] = []

    def note(path: Any, value: Any, shape: Any) -> None:
        if not isinstance(value, torch.Tensor):
            return
        name = "_".join(
            re.sub(r"\W", "", str(getattr(k, "key", getattr(k, "idx", k)))) for k in path
        )
        dims = dict(enumerate(shape)) if isinstance(shape, (tuple, list)) else dict(shape or {})
        wrong = [i for i in dims if not isinstance(i, int) or not 0 <= i < value.dim()]
        if wrong:
            raise ExportError(f"dynamic_shapes: {name} has {value.dim()} dimensions, not {wrong}.")
        found.append((name, value, dims))

    if hasattr(dynamic_shapes, "dynamic_shapes"):  # a ShapesCollection
        dynamic_shapes = dynamic_shapes.dynamic_shapes(model, args, kwargs)
    try:
        combined: Any = _combine_args(model, tuple(args), dict(kwargs))
        if isinstance(dynamic_shapes, (tuple, list)):
            dynamic_shapes = dict(zip(combined, dynamic_shapes, strict=True))
        unknown = [name for name in dynamic_shapes if name not in combined]
        if unknown:
            raise ExportError(
                f"dynamic_shapes names {unknown}; the model is called with {list(combined)}."
            )
        shapes = {name: dynamic_shapes.get(name) for name in combined}
        _tree_map_with_path(note, dict(combined), shapes, tree_name="inputs")
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(f"dynamic_shapes does not fit the inputs: {error}") from error
    return found

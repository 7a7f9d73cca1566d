"""Adapter: which dimensions of the inputs are symbols: learned from calls, or declared.

Dimensions that were equal in every call so far share a symbol. PyTorch's shape environment keeps
the guards that the trace, derivatives and kernels put on sizes; they are evaluated for other sizes.
Sizes may also be declared, as for torch.export.

The trace computes a size where it is first used, maybe inside a block, and then uses that node
everywhere. Closures take only tensors, so sizes are made local: each region computes its sizes from
the shapes of its own inputs. If none of them has the size, a user input is added for its shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
import torch.fx
from torch import nn
from torch._dynamo.source import ConstantSource
from torch.export.dynamic_shapes import _combine_args, _DimHint, _tree_map_with_path
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ...reuse.errors import ExportError
from ...reuse.ir.program import Source, UserInput
from ...reuse.ir.torch_symbols import (
    computing_node,
    expression_of,
    is_size,
    replace_operand,
    size_in,
    sizes_as_literals,
)
from ...reuse.ir.types import TensorType
from ..capture.regions import Region, regions_inside, shapes_of
from ..tracing.frames import user_line
from ..tracing.torch_tracing import TracingFakeMode
from .torch_known_sizes import KnownSizes, Names, Shapes, may_vary, parted

Place = tuple[torch.fx.Node, int]  # a tensor, and one of its dimensions


def make_sizes_local(root: Region, sources: Mapping[torch.fx.Node, Source]) -> None:
    """Rewrites a recorded run in-place so that each region computes the sizes that it uses."""
    users = [n for n, s in sources.items() if isinstance(s, UserInput)]
    localizer = _Localizer(_places(users))
    localizer.region(root, is_root=True)
    present = set(localizer.dropped[0].graph.nodes) if localizer.dropped else set()
    for node in reversed(localizer.dropped):
        if node in present:  # the tracer may have dropped unused nodes
            node.graph.erase_node(node)


def make_sizes_literal(root: Region) -> None:
    """Rewrites a recorded run in-place so that sizes are literals in operator arguments."""
    nodes = root.nodes()
    for region in (root, *regions_inside(root)):
        region.items[:] = [i for i in region.items if isinstance(i, Region) or not is_size(i)]
    if nodes:
        sizes_as_literals(nodes[0].graph)


def _places(nodes: Iterable[torch.fx.Node]) -> dict[Any, Place]:
    """Returns for each symbol a tensor dimension that has its size."""
    found: dict[Any, Place] = {}
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(TensorType.of(value).shape):
                if not isinstance(size, int) and size.is_Symbol:
                    found.setdefault(size, (node, dim))
    return found


class _Localizer:
    """Makes sizes local, region by region, inner ones and earlier ones first."""

    def __init__(self, outer: Mapping[Any, Place]) -> None:
        self._outer = outer
        self._extra: dict[Region, list[torch.fx.Node]] = {}
        self.dropped: list[torch.fx.Node] = []

    def region(self, region: Region, *, is_root: bool = False) -> None:
        own = {} if is_root else _places(region.inputs)
        places = {**self._outer, **own}
        needed: dict[torch.fx.Node, None] = {}
        items: list[torch.fx.Node | Region] = []
        for item in region.items:
            if isinstance(item, Region):
                self.region(item)
                needed.update(dict.fromkeys(self._extra[item]))
            elif "call" in item.meta:
                extra = self._extra[item.meta["call"].region]
                item.args = (*item.args, *extra)
                needed.update(dict.fromkeys(extra))
            elif is_size(item):
                self.dropped.append(item)
                continue
            else:
                made = self._rewrite(item, places)
                needed.update((n, None) for node in made for n in node.all_input_nodes)
                items.extend(made)
            items.append(item)
        region.items[:] = items
        outer = {node for node, _ in self._outer.values()}
        extra = [n for n in needed if n in outer and n not in region.inputs]
        self._extra[region] = extra
        if not is_root:
            region.inputs.extend(extra)
            region.input_names.extend(n.name for n in extra)

    def _rewrite(self, node: torch.fx.Node, places: Mapping[Any, Place]) -> list[torch.fx.Node]:
        """Replaces the sizes among a node's operands; returns the nodes that compute them."""
        sizes = [n for n in node.all_input_nodes if is_size(n)]
        if not sizes:
            return []
        before = node.prev
        graph = node.graph
        with graph.inserting_before(node):
            for size in sizes:
                expression = expression_of(size.meta["val"])
                symbols = {
                    s: graph.call_function(torch.ops.aten.sym_size.int, places[s])
                    for s in sorted(expression.free_symbols, key=str)
                }
                replace_operand(node, size, computing_node(expression, symbols, graph))
        made = []
        while node.prev is not before:
            before = before.next
            before.meta["stamp"] = node.meta.get("stamp")
            made.append(before)
        return made


class TracedSizes:
    """The symbolic sizes of one capture: learned from calls, or declared by the user.

    No hint may be one of the numbers ``taken``, so that a comparison in the trace does not unify a
    symbol with a number that it equals only in this call. ``moved`` says whether a symbol's hint
    differs from the size in this call.
    """

    def __init__(self, environment: ShapeEnv, taken: Iterable[int] = ()) -> None:
        self.mode = TracingFakeMode(
            allow_non_fake_inputs=True, shape_env=environment, static_shapes=True
        )
        # The mode's result cache rarely hits with symbolic sizes, and filling it takes longer than
        # running the operators.
        self.mode.cache_enabled = False
        self.moved = False
        self._env = environment
        self._taken = set(taken)
        self._sizes: dict[int, list[Any]] = {}  # of inputs that have symbols

    def _new_symbol(self, name: str, size: int, hint: int) -> Any:
        """Makes a symbol, with a hint, for a size of this call."""
        self._taken.add(hint)
        self.moved = self.moved or hint != size
        return self._env.create_symbol(hint, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)

    def _free(self, wanted: int, low: int = 2, high: float = float("inf")) -> int:
        """Returns a hint in the range that is not taken yet: the wanted number or one near it."""
        below, above = range(wanted, low - 1, -1), range(wanted + 1, wanted + len(self._taken) + 2)
        free = (n for n in (*below, *above) if n not in self._taken and n <= high)
        return next(free, wanted)

    def given(self, index: int, leaf: Any) -> Any:
        """Returns a symbol, or the value itself, for a flat input that is not a tensor."""
        return leaf

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a fake of an input; dimensions without a symbol keep their size."""
        sizes = self._sizes.get(id(tensor), [])
        if all(isinstance(n, int) for n in sizes):
            return self.mode.from_tensor(tensor.detach())
        with self.mode:
            return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)


@dataclass(frozen=True)
class _Declared:
    """A dynamic dimension that the user declared; tensors may share it by its name."""

    name: str
    symbol: Any
    size: Any
    example: int
    low: float
    high: float
    strict: bool


class DeclaredSizes(TracedSizes):
    """The symbolic sizes of one capture, declared by the user.

    ``dynamic_shapes`` is as ``torch.export.export`` takes it: by argument name or position, per
    tensor a dictionary or sequence of ``Dim``, ``Dim.DYNAMIC``, ``Dim.AUTO``, None, int, or a name,
    which is short for a ``Dim`` of that name. ``hints="distinct"`` gives equal example sizes
    different hints; ``"example"`` uses the example sizes, which keeps relations between dimensions.
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

    def localize(self, root: Region, sources: Mapping[torch.fx.Node, Source]) -> None:
        """Makes each region compute the sizes that it uses."""
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
        """Returns other sizes in the declared ranges: the example's plus one, and minus one."""
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
        """Returns the guards on sizes, besides their declared ranges, which are checked."""
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


Batch = Literal["open", "as it varied"]
"""``"open"`` makes the batch symbolic before it varied, as the last one of an epoch is smaller."""


def learned_names(
    leaves: Sequence[Any],
    earlier: Sequence[Shapes],
    *,
    every: bool,
    growing: Sequence[int | None] = (),
    batch: Batch = "as it varied",
) -> Names:
    """Returns which dimensions are symbols.

    A dimension is symbolic if it varied. Sizes 0 and 1 stay numbers, because operators treat them
    differently, and so do the sizes of inputs that are not contiguous. A dimension whose distance
    to another was constant is written with its symbol: ``n0+1``. Int inputs are treated as sizes.

    ``earlier`` are the shapes of calls that differ in sizes only; ``growing`` is, for each input,
    the dimension that always grows (of a cache), if there is one. ``every`` makes every dimension
    symbolic, ``batch="open"`` the first one too, if another dimension of an input varied.
    """
    history = [*earlier, shapes_of(leaves)]
    first = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves)))}
    grown = _grown(history, growing)
    # By how much a dimension may grow in this call: the sizes of other inputs.
    others = zip(history[-1], growing, strict=False)
    steps = {n for shape, grows in others if grows is None for n in shape[1:]}
    varying: list[list[tuple[int, ...]]] = []  # for each dimension its sizes, call by call
    related = set(grown)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and first[id(leaf)] != index:  # one tensor passed twice
            varying.append(varying[first[id(leaf)]])
            continue
        varying.append([])
        for dim, size in enumerate(history[-1][index]):
            sizes = tuple(shapes[index][dim] for shapes in history)
            grows = bool(grown) and _grows(sizes, dim, leaf, growing[index], grown, steps)
            every_dim = every and isinstance(leaf, torch.Tensor)
            varies = every_dim or grows or len(set(sizes)) > 1
            varying[-1].append(sizes if varies and size > 1 and may_vary(leaf) else ())
            related.update([sizes] if grows or len(history) > 1 else [])
    if batch == "open" and earlier:
        related -= _open_batches(varying, history, leaves)
    symbols = _symbols({sizes for dims in varying for sizes in dims if sizes}, related)
    return tuple(tuple(symbols.get(sizes, "") for sizes in dims) for dims in varying)


def _open_batches(
    varying: Sequence[list[tuple[int, ...]]], history: Sequence[Shapes], leaves: Sequence[Any]
) -> set[tuple[int, ...]]:
    """Makes the first dimension of inputs that vary symbolic, and those of equal size.

    Returns its sizes, call by call. As they were constant, distances to them mean nothing.
    """
    sizes_of_first = [
        tuple(shapes[index][0] for shapes in history) if dims else ()
        for index, dims in enumerate(varying)
    ]
    batches = {
        sizes
        for sizes, dims in zip(sizes_of_first, varying, strict=True)
        if any(dims) and not dims[0] and sizes[-1] > 1
    }
    for sizes, dims, leaf in zip(sizes_of_first, varying, leaves, strict=True):
        if sizes in batches and isinstance(leaf, torch.Tensor) and may_vary(leaf):
            dims[0] = sizes
    return batches


def _grown(history: Sequence[Shapes], growing: Sequence[int | None]) -> set[tuple[int, ...]]:
    """Returns the sizes, call by call, of dimensions that always grow."""
    pairs = [(i, dim) for i, dim in enumerate(growing) if dim is not None]
    pairs = [(i, dim) for i, dim in pairs if len(history[-1][i]) >= -dim]
    return {tuple(shapes[i][dim] for shapes in history) for i, dim in pairs}


def _grows(
    sizes: tuple[int, ...],
    dim: int,
    leaf: Any,
    growing: int | None,
    grown: set[tuple[int, ...]],
    steps: set[int],
) -> bool:
    """Whether a dimension always grows, or is the last one of a mask that grows with it."""
    if not isinstance(leaf, torch.Tensor):
        return growing is not None
    if growing is not None:
        return dim == leaf.dim() + growing
    return 0 < dim == leaf.dim() - 1 and any(sizes[-1] - base[-1] in steps for base in grown)


def _symbols(
    varying: set[tuple[int, ...]], related: set[tuple[int, ...]]
) -> dict[tuple[int, ...], str]:
    """Names the symbol of each dimension, given by its sizes call by call; smaller sizes first.

    Those that are ``related`` may be expressed by another one if their distance was constant.
    """
    names: dict[tuple[int, ...], str] = {}
    bases: dict[Any, tuple[str, int]] = {}  # by their growth since the first call, if related
    for sizes in sorted(varying):
        is_related = sizes in related
        growth = tuple(n - sizes[0] for n in sizes) if is_related else sizes
        name, start = bases.setdefault((is_related, growth), (f"n{len(names)}", sizes[0]))
        names[sizes] = name if sizes[0] == start else f"{name}+{sizes[0] - start}"
    return names


class NotingEnv(ShapeEnv):
    """Notes the user's line where a symbol is specialized to a number (``int(n)``, a loop)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lines: dict[Any, str] = {}

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        if getattr(tgt, "is_number", False):
            self.lines.setdefault(a, user_line())
        super()._set_replacement(a, tgt, msg)


class InputSizes(TracedSizes, KnownSizes):
    """The symbolic sizes of one capture, learned from calls; ``names`` says which are symbols.

    Hints differ from the numbers ``hints``; with None they are the sizes of the call.
    """

    def __init__(
        self, leaves: Sequence[Any], names: Names, hints: frozenset[int] | None = frozenset()
    ) -> None:
        env = NotingEnv(allow_dynamic_output_shape_ops=False, allow_scalar_outputs=False)
        TracedSizes.__init__(self, env, hints or ())
        KnownSizes.__init__(self, env, leaves, names)
        self._specialized_at = env.lines
        self._moves = hints is not None
        self._counts: dict[int, Any] = {}  # by position, because equal ints are the same object
        for index, (leaf, dims) in enumerate(zip(leaves, self._names, strict=True)):
            if any(dims):
                pairs = zip(dims, self.shapes[index], strict=True)
                sizes = [self._size(name, n) if name else n for name, n in pairs]
                if isinstance(leaf, torch.Tensor):
                    self._sizes[id(leaf)] = sizes
                else:
                    self._counts[index] = sizes[0]

    def given(self, index: int, leaf: Any) -> Any:
        """Returns a symbol for an int input that varies, or the value itself."""
        return self._counts.get(index, leaf)

    def _size(self, dim: str, dim_example: int) -> Any:
        name, offset = parted(dim)
        example = dim_example - offset
        if name not in self._symbols:
            hint = self._free(example) if self._moves else example
            self._symbols[name] = self._new_symbol(name, example, hint)
        size = size_in(self._env, self._symbols[name])
        return size + offset if offset else size

    def localize(self, root: Region, sources: Any) -> None:
        """Makes the sizes in a recorded run literals."""
        make_sizes_literal(root)

"""Adapter: DTensor's sharding rules, for one operator and one axis of a mesh at a time.

PyTorch keeps them in two tables. A newer rule lists the placements of all operands and results on
one axis. An older one, such as that of a view, takes the placements that operands may have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.node import map_arg

from ...reuse.ir.costs import tensors_of
from .layouts import SUM, WHOLE, Layout, split

_ATEN = torch.ops.aten
_ADD_ROWS = torch.ops.aten._unsafe_masked_index_put_accumulate.default
_COPY, _FULL = _ATEN.copy.default, _ATEN.full.default
# Attention computes each row and head by itself, so it is local if it is sharded along these.
ATTENTION = frozenset(
    {
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_backward.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_efficient_attention_backward.default,
    }
)
ROWS_AND_HEADS = 2


class Way(NamedTuple):
    """A way to compute an operator on one axis, as layouts of its operands and its results.

    The operands are ``node.all_input_nodes``, None where one is not a tensor; of the results, the
    tensors.
    """

    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout, ...]


Factors = tuple[tuple[int, int], ...]
"""Sizes of dimensions that may be sharded in several parts, with the number of parts."""


def placement(layout: Layout) -> Placement:
    """Returns a layout as DTensor's placement."""
    if layout.kind == "whole":
        return Replicate()
    if layout.is_partial:
        return Partial("max" if layout.kind == "max" else "sum")
    if layout.factor > 1:
        return _StridedShard(layout.dim, split_factor=layout.factor)
    return Shard(layout.dim)


def placements(layouts: Sequence[Layout], sizes: Sequence[int]) -> tuple[Placement, ...]:
    """Returns a tensor's layouts as DTensor's placements on axes of these sizes."""
    made = [placement(one) for one in layouts]
    for place, one in enumerate(layouts):
        if one.factor > 1:
            # DTensor counts the parts that are left of the dimension after the axes before.
            pairs = zip(layouts[:place], sizes, strict=False)
            left = one.factor // math.prod(n for other, n in pairs if other == split(one.dim))
            made[place] = _StridedShard(one.dim, split_factor=left)
    return tuple(made)


def layout_of(one: Any) -> Layout | None:
    """Returns a placement as a layout; None for one that plans do not use."""
    if isinstance(one, _StridedShard):
        return split(one.dim, int(one.split_factor))
    if isinstance(one, (Shard, _ShardingPlaceholder)):
        return split(one.dim)
    if isinstance(one, Replicate):
        return WHOLE
    if type(one) is Partial:
        return Layout(one.reduce_op) if one.reduce_op in ("sum", "max") else None
    return Layout("masked") if isinstance(one, Partial) else None


def is_local_attention(node: torch.fx.Node) -> bool:
    """Whether an operator is attention that each rank can compute for its own rows and heads."""
    target: Any = node.target
    if target not in ATTENTION:
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    # Dropout draws a mask of the whole tensor.
    return not given.get("dropout_p") and given.get("attn_bias") is None


def has_rows(value: Any) -> bool:
    """Whether an operand or result of attention has dimensions for rows and heads."""
    return isinstance(value, torch.Tensor) and value.dim() > ROWS_AND_HEADS


# The attributes in which versions of DTensor keep rules.
_TABLES = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")


def has_rule(operator: Any) -> bool:
    """Whether DTensor says how an operator is split."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    return any(operator in getattr(propagator, name, ()) for name in _TABLES)


class Rules:
    """Finds the ways to compute operators on an axis of ``size`` ranks, once for different ones.

    ``unknown`` has the operators without a rule, which each rank runs on whole tensors.
    """

    def __init__(self, size: int, factors: Factors = ()) -> None:
        self.unknown: set[str] = set()
        self._size = size
        self._factors = factors
        ranks = torch.arange(size, device="cpu")
        self._mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=0)
        self._known: dict[Any, list[Way]] = {}
        propagator = DTensor._op_dispatcher.sharding_propagator
        # Older versions of PyTorch have one table only.
        self._new = getattr(propagator, "op_single_dim_strategy_funcs", {})
        self._old = propagator.op_strategy_funcs

    def ways(self, node: torch.fx.Node) -> list[Way]:
        """Returns the ways to compute a node; in the first one all tensors are whole."""
        operands = [n for n in node.all_input_nodes]
        places = {n: i for i, n in enumerate(operands)}
        key = (
            node.target,
            repr(map_arg((node.args, node.kwargs), lambda n: places[n])),
            tuple(tuple((t.shape, t.dtype) for t in tensors_of(n)) for n in (*operands, node)),
        )
        if key not in self._known:
            self._known[key] = self._found(node, operands)
        return self._known[key]

    def layouts(self, tensor: torch.Tensor) -> list[Layout]:
        """Returns the layouts that a tensor can have, but for partial ones."""
        found = [WHOLE, *map(split, range(tensor.dim()))]
        found += [
            split(dim, factor)
            for dim, length in enumerate(tensor.shape)
            for size, factor in self._factors
            if size == length
        ]
        return [one for one in found if self.fits(tensor, one)]

    def fits(self, tensor: torch.Tensor, layout: Layout) -> bool:
        """Whether all ranks get shards of one size, because all run one program."""
        if not layout.is_split:
            return True
        if layout.dim >= tensor.dim():
            return False
        length = tensor.shape[layout.dim]
        if layout.factor > 1 and (length, layout.factor) not in self._factors:
            return False
        return length % (self._size * layout.factor) == 0

    def _found(self, node: torch.fx.Node, operands: Sequence[torch.fx.Node]) -> list[Way]:
        occurrences = _tensor_arguments(node)
        results = tensors_of(node)
        rows = self._rows(node, occurrences, results)
        tensors = [t[0] if (t := tensors_of(n)) else None for n in operands]
        whole = Way(tuple(None if t is None else WHOLE for t in tensors), (WHOLE,) * len(results))
        # Some rules lack this way, which is always possible.
        found = {whole: None}
        for outputs, inputs in rows:
            by_node: dict[torch.fx.Node, Layout] = {}
            for operand, one in zip(occurrences, inputs, strict=True):
                # A tensor that is given twice (x * x) has one layout.
                if one is None or by_node.setdefault(operand, one) != one:
                    break
            else:
                made = tuple(one for one in outputs if one is not None)
                if len(made) < len(outputs):
                    continue
                way = Way(tuple(by_node.get(n) for n in operands), made)
                pairs = [*zip(tensors, way.inputs, strict=True)]
                pairs += zip(results, way.outputs, strict=True)
                if all(t is None or one is None or self.fits(t, one) for t, one in pairs):
                    found[way] = None
        return list(found)

    def _rows(
        self,
        node: torch.fx.Node,
        occurrences: Sequence[torch.fx.Node],
        results: Sequence[torch.Tensor],
    ) -> Iterable[tuple[list[Layout | None], list[Layout | None]]]:
        """Yields layouts of results and of operands, by our rules or by those of DTensor."""
        target: Any = node.target
        if target is torch.ops.aten.cat.default:
            yield from _joined_in_parts(node, occurrences)
        if is_local_attention(node):
            for dim in (0, 1):  # by sequence or by head
                full = [has_rows(tensors_of(n)[0]) for n in occurrences]
                masks = [n is node.kwargs.get("attn_mask") for n in occurrences]
                made = [split(dim) if has_rows(t) else WHOLE for t in results]
                inputs = (
                    split(dim) if f and not m else WHOLE for f, m in zip(full, masks, strict=True)
                )
                yield list(made), list(inputs)
        elif node.target is _ADD_ROWS and is_zero(node.args[0]):
            # The gradient of an embedding: each rank adds up its rows.
            yield [SUM], [WHOLE, *[split(0)] * (len(occurrences) - 1)]
        elif node.target is _COPY:
            # The copy's target is new memory, so each rank can take any shard of it.
            for one in (*self.layouts(results[0]), SUM):
                yield [one], [WHOLE, one]
        elif not occurrences or torch.Tag.nondeterministic_seeded in target.tags:
            return  # constants are whole on each rank, and so are random numbers
        elif node.target in self._new:
            yield from self._new_rows(node, len(results))
        elif node.target in self._old:
            yield from self._old_rows(node, occurrences)
        else:
            self.unknown.add(str(node.target))

    def _new_rows(
        self, node: torch.fx.Node, num_results: int
    ) -> Iterable[tuple[list[Layout | None], list[Layout | None]]]:
        rule = self._new[node.target]
        function = getattr(rule, "func", rule)
        args, kwargs = map_arg((node.args, node.kwargs), _meta)
        num_operands = len(_tensor_arguments(node))
        for row in function(node.target, args, dict(kwargs)):
            outputs, rest = list(row[:-num_operands]), row[-num_operands:]
            outputs = [one for one in outputs if one is not None][:num_results]
            # A rule for any number of results (split) names only some.
            outputs += outputs[-1:] * (num_results - len(outputs))
            layouts = [*map(layout_of, outputs)], [_as_operand(layout_of(one)) for one in rest]
            yield layouts
            if any(isinstance(one, _ShardingPlaceholder) for one in row):
                for _, factor in self._factors:
                    yield tuple(  # type: ignore[misc]
                        [_parted(one, factor) for one in part] for part in layouts
                    )

    def _old_rows(
        self, node: torch.fx.Node, occurrences: Sequence[torch.fx.Node]
    ) -> Iterable[tuple[list[Layout | None], list[Layout | None]]]:
        target: Any = node.target
        metas = {n: _meta(n) for n in occurrences}
        candidates = {n: [*self.layouts(tensors_of(n)[0]), SUM] for n in occurrences}
        # A single operand is tried layout by layout, because a rule may fail on some.
        tries: list[dict[torch.fx.Node, list[Layout]]] = [candidates]
        if len(occurrences) == 1:
            tries = [{occurrences[0]: [one]} for one in candidates[occurrences[0]]]
        for tried in tries:
            strategies: dict[torch.fx.Node, Any] = {
                n: OpStrategy([self._spec(one, metas[n]) for one in tried[n]]) for n in occurrences
            }
            given: Any = node.args, node.kwargs
            args, kwargs = map_arg(given, strategies.__getitem__)
            args = tuple(TupleStrategy(a) if _is_list_of_tensors(a) else a for a in args)
            try:
                made = self._old[target](OpSchema(target, args, dict(kwargs)))
            except Exception:  # the rule fails on such a layout
                continue
            for spec in getattr(made, "strategies", ()):
                outputs = spec.output_specs
                if not isinstance(outputs, (tuple, list)):  # one for all
                    outputs = [outputs] * len(tensors_of(node))
                inputs = spec.input_specs or [spec.output_specs] * len(occurrences)
                yield [*map(_first, outputs)], [_as_operand(_first(one)) for one in inputs]

    def _spec(self, layout: Layout, meta: TensorMeta) -> OpSpec:
        return OpSpec(DTensorSpec(self._mesh, (placement(layout),), tensor_meta=meta))


def _joined_in_parts(
    node: torch.fx.Node, operands: Sequence[torch.fx.Node]
) -> Iterable[tuple[list[Layout | None], list[Layout | None]]]:
    """Yields the layouts of a ``cat`` of equal tensors along their sharded dimension."""
    dim, shape = node.args[1] if len(node.args) > 1 else 0, tensors_of(node)[0].shape
    assert isinstance(dim, int)
    # An empty operand (a new cache) has one dimension, whatever the others have.
    shapes = {tensors_of(n)[0].shape for n in operands}
    if len(shapes) == 1 and shapes.pop()[dim] * len(operands) == shape[dim]:
        yield [split(dim % len(shape), len(operands))], [split(dim % len(shape))] * len(operands)


def is_zero(operand: Any) -> bool:
    """Whether an operand is a tensor full of zeros."""
    if not isinstance(operand, torch.fx.Node) or operand.target is not _FULL:
        return False
    return isinstance(operand.args[1], (int, float)) and operand.args[1] == 0


def _first(spec: DTensorSpec | None) -> Layout | None:
    return None if spec is None else layout_of(spec.placements[0])


def _as_operand(layout: Layout | None) -> Layout | None:
    # A rank masks the indices itself, and takes them whole.
    return WHOLE if layout is not None and layout.kind == "masked" else layout


def _parted(layout: Layout | None, factor: int) -> Layout | None:
    return split(layout.dim, factor) if layout is not None and layout.is_split else layout


def _tensor_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Returns the operands that are tensors, each as often as it is given."""
    found: list[torch.fx.Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return [n for n in found if tensors_of(n)]


def _is_list_of_tensors(argument: Any) -> bool:
    return isinstance(argument, (tuple, list)) and any(isinstance(a, OpStrategy) for a in argument)


def _meta(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value
    return TensorMeta(value.shape, value.stride(), value.dtype)

"""Adapter: turns a leaf of global shapes into a graph of local shapes, by PyTorch's DTensor.

The leaf's graph runs once on DTensors over fake local tensors, under a trace. DTensor's own rules
give the layouts of each operator's results and redistribute operands, so the trace has local
operators and functional collectives, and no DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from ...autodiff.traces.torch_make_fx import Decompositions, fake_tensor, new_fake_mode, traced
from ...reuse.errors import PlanError
from ...reuse.ir.leaf import flat_types, without_autocast
from ...reuse.ir.operators import mutated_args
from ...reuse.ir.program import Leaf, input_nodes, outputs_of
from ...reuse.ir.types import TensorType, is_dense
from ...reuse.torch_names import RESHAPES
from ..process_groups import first_line
from .plan import LeafPlan, NodeLayouts, Placements
from .torch_collectives import exchanges
from .torch_parts import (
    SPLIT,
    distributed,
    in_order_of,
    joined_in_parts,
    laid_out,
    laid_out_as,
    moved,
    of_own_parts,
    reshaped_in_parts,
    stride_like,
    without_data,
)
from .torch_sharding_rules import (
    ROWS_AND_HEADS,
    Rules,
    has_rows,
    has_rule,
    is_local_attention,
    layout_of,
    placements,
)

_ATEN = torch.ops.aten
# Views through which a partial value can pass before it is summed.
_VIEWS = frozenset(
    {
        *RESHAPES,
        *(_ATEN.permute.default, _ATEN.t.default, _ATEN.transpose.int),
        *(_ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.reshape.default),
    }
)
_CONVERT = torch.ops.prims.convert_element_type.default
CASTS = frozenset({_ATEN._to_copy.default, _CONVERT})
"""Operators that change the type of elements."""
_CAT, _COPY = _ATEN.cat.default, _ATEN.copy.default
_LINEAR = frozenset({_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.neg.default, _ATEN.clone.default})
_LINEAR |= {_COPY}
_DROPOUT = _ATEN.native_dropout.default
_EMBEDDING, _GATHER = _TABLES = _ATEN.embedding.default, _ATEN.gather.default
_ADD_ROWS = _ATEN._unsafe_masked_index_put_accumulate.default
_LOSSES = _ATEN.nll_loss_forward.default, _ATEN.nll_loss_backward.default
_LOSSES_OF_IMAGES = _ATEN.nll_loss2d_forward.default, _ATEN.nll_loss2d_backward.default
_MEAN, _SUM = 1, 2


@dataclass(frozen=True)
class LocalGraph:
    """A leaf's graph on local tensors.

    Attributes:
        module: takes and returns local tensors.
        input_types: of the local inputs.
        output_layouts: the layouts of the results.
        whole: the operators that every rank runs on whole tensors, since no rule splits them.
        is_even: whether all shards of operands and results have equal sizes.
    """

    module: torch.fx.GraphModule
    input_types: tuple[TensorType, ...]
    output_layouts: tuple[Placements, ...]
    whole: tuple[str, ...]
    is_even: bool


def local_type(type_: TensorType, mesh: DeviceMesh, layout: Placements) -> TensorType:
    """Returns the type of this rank's shard of a tensor; the order of strides stays."""
    if not any(isinstance(p, SPLIT) for p in layout):
        return type_
    shape, _ = compute_local_shape_and_global_offset(torch.Size(type_.shape), mesh, layout)
    shape = tuple(int(size) for size in shape)
    stride = stride_like(type_.stride, shape)
    return TensorType(type_.dtype, shape, stride, type_.device)


def replicated(mesh: DeviceMesh) -> Placements:
    """Returns the layout of a replicated tensor."""
    return (Replicate(),) * mesh.ndim


@without_autocast()
def local_graph(
    leaf: Leaf,
    mesh: DeviceMesh,
    input_types: Sequence[TensorType],
    layouts: Sequence[Placements],
    plan: LeafPlan,
    partial_outputs: frozenset[int],
    decompositions: Decompositions,
) -> LocalGraph:
    """Makes the local graph of a leaf.

    Args:
        leaf: of global shapes.
        mesh: the mesh that it runs on.
        input_types: of this rank's shards of the inputs.
        layouts: of the inputs.
        plan: of the leaf.
        partial_outputs: results that are returned as partial ones, to be summed later.
        decompositions: of the local operators.
    """
    mode = new_fake_mode(leaf.module)
    locals_ = [fake_tensor(mode, t) for t in input_types]
    runs: list[_Sharding] = []
    types = zip(flat_types(leaf.input_types), layouts, strict=True)
    lying = ((t, p) for t, lies in types for p in lies if isinstance(p, _StridedShard))
    parts = tuple({(t.shape[p.dim], int(p.split_factor)): None for t, p in lying})
    rules = [Rules(size, parts) for size in mesh.shape if parts]  # made outside of the trace

    def run(flat: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        parts = zip(flat, flat_types(leaf.input_types), layouts, strict=True)
        given = [distributed(local, mesh, lies, type_) for local, type_, lies in parts]
        runs.append(_Sharding(leaf.module, mesh, plan, partial_outputs, rules))
        return runs[-1].local_results(given)

    try:
        with mode, torch.no_grad(), exchanges():
            module = traced(run, [locals_], (), decompositions)
    except RuntimeError as error:  # a rule of DTensor's that asks for numbers, or has no way
        raise PlanError(
            f"@{leaf.name} cannot be split over the mesh as planned. Leave what it computes with "
            f"whole on each rank. {first_line(error)}"
        ) from error
    (sharding,) = runs
    for node in module.graph.nodes:
        if node.op == "get_attr" or mutated_args(node):
            raise PlanError(
                f"@{leaf.name} cannot be split over the mesh: {node.target} changes something in "
                "place (statistics of a BatchNorm in training) or holds a constant."
            )
    layouts_made = tuple(sharding.output_layouts)
    whole, is_even = tuple(sharding.whole), sharding.is_even
    return LocalGraph(module, tuple(input_types), layouts_made, whole, is_even)


class _Sharding(torch.fx.Interpreter):
    """Runs a graph on DTensors: redistributes operands to the plan's layouts, sums if needed.

    A partial value is summed over ranks at its first use by a nonlinear operator; all later readers
    use the sum.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        mesh: DeviceMesh,
        plan: LeafPlan,
        partial_outputs: frozenset[int],
        rules: Sequence[Rules],
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False
        self._mesh, self._plan = mesh, plan
        self._partial_outputs = partial_outputs
        self._rules = rules
        self._replicated = replicated(mesh)
        self.output_layouts: list[Placements] = []
        self.whole: dict[str, None] = {}
        self.is_even = True
        self._known: dict[tuple[torch.fx.Node, Placements], DTensor] = {}

    def local_results(self, given: Sequence[DTensor]) -> tuple[torch.Tensor, ...]:
        """Runs the graph; returns this rank's shards of the results."""
        planned = self._plan.inputs or (None,) * len(given)
        for node, tensor, layout in zip(input_nodes(self.module), given, planned, strict=True):  # type: ignore[arg-type]
            self.env[node] = self._at(tensor, layout)
        for node in self.module.graph.nodes:  # type: ignore[union-attr]
            if node.op not in ("placeholder", "output"):
                self.env[node] = self._run(node)
        return tuple(self._results())

    def _results(self) -> list[torch.Tensor]:
        nodes = outputs_of(self.module)  # type: ignore[arg-type]
        planned = self._plan.outputs or (None,) * len(nodes)
        made = []
        for index, (node, layout) in enumerate(zip(nodes, planned, strict=True)):
            if layout is None and index not in self._partial_outputs:
                self._summed(node)
            tensor = self._wrapped(self.env[node])
            if layout is not None:
                tensor = self._moved(node, layout)
            self.output_layouts.append(tuple(tensor.placements))
            made.append(tensor.to_local())
        return made

    def _run(self, node: torch.fx.Node) -> Any:
        layouts = self._plan.nodes.get(node)
        as_made = {}
        if layouts is not None:
            pairs = zip(node.all_input_nodes, layouts.inputs)  # noqa: B905  (may say less)
            for operand, layout in pairs:
                if layout is not None:
                    as_made[operand] = self.env[operand]
                    self.env[operand] = self._moved(operand, layout)
        result = self._computed(node, layouts)
        # Other readers may need other layouts: each is made from the original one.
        self.env.update(as_made)
        return result

    def _moved(self, node: torch.fx.Node, layout: Placements) -> DTensor:
        """Returns a value in a layout; redistributes it once for all its readers."""
        key = (node, layout)
        if key not in self._known:
            self._known[key] = self._at(self._wrapped(self.env[node]), layout)
        return self._known[key]

    def _computed(self, node: torch.fx.Node, layouts: NodeLayouts | None) -> Any:
        self._sum_operands(node)
        # Results from PyTorch's caches may be on an equal mesh with other process groups.
        result = torch.utils._pytree.tree_map_only(DTensor, self._on_own_mesh, self._call(node))
        if layouts is None or not layouts.outputs:
            return result
        # Partial results stay as they are.
        wanted = [o if o and not any(p.is_partial() for p in o) else None for o in layouts.outputs]
        if isinstance(result, torch.Tensor):
            return self._at(self._wrapped(result), wanted[0])
        planned = iter(wanted)  # of tensors only: attention on a GPU also returns numbers
        return tuple(
            self._at(self._wrapped(t), next(planned)) if isinstance(t, torch.Tensor) else t
            for t in result
        )

    def _on_own_mesh(self, tensor: DTensor) -> DTensor:
        self._note_parts(tensor, tuple(tensor.placements))
        if tensor.device_mesh is self._mesh:
            return tensor
        layout = tuple(tensor.placements)
        return distributed(tensor.to_local(), self._mesh, layout, without_data(tensor))

    def _note_parts(self, tensor: DTensor, layout: Placements) -> None:
        """Notes if a tensor has shards of different sizes in a layout."""
        left = list(tensor.shape)
        for p, size in zip(layout, self._mesh.shape, strict=True):
            if isinstance(p, SPLIT):
                parts = size * (int(p.split_factor) if isinstance(p, _StridedShard) else 1)
                self.is_even = self.is_even and left[p.dim] % parts == 0
                left[p.dim] //= size

    def _sum_operands(self, node: torch.fx.Node) -> None:
        """Sums the partial operands that an operator cannot take."""
        held = [self.env[n] for n in node.all_input_nodes]
        if not any(map(_is_partial, held)):
            return
        if self._takes_parts(node):
            return
        layouts = {tuple(t.placements) for t in held if isinstance(t, DTensor)}
        tensors = all(isinstance(a, (torch.fx.Node, int)) for a in node.args)
        if node.target in _LINEAR and len(layouts) == 1 and tensors and not node.kwargs:
            return
        for operand in node.all_input_nodes:
            self._summed(operand)

    def _takes_parts(self, node: torch.fx.Node) -> bool:
        """Whether a sum may be taken after an operator: a view, or a cast to more precision.

        A result of the leaf is summed in its own dtype: a gradient in that of its parameter.
        """
        if node.target in CASTS:
            asked: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dtype")
            held = self.env[node.all_input_nodes[0]].dtype
            is_result = all(user.op == "output" for user in node.users)
            is_float = asked is not None and asked.is_floating_point
            return is_float and (is_result or asked.itemsize > held.itemsize)
        return node.target in _VIEWS

    def _summed(self, node: torch.fx.Node) -> None:
        """Sums a value over ranks; for a view, sums its base, so that all views share the sum."""
        tensor = self.env[node]
        if not isinstance(tensor, DTensor) or not _is_partial(tensor):
            return
        chain = [node]
        while self._takes_parts(chain[-1]) and _is_partial(self.env[chain[-1].all_input_nodes[0]]):
            chain.append(chain[-1].all_input_nodes[0])
        if len(chain) > 1:
            self._summed(chain[-1])
            for view in reversed(chain[:-1]):
                self.env[view] = self._call(view)
            return
        layout = tuple(Replicate() if p.is_partial() else p for p in tensor.placements)
        self.env[node] = self._at(tensor, layout)

    def _call(self, node: torch.fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if node.op != "call_function":
            return getattr(self, node.op)(node.target, args, kwargs)
        flat = [self.env[n] for n in node.all_input_nodes]
        target: Any = node.target
        if not any(isinstance(t, DTensor) for t in flat):
            return target(*args, **kwargs)  # no operands: the same on each rank
        if not isinstance(target, torch._ops.OpOverload):
            return target(*args, **kwargs)  # an item of a tuple
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), self._wrapped)  # type: ignore[misc]
        if target is _CAT:  # rules of PyTorch 2.13 split an empty operand (a new cache), too
            args = ([t for t in args[0] if t.shape != (0,)] or args[0], *args[1:])
            if (made := joined_in_parts(args, self._asked(node))) is not None:
                return made
        if target is _COPY and (made := laid_out_as(*args[:2])) is not None:
            return made
        if is_local_attention(node) and (made := self._attention(args, kwargs, target)) is not None:
            return made
        if target in _TABLES and (made := self._looked_up(target, args)) is not None:
            return made
        if target in _LOSSES and (made := self._loss(target, args)) is not None:
            return made
        if target is _DROPOUT and (made := self._dropout(args)) is not None:
            return made
        if target is _ADD_ROWS and (made := self._rows_added(node, args)) is not None:
            return made
        draws = torch.Tag.nondeterministic_seeded in target.tags
        if draws or target in _LOSSES_OF_IMAGES or not has_rule(target):
            return self._call_whole(node, args, kwargs)
        planned = self._plan.nodes.get(node) or self._in_parts(node)
        if planned is None and self._rules:
            args, kwargs = torch.fx.node.map_aggregate((args, kwargs), self._joined)  # type: ignore[misc]
        if target in RESHAPES:
            return self._reshaped(args, kwargs, planned or NodeLayouts())
        if planned and (made := of_own_parts(node, args, kwargs, planned)) is not None:
            return made
        if target is _CONVERT:  # DTensor's rule for it sums first
            return _ATEN._to_copy.default(args[0], dtype=args[1])
        return target(*args, **kwargs)

    def _in_parts(self, node: torch.fx.Node) -> NodeLayouts | None:
        """Returns an operator's layouts by our rules for sharded parts; DTensor has few of them."""
        held = {n: t for n in node.all_input_nodes if isinstance(t := self.env[n], torch.Tensor)}
        lies = [tuple(self._wrapped(t).placements) for t in held.values()]
        ways = []
        for axis, rules in enumerate(self._rules):
            present = tuple(layout_of(one[axis]) for one in lies)
            ways += [w for w in rules.ways(node) if w.inputs == present][:1]
        if not ways or len(ways) < len(self._rules):
            return None
        layouts = zip(*(way.outputs for way in ways), strict=True)
        made = tuple(placements(one, self._mesh.shape) for one in layouts)
        in_parts = any(isinstance(p, _StridedShard) for one in (*lies, *made) for p in one)
        return NodeLayouts(tuple(lies), made) if in_parts else None

    def _joined(self, value: Any) -> Any:
        """Gathers a tensor that is sharded in parts, for an operator without a rule for that."""
        if not isinstance(value, DTensor):
            return value
        lies = (Replicate() if isinstance(p, _StridedShard) else p for p in value.placements)
        return self._at(value, tuple(lies))

    def _asked(self, node: torch.fx.Node) -> Placements | None:
        """Returns the planned layout of an operator's first result."""
        planned = self._plan.nodes.get(node)
        return planned.outputs[0] if planned is not None and planned.outputs else None

    def _reshaped(self, args: Any, kwargs: Any, planned: NodeLayouts) -> DTensor:
        """Reshapes; gathers first if the result would be a strided shard, which few rules take."""
        lies: Placements = tuple(args[0].placements)
        asked = planned.outputs[0] if planned.outputs else None
        in_parts = any(isinstance(p, _StridedShard) for p in (*lies, *(asked or ())))
        sums, asked_sums = ([p.is_partial() for p in one] for one in (lies, asked or ()))
        as_planned = in_parts or planned.inputs[:1] == (lies,)
        if asked and as_planned and sums == asked_sums:
            # As planned, a rank's shard of the result is its shard of the operand. DTensor has no
            # rule if several mesh dimensions shard one dimension in parts, and treats a view of the
            # whole as a view of each shard, which a collective may have laid out in another order.
            return reshaped_in_parts(args[0], args[1], asked)
        made: DTensor = _ATEN.reshape.default(*args, **kwargs)
        strided = [isinstance(p, _StridedShard) for p in made.placements]
        if not any(strided):
            return made
        layout = tuple(
            Replicate() if is_strided else p
            for p, is_strided in zip(args[0].placements, strided, strict=True)
        )
        return _ATEN.reshape.default(self._at(args[0], layout), *args[1:], **kwargs)

    def _call_whole(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        """Runs an operator on whole tensors on each rank; all ranks draw the same numbers."""
        self.whole[str(node.target).removesuffix(".default")] = None

        def whole(value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            made = self._at(value, self._replicated).to_local()
            # Some operators depend on the memory layout, so it is that of one process.
            return laid_out(made, value.stride())

        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), whole)  # type: ignore[misc]
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        return torch.utils._pytree.tree_map_only(torch.Tensor, self._wrapped, result)

    def _dropout(self, args: Any) -> Any:
        """Applies dropout by its shard of a mask that is drawn for the whole tensor."""
        tensor, p, train = args
        if not any(placement.is_shard() for placement in tensor.placements) or not train:
            return None if train else (tensor, torch.ones_like(tensor, dtype=torch.bool))
        if p in (0, 1):
            return None
        if not is_dense(tuple(tensor.shape), tuple(tensor.stride())):
            return None
        # Random numbers are drawn in the order of memory.
        order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
        shape = [tensor.shape[d] for d in order]
        ones = torch.ones(shape, dtype=tensor.dtype, device=tensor.device)
        ones = ones.permute([order.index(d) for d in range(tensor.dim())])
        mask = self._at(self._wrapped(_DROPOUT(ones, p, True)[1]), tuple(tensor.placements))
        return tensor * mask * (1.0 / (1.0 - p)), mask

    def _looked_up(self, target: Any, args: Any) -> Any:
        """Looks up ids in its rows of a table, for a partial result; None if it has all rows."""
        table, ids, dim = (*args[:2], 0) if target is _EMBEDDING else (args[0], args[2], args[1])
        dim %= table.dim()
        split = [p.is_shard(dim) for p in table.placements]
        if not any(split):
            return None
        held = tuple(table.placements) if target is _GATHER else self._replicated
        own = tuple(p if s else h for p, s, h in zip(table.placements, split, held, strict=True))
        layout = own if target is _GATHER else tuple(ids.placements)
        layout = tuple(Replicate() if s else p for p, s in zip(layout, split, strict=True))
        part = self._at(table, own).to_local()
        found = self._in_own_part(
            self._at(ids, layout).to_local(), part.shape[dim], split, table.shape[dim]
        )
        if found is None:
            return None
        rows, inside = found
        if target is _EMBEDDING:
            made, inside = _EMBEDDING(part, rows), inside.unsqueeze(-1)
        else:
            made = _GATHER(part, dim, rows)
        parts = tuple(Partial() if s else p for p, s in zip(layout, split, strict=True))
        shape = ids.shape if target is _GATHER else (*ids.shape, table.shape[1])
        whole = torch.empty(shape, device="meta")
        return distributed(made.masked_fill(~inside, 0), self._mesh, parts, whole)

    def _in_own_part(
        self, ids: torch.Tensor, num_rows: int, split: Sequence[bool], num_all: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns ids relative to this rank's rows (0 if outside), and which are inside.

        None if rows are not sharded evenly.
        """
        coordinate = self._mesh.get_coordinate()
        assert coordinate is not None
        place, num_parts = 0, 1
        for axis in (i for i, is_split in enumerate(split) if is_split):
            place = place * self._mesh.size(axis) + coordinate[axis]
            num_parts *= self._mesh.size(axis)
        if num_rows * num_parts != num_all:
            return None
        rows = ids - place * num_rows
        # An id out of range stays so on the first or the last rank, and raises an error there.
        inside = rows >= 0 if place else torch.ones_like(rows, dtype=torch.bool)
        if place + 1 < num_parts:
            inside = inside & (rows < num_rows)
        return rows * inside, inside

    def _loss(self, target: Any, args: Any) -> Any:
        """Divides the sum of losses over ranks by that of counted targets (some are ignored).

        None if it is not a mean over rows; rules of PyTorch 2.13 take the mean of ranks' means.
        """
        is_forward = target is _LOSSES[0]
        scores, targets, weight, reduction, *others = args if is_forward else args[1:]
        is_split = any(isinstance(p, SPLIT) for p in scores.placements)
        if reduction != _MEAN or scores.dim() != 2 or not is_split:
            return None
        lead = tuple(p if _splits_rows(p) else Replicate() for p in scores.placements)
        own: list[Any] = [self._at(t, lead).to_local() for t in (scores, targets)]
        own.append(weight if weight is None else self._at(weight, self._replicated).to_local())
        if is_forward:
            layout = tuple(Partial() if isinstance(p, SPLIT) else p for p in lead)
            sums = target(*own, _SUM, *others)
            number = torch.empty((), device="meta")
            parts = (distributed(t, self._mesh, layout, number) for t in sums)
            total, num_counted = (self._at(part, self._replicated) for part in parts)
            return total / num_counted, num_counted
        gradient, count = (self._at(t, self._replicated).to_local() for t in (args[0], args[-1]))
        made = target(gradient, *own, reduction, *others[:-1], count)
        return distributed(made, self._mesh, lead, without_data(scores))

    def _rows_added(self, node: torch.fx.Node, args: Any) -> Any:
        """Adds this rank's rows to zeros, a partial result; None for another operation."""
        zeros, mask, indices, values = args
        base: Any = node.args[0]
        is_zero = base.target is _ATEN.full.default and base.args[1] == 0
        lead = tuple(values.placements)
        if (
            not is_zero
            or len(indices) != 1
            or not all(p.is_replicate() or _splits_rows(p) for p in lead)
        ):
            return None
        parts = [self._at(t, lead).to_local() for t in (mask, indices[0], values)]
        made = _ADD_ROWS(zeros.to_local(), parts[0], [parts[1]], parts[2])
        layout = tuple(Partial() if isinstance(p, SPLIT) else p for p in lead)
        return distributed(made, self._mesh, layout, zeros)

    def _attention(self, args: Any, kwargs: Any, target: Any) -> Any:
        """Runs attention on this rank's rows and heads; None if they are not sharded so."""
        mask = kwargs.get("attn_mask")
        tensors = [a for a in args if isinstance(a, DTensor) and has_rows(a)]
        alone = (*map(Shard, range(ROWS_AND_HEADS)), Replicate())
        splits = [lies for lies in (t.placements for t in tensors) if all(p in alone for p in lies)]
        if not splits:
            return None
        # In a backward, the layout of the forward's tensors: the gradient may have another one.
        lead = max(splits, key=lambda lies: sum(p.is_shard() for p in lies))
        if not all(self._splits_alike(tensors, dim) for dim in map(_split_dim, lead)):
            return None
        if isinstance(mask, DTensor) and mask.dim() not in (2, 4):
            return None

        def local(value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            if not has_rows(value) and value is not mask:
                return self._at(value, self._replicated).to_local()
            own = value is mask  # of size 1, a dimension of the mask is for all rows or heads
            layout = (
                Replicate() if own and p.is_shard() and _is_single(value, _split_dim(p)) else p
                for p in lead
            )
            return self._at(value, tuple(layout)).to_local()

        own_args, own_kwargs = torch.fx.node.map_aggregate((args, kwargs), local)  # type: ignore[misc]
        made = target(*own_args, **own_kwargs)
        # A run on whole meta tensors gives the types of the whole results.
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), without_data)  # type: ignore[misc]
        with disable_proxy_modes_tracing():  # on a GPU it would stay in the graph: it may draw
            whole = target(*args, **kwargs)
        # On a GPU results have the operands' layout; others are numbers and a generator's state.
        return tuple(
            distributed(in_order_of(t, w), self._mesh, tuple(lead), w) if has_rows(t) else t
            for t, w in zip(made, whole, strict=True)
        )

    def _splits_alike(self, tensors: Sequence[DTensor], dim: int) -> bool:
        """Whether each rank's shards of a dimension belong together in all tensors."""
        # There may be fewer heads of keys: each is for several consecutive heads of queries.
        sizes = {t.shape[dim] for t in tensors} if dim >= 0 else {1}
        pairs = zip(tensors[0].placements, self._mesh.shape, strict=True)
        num_parts = math.prod(size for p, size in pairs if _split_dim(p) == dim)
        return len(sizes) == 1 or all(size % num_parts == 0 for size in sizes)

    def _wrapped(self, tensor: Any) -> Any:
        """Returns a tensor that is the same on each rank as a DTensor."""
        if isinstance(tensor, DTensor) or not isinstance(tensor, torch.Tensor):
            return tensor
        return DTensor.from_local(tensor, self._mesh, self._replicated, run_check=False)

    def _at(self, tensor: DTensor, layout: Placements | None) -> DTensor:
        if layout is None:
            return tensor
        layout = tuple(
            Shard(p.dim % tensor.dim()) if isinstance(p, Shard) and p.dim < 0 else p for p in layout
        )
        if tuple(tensor.placements) == layout:
            return tensor
        self._note_parts(tensor, layout)
        pairs = zip(tensor.placements, layout, strict=True)
        whole = tuple(Replicate() if q.is_partial() and p != q else q for p, q in pairs)
        made = moved(tensor, whole)
        if whole == layout:
            return made
        # A replicated value becomes a partial one of equal parts.
        sizes = zip(whole, layout, self._mesh.shape, strict=True)
        num_parts = math.prod(size for p, q, size in sizes if p != q)
        return distributed(made.to_local() / num_parts, self._mesh, layout, made)


def _split_dim(placement: Any) -> int:
    # -1 if it is no shard.
    return placement.dim if isinstance(placement, Shard) else -1


def _splits_rows(placement: Any) -> bool:
    return isinstance(placement, SPLIT) and placement.dim == 0


def _is_single(tensor: DTensor, dim: int) -> bool:
    return tensor.dim() == 2 or tensor.shape[dim] == 1


def _is_partial(value: Any) -> bool:
    return isinstance(value, DTensor) and any(p.is_partial() for p in value.placements)

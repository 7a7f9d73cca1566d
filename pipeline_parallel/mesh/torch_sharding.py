"""Adapter: turns a leaf of global shapes into a graph of local shapes, by PyTorch's DTensor.

The leaf's graph runs once on DTensors over fake local tensors, under a trace. DTensor's own rules
decide the placements of each operator's results and redistribute its operands, so the trace holds
local operators and functional collectives, and no DTensors.
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
from torch.fx.node import map_aggregate as aggregate

from ...autodiff.traces.torch_make_fx import Decompositions, fake_tensor, new_fake_mode, traced
from ...reuse.errors import PlanError
from ...reuse.ir.leaf import flat_types, without_autocast
from ...reuse.ir.operators import mutated_args
from ...reuse.ir.program import Leaf, input_nodes, outputs_of
from ...reuse.ir.types import TensorType, is_dense
from ...reuse.once import once
from ...reuse.torch_names import RESHAPES
from ..process_groups import first_line
from . import torch_parts, torch_sharding_rules
from .plan import LeafPlan, NodeLayouts, Placements
from .torch_collectives import exchanges

_ATEN = torch.ops.aten
# Views of a partial tensor are partial too, so it may be summed after them.
_VIEWS = frozenset(
    {
        *RESHAPES,
        *(_ATEN.permute.default, _ATEN.t.default, _ATEN.transpose.int),
        *(_ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.reshape.default),
    }
)
_CONVERT = torch.ops.prims.convert_element_type.default
CASTS = frozenset({_ATEN._to_copy.default, _CONVERT})  # operators that change the type of elements
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
    """A leaf's graph on local tensors, the types of these, and the placements of its results.

    ``whole`` has the operators that every rank runs on whole tensors, because no rule splits them.
    """

    module: torch.fx.GraphModule
    input_types: tuple[TensorType, ...]
    output_layouts: tuple[Placements, ...]
    whole: tuple[str, ...]


def local_type(type_: TensorType, mesh: DeviceMesh, layout: Placements) -> TensorType:
    """Returns the type of this rank's shard of a tensor, with the same order of strides."""
    if not any(isinstance(p, torch_parts.SPLIT) for p in layout):
        return type_
    shape, _ = compute_local_shape_and_global_offset(torch.Size(type_.shape), mesh, layout)
    shape = tuple(int(size) for size in shape)
    stride = torch_parts.stride_like(type_.stride, shape)
    return TensorType(type_.dtype, shape, stride, type_.device)


def replicated(mesh: DeviceMesh) -> Placements:
    """Returns the placements of a replicated tensor."""
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
    """Makes the local graph of a leaf, for shards of its inputs with these types and placements.

    The ``partial_outputs`` may stay partial: the caller sums them.
    """
    mode = new_fake_mode(leaf.module)
    locals_ = [fake_tensor(mode, t) for t in input_types]
    runs: list[_Sharding] = []
    pairs = [*zip(flat_types(leaf.input_types), layouts, strict=True)]
    strided = ((t, p) for t, layout in pairs for p in layout if isinstance(p, _StridedShard))
    parts = tuple({(t.shape[p.dim], int(p.split_factor)): None for t, p in strided})
    # Made here, because the trace would record the tensors that they hold.
    rules = [torch_sharding_rules.Rules(size, parts) for size in mesh.shape if parts]

    def run(flat: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        given = [
            torch_parts.distributed(local, mesh, layout, type_)
            for local, (type_, layout) in zip(flat, pairs, strict=True)
        ]
        runs.append(_Sharding(leaf.module, mesh, plan, partial_outputs, rules))
        return runs[-1].local_results(given)

    try:
        with mode, torch.no_grad(), exchanges():
            module = traced(run, [locals_], (), decompositions)
    except RuntimeError as error:  # a rule of DTensor that reads values, or supports no placement
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
    return LocalGraph(module, tuple(input_types), layouts_made, tuple(sharding.whole))


class _Sharding(torch.fx.Interpreter):
    """Runs a graph on DTensors, with operands redistributed as planned and sums taken late.

    A partial tensor is summed over ranks where a nonlinear operator first reads it; all later
    readers get the sum.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        mesh: DeviceMesh,
        plan: LeafPlan,
        partial_outputs: frozenset[int],
        rules: Sequence[torch_sharding_rules.Rules],
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False
        self._mesh, self._plan = mesh, plan
        self._partial_outputs = partial_outputs
        self._rules = rules
        self._replicated = replicated(mesh)
        self.output_layouts: list[Placements] = []
        self.whole: dict[str, None] = {}

    def local_results(self, given: Sequence[DTensor]) -> tuple[torch.Tensor, ...]:
        """Runs the graph; returns this rank's shards of the results."""
        planned = self._plan.inputs or (None,) * len(given)
        for node, tensor, layout in zip(input_nodes(self.module), given, planned, strict=True):  # type: ignore[arg-type]
            self.env[node] = self._placed(tensor, layout)
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
                self._sum(node)
            tensor = self._as_dtensor(self.env[node])
            if layout is not None:
                tensor = self._in_layout(node, layout)
            self.output_layouts.append(tuple(tensor.placements))
            made.append(tensor.to_local())
        return made

    def _run(self, node: torch.fx.Node) -> Any:
        layouts = self._plan.nodes.get(node)
        as_made = {}
        if layouts is not None:
            pairs = zip(node.all_input_nodes, layouts.inputs)  # noqa: B905  (may name fewer)
            for operand, layout in pairs:
                if layout is not None:
                    as_made[operand] = self.env[operand]
                    self.env[operand] = self._in_layout(operand, layout)
        result = self._computed(node, layouts)
        # Other readers may need other placements, which are made from the original ones.
        self.env.update(as_made)
        return result

    @once
    def _in_layout(self, node: torch.fx.Node, layout: Placements) -> DTensor:
        """Returns a node's tensor redistributed, which is done once for all its readers."""
        return self._placed(self._as_dtensor(self.env[node]), layout)

    def _computed(self, node: torch.fx.Node, layouts: NodeLayouts | None) -> Any:
        self._sum_partial_operands(node)
        # PyTorch caches results by equal meshes, so one may be on a mesh with other process groups.
        result = torch.utils._pytree.tree_map_only(DTensor, self._on_own_mesh, self._call(node))
        if layouts is None or not layouts.outputs:
            return result
        # Partial results stay as they are.
        wanted = [o if o and not any(p.is_partial() for p in o) else None for o in layouts.outputs]
        if isinstance(result, torch.Tensor):
            return self._placed(self._as_dtensor(result), wanted[0])
        planned = iter(wanted)  # of tensors only: attention on a GPU also returns numbers
        return tuple(
            self._placed(self._as_dtensor(t), next(planned)) if isinstance(t, torch.Tensor) else t
            for t in result
        )

    def _on_own_mesh(self, tensor: DTensor) -> DTensor:
        if tensor.device_mesh is self._mesh:
            return tensor
        whole = torch_parts.without_data(tensor)
        return torch_parts.distributed(
            tensor.to_local(), self._mesh, tuple(tensor.placements), whole
        )

    def _sum_partial_operands(self, node: torch.fx.Node) -> None:
        """Sums the operands of an operator, unless it is linear in the partial ones."""
        held = [self.env[n] for n in node.all_input_nodes]
        if not any(map(_is_partial, held)):
            return
        if self._may_sum_later(node):
            return
        layouts = {tuple(t.placements) for t in held if isinstance(t, DTensor)}
        tensors = all(isinstance(a, (torch.fx.Node, int)) for a in node.args)
        if node.target in _LINEAR and len(layouts) == 1 and tensors and not node.kwargs:
            return
        for operand in node.all_input_nodes:
            self._sum(operand)

    def _may_sum_later(self, node: torch.fx.Node) -> bool:
        """Whether a sum may be taken after an operator: a view, or a cast to more precision.

        So may it after any cast that makes a result of the leaf: a gradient is summed in the dtype
        of its parameter.
        """
        if node.target in CASTS:
            asked: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dtype")
            held = self.env[node.all_input_nodes[0]].dtype
            is_result = all(user.op == "output" for user in node.users)
            is_float = asked is not None and asked.is_floating_point
            return is_float and (is_result or asked.itemsize > held.itemsize)
        return node.target in _VIEWS

    def _sum(self, node: torch.fx.Node) -> None:
        """Sums a node's tensor over ranks; for a view, sums its base, which all views share."""
        tensor = self.env[node]
        if not isinstance(tensor, DTensor) or not _is_partial(tensor):
            return
        chain = [node]
        while self._may_sum_later(chain[-1]) and _is_partial(
            self.env[chain[-1].all_input_nodes[0]]
        ):
            chain.append(chain[-1].all_input_nodes[0])
        if len(chain) > 1:
            self._sum(chain[-1])
            for view in reversed(chain[:-1]):
                self.env[view] = self._call(view)
            return
        layout = tuple(Replicate() if p.is_partial() else p for p in tensor.placements)
        self.env[node] = self._placed(tensor, layout)

    def _call(self, node: torch.fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if node.op != "call_function":
            return getattr(self, node.op)(node.target, args, kwargs)
        flat = [self.env[n] for n in node.all_input_nodes]
        target: Any = node.target
        if not any(isinstance(t, DTensor) for t in flat):
            return target(*args, **kwargs)  # without operands: the same on each rank
        if not isinstance(target, torch._ops.OpOverload):
            return target(*args, **kwargs)  # a getitem
        args, kwargs = aggregate((args, kwargs), self._as_dtensor)  # type: ignore[misc]
        if target is _CAT:  # rules of PyTorch 2.13 split an empty operand (a new cache), too
            args = ([t for t in args[0] if t.shape != (0,)] or args[0], *args[1:])
        if (made := self._by_own_rule(node, args, kwargs)) is not None:
            return made
        draws = torch.Tag.nondeterministic_seeded in target.tags
        if draws or target in _LOSSES_OF_IMAGES or not torch_sharding_rules.has_rule(target):
            return self._call_on_whole(node, args, kwargs)
        planned = self._plan.nodes.get(node) or self._layouts_in_parts(node)
        if planned is None and self._rules:
            args, kwargs = aggregate((args, kwargs), self._without_parts)  # type: ignore[misc]
        if target in RESHAPES:
            return self._reshaped(args, kwargs, planned or NodeLayouts())
        if planned and (made := torch_parts.of_own_parts(node, args, kwargs, planned)) is not None:
            return made
        if target is _CONVERT:  # DTensor's rule for it sums first
            return _ATEN._to_copy.default(args[0], dtype=args[1])
        return target(*args, **kwargs)

    def _by_own_rule(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        """Runs an operator that DTensor would refuse or gather for; None if DTensor runs it."""
        target: Any = node.target
        if target is _CAT:
            planned = self._plan.nodes.get(node, NodeLayouts())
            return torch_parts.joined_in_parts(args, next(iter(planned.outputs), None))
        if target is _COPY:
            return torch_parts.with_layout_of(*args[:2])
        if target in _TABLES:
            return self._look_up(target, args)
        if target in _LOSSES:
            return self._loss(target, args)
        if target is _DROPOUT:
            return self._dropout(args)
        if target is _ADD_ROWS and torch_sharding_rules.is_zero(node.args[0]):
            return self._add_rows(args)
        return (
            self._attention(args, kwargs, target)
            if torch_sharding_rules.is_local_attention(node)
            else None
        )

    def _layouts_in_parts(self, node: torch.fx.Node) -> NodeLayouts | None:
        """Returns an operator's placements if a dimension is sharded in parts; None if not.

        They follow from our rules, since few rules of DTensor take such a dimension.
        """
        held = {n: t for n in node.all_input_nodes if isinstance(t := self.env[n], torch.Tensor)}
        present = [tuple(self._as_dtensor(t).placements) for t in held.values()]
        ways = []
        for axis, rules in enumerate(self._rules):
            inputs = tuple(torch_sharding_rules.layout_of(one[axis]) for one in present)
            ways += [w for w in rules.ways(node) if w.inputs == inputs][:1]
        if not ways or len(ways) < len(self._rules):
            return None
        layouts = zip(*(way.outputs for way in ways), strict=True)
        made = tuple(torch_sharding_rules.placements(one, self._mesh.shape) for one in layouts)
        in_parts = any(isinstance(p, _StridedShard) for one in (*present, *made) for p in one)
        return NodeLayouts(tuple(present), made) if in_parts else None

    def _without_parts(self, value: Any) -> Any:
        """Gathers a tensor that is sharded in parts, for an operator without a rule for parts."""
        if not isinstance(value, DTensor):
            return value
        layout = (Replicate() if isinstance(p, _StridedShard) else p for p in value.placements)
        return self._placed(value, tuple(layout))

    def _reshaped(self, args: Any, kwargs: Any, planned: NodeLayouts) -> DTensor:
        """Reshapes as planned; without a plan, gathers first if the result would be in parts."""
        layout: Placements = tuple(args[0].placements)
        asked = next(iter(planned.outputs), None)
        in_parts = any(isinstance(p, _StridedShard) for p in (*layout, *(asked or ())))
        sums, asked_sums = ([p.is_partial() for p in one] for one in (layout, asked or ()))
        as_planned = in_parts or planned.inputs[:1] == (layout,)
        if asked and as_planned and sums == asked_sums:
            # As planned, a rank's shard of the result is its reshaped shard of the operand. DTensor
            # has no rule if several mesh dimensions shard one dimension in parts. And it views each
            # shard as it would the whole, but a collective may have changed a shard's strides.
            return torch_parts.reshaped_in_parts(args[0], args[1], asked)
        made: DTensor = _ATEN.reshape.default(*args, **kwargs)
        strided = [isinstance(p, _StridedShard) for p in made.placements]
        if not any(strided):
            return made
        pairs = zip(layout, strided, strict=True)
        gathered = tuple(Replicate() if is_strided else p for p, is_strided in pairs)
        return _ATEN.reshape.default(self._placed(args[0], gathered), *args[1:], **kwargs)

    def _call_on_whole(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        """Runs an operator on whole tensors on each rank; all draw the same random numbers."""
        self.whole[str(node.target).removesuffix(".default")] = None

        def whole(value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            made = self._placed(value, self._replicated).to_local()
            # Some operators depend on strides, so these are those of a single process.
            return torch_parts.laid_out(made, value.stride())

        args, kwargs = aggregate((args, kwargs), whole)  # type: ignore[misc]
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        return torch.utils._pytree.tree_map_only(torch.Tensor, self._as_dtensor, result)

    def _dropout(self, args: Any) -> Any:
        """Applies dropout by this rank's shard of the mask of the whole tensor."""
        tensor, p, train = args
        if not any(placement.is_shard() for placement in tensor.placements) or not train:
            return None if train else (tensor, torch.ones_like(tensor, dtype=torch.bool))
        if p in (0, 1):
            return None
        if not is_dense(tuple(tensor.shape), tuple(tensor.stride())):
            return None
        # Random numbers are drawn in the order of memory, so the mask has the tensor's strides.
        order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
        shape = [tensor.shape[d] for d in order]
        ones = torch.ones(shape, dtype=tensor.dtype, device=tensor.device)
        ones = ones.permute([order.index(d) for d in range(tensor.dim())])
        mask = self._placed(self._as_dtensor(_DROPOUT(ones, p, True)[1]), tuple(tensor.placements))
        return tensor * mask * (1.0 / (1.0 - p)), mask

    def _look_up(self, target: Any, args: Any) -> Any:
        """Looks up ids in this rank's rows of a table, for a partial result; None if it has all."""
        table, ids, dim = (*args[:2], 0) if target is _EMBEDDING else (args[0], args[2], args[1])
        dim %= table.dim()
        split = [p.is_shard(dim) for p in table.placements]
        if not any(split):
            return None
        held = tuple(table.placements) if target is _GATHER else self._replicated
        own = tuple(p if s else h for p, s, h in zip(table.placements, split, held, strict=True))
        layout = own if target is _GATHER else tuple(ids.placements)
        layout = tuple(Replicate() if s else p for p, s in zip(layout, split, strict=True))
        part = self._placed(table, own).to_local()
        found = self._own_rows(
            self._placed(ids, layout).to_local(), part.shape[dim], split, table.shape[dim]
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
        return torch_parts.distributed(made.masked_fill(~inside, 0), self._mesh, parts, whole)

    def _own_rows(
        self, ids: torch.Tensor, num_rows: int, split: Sequence[bool], num_all: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns ids as positions in this rank's rows (0 for other ids), and which are in them.

        Returns None if rows are not sharded evenly.
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
        # An id out of the table's range stays so on the first or last rank, and fails there.
        inside = rows >= 0 if place else torch.ones_like(rows, dtype=torch.bool)
        if place + 1 < num_parts:
            inside = inside & (rows < num_rows)
        return rows * inside, inside

    def _loss(self, target: Any, args: Any) -> Any:
        """Divides the sum of losses over ranks by the number of targets that are not ignored.

        Rules of PyTorch 2.13 take the mean of the ranks' means, which ignore different numbers.
        Returns None if it is not a mean over sharded rows.
        """
        is_forward = target is _LOSSES[0]
        scores, targets, weight, reduction, *others = args if is_forward else args[1:]
        is_split = any(isinstance(p, torch_parts.SPLIT) for p in scores.placements)
        if reduction != _MEAN or scores.dim() != 2 or not is_split:
            return None
        lead = tuple(p if _splits_rows(p) else Replicate() for p in scores.placements)
        own: list[Any] = [self._placed(t, lead).to_local() for t in (scores, targets)]
        own.append(weight if weight is None else self._placed(weight, self._replicated).to_local())
        if is_forward:
            layout = tuple(Partial() if isinstance(p, torch_parts.SPLIT) else p for p in lead)
            sums = target(*own, _SUM, *others)
            number = torch.empty((), device="meta")
            parts = (torch_parts.distributed(t, self._mesh, layout, number) for t in sums)
            total, num_counted = (self._placed(part, self._replicated) for part in parts)
            return total / num_counted, num_counted
        gradient, count = (
            self._placed(t, self._replicated).to_local() for t in (args[0], args[-1])
        )
        made = target(gradient, *own, reduction, *others[:-1], count)
        return torch_parts.distributed(made, self._mesh, lead, torch_parts.without_data(scores))

    def _add_rows(self, args: Any) -> Any:
        """Adds this rank's rows to zeros, a partial result; None if not only rows are sharded."""
        zeros, mask, indices, values = args
        lead = tuple(values.placements)
        if len(indices) != 1 or not all(p.is_replicate() or _splits_rows(p) for p in lead):
            return None
        parts = [self._placed(t, lead).to_local() for t in (mask, indices[0], values)]
        made = _ADD_ROWS(zeros.to_local(), parts[0], [parts[1]], parts[2])
        layout = tuple(Partial() if isinstance(p, torch_parts.SPLIT) else p for p in lead)
        return torch_parts.distributed(made, self._mesh, layout, zeros)

    def _attention(self, args: Any, kwargs: Any, target: Any) -> Any:
        """Runs attention on this rank's rows and heads; None if other dimensions are sharded."""
        mask = kwargs.get("attn_mask")
        tensors = [a for a in args if isinstance(a, DTensor) and torch_sharding_rules.has_rows(a)]
        alone = (*map(Shard, range(torch_sharding_rules.ROWS_AND_HEADS)), Replicate())
        layouts = (tensor.placements for tensor in tensors)
        splits = [layout for layout in layouts if all(p in alone for p in layout)]
        if not splits:
            return None
        # The placements that shard most: those of the forward's tensors, since a gradient may have
        # come replicated.
        lead = max(splits, key=lambda layout: sum(p.is_shard() for p in layout))
        if not all(self._divides_alike(tensors, dim) for dim in map(_split_dim, lead)):
            return None
        if isinstance(mask, DTensor) and mask.dim() not in (2, 4):
            return None

        def local(value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            if not torch_sharding_rules.has_rows(value) and value is not mask:
                return self._placed(value, self._replicated).to_local()
            own = value is mask  # where its size is 1, one mask is for all rows or heads
            layout = (
                Replicate() if own and p.is_shard() and _is_single(value, _split_dim(p)) else p
                for p in lead
            )
            return self._placed(value, tuple(layout)).to_local()

        own_args, own_kwargs = aggregate((args, kwargs), local)  # type: ignore[misc]
        made = target(*own_args, **own_kwargs)
        # A run on whole meta tensors tells the types of the whole results.
        args, kwargs = aggregate((args, kwargs), torch_parts.without_data)  # type: ignore[misc]
        with disable_proxy_modes_tracing():  # traced, it would stay in the graph if it may draw
            whole = target(*args, **kwargs)
        # Kernels of a GPU keep the strides of operands, and also return a generator's state.
        return tuple(
            torch_parts.distributed(torch_parts.in_order_of(t, w), self._mesh, tuple(lead), w)
            if torch_sharding_rules.has_rows(t)
            else t
            for t, w in zip(made, whole, strict=True)
        )

    def _divides_alike(self, tensors: Sequence[DTensor], dim: int) -> bool:
        """Whether a rank's shards of a dimension belong together in all tensors."""
        # Several consecutive heads of queries may share one head of keys.
        sizes = {t.shape[dim] for t in tensors} if dim >= 0 else {1}
        pairs = zip(tensors[0].placements, self._mesh.shape, strict=True)
        num_parts = math.prod(size for p, size in pairs if _split_dim(p) == dim)
        return len(sizes) == 1 or all(size % num_parts == 0 for size in sizes)

    def _as_dtensor(self, tensor: Any) -> Any:
        """Returns a tensor as a DTensor; a plain one is the same on each rank."""
        if isinstance(tensor, DTensor) or not isinstance(tensor, torch.Tensor):
            return tensor
        return DTensor.from_local(tensor, self._mesh, self._replicated, run_check=False)

    def _placed(self, tensor: DTensor, layout: Placements | None) -> DTensor:
        if layout is None:
            return tensor
        layout = tuple(
            Shard(p.dim % tensor.dim()) if isinstance(p, Shard) and p.dim < 0 else p for p in layout
        )
        if tuple(tensor.placements) == layout:
            return tensor
        pairs = zip(tensor.placements, layout, strict=True)
        whole = tuple(Replicate() if q.is_partial() and p != q else q for p, q in pairs)
        made = torch_parts.moved(tensor, whole)
        if whole == layout:
            return made
        # A replicated tensor becomes partial: each rank has an equal fraction.
        sizes = zip(whole, layout, self._mesh.shape, strict=True)
        num_parts = math.prod(size for p, q, size in sizes if p != q)
        return torch_parts.distributed(made.to_local() / num_parts, self._mesh, layout, made)


def _split_dim(placement: Any) -> int:
    # -1 if it is no shard.
    return placement.dim if isinstance(placement, Shard) else -1


def _splits_rows(placement: Any) -> bool:
    return isinstance(placement, torch_parts.SPLIT) and placement.dim == 0


def _is_single(tensor: DTensor, dim: int) -> bool:
    return tensor.dim() == 2 or tensor.shape[dim] == 1


def _is_partial(value: Any) -> bool:
    return isinstance(value, DTensor) and any(p.is_partial() for p in value.placements)

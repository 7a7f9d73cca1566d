"""A found plan beside autoparallel's: the same model, mesh and costs, in one process.

    git clone https://github.com/meta-pytorch/autoparallel
    pip install pulp
    python benchmarks/beside_autoparallel.py --autoparallel autoparallel   # Llama-8B on 8 x 8
    python benchmarks/beside_autoparallel.py --autoparallel autoparallel --layers 8 --own-costs

Both plan `decoders.Decoder` in bfloat16 on a fake process group of 64 ranks, without memory.
Theirs minimizes its own linear program, in which operators and redistributions cost what they cost
in ours (``--own-costs``: what they cost in theirs, for the seconds to solve). It plans the graph
that it traces itself, with its own views and decompositions, so three sums are printed: what
products take, other operators, and what moves. Seconds are of the CPU, those of its solver's
process included.
"""

from __future__ import annotations

import argparse
import math
import operator
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from decoders import Decoder, DecoderConfig
from parallel_plan import H100, LLAMA_8B, captured
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.experimental import register_sharding

from lazyinline.pipeline_parallel.mesh import problem
from lazyinline.pipeline_parallel.mesh.choices import Choices
from lazyinline.pipeline_parallel.mesh.folding import folded_step
from lazyinline.pipeline_parallel.mesh.layouts import LINKS, Axis, Layout, Layouts, Moves
from lazyinline.pipeline_parallel.mesh.planner import Taken
from lazyinline.pipeline_parallel.mesh.problem import Problem
from lazyinline.pipeline_parallel.mesh.torch_sharding_rules import layout_of
from lazyinline.reuse.ir.costs import flops, is_free
from lazyinline.reuse.ir.operators import is_elementwise

AXES = (Axis("data", 8, LINKS["h100-network"]), Axis("tensor", 8, LINKS["h100-nvlink"]))
_US = 1e6


@dataclass(frozen=True)
class Cost:
    """What a plan takes by our costs.

    Attributes:
        products_s: seconds of matrix products and attention.
        others_s: of other operators.
        moves_s: of collectives and slices.
    """

    products_s: float = 0.0
    others_s: float = 0.0
    moves_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum."""
        return self.products_s + self.others_s + self.moves_s

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, count: int) -> Cost:
        return Cost(*(count * one for one in astuple(self)))

    def __str__(self) -> str:
        texts = [f"{1e3 * one:.1f} ms" for one in (self.seconds, *astuple(self))]
        return "{}: products {}, other operators {}, moves {}".format(*texts)


def main(arguments: Sequence[str] | None = None) -> dict[str, Cost]:
    """Runs both; returns their costs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--autoparallel", required=True, help="a checkout of it")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--own-costs", action="store_true", help="plan theirs by its own costs")
    options = parser.parse_args(arguments)
    sys.path.insert(0, options.autoparallel)
    config = DecoderConfig(options.layers, batch=options.batch, seq=options.seq, **LLAMA_8B)
    # Their discount and ours are of different collectives, so nothing is discounted here.
    with mock.patch.object(problem, "PREFETCHED", 1.0):
        return {"lazyinline": ours(config), "autoparallel": theirs(config, options.own_costs)}


class Costs:
    """Costs of operators and of redistributions, for graphs of any origin."""

    def __init__(self) -> None:
        self.moves = Moves(AXES)
        self._flops: dict[torch.fx.Node, int] = {}

    def operator(
        self, node: torch.fx.Node, tensors: Sequence[torch.Tensor], layouts: Sequence[Layouts]
    ) -> Cost:
        """Returns what an operator takes, given its operands and results and how they lie."""
        if node.op != "call_function" or is_free(node):
            return Cost()
        if node not in self._flops:
            self._flops[node] = flops(node)
        work, moved = 1.0, 0.0
        for axis, place in zip(AXES, zip(*layouts, strict=True), strict=True):
            work *= min(1 / axis.size if one.is_split else 1.0 for one in place)
        for tensor, lies in zip(tensors, layouts, strict=True):
            parts = math.prod(a.size for a, x in zip(AXES, lies, strict=True) if x.is_split)
            moved += tensor.numel() * tensor.element_size() / parts
        traffic_s = moved / (4 if is_elementwise(node) else 1) / H100.bytes_per_s
        flop_s = work * H100.seconds(self._flops[node], 0, tensors[-1].dtype)
        both = max(flop_s, traffic_s)
        return Cost(products_s=both) if flop_s else Cost(others_s=both)


def ours(config: DecoderConfig) -> Cost:
    """Plans with lazyinline; prints the seconds and returns the cost."""
    start = time.process_time()
    step = captured(config.num_layers, batch=config.batch, seq=config.seq)
    middle = time.process_time()
    choices = Choices(folded_step(step), AXES, H100)
    solution = Problem(choices, Moves(AXES), {}, None).solve()
    end = time.process_time()
    costs, total = Costs(), Cost()
    taken = Taken(choices, costs.moves, solution)
    for number, (_, count) in enumerate(choices.folded.leaves):
        for node, item in choices.items_of(number).items():
            tensors, layouts = [*item.inputs, *item.outputs], list(chain(*taken.ways(item)))
            pairs = [(t, x) for t, x in zip(tensors, layouts, strict=True) if t is not None]
            total += costs.operator(node, *zip(*pairs, strict=True)) * count
    total += Cost(moves_s=solution.seconds - sum(g.seconds[o] for g, o in solution.options.items()))
    assert math.isclose(total.seconds, solution.seconds, rel_tol=1e-6)
    print(f"lazyinline:   captured in {middle - start:.1f} s, planned in {end - middle:.1f} s")
    print(f"  {total}")
    return total


def theirs(config: DecoderConfig, own_costs: bool) -> Cost:
    """Plans with autoparallel; prints the seconds and returns the cost by ours."""
    from autoparallel import optimize_sharding
    from autoparallel.api import AutoParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    mesh = dist.device_mesh.init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))
    _register_attention()
    with torch.device("meta"):
        model = Decoder(config).to(torch.bfloat16)
    batch = (config.batch, config.seq)
    costs = Costs()
    with ExitStack() as stack:
        # Their costs are of a device that is asked what it is.
        stack.enter_context(mock.patch("torch.cuda.get_device_name", lambda *_: "H100"))
        if not own_costs:
            asked = {"estimate_strategy_runtime_cost": partial(_operator_us, costs)}
            asked["estimate_strategy_comms_cost"] = partial(_move_us, costs)
            for name, function in asked.items():
                stack.enter_context(mock.patch.object(optimize_sharding, name, function))
        start, solver = time.process_time(), _of_children()
        planner = AutoParallel(model, lambda: (torch.zeros(batch, dtype=torch.long),) * 2, mesh)
        found = stack.enter_context(planner)
        found.add_output_constraints([(Replicate(), Replicate())])
        middle = time.process_time()
        placement = found.optimize_placement()
        end = time.process_time() + _of_children() - solver
    print(f"autoparallel: set up in {middle - start:.1f} s, solved in {end - middle:.1f} s")
    total = _cost(costs, placement)
    print(f"  {total}")
    return total


def _cost(costs: Costs, placement: Mapping[torch.fx.Node, Any]) -> Cost:
    from autoparallel.graph_passes.graph_utils import all_input_nodes

    total, moved = Cost(), set[Any]()
    for node, spec in placement.items():
        total += _operator(costs, node, spec)
        operands = [n for n in all_input_nodes(node) if n in placement]
        for operand, wanted in zip(operands, spec.input_specs, strict=False):
            given = placement[operand].output_specs
            if node.target is operator.getitem:
                given = given[node.args[1]]
            # As in ours, a tensor is brought to a layout once.
            if (operand, wanted.placements) not in moved:
                moved.add((operand, wanted.placements))
                total += Cost(moves_s=_move_us(costs, given, wanted) / _US)
    return total


def _operator_us(costs: Costs, node: torch.fx.Node, strategy: Any) -> float:
    return _US * _operator(costs, node, strategy).seconds


def _operator(costs: Costs, node: torch.fx.Node, strategy: Any) -> Cost:
    outputs = strategy.output_specs
    specs = [*strategy.input_specs, *(outputs if isinstance(outputs, (tuple, list)) else [outputs])]
    specs = [one for one in specs if one is not None]
    metas = [torch.empty(0, dtype=s.tensor_meta.dtype, device="meta") for s in specs]
    tensors = [m.new_empty(s.tensor_meta.shape) for m, s in zip(metas, specs, strict=True)]
    return costs.operator(node, tensors, [_layouts(one) for one in specs])


def _move_us(costs: Costs, before: Any, after: Any) -> float:
    meta = before.tensor_meta
    num_bytes = math.prod(meta.shape) * meta.dtype.itemsize
    given, taken = _layouts(before), _layouts(after)
    return 0.0 if given == taken else _US * costs.moves.seconds(given, taken, num_bytes)


def _layouts(spec: Any) -> Layouts:
    # What has no name in ours is a part of another reduction, which nothing is brought to.
    return tuple(layout_of(one) or Layout("other") for one in spec.placements)


def _register_attention() -> None:
    """Splits the attention of a CPU by rows and heads, as DTensor's rules do that of a GPU."""
    aten = torch.ops.aten
    for target, num_results in (
        (aten._scaled_dot_product_flash_attention_for_cpu.default, 2),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, 3),
    ):

        def ways(*args: Any, num_results: int = num_results, **kwargs: Any) -> Any:
            taken = [None if not isinstance(a, DTensorSpec) else a for a in args]
            return [
                ([one] * num_results, [None if a is None else one for a in taken])
                for one in (Replicate(), Shard(0), Shard(1))
            ]

        register_sharding(target)(ways)


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()

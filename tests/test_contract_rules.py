"""Contract with DTensor's rules: what ``pipeline_parallel/mesh/torch_sharding_rules.py`` relies on.

When a new torch breaks one of these, that file is the one to look at. Moves are held against the
order in which ``redistribute`` takes them.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.fx
from contracts import contract, resolve
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from lazyinline.pipeline_parallel.mesh.layouts import SUM, WHOLE, Axis, Moves, split
from lazyinline.pipeline_parallel.mesh.torch_sharding_rules import Rules, layout_of, placement

pytestmark = pytest.mark.smoke
aten = torch.ops.aten
TENSOR = "torch.distributed.tensor"


def ways_of(rules: Rules, operator: Any, *args: Any) -> set[str]:
    """Returns the ways of an operator as text; tuples among the arguments are shapes of tensors."""
    graph = torch.fx.Graph()
    nodes = []
    for index, given in enumerate(args):
        if not isinstance(given, tuple):
            nodes.append(given)
            continue
        node = graph.placeholder(f"x{index}")
        node.meta["val"] = torch.empty(given, device="meta")
        nodes.append(node)
    made = graph.call_function(operator, tuple(nodes))
    values = [n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in nodes]
    made.meta["val"] = operator(*values)
    return {
        f"{' '.join(map(str, way.inputs))} -> {' '.join(map(str, way.outputs))}"
        for way in rules.ways(made)
    }


@contract(
    f"{TENSOR}._dtensor_spec: DTensorSpec TensorMeta",
    f"{TENSOR}._op_schema: OpSchema OpSpec OpStrategy TupleStrategy",
    f"{TENSOR}._ops.single_dim_strategy._ShardingPlaceholder",
    f"{TENSOR}.DTensor._op_dispatcher.sharding_propagator",
    f"{TENSOR}.placement_types._StridedShard",
    "._op_dispatcher",
)
def test_a_product_and_a_view_are_split_by_the_rules_of_dtensor() -> None:
    rules = Rules(2, ((12, 3),))
    product = ways_of(rules, aten.mm.default, (4, 8), (8, 12))
    assert {"R R -> R", "S0 R -> S0", "R S1 -> S1", "S1 S0 -> P", "R S1/3 -> S1/3"} <= product
    view = ways_of(rules, aten.view.default, (4, 12), [4, 3, 4])
    assert view == {"R -> R", "S0 -> S0", "P -> P", "S1/3 -> S2"}
    joined = ways_of(Rules(2, ((32, 4),)), aten.view.default, (4, 8, 6), [32, 6])
    assert {"S0 -> S0", "S1 -> S0/4", "S2 -> S1"} <= joined
    assert rules.unknown == set()


@contract(
    "torch.ops.aten._unsafe_masked_index_put_accumulate.default",
    "._scaled_dot_product_efficient_attention",
    "._scaled_dot_product_efficient_attention_backward",
    "._scaled_dot_product_flash_attention",
    "._scaled_dot_product_flash_attention_backward",
    "._scaled_dot_product_flash_attention_for_cpu",
    "._scaled_dot_product_flash_attention_for_cpu_backward",
    "._unsafe_masked_index_put_accumulate",
)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("flash_attention_for_cpu", ()),
        ("flash_attention", ()),
        ("efficient_attention", (None, True)),
    ],
)
def test_attention_is_split_by_sequence_and_by_head(kind: str, settings: tuple[Any, ...]) -> None:
    operator = getattr(aten, f"_scaled_dot_product_{kind}").default
    ways = ways_of(Rules(2), operator, *[(2, 4, 8, 16)] * 3, *settings)
    # Numbers for random draws, the last results of a GPU's, are whole.
    found = {way.removesuffix(" R R R").removesuffix(" R R") for way in ways if "S" in way}
    assert found == {"S0 S0 S0 -> S0 S0", "S1 S1 S1 -> S1 S1"}


@pytest.mark.parametrize("layout", [WHOLE, SUM, split(1), split(0, 3)], ids=str)
def test_a_layout_is_a_placement(layout: Any) -> None:
    assert layout_of(placement(layout)) == layout


def test_moves_are_in_the_order_of_redistribute() -> None:
    mesh = DeviceMesh("cpu", torch.arange(8).view(2, 4), _init_backend=False, _rank=0)
    layouts = {WHOLE: Replicate(), SUM: Partial(), split(0): Shard(0), split(1): Shard(1)}
    moves = Moves([Axis("a", 2), Axis("b", 4)])
    spec, meta = (
        resolve(f"{TENSOR}._dtensor_spec.{name}") for name in ("DTensorSpec", "TensorMeta")
    )
    infos = resolve(f"{TENSOR}._redistribute._gen_transform_infos")
    shape = meta(torch.Size((16, 16)), (16, 1), torch.float32)
    pairs = [pair for pair in itertools.product(layouts, layouts) if pair]
    for before, after in itertools.product(pairs, pairs):
        if SUM in after:
            continue
        ends = [
            spec(mesh, tuple(layouts[one] for one in x), tensor_meta=shape) for x in (before, after)
        ]
        theirs = [
            info.mesh_dim
            for info in infos(*ends)
            if info.src_dst_placements[0] != info.src_dst_placements[1]
        ]
        ours = [step.axis for step in moves.steps(before, after, 1024)]
        assert ours == theirs, (before, after)

"""Contract with DTensor, its collectives and rules, and with torch.distributed.pipelining.

When a new torch breaks one of these, ``pipeline_parallel/mesh/torch_*.py`` and
``pipeline_parallel/torch_pipelining.py`` are the files to look at.
"""

import inspect
import itertools
import re
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx
from contracts import contract, resolve
from parallel_models import mesh_of
from rank_threads import one_of_many, run_in_threads
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _redistribute,
    placement_types,
)

from lazyinline.autodiff.traces.torch_make_fx import new_fake_mode, traced
from lazyinline.pipeline_parallel.mesh.layouts import SUM, WHOLE, Axis, Moves, split
from lazyinline.pipeline_parallel.mesh.torch_collectives import (
    COLLECTIVES,
    WAIT,
    absent_ranks,
    axes_of,
    become,
    collectives_over,
    exchanges,
    forget_meshes,
    groups_of,
    with_own_collectives,
)
from lazyinline.pipeline_parallel.mesh.torch_sharding_rules import (
    Rules,
    has_rule,
    layout_of,
    placement,
)
from lazyinline.pipeline_parallel.torch_pipelining import ClosureStage, action_table

pytestmark = [pytest.mark.smoke, pytest.mark.filterwarnings("ignore::FutureWarning")]
_ATEN = torch.ops.aten


def test_rules_are_found_where_they_are_looked_for() -> None:
    ruled = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.view.default, _ATEN.add.Tensor)
    assert all(map(has_rule, ruled))
    assert not has_rule(_ATEN.as_strided.default)


@contract(
    "torch.ops._c10d_functional",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    "torch.utils._pytree.tree_map_only",
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])  # of which nothing is there
def test_a_trace_of_redistributions_holds_functional_collectives_alone(device: str) -> None:
    def move(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        (local,) = inputs
        parts = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        rows = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        targets = (
            *((parts, Replicate()), (parts, Shard(0))),
            *((rows, Replicate()), (rows, Shard(1))),
        )
        return [t.redistribute(mesh, [to]).to_local() for t, to in targets]

    with one_of_many(2):
        mesh = init_device_mesh(device, (2,), mesh_dim_names=("tensor",))
        axes = axes_of(mesh)
        own_move = placement_types.shard_dim_alltoall
        with new_fake_mode(), torch.no_grad(), exchanges():
            module = traced(move, [[torch.empty(4, 4, device=device)]], (), {})
        assert placement_types.shard_dim_alltoall is own_move
        own = with_own_collectives(module, axes)
    targets = [n.target for n in own.graph.nodes if n.op == "call_function"]
    assert [t for t in targets if t in COLLECTIVES] == [
        torch.ops.lazyinline.all_reduce.default,
        torch.ops.lazyinline.reduce_scatter.default,
        torch.ops.lazyinline.all_gather.default,
        torch.ops.lazyinline.all_to_all.default,
    ]
    assert not [t for t in targets if "functional" in str(t)]
    assert targets.count(WAIT) == 4


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_collective_gives_what_its_out_form_and_its_prediction_give(name: str) -> None:
    operator: Any = getattr(torch.ops.lazyinline, name)

    def run(rank: int) -> torch.Tensor:
        groups = groups_of(mesh_of(tensor=2))
        x = torch.arange(8.0).reshape(4, 2) + 10 * rank
        own: tuple[Any, ...] = {
            "all_reduce": ("sum",),
            "all_gather": (2,),
            "reduce_scatter": ("sum", 2),
            "all_to_all": (2,),
        }[name]
        with collectives_over(groups):
            made: torch.Tensor = WAIT(operator(x, *own, "tensor"), x)
            out = WAIT(operator.out(x, *own, "tensor", out=torch.zeros_like(made)), x)
        predicted = operator(x.to("meta"), *own, "tensor")
        assert torch.equal(made, out)
        assert predicted.shape == made.shape
        return made

    first, second = run_in_threads(2, run)
    both = torch.arange(8.0).reshape(4, 2), torch.arange(8.0).reshape(4, 2) + 10
    expected = {
        "all_reduce": [sum(both)] * 2,
        "all_gather": [torch.cat(both)] * 2,
        "reduce_scatter": list(torch.chunk(both[0] + both[1], 2)),
        "all_to_all": [torch.cat(rows) for rows in zip(*(x.chunk(2) for x in both), strict=True)],
    }[name]
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])


@contract("._to_copy")
def test_a_cast_leaves_a_part_of_a_sum_as_it_is() -> None:
    with one_of_many(2):
        part = DTensor.from_local(torch.ones(2), mesh_of(tensor=2), [Partial()])
        made = _ATEN._to_copy.default(part, dtype=torch.float64)
        assert tuple(made.placements) == (Partial(),)


@contract("torch.testing._internal.distributed.fake_pg")
def test_ranks_can_be_absent_and_collectives_over_them_move_nothing() -> None:
    before = sys.excepthook
    for _ in range(2):  # the group ends with it
        with absent_ranks({"data": 2, "tensor": 512}) as mesh:
            assert mesh.size() == 1024 and list(mesh.get_coordinate() or ()) == [0, 0]
            axes = axes_of(mesh)
            assert list(axes.values()) == ["data", "tensor"] and {*map(type, axes)} == {str}
            x = torch.ones(2)
            dist.all_reduce(x, group=mesh.get_group("data"))
            assert torch.equal(x, torch.ones(2))
        assert not dist.is_initialized() and sys.excepthook is before


def test_a_process_becomes_another_absent_rank_and_takes_its_chunks() -> None:
    with absent_ranks({"data": 2, "tensor": 2}) as mesh:
        whole = DTensor.from_local(torch.arange(4.0), mesh, [Replicate(), Replicate()])
        for place in range(4):
            become(mesh, divmod(place, 2))
            assert tuple(mesh.get_coordinate() or ()) == divmod(place, 2)
            part = whole.redistribute(mesh, [Shard(0), Shard(0)]).to_local()
            assert part.tolist() == [place]


@contract(
    "torch.distributed.tensor._redistribute._gen_transform_infos.cache_clear",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache",
)
def test_pytorch_forgets_what_it_remembers_by_meshes() -> None:
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    remembered = propagator.propagate_op_sharding.cache_info
    with one_of_many(2):
        DTensor.from_local(torch.ones(2), mesh_of(tensor=2), [Replicate()]).add(1).redistribute(
            placements=[Shard(0)]
        )
    forget_meshes()
    assert not remembered().currsize
    assert not _redistribute._gen_transform_infos.cache_info().currsize


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
    joined = ways_of(Rules(2, ((32, 4),)), aten.view.default, (4, 8, 6), [32, 6])
    in_strides = ({"S1/3 -> S2"}, {"S1 -> S0/4"}) if torch.__version__ >= "2.13" else (set(), set())
    assert view == {"R -> R", "S0 -> S0", "P -> P"} | in_strides[0]
    assert {"S0 -> S0", "S2 -> S1"} | in_strides[1] <= joined
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


# Asked for by schedules, and right as PyTorch's stage does it.
INHERITED = {"is_first", "is_last", "has_backward", "group_rank", "group_size", "num_stages"}
INHERITED |= {"device", "stage_index", "stage_index_to_group_rank", "submod", "output_chunks"}
INHERITED |= {"args_recv_info", "act_send_info"}
# After metadata inference, which is replaced: looks for FSDP modules in an empty module.
INHERITED |= {"_post_metadata_inference_cleanup", "_inference_mode"}
# Since torch 2.15. The set-up of process groups, and metadata of an empty module.
INHERITED |= {"p2p_per_edge", "_p2p_edge_groups", "_parent_group", "_user_meta"}
INHERITED |= {"_pre_metadata_inference_backup"}
# What PyTorch's forward keeps, which is replaced; and what is called of an FSDP module only.
INHERITED |= {"release_fwd_send_outputs"}
INHERITED |= {"start_gradient_reduction", "wait_for_gradient_reduction"}


def test_what_is_overridden_exists() -> None:
    own = {"give", "doing"}
    names = [n for n, f in vars(ClosureStage).items() if inspect.isfunction(f)]
    helpers = {"__init__", "_receive", "_send", "_operation", "_rank_of", "_nothing", *own}
    helpers |= {"_counted", "_run"}
    # Present from torch 2.12, 2.13 or 2.15 on, or until then.
    sometimes = {"_warmup_forward_vote", "_warmup_backward_result", "_get_init_p2p_neighbors_ops"}
    sometimes |= {"_clear_unlaunched_fwd_recv", "_clear_unlaunched_bwd_recv"}
    missing = [n for n in names if n not in helpers | sometimes and not hasattr(PipelineStage, n)]
    assert not missing, f"PipelineStage has no {missing} any more"


def test_schedules_ask_a_stage_for_nothing_else() -> None:
    source = inspect.getsource(schedules)
    asked = set(
        re.findall(r"\b(?:self\._stage|stage|stage_index_to_stage\[[^]]*\])\.(\w+)", source)
    )
    overridden = set(vars(ClosureStage))
    assert "forward_one_chunk" in asked, "the pattern finds nothing"
    assert not asked - overridden - INHERITED, "schedules ask for something new"


def test_steps_are_called_with_the_arguments_that_are_known() -> None:
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        theirs = inspect.signature(getattr(PipelineStage, name)).parameters
        ours = inspect.signature(getattr(ClosureStage, name)).parameters
        assert list(theirs) == list(ours), name


def test_the_action_table_has_the_kinds_that_are_known() -> None:
    kinds = {kind.name: kind.value for kind in schedules.FORWARD.__class__}
    assert kinds["FORWARD"] == "F" and kinds["FULL_BACKWARD"] == "B"
    assert kinds["BACKWARD_INPUT"] == "I" and kinds["BACKWARD_WEIGHT"] == "W"
    assert action_table("1F1B", 2, 2, 4).ranks[1][0].micro_batch == 0

"""Plans over a mesh: what is found without a mark, what memory asks for, that it is cheapest."""

import functools
import itertools
import json
import math
import pathlib
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from decoders import Decoder, DecoderConfig, GptDecoder
from models import Block, Made, Stack
from parallel_models import TinyMixture, mesh_of, tiny, tokens
from rank_threads import one_of_many, run_in_threads
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import lazyinline
from lazyinline import PlanError
from lazyinline.autodiff.training_program import StepProgram
from lazyinline.backend.cache import decode_leaf, encode_leaf
from lazyinline.frontend.compiler import PASSES, Compiler
from lazyinline.frontend.options import Batching, Options
from lazyinline.frontend.passes.state import Subject, between, run, step_goal
from lazyinline.pipeline_parallel.mesh import problem
from lazyinline.pipeline_parallel.mesh.choices import Choices, _fits
from lazyinline.pipeline_parallel.mesh.layouts import Axis, AxisRates, Layout, Moves
from lazyinline.pipeline_parallel.mesh.plan import Placements
from lazyinline.pipeline_parallel.mesh.planner import (
    FoundPlan,
    axes_of_mesh,
    cheapest_plan,
    find_plan,
    folded_step,
)
from lazyinline.pipeline_parallel.mesh.problem import OverMemoryError, Problem, evaluated
from lazyinline.pipeline_parallel.mesh.torch_parts import (
    _StridedShard,
    distributed,
    moved,
    reshaped_in_parts,
)
from lazyinline.pipeline_parallel.mesh.torch_sharding_rules import Rules, placements
from lazyinline.reuse.ir.costs import Rates
from lazyinline.reuse.ir.program import Leaf, RecomputeMark
from lazyinline.reuse.ir.rewrite import map_leaves

# Products and links take what they take; memory traffic is nearly free, so the plan is the one of
# which collectives alone decide.
RATES = Rates(flops_per_s=4e14, bytes_per_s=1e15)
LINK = AxisRates(bytes_per_s=3e11, latency_s=1e-5)
SIZES = {"hidden": 2048, "num_heads": 16, "ffn": 8192, "vocab": 32000, "seq": 1024}
MODELS = {"llama": Decoder, "gpt": GptDecoder}


def step_of(
    model: nn.Module, *args: Tensor, micro_batches: int = 1, recompute: Any = None
) -> StepProgram:
    """Returns the decomposed step of a model."""
    compiler = Compiler(Options(recompute=recompute))
    batching = Batching(micro_batches=micro_batches)
    state = compiler.started(Subject(model, args, {}), step_goal(batching))
    state = run(between(PASSES, "capture", "decompose"), state)
    return replace(state.step, program=state.programs["step"])


@functools.cache  # a plan changes nothing of it
def decoder_step(
    name: str,
    *,
    batch: int = 1,
    layers: int = 3,
    micro_batches: int = 1,
    recompute: RecomputeMark = "",
) -> StepProgram:
    """Returns the step of a decoder on the meta device: nothing of it has memory."""
    config = DecoderConfig(layers, batch=batch, **SIZES)
    with torch.device("meta"):
        model = MODELS[name](config)
        ids = torch.zeros(batch, config.seq, dtype=torch.long)
    return step_of(model, ids, ids, micro_batches=micro_batches, recompute=recompute or None)


def axis(name: str, size: int) -> Axis:
    return Axis(name, size, LINK)


def kinds(found: FoundPlan, block: str) -> list[str]:
    """Returns the kinds of a block's collectives."""
    return sorted(step.kind for name, step, _ in found.taken.collectives() if name == block)


def layouts(found: FoundPlan, ending: str) -> set[str]:
    """Returns the placements of the parameters of all layers with this name."""
    return {
        repr(placements)
        for name, placements in found.plan.parameters.items()
        if name.endswith(ending) and "blocks" in name
    }


@pytest.mark.parametrize(("size", "micro_batches"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize(
    ("name", "block", "names"),
    [
        ("llama", "DecoderBlock", ("ffn.gate.weight", "ffn.up.weight", "ffn.down.weight")),
        ("gpt", "GptBlock", ("up.weight", "up.bias", "down.weight")),
    ],
)
@pytest.mark.sweep(keep=["llama-DecoderBlock-names0-2-1]", "gpt-GptBlock-names1-2-2"])
def test_megatrons_plan_is_found_without_a_mark(
    name: str, block: str, names: tuple[str, ...], size: int, micro_batches: int
) -> None:
    step = decoder_step(name, micro_batches=micro_batches)
    found = find_plan(step, [axis("tensor", size)], RATES)
    sums = [(s.kind, n) for part, s, n in found.taken.collectives() if part == f"{block}.forward"]
    assert sums == [("all_reduce", 3 * micro_batches)] * 2
    assert layouts(found, "attention.qkv.weight") == {"(_StridedShard(dim=0, sf=3),)"}
    assert layouts(found, "attention.out.weight") == {"(Shard(dim=1),)"}
    *by_rows, by_columns = names
    assert all(layouts(found, one) == {"(Shard(dim=0),)"} for one in by_rows)
    assert layouts(found, by_columns) == {"(Shard(dim=1),)"}
    assert not found.taken.choices.unknown
    printed = f"{found.plan}\n{found.plan.table}"
    assert f"@{block}.forward, {3 * micro_batches} calls" in printed
    assert "all_reduce over tensor 8 MiB" in printed
    assert "more, by moving" in printed
    assert "blocks.*.attention.out.weight" in printed


def test_closures_from_the_cache_have_the_plan_of_new_ones() -> None:
    step = decoder_step("gpt", batch=4)
    new = find_plan(step, [axis("tensor", 2)], RATES)

    def read(leaf: Leaf) -> Leaf:
        return decode_leaf(json.loads(json.dumps(encode_leaf(leaf))), leaf.name, leaf.input_names)

    program = map_leaves(step.program, read)
    found = find_plan(replace(step, program=program), [axis("tensor", 2)], RATES)
    assert (str(found.plan), found.plan.table) == (str(new.plan), new.plan.table)


def test_tokens_are_split_where_memory_asks_for_it() -> None:
    step = decoder_step("llama")
    plain = find_plan(step, [axis("tensor", 4)], RATES)
    limit = int(plain.plan.held_bytes * 0.66)
    found = find_plan(step, [axis("tensor", 4)], RATES, memory_bytes_per_rank=limit)
    assert found.plan.held_bytes <= limit
    assert found.seconds >= plain.seconds
    forward = kinds(found, "DecoderBlock.forward")
    assert forward == ["all_gather"] * 2 + ["reduce_scatter"] * 2, "each all-reduce, in halves"


def test_parameters_are_split_over_an_axis_of_the_batch_where_memory_asks_for_it() -> None:
    step, axes = decoder_step("llama", batch=16), [Axis("data", 4, AxisRates(1e11, 2e-5))]
    plain = find_plan(step, axes, RATES)
    assert layouts(plain, "ffn.up.weight") == {"(Replicate(),)"}
    assert kinds(plain, "DecoderBlock.forward") == []
    limit = int(plain.plan.held_bytes * 0.6)
    found = find_plan(step, axes, RATES, memory_bytes_per_rank=limit)
    assert found.plan.held_bytes <= limit
    assert "Shard" in str(layouts(found, "ffn.up.weight"))
    assert set(kinds(found, "DecoderBlock.forward")) == {"all_gather"}
    assert "reduce_scatter" in kinds(found, "DecoderBlock.backward")


@pytest.mark.parametrize(
    ("share", "bytes_per_s", "chosen"),
    [(0.9, 3e11, ""), (0.85, 2e10, "selective"), (0.75, 2e10, "full")],
)
@pytest.mark.sweep(keep="0.85")
def test_what_is_computed_again_is_weighed_against_what_moves_more(
    share: float, bytes_per_s: float, chosen: RecomputeMark
) -> None:
    axes = [Axis("tensor", 2, AxisRates(bytes_per_s, 1e-5))]
    plain = find_plan(decoder_step("llama", batch=4), axes, RATES)
    limit, every = int(share * plain.plan.held_bytes), list[FoundPlan]()
    with_room = {"": plain}  # nothing else is tried
    assert cheapest_plan(with_room.__getitem__, ("selective", "full")) is plain

    def find(policy: RecomputeMark) -> FoundPlan:
        step = decoder_step("llama", batch=4, recompute=policy)
        every.append(find_plan(step, axes, RATES, memory_bytes_per_rank=limit))
        return every[-1]

    found = cheapest_plan(find, ("selective", "full"))
    assert found.plan.recompute == chosen
    assert found.seconds == min(one.seconds for one in every)
    assert found.plan.held_bytes <= limit
    assert len(every) == 3
    assert f"the fastest is recompute {chosen or 'none'}" in found.plan.table


def test_without_room_for_any_recompute_the_least_that_fits_is_told() -> None:
    least = {"": 30, "selective": 20, "full": 25}

    def find(policy: RecomputeMark) -> FoundPlan:
        raise OverMemoryError(10, least[policy])

    with pytest.raises(PlanError, match="at most 10 bytes per rank; any holds at least 20"):
        cheapest_plan(find, ("selective", "full"))


def test_data_and_tensor_parallel_are_found_together() -> None:
    with torch.device("meta"):
        layers = Stack(*(Block(4096) for _ in range(3)))
        model = Made(lambda self, x: self.layers(x).square().mean(), layers=layers)
        step = step_of(model, torch.zeros(2002, 4096))
    axes = [Axis("data", 2, AxisRates(3e10, 2e-5)), axis("tensor", 4)]
    found = find_plan(step, axes, RATES)
    by_name = found.plan.parameters
    (middle,) = (one for name, one in by_name.items() if name.endswith("layers.1.up.weight"))
    assert repr(middle) == "(Replicate(), Shard(dim=0))"
    assert ("all_reduce", 1) in {(s.kind, s.axis) for _, s, _ in found.taken.collectives()}
    assert found.seconds == pytest.approx(found.taken.solution.bound_s)


def test_experts_are_split_where_reading_their_weights_takes_longest() -> None:
    with torch.device("meta"):
        model, ids = TinyMixture(width=512, experts=64), torch.zeros(1, 32, dtype=torch.long)
    rates, axes = Rates(flops_per_s=4e14, bytes_per_s=2.5e12), [axis("ranks", 4)]
    found = find_plan(step_of(model, ids, ids), axes, rates)
    experts = {repr(p) for n, p in found.plan.parameters.items() if n.endswith((".up", ".down"))}
    assert experts == {"(Shard(dim=0),)"}
    assert not found.taken.choices.unknown


def test_gradients_of_a_joint_projection_are_joined_by_rows() -> None:
    found = find_plan(decoder_step("gpt", batch=4), [axis("data", 2)], RATES)
    assert "all_to_all" not in {step.kind for _, step, _ in found.taken.collectives()}
    assert kinds(found, "GptBlock.forward") == []


def test_what_memory_cannot_hold_is_refused() -> None:
    step, axes = decoder_step("gpt", batch=4), [axis("tensor", 2)]
    with pytest.raises(PlanError, match="at most 1000 bytes") as refused:
        find_plan(step, axes, RATES, memory_bytes_per_rank=1000)
    (least,) = re.findall(r"at least ([\d,]+)", str(refused.value))
    limit = round(1.1 * int(least.replace(",", "")))
    assert find_plan(step, axes, RATES, memory_bytes_per_rank=limit).plan.held_bytes <= limit


def test_the_number_of_layers_does_not_count() -> None:
    few, many = (folded_step(decoder_step("llama", layers=n)) for n in (3, 6))
    assert [leaf.name for leaf, _ in few.leaves] == [leaf.name for leaf, _ in many.leaves]
    assert len(few.slots) == len(many.slots)
    assert max(count for _, count in many.leaves) == 6


@pytest.mark.parametrize("bytes_per_s", [1e8, 1e10, 1e12], ids=["slow", "as memory", "fast"])
@pytest.mark.sweep(keep="as memory")
def test_no_choice_is_cheaper(bytes_per_s: float) -> None:
    with torch.device("meta"):
        up = nn.Linear(64, 256, bias=False)
        step = step_of(Made(lambda self, x: self.up(x).relu().sum(), up=up), torch.zeros(32, 64))
    axes = [Axis("ranks", 4, AxisRates(bytes_per_s, 1e-6))]
    moves, choices = Moves(axes), Choices(folded_step(step), axes, Rates(1e10, 1e10))
    every = itertools.product(*(range(len(group)) for group in choices.groups))
    found = Problem(choices, moves, {}, None).solve()
    options = (dict(zip(choices.groups, pick, strict=True)) for pick in every)
    cheapest = min(evaluated(choices, moves, {}, picked).seconds for picked in options)
    assert found.seconds == pytest.approx(cheapest)


@pytest.mark.parametrize("share", [1.01, 0.66])
def test_a_plan_takes_as_long_where_the_simplex_method_takes_too_many_steps(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, axes = decoder_step("llama"), [axis("tensor", 4)]
    limit = int(share * find_plan(step, axes, RATES).plan.held_bytes)
    plain = find_plan(step, axes, RATES, memory_bytes_per_rank=limit)
    monkeypatch.setattr(problem, "_SIMPLEX_STEPS", 1)
    found = find_plan(step, axes, RATES, memory_bytes_per_rank=limit)
    solution, before = found.taken.solution, plain.taken.solution
    assert solution.bound_s == pytest.approx(before.bound_s)
    assert solution.is_scarce == before.is_scarce == (share < 1)
    assert ("no plan with equal layers takes less" in found.plan.table) == (share < 1)


def test_an_operator_without_a_rule_is_whole_on_each_rank_and_named() -> None:
    def searching(self: Any, x: Tensor) -> Tensor:
        h = self.up(x)
        places = torch.searchsorted(torch.linspace(0, 1, 4), h.detach())
        return (h * places).sum()  # type: ignore[no-any-return]

    step = step_of(Made(searching, up=nn.Linear(8, 8)), torch.zeros(8, 8))
    found = find_plan(step, [axis("tensor", 2)], RATES)
    assert found.taken.choices.unknown == ["aten.searchsorted.Tensor"]
    assert "without a rule: aten.searchsorted.Tensor" in found.plan.table


def of_many_kinds(self: Any, ids: Tensor) -> Tensor:
    """Views, attention, softmax, reductions, an embedding, a cross entropy."""
    x = self.embedding(ids)
    q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind()
    y = F.scaled_dot_product_attention(q, k, v)
    y = y + torch.softmax(q @ k.transpose(-1, -2), -1) @ v
    y = y.transpose(1, 2).flatten(2)
    y = y - y.mean(-1, keepdim=True) + y.amax(-1, keepdim=True)
    return F.cross_entropy(self.head(y).flatten(0, 1), ids.flatten())


def test_every_kind_of_operator_can_be_split() -> None:
    held = {"embedding": nn.Embedding(16, 32), "qkv": nn.Linear(32, 96), "head": nn.Linear(32, 16)}
    step = step_of(Made(of_many_kinds, **held), torch.zeros(4, 8, dtype=torch.long))
    axes = [axis("tensor", 2)]
    choices = Choices(folded_step(step), axes, RATES)
    assert choices.unknown == []
    leaves = range(len(choices.folded.leaves))
    items = [item for leaf in leaves for item in choices.items_of(leaf).values()]
    assert len(items) > 50
    for item in items:
        if any(tensor is not None and tensor.dim() for tensor in item.inputs):
            assert len(item.ways[0]) > 1, item.node


def test_rates_are_the_same_on_every_rank_and_in_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "links.json"

    def measured(rank: int) -> dict[str, AxisRates]:
        return lazyinline.measure_links(mesh_of(data=2, tensor=2), path)

    first, *others = run_in_threads(4, measured)
    assert list(first) == ["data", "tensor"]
    assert all(one == first for one in others)
    assert all(one.latency_s > 0 and one.bytes_per_s > 0 for one in first.values())
    axes = axes_of_mesh(("data", "tensor"), (2, 2), "cpu", path)
    rates = {axis.name: (axis.rates.bytes_per_s, axis.rates.latency_s) for axis in axes}
    assert rates == {name: (r.bytes_per_s, r.latency_s) for name, r in first.items()}


@pytest.mark.parametrize(
    ("bytes_per_s", "is_split"), [(1e12, True), (1e3, False)], ids=["fast", "slow"]
)
def test_a_plan_is_found_by_the_rates_of_the_mesh(
    bytes_per_s: float, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazyinline.frontend.mesh_placement, "CPU", Rates(2e6, 8e6))
    links = {"x": AxisRates(bytes_per_s, 1e-7)}  # a plan that is found takes any name
    given: Any = {"plan": "auto", "links": links, "backend": "eager"}
    with one_of_many(2):
        parallel = lazyinline.parallelize(tiny(0), tokens(rows=1), mesh=mesh_of(x=2), **given)
    assert "mesh: x 2" in str(parallel.plan)
    plan = parallel.plan.layouts
    assert plan is not None
    lies = [*plan.parameters.values(), *plan.batch]
    assert any(p.is_shard() for layout in lies for p in layout) is is_split


def test_what_is_no_file_of_rates_is_said(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "links.json"
    for content in ("", "[]", '{"tensor": {"bytes": 1}}'):
        path.write_text(content)
        with pytest.raises(lazyinline.PlanError, match=r"links.json.*is no file of"):
            axes_of_mesh(("tensor",), (2,), "cpu", path)
    with pytest.raises(lazyinline.PlanError, match="has the dimension 'tensor'"):
        axes_of_mesh(("tensor",), (2,), "cpu", {"data": AxisRates(1.0, 1.0)})
    with one_of_many(2), pytest.raises(lazyinline.PlanError, match="links= are for plan='auto'"):
        lazyinline.parallelize(
            tiny(1), (torch.zeros(2, 8, dtype=torch.long),) * 2, mesh=mesh_of(tensor=2), links={}
        )


AXES = [Axis(name, 2) for name in ("data", "tensor")]
RESHAPES = [
    ((24, 24), (2, 12, 24), ((24, 3),)),
    ((2, 12, 24), (24, 24), ((24, 3), (24, 6))),
    ((4, 24), (4, 3, 8), ((24, 3),)),
    ((24, 4), (3, 4, 2, 4), ((24, 3), (24, 12))),
]


def pairs_planned(
    before: tuple[int, ...], after: tuple[int, ...], factors: tuple[tuple[int, int], ...]
) -> list[tuple[Placements, Placements]]:
    """Returns how a reshape's operand and result may lie, where one of them is in parts."""
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = torch.empty(before, device="meta")
    node = graph.call_function(torch.ops.aten.reshape.default, (given, after))
    node.meta["val"] = torch.empty(after, device="meta")
    ways = Rules(2, factors).ways(node)
    found = []
    for pick in itertools.product(ways, ways):
        ends: list[tuple[Layout, ...]] = [
            tuple(way.inputs[0] or pytest.fail("a tensor") for way in pick),
            tuple(way.outputs[0] for way in pick),
        ]
        values = given.meta["val"], node.meta["val"]
        if any(one.is_partial for end in ends for one in end):
            continue
        if all(_fits(t, e, AXES, at_rest=False) for t, e in zip(values, ends, strict=True)):
            lies, asked = (placements(end, (2, 2)) for end in ends)
            if any(isinstance(p, _StridedShard) for p in (*lies, *asked)):
                found.append((lies, asked))
    return found


@pytest.mark.parametrize(("before", "after", "factors"), RESHAPES)
def test_a_planned_reshape_in_parts_is_a_reshape_of_each_ranks_part(
    before: tuple[int, ...], after: tuple[int, ...], factors: tuple[tuple[int, int], ...]
) -> None:
    pairs = pairs_planned(before, after, factors)
    assert pairs
    x = torch.arange(float(math.prod(before))).reshape(before)

    def wrong(rank: int) -> list[str]:
        mesh, whole = mesh_of(data=2, tensor=2), (Replicate(), Replicate())
        given: DTensor = distributed(x, mesh, whole, x)
        found = []
        for lies, asked in pairs:
            made = moved(reshaped_in_parts(moved(given, lies), after, asked), whole).to_local()
            found += [] if torch.equal(made, x.reshape(after)) else [f"{lies} to {asked}"]
        return found

    assert run_in_threads(4, wrong) == [[]] * 4


def test_a_dimension_split_in_parts_is_told_from_one_split_as_a_whole() -> None:
    # Moves count the ranks of plain splits by this comparison.
    assert _StridedShard(0, split_factor=3) != Shard(0)
    assert Shard(0) != _StridedShard(0, split_factor=3)

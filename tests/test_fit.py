"""``lazyinline.fit``: what a rank of a mesh holds, without the others; what one really holds."""

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import Decoder, DecoderConfig
from memory_events import memory_use
from models import Made, MarkedBlock, Stack
from parallel_models import MEGATRON, mesh_of, tiny, tokens
from rank_threads import one_of_many
from torch import nn
from torch.distributed.tensor import Shard

import lazyinline
from lazyinline.backend.gpu.targets import CONTEXT_BYTES, GIB, target_named
from lazyinline.backend.kernels import lower
from lazyinline.frontend import commands
from lazyinline.frontend import fit as fitting
from lazyinline.frontend.fit import Fit
from lazyinline.pipeline_parallel.mesh.plan import MeshPlan
from lazyinline.pipeline_parallel.mesh.traffic import RankMemory, ShardedStep
from lazyinline_command.main import main

TARGET = "cuda:sm_90"
LIMIT_BYTES = target_named(TARGET).usable_bytes + CONTEXT_BYTES
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def decoder() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A model on the meta device, and a batch of eight rows."""
    with torch.device("meta"):
        config = DecoderConfig(3, hidden=32, num_heads=2, vocab=64, seq=64, batch=8)
        ids = torch.zeros(8, 64, dtype=torch.long)
        return Decoder(config).bfloat16(), (ids, ids)


@needs_triton
def test_a_rank_is_counted_offline_and_nothing_of_the_process_stays_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lower, "is_interpreting", lambda: True)  # it takes no machine code
    model, args = decoder()
    before = torch.get_rng_state(), sys.excepthook
    found = lazyinline.fit(model, args, mesh={"fsdp": 4}, target=TARGET, micro_batches=2)
    assert torch.equal(torch.get_rng_state(), before[0]) and sys.excepthook is before[1]
    assert not dist.is_initialized()
    held, trained = found.memory, sum(p.numel() * 2 for p in model.parameters())
    tables = sum(b.numel() * b.element_size() for b in model.buffers())
    assert held.gradients * 4 == trained and held.optimizer == 2 * held.gradients
    assert held.parameters - held.gradients == tables
    assert held.batch - 4 <= 8 * 64 * 8 // 4 * 2 <= held.batch
    assert found.fits and found.instead is None
    # Attention is computed on a rank's rows, of three layers and two parts; cuBLAS has the rest.
    row, sums = 64 * 32 * 2, 2 * 64 * 4
    summed = 128 * 32 * 4  # a gradient of queries, in single precision and whole blocks
    assert not found.step.layouts.whole
    assert held.launches - 32 * 2**20 <= 6 * (row + sums) + 3 * row + summed + 1024
    assert found.seconds > 0
    assert max(map(len, str(found).splitlines())) <= 100


def as_if(gib: float, seconds: float, way: str) -> Fit:
    """What would be said of a step that holds so much; nothing is compiled."""
    memory = RankMemory(int(gib * GIB), 0, 0, 0, 0)
    step = ShardedStep(MeshPlan((("fsdp", 2),), held_bytes=int(gib * GIB)), (), memory)
    return Fit(target_named(TARGET), LIMIT_BYTES, way, {"fsdp": 2}, step, memory, seconds)


@pytest.mark.parametrize(
    ("auto_s", "fastest"), [(3.0, "given selective"), (2.0, "auto None"), (None, "given selective")]
)
def test_where_a_step_does_not_fit_the_fastest_that_does_is_named(
    auto_s: float | None, fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(self: Any, plan: Any, recompute: str | None, room_bytes: int | None = None) -> Fit:
        if plan != "auto":
            gib = {None: 90, "selective": 70, "full": 50}[recompute]
            return as_if(gib, 2.5, f"given {recompute}")
        if auto_s is None or room_bytes not in (None, LIMIT_BYTES):
            raise lazyinline.PlanError("nothing fits")
        return as_if(81 if room_bytes is None else 77, auto_s, f"auto {recompute}")

    monkeypatch.setattr(fitting._Offline, "fit", compiled)
    model, args = decoder()
    found = lazyinline.fit(model, args, mesh={"fsdp": 2}, target=TARGET)
    assert not found.fits and found.way == "given None"
    assert found.instead is not None and found.instead.way == fastest
    assert "does NOT fit" in str(found) and "what fits:" in str(found)
    monkeypatch.setattr(fitting._Offline, "fit", lambda *asked: as_if(90, 1, str(asked[2])))
    nothing = lazyinline.fit(model, args, mesh={"fsdp": 2}, target=TARGET, recompute="full")
    assert nothing.instead is None and "nothing that was tried fits" in str(nothing)


@needs_triton
def test_stages_are_counted_for_each_rank_and_the_one_that_holds_most_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lower, "is_interpreting", lambda: True)
    with torch.device("meta"):
        layers = Stack(*(MarkedBlock(32) for _ in range(2)))
        model = Made(lambda self, x: self.layers(x).square().mean(), layers=layers).bfloat16()
        args = (torch.zeros(8, 32, dtype=torch.bfloat16),)
    mesh = {"pp": 2, "fsdp": 2}
    found = lazyinline.fit(model, args, mesh=mesh, target=TARGET, micro_batches=4)
    plan = found.pipeline
    assert plan is not None
    assert [stage.in_flight for stage in plan.stages] == [2, 1]
    assert plan.bubble > 1 / 5 - 0.05 and found.seconds == plan.step_s  # of stages that are alike
    held = sum(p.numel() * 2 for p in model.parameters())
    assert sum(stage.gradient_bytes for stage in plan.stages) * 2 == held
    # What a stage sends arrives at the next.
    sends = [one for one in found.step.collectives if one.part == "stage 0, forward"]
    sends = [one for one in sends if one.kind == "send"]
    assert [(one.axis, one.num_bytes) for one in sends] == [
        ("pp", plan.stages[1].received_bytes)
    ] * 4
    assert "1F1B of 2 stages, 4 micro-batches" in str(found)
    assert max(map(len, str(found).splitlines())) <= 100


def test_the_command_prints_what_fit_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def fit(model: Any, args: Any, kwargs: Any, **options: Any) -> Fit:
        asked.update(options)
        return as_if(12, 1, "as asked")

    monkeypatch.setattr(commands, "fit", fit)
    given = ("--mesh", "fsdp=4,tp=2", "--target", TARGET, "--memory-gib", "40", "--show")
    assert main(["fit", "test_fit:decoder", *given]) == 0
    printed = capsys.readouterr().out
    assert "as asked" in printed and "in all: 0 collectives" in printed
    assert asked["mesh"] == {"fsdp": 4, "tp": 2} and asked["plan"] is None
    assert asked["memory_bytes_per_rank"] == 40 * GIB


def raising() -> None:
    raise ValueError("no weights here")


def without_loss() -> Any:
    return nn.Linear(4, 4), (torch.zeros(8, 4),)


def run_branching(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.layer(x).sum()
    return y * 2 if y > 0 else y


def branching() -> Any:
    return Made(run_branching, layer=nn.Linear(4, 4)), (torch.zeros(8, 4),)


def more_ranks_than_heads() -> Any:
    model = tiny()
    for name in "qkv":
        lazyinline.shard(getattr(model.layers[0].attention, name), {"weight": Shard(0)})
    return model, tokens()


OF_DECODER: Mapping[str, str] = {
    "--mesh fsdp": "fsdp is not of the form fsdp=8,tp=2",
    "--mesh fsdp=x": "fsdp=x is not of the form",
    "--mesh fsdp=2,fsdp=2": "each name once",
    "--mesh rows=2": "named ('rows',). Each needs a name that says what it is for: data,",
    "--mesh tp=2,tensor=2": "one of tensor, tp",
    "--mesh pp=2": "has only the dimension 'pp'",
    "--mesh pp=2,fsdp=2 --micro-batches 1": "number of stages (2)",
    "--mesh pp=8,tp=1 --micro-batches 16": "(8, 64) cannot be split into 16",
    "--mesh pp=2,tp=1 --schedule zbv": "ZBVZeroBubble holds two stage(s) per rank",
    "--mesh pp=2,tp=1 --num-stages 3": "num_stages=3 cannot be spread evenly over 2",
    "--mesh pp=2,tp=1 --schedule first": "schedule='first' is unknown",
    "--mesh fsdp=2000000": "number of ranks, 1 to 1,048,576",
    "--mesh fsdp=3": "(8, 64) cannot be split evenly over the 3 ranks",
    "--mesh fsdp=2 --micro-batches 3": "into 3 equal micro-batches",
    "--mesh fsdp=2 --target cpu": "target='cpu' is unknown; there are cuda:sm_80",
    "--mesh fsdp=2 --target cuda:sm_42": "target='cuda:sm_42' is unknown",
    "--mesh fsdp=2 --memory-gib 0": "memory_bytes_per_rank=0: the first is at least 0",
    "--mesh fsdp=2 --memory-gib nan": "invalid Fraction value: 'nan'",
    "--mesh fsdp=2 --optimizer-tensors -1": "optimizer_tensors=-1 and",
}
OF_TARGETS: Mapping[str, str] = {
    "nosuch:decoder": "No module named 'nosuch'",
    "test_fit:nosuch": "no attribute 'nosuch'",
    "test_fit": "'test_fit' is not a target. A target is package.module:function",
    "test_fit:raising": "ValueError: no weights here",
    "test_fit:without_loss": "must be a scalar tensor, not (8, 4)",
    "test_fit:branching": "needs the value of a tensor at test_fit.py",
    "test_fit:more_ranks_than_heads": "(size 4) is not evenly divisible by mesh dimension 0",
}


def test_what_cannot_be_counted_is_told_in_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    asked = {("test_fit:decoder", *options.split()): said for options, said in OF_DECODER.items()}
    asked |= {(target, "--mesh", "tp=8"): said for target, said in OF_TARGETS.items()}
    for (target, *options), said in asked.items():
        try:
            status = main(["fit", target, "--target", TARGET, *options])
        except SystemExit as refused:  # by the parser
            status = refused.code
        output, errors = capfd.readouterr()
        last = errors.strip().splitlines()[-1]
        assert (status, output) == (2, ""), (target, options, errors)
        assert last.startswith("lazyinline") and said in last and "Traceback" not in errors, errors


def test_what_a_program_cannot_ask_is_told() -> None:
    model, args = decoder()
    with one_of_many(2), pytest.raises(lazyinline.PlanError, match="is initialized"):
        lazyinline.fit(model, args, mesh={"fsdp": 2}, target=TARGET)
    refused: tuple[dict[str, Any], ...] = (
        {"mesh": (2, 2)},
        {"mesh": {"fsdp": 0}},
        {"plan": "best"},
        {"memory_bytes_per_rank": -1},
        {"recompute": lazyinline.Budget(fraction=0.5)},
    )
    for options in refused:
        with pytest.raises(
            lazyinline.PlanError, match=r"mesh=\(2|: 0}|'best'|=-1: the|A Budget is"
        ):
            lazyinline.fit(model, args, **{"mesh": {"fsdp": 2}, "target": TARGET, **options})


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"data": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.sweep(keep="full-{'fsdp': 2}")
def test_a_rank_holds_what_its_plan_says(axes: dict[str, int], recompute: Any) -> None:
    model = tiny(2, width=64).float()
    plan = MEGATRON if "tp" in axes else None
    with one_of_many(torch.Size(axes.values()).numel()):
        parallel = lazyinline.parallelize(
            model, tokens(), mesh=mesh_of(**axes), plan=plan, recompute=recompute, backend="eager"
        )
        said = parallel.plan.memory
        assert said is not None and f"a rank holds {said}"
        use = memory_use(lambda: parallel.step(*tokens()))
        own = [p.to_local() for p in model.parameters()]  # type: ignore[attr-defined]
        held = sum(t.numel() * t.element_size() for t in own)
        assert said.parameters == held
        measured = use.peak_bytes + held
    assert abs(said.num_bytes - measured) <= 0.02 * measured, (said, measured)

"""Recompute: fewer bytes saved, eager's gradients under every policy, masks drawn once."""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from arena_proof import check_no_overlap
from comparing import as_it_is, assert_equals_eager
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lazyinline
from lazyinline import Budget, PlanError, ReuseError, lazy_inline
from lazyinline.frontend.compiler import PASSES, Compiler
from lazyinline.frontend.options import Options
from lazyinline.frontend.passes import context
from lazyinline.frontend.passes.state import Goal, Subject, between, run
from lazyinline.recompute.solver import (
    CutProblem,
    ForwardValue,
    Group,
    fewest_bytes,
    frontier,
    spread,
)
from lazyinline.reuse.ir.costs import CPU
from lazyinline.reuse.ir.operators import is_view
from lazyinline.reuse.ir.program import Leaf, walk_closures
from lazyinline_command.main import main

WIDTH, HEADS, TOKENS, BATCH = 16, 2, 6, 3
SMALL, NOTHING = Budget(fraction=0.3), Budget(fraction=0.0)
POLICIES = {"None": None, "full": "full", "selective": "selective", "0.3": SMALL, "0.0": NOTHING}


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.gelu(self.up(x)), self.dropout, self.training)
        return self.down(x)


@lazy_inline
class NestedMlp(Mlp):
    """A block inside a block."""


class Block(nn.Module):
    mlp_class: type[Mlp] = Mlp

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = self.mlp_class(dropout)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(BATCH, TOKENS, 3, HEADS, -1).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        p = self.dropout if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + F.dropout(a.transpose(1, 2).reshape(x.shape), p, self.training)
        return x + self.mlp(x)


@lazy_inline
class FlatBlock(Block):
    """Becomes one leaf."""


@lazy_inline
class ComposedBlock(Block):
    """Becomes a program, for its MLP is a block too."""

    mlp_class = NestedMlp


class Model(nn.Module):
    """A stack of blocks with a loss; ``run`` says how a layer is called."""

    def __init__(
        self,
        block: type[nn.Module] = FlatBlock,
        num_layers: int = 3,
        dropout: float = 0.1,
        run: Callable[..., Tensor] = lambda layer, x: layer(x),
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block(dropout) for _ in range(num_layers))
        self.__dict__["run"] = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = self.run(layer, x)
        return x.square().mean()


COMPARED: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda y: y - y.amax(-1, keepdim=True),
    "amin of each token": lambda y: y / (2 + y.abs().amin(1, keepdim=True)),
    "max": lambda y: y * y.max(),
    "maximum": lambda y: torch.maximum(y, y.roll(1, 1)),
}


class Comparing(nn.Module):
    """Its backward finds the elements that are equal to a maximum."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.up(COMPARED[self.name](F.gelu(self.norm(x)) + torch.tanh(x)))


@pytest.mark.sweep(keep=["amax-None", "amax-0.6"])
@pytest.mark.parametrize("policy", [*POLICIES, "0.6"])
@pytest.mark.parametrize("name", COMPARED)
def test_what_a_backward_compares_was_computed_by_the_same_kernels(name: str, policy: str) -> None:
    # Another kernel may round otherwise: then nothing is equal, and gradients are divided by zero.
    policies = {**POLICIES, "0.6": Budget(fraction=0.6)}
    model = nn.Sequential(*(lazy_inline(Comparing)(name) for _ in range(2)))
    options = Options(recompute=policies[policy], backend="inductor")
    subject = Subject(model, (torch.randn(BATCH, TOKENS, WIDTH),), {})
    state = Compiler(options).started(subject, Goal(train=True))
    backward = run(between(PASSES, "capture", "recompute"), state).derivative.backward
    found = []
    for leaf in (
        closure for closure in walk_closures(backward.program) if isinstance(closure, Leaf)
    ):
        for node in leaf.nodes:
            if node.target is torch.ops.aten.eq.Tensor:
                found.append({is_handed_over(operand) for operand in node.all_input_nodes})
    assert all(len(are_handed_over) == 1 for are_handed_over in found)
    assert found or policy != "full"


def is_handed_over(node: torch.fx.Node) -> bool:
    """Whether a value comes from the forward, or is exactly a function of what does."""
    while is_view(node) or node.target is torch.ops.aten.abs.default:
        (node,) = node.all_input_nodes
    return node.op == "placeholder"


class NoisyGradient(torch.autograd.Function):
    """Its backward draws: as the gradient lies, as the input lies, and for nobody."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        torch.rand_like(gradient)
        torch.rand(3)
        as_input = torch.rand_like(x)
        return gradient * torch.rand_like(gradient) * as_input


class DrawsForNobody(nn.Module):
    """Draws numbers that no result needs, the last of them from others of that kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), 0.2)
        torch.rand_like(x + torch.rand_like(x))
        return x


@lazy_inline
class NoisyBlock(DrawsForNobody):
    def forward(self, x: Tensor) -> Tensor:
        x = NoisyGradient.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return x + F.dropout(torch.tanh(x), 0.2)


@lazy_inline
class WastefulBlock(DrawsForNobody):
    """Returns noise added to what is saved, so that the noise can be drawn from saved values."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        noisy = x + (x + torch.rand_like(x))
        return noisy + torch.rand_like(noisy)


def of_layers(*layers: nn.Module) -> Model:
    model = Model()
    model.layers = nn.ModuleList(layers)
    return model


MODELS: dict[str, Callable[[], Model]] = {
    "flat": Model,
    "composed": lambda: Model(ComposedBlock, num_layers=2),
    "drawing": lambda: of_layers(NoisyBlock(), NoisyBlock(), WastefulBlock(), WastefulBlock()),
}


def batch() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def assert_steps_equal_eager(model: nn.Module, **options: Any) -> Any:
    """Several optimizer steps, each with masks of its own; returns what was compiled."""
    sgd = functools.partial(torch.optim.SGD, lr=0.3)
    options = {"door": "step", "optimizer": sgd, "loss_fn": as_it_is, **options}
    return assert_equals_eager(model, [batch()], **options).compiled


DOORS = {"compile": "compile", "compile_step": "step"}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.sweep(keep=["eager-composed-compile_step-0.3", "eager-drawing-compile-full"])
def test_gradients_and_draws_are_eagers(backend: Any, kind: str, door: str, policy: str) -> None:
    options: dict[str, Any] = {"door": DOORS[door], "backend": backend}
    assert_steps_equal_eager(MODELS[kind](), recompute=POLICIES[policy], **options)


@functools.cache  # some questions are asked of one step
def step_of(policy: Any, reuse: Any = "auto", **sizes: Any) -> lazyinline.TrainingStep:
    step = lazyinline.compile_step(Model(**sizes), recompute=policy, reuse=reuse, backend="eager")
    step(batch())
    return step


@pytest.mark.parametrize("block", [FlatBlock, ComposedBlock])
@pytest.mark.sweep(keep="Flat")
def test_policies_trade_bytes_for_work(block: type[Block]) -> None:
    more = {} if block is FlatBlock else {"block": block}
    steps = [step_of(p, num_layers=2, **more) for p in (None, "selective", "full")]
    saved, peaks = ([getattr(s.stats, n) for s in steps] for n in ("saved_bytes", "peak_bytes"))
    assert saved[0] > saved[1] > saved[2]
    assert peaks[0] > max(peaks[1:])
    work = [s.last_report.recomputed_flops for s in steps]
    assert work[0] == work[1] == 0 < work[2]


def test_full_saves_block_inputs_and_masks_only_and_compiles_a_variant_once() -> None:
    two, three = (step_of("full", **n).last_report for n in ({"num_layers": 2}, {}))
    (block,) = [r for r in three.recompute if r.closure == "FlatBlock"]
    assert block.num_calls == 3 and three.num_kernels == two.num_kernels
    assert {str(t.type).partition("[")[0] for t in block.saved} <= {"bool", "f32"}
    masks = [(BATCH, TOKENS, WIDTH), (BATCH, TOKENS, 4 * WIDTH), (BATCH, HEADS, TOKENS, TOKENS)]
    assert sorted(t.type.shape for t in block.saved) == sorted(masks)


def records_of(model: nn.Module, policy: Any = None) -> dict[tuple[str, str], int]:
    step = assert_steps_equal_eager(model, recompute=policy, calls=1)
    return {(r.closure, r.choice): r.num_calls for r in step.last_report.recompute}


def test_mark_on_a_class_and_exemption_of_an_instance() -> None:
    class Marked(NestedMlp):
        pass

    lazyinline.recompute(Marked, "selective")
    model = Model(block=Marked)
    lazyinline.recompute(model.layers[0], None)
    found = records_of(model, "full")
    assert found["Marked", "as the backend saves"] == 1
    assert found["Marked", "cut"] == 2


def test_single_operator_inside_one_block_can_be_marked() -> None:
    model = Model(num_layers=2)
    lazyinline.recompute(model.layers[1].mlp)
    found = records_of(model)
    assert found["Mlp", "cut"] == found["FlatBlock", "as the backend saves"] == 1


def test_marked_module_without_any_block_is_recomputed() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mlp(0.1), nn.Flatten(0), nn.LogSigmoid())
    lazyinline.recompute(model[1])
    step = lazyinline.compile_step(model, loss_fn=torch.mean, backend="eager")
    step(batch())
    assert [r.choice for r in step.last_report.recompute if r.closure == "Mlp"] == ["cut"]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.smoke
def test_checkpoint_in_the_model_is_honoured(use_reentrant: bool) -> None:
    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    assert records_of(Model(NestedMlp, run=run))["NestedMlp", "cut"] == 3


@pytest.fixture
def beside_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the CPU a host, as a GPU has one, and copies that cost next to nothing."""
    monkeypatch.setattr(context, "CPU", replace(CPU, host_bytes_per_s=1e15))


@pytest.mark.parametrize(("door", "backend"), [("compile_step", "eager"), ("compile", "inductor")])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.sweep(keep="drawing-compile_step")
def test_what_waits_on_the_host_comes_back_as_it_was(
    beside_a_host: None, backend: Any, kind: str, door: str
) -> None:
    options: dict[str, Any] = {"door": DOORS[door], "backend": backend}
    report = assert_steps_equal_eager(MODELS[kind](), recompute=NOTHING, **options).last_report
    on_host = sum(r.num_calls * r.offloaded_bytes for r in report.recompute)
    assert report.copied_bytes == 2 * on_host > 0
    assert any("of them on the host" in str(record) for record in report.recompute)
    assert [d.device for d in report.devices] == ["cpu", "the host"]


def test_an_offloaded_step_has_the_bits_of_one_that_keeps_all(beside_a_host: None) -> None:
    found = []
    for policy in (None, NOTHING):
        torch.manual_seed(0)
        model = Model(NestedMlp)
        step = lazyinline.compile_step(model, recompute=policy, backend="eager")
        torch.manual_seed(1)
        found.append((step(batch()), *(p.grad for p in model.parameters()), held_bytes(step)))
    (*kept, most), (*offloaded, least) = found
    assert all(map(torch.equal, kept, offloaded))
    assert least < most
    program = step.entries.first._compiled.runner
    for name, host in (("arena", False), ("host", True)):
        placed = [
            (b.birth, b.death, program.offsets[i], b.num_bytes)
            for i, b in enumerate(program.layout.instances)
            if b.kind == "arena" and (b.device is not None) == host
        ]
        assert placed, name
        check_no_overlap(*zip(*placed, strict=True))


def held_bytes(step: lazyinline.TrainingStep) -> int:
    return step.stats.peak_bytes + step.stats.outside_bytes


def test_a_budget_is_kept_down_to_the_smallest_peak_and_a_cpu_offloads_nothing() -> None:
    said = r"smallest peak that recompute reaches is (\d+) bytes"
    with pytest.raises(PlanError, match=said) as refused:
        step_of(Budget(saved_bytes=0), block=NestedMlp)
    smallest = int(str(refused.value).split("reaches is ")[1].split()[0])
    work = []
    for limit in (smallest, (smallest + held_bytes(step_of(None, block=NestedMlp))) // 2):
        step = step_of(Budget(saved_bytes=limit), block=NestedMlp)
        assert held_bytes(step) <= limit
        report = step.last_report
        work.append(report.recomputed_flops)
        assert 0 < sum(r.closure == "NestedMlp" for r in report.recompute) <= 3
        assert not report.devices and not any(r.offloaded_bytes for r in report.recompute)
    assert work[0] > work[1]


@lazy_inline
class NormedBlock(nn.Module):
    """Running statistics, which its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.linear(x)))


@pytest.mark.parametrize(
    ("policy", "micro_batches"),
    [("full", 1), ("full", 3), *((Budget(fraction=f), 3) for f in (0.0, 0.3, 0.6))],
    ids=str,
)
@pytest.mark.sweep(keep="full-3")
def test_running_statistics_are_updated_once(policy: Any, micro_batches: int) -> None:
    model = of_layers(*(NormedBlock() for _ in range(4)))
    assert_steps_equal_eager(model, recompute=policy, micro_batches=micro_batches, optimizer=None)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Budget(), "give saved_bytes= or fraction="),
        (lambda: Budget(saved_bytes=1, fraction=0.5), "has one bound"),
        (lambda: Budget(fraction=1.5), "from 0 to 1"),
        (lambda: Budget(saved_bytes=-1), "not negative"),
        (lambda: lazyinline.compile(Model(), recompute="some"), "recompute='some' is unknown"),
        (lambda: lazyinline.compile(Model(), recompute="full", reuse="off"), "leaves none"),
        (lambda: lazyinline.recompute(nn.GELU(), "some"), "not 'some'"),
        (lambda: lazyinline.recompute(nn.GELU(), Budget(fraction=0.5)), "whole program"),
        (lambda: step_of("full", block=Mlp, reuse="marked"), "the model has none"),
    ],
)
def test_bad_requests_say_what_is_wrong(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        make()


def test_only_modules_can_be_marked() -> None:
    with pytest.raises(ReuseError, match=r"torch\.utils\.checkpoint, which is honoured"):
        lazyinline.recompute(F.gelu)


def inspected() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Model(num_layers=3), (batch(),)


def test_inspect_shows_what_is_saved_and_what_is_recomputed(
    golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["inspect", "test_recompute:inspected", "--train", "--recompute", "full"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    golden("recompute_inspect", printed[printed.index("saved for the backward") :])


def all_counts(num_calls: int, num_variants: int) -> Iterator[tuple[int, ...]]:
    if num_variants == 1:
        yield (num_calls,)
        return
    for first in range(num_calls + 1):
        for rest in all_counts(num_calls - first, num_variants - 1):
            yield (first, *rest)


def total(groups: list[Group], spread_: Any, column: str) -> float:
    return sum(
        n * x
        for group, counts in zip(groups, spread_, strict=True)
        for n, x in zip(counts, getattr(group, column), strict=True)
    )


def within_variants(group: Group, counts: tuple[int, ...]) -> bool:
    used = {i for i, n in enumerate(counts) if n} | group.compiled
    return len(used) <= group.max_variants


def assert_spread(groups: list[Group], found: Any, budget: int, best: float | None) -> None:
    """It fits, and costs no more than the best one; there is none where there is no best one."""
    assert (found is None) == (best is None)
    if found is None:
        return
    assert total(groups, found, "num_bytes") <= budget
    assert all(itertools.starmap(within_variants, zip(groups, found, strict=True)))
    assert total(groups, found, "extra_s") == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_spread_is_as_good_as_trying_everything(seed: int) -> None:
    numbers = random.Random(seed)
    groups: list[Group] = []
    for _ in range(numbers.randint(1, 2)):
        size = numbers.randint(1, 5)
        num_bytes = tuple(sorted(numbers.sample(range(40), size)))
        extra_s = tuple(map(float, sorted(numbers.sample(range(60), size), reverse=True)))
        groups.append(Group(numbers.randint(1, 5), num_bytes, extra_s, frozenset([0])))
    budget = numbers.randint(0, 150)
    choices = [
        [c for c in all_counts(g.num_calls, len(g.num_bytes)) if within_variants(g, c)]
        for g in groups
    ]
    fitting = [
        total(groups, spread_, "extra_s")
        for spread_ in itertools.product(*choices)
        if total(groups, spread_, "num_bytes") <= budget
    ]
    assert_spread(groups, spread(groups, budget), budget, min(fitting, default=None))


def test_no_spread_is_a_byte_above_the_budget() -> None:
    """The solver's own tolerance, a millionth, is a kilobyte of these."""
    for seed in range(8):
        draw = random.Random(seed).randint
        groups = [
            Group(draw(1, 5), (draw(1, 9), 10**9 + draw(-300, 300)), (float(draw(1, 9)), 0.0))
            for _ in range(3)
        ]
        budget = sum(g.num_calls for g in groups) // 2 * 10**9
        found = spread(groups, budget)
        assert found is not None
        assert total(groups, found, "num_bytes") <= budget


def chain(seed: int, num_values: int = 9, host: bool = False) -> CutProblem:
    """A random problem small enough to try every set of saved values."""
    numbers = random.Random(seed)
    values = []
    for index in range(num_values):
        parents = tuple(i for i in range(index) if numbers.random() < 0.4)
        seconds, size = numbers.randint(0, 9), numbers.randint(1, 9)
        can_redo = numbers.random() < 0.85
        savable = not can_redo or numbers.random() < 0.85
        wanted = numbers.random() < 0.5
        of_cut = (parents, savable, can_redo, False, wanted)
        copied = {"offload_s": numbers.choice((2.0, 4.0, math.inf))} if host else {}
        values.append(ForwardValue(f"v{index}", size, seconds, 0, 0.0, *of_cut, **copied))
    return CutProblem(tuple(values))


@pytest.mark.parametrize("host", [False, True], ids=["alone", "beside a host"])
@pytest.mark.parametrize("seed", range(9))
def test_cuts_are_as_good_as_trying_everything(seed: int, host: bool) -> None:
    problem = chain(seed, num_values=6 if host else 9, host=host)
    points = []
    for way in itertools.product("rko" if host else "rk", repeat=len(problem.values)):
        pairs = list(zip(problem.values, way, strict=True))  # recomputed, kept, offloaded
        saved = {v.name for v, how in pairs if how != "r"}
        point = problem.evaluate(saved, {v.name for v, how in pairs if how == "o"})
        if point is not None and math.isfinite(point.extra_s):
            points.append(point)
    found = frontier(problem, 6)
    assert found[0].num_bytes == min(p.num_bytes for p in points)
    assert host or fewest_bytes(problem).num_bytes == found[0].num_bytes
    for point in found:
        best = min(p.extra_s for p in points if p.num_bytes <= point.num_bytes)
        assert point.extra_s == pytest.approx(best)

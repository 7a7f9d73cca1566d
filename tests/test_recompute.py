"""Recompute: fewer bytes saved, eager's gradients under every policy, masks drawn once."""

import copy
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_same_gradients, relative_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lazyinline
from lazyinline import Budget, PlanError, ReuseError, lazy_inline
from lazyinline.recompute.cut_problem import CutProblem, ForwardValue
from lazyinline.recompute.fit_budget import BudgetFit
from lazyinline.recompute.solver import Group, fewest_bytes, frontier, spread
from lazyinline.recompute.solver import _spread as integer_spread
from lazyinline_command.main import main

WIDTH, HEADS, TOKENS, BATCH = 16, 2, 6, 3
POLICIES = [None, "full", "selective", Budget(fraction=0.3), Budget(fraction=0.0)]


class Mlp(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.gelu(self.up(x)), self.dropout, self.training)
        return self.down(x)


class NestedMlp(Mlp):
    """A block inside a block."""


class Block(nn.Module):
    def __init__(self, dropout: float, mlp: type[Mlp]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = mlp(dropout)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(BATCH, TOKENS, 3, HEADS, -1).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        p = self.dropout if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + F.dropout(a.transpose(1, 2).reshape(x.shape), p, self.training)
        return x + self.mlp(x)


class FlatBlock(Block):
    """Becomes one leaf."""


class ComposedBlock(Block):
    """Becomes a program, for its MLP is a block too."""


lazy_inline(FlatBlock)
lazy_inline(ComposedBlock)
lazy_inline(NestedMlp)


class Model(nn.Module):
    """A stack of blocks with a loss; ``run`` says how a layer is called."""

    def __init__(
        self,
        block: type[Block] = FlatBlock,
        num_layers: int = 3,
        dropout: float = 0.1,
        run: Callable[..., Tensor] = lambda layer, x: layer(x),
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        mlp = NestedMlp if block is ComposedBlock else Mlp
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block(dropout, mlp) for _ in range(num_layers))
        self.__dict__["run"] = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = self.__dict__["run"](layer, x)
        return x.square().mean()


def batch() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def assert_steps_equal_eager(model: nn.Module, run: Any, seeds: Iterator[int] | range) -> None:
    """Several optimizer steps, each with masks of its own."""
    expected = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, expected))
    x = batch()
    for seed in seeds:
        theirs.zero_grad()
        torch.manual_seed(seed)
        reference = expected(x)
        reference.backward()
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        loss = run(x)
        assert torch.equal(torch.get_rng_state(), after), "numbers were drawn twice, or not at all"
        assert relative_error(loss, reference.detach()) < 1e-6
        assert_same_gradients(model, expected)
        ours.step()
        theirs.step()


def module_run(compiled: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        compiled.zero_grad()
        loss = compiled(x)
        loss.backward()
        return loss.detach()

    return run


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.sweep(keep=["full", "0.3"])
def test_gradients_equal_eager_with_dropout_in_a_step(policy: Any) -> None:
    model = Model(ComposedBlock)
    step = lazyinline.compile_step(model, recompute=policy, backend="eager")
    assert_steps_equal_eager(model, step, range(3))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.sweep(keep=["selective"])
def test_gradients_equal_eager_with_dropout_in_a_module(policy: Any) -> None:
    model = Model(FlatBlock)
    compiled = lazyinline.compile(model, recompute=policy, backend="eager")
    assert_steps_equal_eager(model, module_run(compiled), range(2))


@pytest.mark.parametrize("policy", ["full", Budget(fraction=0.4)], ids=str)
@pytest.mark.sweep
def test_gradients_equal_eager_on_inductor(policy: Any) -> None:
    model = Model(ComposedBlock, num_layers=2)
    step = lazyinline.compile_step(model, recompute=policy)
    assert_steps_equal_eager(model, step, range(2))


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


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


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


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("way", [lazyinline.compile, lazyinline.compile_step])
@pytest.mark.sweep(keep=["compile-full", "compile_step-Budget(saved_bytes=None, fraction=0.3"])
def test_random_numbers_are_drawn_where_eager_draws_them(
    way: Callable[..., Any], policy: Any
) -> None:
    model = nn.Sequential(NoisyBlock(), NoisyBlock(), WastefulBlock(), WastefulBlock(), Mean())
    compiled = way(model, recompute=policy, backend="eager")
    run = compiled if way is lazyinline.compile_step else module_run(compiled)
    assert_steps_equal_eager(model, run, range(2))


@pytest.mark.sweep
def test_random_numbers_are_drawn_where_eager_draws_them_on_inductor() -> None:
    model = nn.Sequential(NoisyBlock(), NoisyBlock(), WastefulBlock(), WastefulBlock(), Mean())
    assert_steps_equal_eager(model, lazyinline.compile_step(model), range(2))


def step_of(policy: Any, reuse: Any = "auto", **sizes: Any) -> lazyinline.TrainingStep:
    step = lazyinline.compile_step(Model(**sizes), recompute=policy, reuse=reuse, backend="eager")
    step(batch())
    return step


@pytest.mark.parametrize("block", [FlatBlock, ComposedBlock])
@pytest.mark.sweep(keep="Flat")
def test_policies_trade_bytes_for_work(block: type[Block]) -> None:
    none, selective, full = (
        step_of(p, block=block, num_layers=4) for p in (None, "selective", "full")
    )
    saved = [s.stats.saved_bytes for s in (none, selective, full)]
    assert saved == sorted(saved, reverse=True)
    assert len(set(saved)) == 3
    assert none.stats.peak_bytes > max(selective.stats.peak_bytes, full.stats.peak_bytes)
    work = [s.last_report.recomputed_flops for s in (none, selective, full)]
    assert work[:2] == [0, 0]
    assert work[2] > 0


def test_full_saves_block_inputs_and_masks_only() -> None:
    records = step_of("full").last_report.recompute
    (block,) = [r for r in records if r.closure == "FlatBlock"]
    assert block.num_calls == 3
    assert {str(t.type).partition("[")[0] for t in block.saved} <= {"bool", "f32"}
    elements = [t.type.shape for t in block.saved]
    masks = [(BATCH, TOKENS, WIDTH), (BATCH, TOKENS, 4 * WIDTH), (BATCH, HEADS, TOKENS, TOKENS)]
    assert sorted(elements) == sorted(masks)


def test_variants_are_compiled_once_whatever_the_depth() -> None:
    counts = [step_of("full", num_layers=n).last_report.num_kernels for n in (2, 6)]
    assert counts[0] == counts[1]


# ---- marks -------------------------------------------------------------------------------


def records_of(model: nn.Module, policy: Any = None) -> dict[tuple[str, str], int]:
    step = lazyinline.compile_step(model, recompute=policy, backend="eager")
    assert_steps_equal_eager(model, step, range(2))
    return {(r.closure, r.choice): r.num_calls for r in step.last_report.recompute}


def test_mark_on_a_class_and_exemption_of_an_instance() -> None:
    class Marked(FlatBlock):
        pass

    lazyinline.recompute(Marked, "selective")
    model = Model(block=Marked)
    lazyinline.recompute(model.layers[0], None)
    found = records_of(model, "full")
    assert found["Marked", "as the backend saves"] == 1
    assert found["Marked", "cut"] == 2


def test_single_operator_inside_one_block_can_be_marked() -> None:
    model = Model(num_layers=3)
    lazyinline.recompute(model.layers[2].mlp)
    found = records_of(model)
    assert found["Mlp", "cut"] == 1
    assert found["FlatBlock", "as the backend saves"] == 2


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

    assert records_of(Model(run=run))["FlatBlock", "cut"] == 3


@pytest.mark.sweep
def test_checkpoint_of_several_blocks_saves_the_first_input_only() -> None:
    def pair(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        return second(first(x))

    class Paired(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for i in range(0, len(self.layers), 2):
                x = checkpoint(pair, self.layers[i], self.layers[i + 1], x, use_reentrant=False)
            return x.square().mean()

    model = Paired(num_layers=4, dropout=0.0)
    step = lazyinline.compile_step(model, backend="eager")
    assert_steps_equal_eager(model, step, range(2))
    inputs_bytes = 4 * BATCH * TOKENS * WIDTH
    # The inputs of two pairs, and the model's last value for the mean.
    assert step.stats.saved_bytes <= 3 * inputs_bytes
    model = Paired(num_layers=4)
    step = lazyinline.compile_step(model, backend="eager")
    assert_steps_equal_eager(model, step, range(1))


# ---- budgets -----------------------------------------------------------------------------


def held_bytes(step: lazyinline.TrainingStep) -> int:
    return step.stats.peak_bytes + step.stats.outside_bytes


def test_budget_is_kept_by_the_linked_peak_and_more_bytes_mean_less_work() -> None:
    high = held_bytes(step_of(None))
    low = held_bytes(step_of(Budget(fraction=0.0)))
    work = []
    for index in range(3):
        limit = low + (high - low) * index // 2
        step = step_of(Budget(saved_bytes=limit))
        assert held_bytes(step) <= limit
        work.append(step.last_report.recomputed_flops)
        variants = [r for r in step.last_report.recompute if r.closure == "FlatBlock"]
        assert len(variants) <= 3
    assert work == sorted(work, reverse=True)
    assert work[0] > work[-1]


@pytest.mark.sweep
def test_guessed_peaks_are_close_to_linked_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[tuple[int, int]] = []
    linked = BudgetFit._linked

    def noted(self: Any, counts: Any) -> int:
        guess = self._peaks.guessed(self._choice(counts))
        pairs.append((guess, linked(self, counts)))
        return pairs[-1][1]

    monkeypatch.setattr(BudgetFit, "_linked", noted)
    limit = int(0.85 * held_bytes(step_of(None, num_layers=4)))
    assert held_bytes(step_of(Budget(saved_bytes=limit), num_layers=4)) <= limit
    assert pairs
    assert all(abs(guess - peak) <= 0.15 * peak for guess, peak in pairs), pairs


class TwoMlps(nn.Module):
    """A program that calls one closure twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = NestedMlp(0.1), NestedMlp(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


lazy_inline(TwoMlps)


class Mixed(Model):
    """Different closures, two of them programs that call the same one, which is called here too."""

    def __init__(self) -> None:
        super().__init__(ComposedBlock, num_layers=2)
        self.layers.insert(1, FlatBlock(0.1, Mlp))
        self.layers.extend([TwoMlps(), NestedMlp(0.1), TwoMlps(), FlatBlock(0.1, Mlp)])


@pytest.mark.parametrize("policy", [Budget(fraction=0.0), Budget(fraction=0.5)], ids=str)
@pytest.mark.sweep
def test_budget_over_different_closures(policy: Budget) -> None:
    model = Mixed()
    step = lazyinline.compile_step(model, recompute=policy, backend="eager")
    assert_steps_equal_eager(model, step, range(2))
    variants = Counter(r.closure for r in step.last_report.recompute)
    del variants["glue"]  # many closures have that name
    assert max(variants.values()) <= 3


@pytest.mark.sweep
def test_budget_that_cannot_be_met_names_the_smallest_peak_which_is_reached() -> None:
    said = r"smallest peak that recompute reaches is (\d+) bytes"
    with pytest.raises(PlanError, match=said) as refused:
        lazyinline.compile_step(Mixed(), recompute=Budget(saved_bytes=0), backend="eager")(batch())
    smallest = int(str(refused.value).split("reaches is ")[1].split()[0])
    budget = Budget(saved_bytes=smallest)
    step = lazyinline.compile_step(Mixed(), recompute=budget, backend="eager")
    step(batch())
    assert held_bytes(step) <= smallest


class NormedBlock(nn.Module):
    """Running statistics, which its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.linear(x)))


lazy_inline(NormedBlock)


@pytest.mark.parametrize(
    ("policy", "micro_batches"),
    [("full", 1), ("full", 3), *((Budget(fraction=f), 3) for f in (0.0, 0.3, 0.6))],
    ids=str,
)
@pytest.mark.sweep(keep=["full-1", "0.3"])
def test_running_statistics_are_updated_once(policy: Any, micro_batches: int) -> None:
    model = Model()
    model.layers = nn.ModuleList(NormedBlock() for _ in range(4))
    expected = copy.deepcopy(model)
    step = lazyinline.compile_step(
        model, recompute=policy, backend="eager", micro_batches=micro_batches
    )
    for _ in range(2):
        expected.zero_grad()
        for part in batch().tensor_split(micro_batches):
            (expected(part) / micro_batches).backward()
        step(batch())
        assert_same_gradients(model, expected)
        for ours, theirs in zip(model.buffers(), expected.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.sweep
def test_measured_costs_give_the_same_gradients() -> None:
    model = Model()
    budget = Budget(fraction=0.4, costs="measured")
    step = lazyinline.compile_step(model, recompute=budget, backend="eager")
    assert_steps_equal_eager(model, step, range(2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Budget(), "give saved_bytes= or fraction="),
        (lambda: Budget(saved_bytes=1, fraction=0.5), "has one bound"),
        (lambda: Budget(fraction=1.5), "from 0 to 1"),
        (lambda: Budget(saved_bytes=-1), "not negative"),
        (lambda: Budget(fraction=0.5, costs="guessed"), "costs='guessed'"),
        (lambda: lazyinline.compile(Model(), recompute="some"), "recompute='some' is unknown"),
        (lambda: lazyinline.compile(Model(), recompute="full", reuse="off"), "leaves none"),
        (lambda: lazyinline.recompute(nn.GELU(), "some"), "not 'some'"),
        (lambda: lazyinline.recompute(nn.GELU(), Budget(fraction=0.5)), "whole program"),
        (lambda: step_of("full", block=Block, reuse="marked"), "the model has none"),
    ],
)
def test_bad_requests_say_what_is_wrong(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        make()


def test_only_modules_can_be_marked() -> None:
    with pytest.raises(ReuseError, match=r"torch\.utils\.checkpoint, which is honoured"):
        lazyinline.recompute(F.gelu)


# ---- the command line --------------------------------------------------------------------


def inspected() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Model(num_layers=3), (batch(),)


def test_inspect_shows_what_is_saved_and_what_is_recomputed(
    golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["inspect", "test_recompute:inspected", "--train", "--recompute", "full"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    golden("recompute_inspect", printed[printed.index("saved for the backward") :])


# ---- the knapsack ------------------------------------------------------------------------


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


@pytest.mark.parametrize("seed", range(20))
def test_spread_is_as_good_as_trying_everything(seed: int) -> None:
    numbers = random.Random(seed)
    groups = []
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
    found = spread(groups, budget)
    if found is None:
        assert not fitting
        return
    assert total(groups, found, "num_bytes") <= budget
    assert all(itertools.starmap(within_variants, zip(groups, found, strict=True)))
    assert total(groups, found, "extra_s") == pytest.approx(min(fitting))


def random_group(numbers: random.Random, num_calls: int, slack: float = 1.0) -> Group:
    """Variants on a line of bytes and work, off it by up to ``slack`` of the work."""
    size = numbers.randint(2, 12)
    num_bytes = tuple(sorted(numbers.sample(range(1, 10**6), size)))
    line = [1.0 - b / num_bytes[-1] + slack * numbers.random() for b in num_bytes]
    compiled = frozenset(numbers.sample(range(size), numbers.randint(0, min(3, size))))
    at_most = max(numbers.randint(1, 3), len(compiled))
    return Group(num_calls, num_bytes, tuple(sorted(line, reverse=True)), compiled, at_most)


@pytest.mark.parametrize("seed", range(16))
def test_variants_that_cannot_pay_change_no_spread(seed: int) -> None:
    """A stack of many calls, and single calls around it."""
    numbers = random.Random(seed)
    slack = 1.0 if seed % 2 else 1e-4
    groups = [random_group(numbers, 1, slack) for _ in range(numbers.randint(0, 2))]
    groups.insert(numbers.randint(0, len(groups)), random_group(numbers, 24 + seed, slack))
    most = sum(g.num_calls * g.num_bytes[-1] for g in groups)
    for fraction in (0.1, 0.4, 0.8, 1.0):
        budget = int(fraction * most)
        found, expected = spread(groups, budget), integer_spread(groups, budget)
        assert (found is None) == (expected is None)
        if found is None or expected is None:
            continue
        assert total(groups, found, "num_bytes") <= budget
        assert all(itertools.starmap(within_variants, zip(groups, found, strict=True)))
        best = total(groups, expected, "extra_s")
        assert total(groups, found, "extra_s") == pytest.approx(best, abs=1e-5)


def test_no_spread_is_a_byte_above_the_budget() -> None:
    """The solver's own tolerance, a millionth, is a kilobyte of these."""
    for seed in range(8):
        numbers = random.Random(seed)
        sizes = [10**9 + numbers.randint(-300, 300) for _ in range(3)]
        groups = [
            Group(
                numbers.choice((1, 2, 5)),
                (numbers.randint(1, 9), size),
                (float(numbers.randint(1, 9)), 0.0),
            )
            for size in sizes
        ]
        budget = (sum(g.num_calls for g in groups) // 2 or 1) * 10**9
        found = spread(groups, budget)
        assert found is not None
        assert total(groups, found, "num_bytes") <= budget


def chain(seed: int) -> CutProblem:
    """A random problem small enough to try every set of saved values."""
    numbers = random.Random(seed)
    values = []
    for index in range(9):
        parents = tuple(i for i in range(index) if numbers.random() < 0.4)
        seconds, size = numbers.randint(0, 9), numbers.randint(1, 9)
        can_redo = numbers.random() < 0.85
        savable = not can_redo or numbers.random() < 0.85
        wanted = numbers.random() < 0.5
        values.append(
            ForwardValue(
                f"v{index}", size, seconds, 0, 0.0, parents, savable, can_redo, False, wanted
            )
        )
    return CutProblem(tuple(values))


@pytest.mark.parametrize("seed", range(12))
def test_cuts_are_as_good_as_trying_everything(seed: int) -> None:
    problem = chain(seed)
    names = [v.name for v in problem.values]
    sets = itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(10))
    points = [p for p in map(problem.evaluate, sets) if p is not None]
    assert fewest_bytes(problem).num_bytes == min(p.num_bytes for p in points)
    for point in frontier(problem, 6):
        best = min(p.extra_s for p in points if p.num_bytes <= point.num_bytes)
        assert point.extra_s == pytest.approx(best)

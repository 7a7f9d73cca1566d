"""measure(): what it reports, what it leaves alone, what it refuses."""

import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import lazyinline
from lazyinline.frontend.measure import timing
from lazyinline.frontend.measure.saved import Saved, read_saved
from lazyinline.frontend.measure.timing import Rounds, StepTime, noise, time_steps
from lazyinline.frontend.measure.torch_memory import taken_bytes
from lazyinline.frontend.measure.workload import StepResult, Workload, compare

ROW_FIELDS = {
    *("model", "layers", "micro_batches", "train", "nodes_held", "nodes_if_inlined"),
    *("compile_cpu_s", "compile_wall_s", "passes", "step_ms", "peak_bytes", "lower_bound_bytes"),
    *("max_abs_error", "max_rel_grad_error"),
}
PASSES = ["capture", "autodiff", "decompose", "lower", "link"]


@lazyinline.lazy_inline
class Block(nn.Module):
    def __init__(self, size: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.linear = nn.Linear(size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.linear(self.norm(x)).relu())


class Net(nn.Module):
    """Blocks, a normalization whose buffers change in every step, and a loss if asked for."""

    def __init__(self, layers: int = 3, size: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size, dropout=dropout) for _ in range(layers))
        self.enter = nn.Linear(size, size)
        self.norm = nn.BatchNorm1d(size)

    def forward(self, x: torch.Tensor, loss: bool = True) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x.square().mean() if loss else x


@pytest.fixture(autouse=True, scope="module")
def few_rounds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ROUNDS", Rounds(most=5))
        yield


def measure_net(net: nn.Module | None = None, **options: object) -> lazyinline.MeasureReport:
    torch.manual_seed(0)
    return lazyinline.measure(
        net or Net(), (torch.randn(4, 8),), **({"backend": "eager"} | options)
    )


@pytest.fixture(scope="module")
def report() -> lazyinline.MeasureReport:
    return measure_net()


def test_sides_differ_in_nodes_only(report: lazyinline.MeasureReport) -> None:
    late, early = report.late.compiled, report.early.compiled
    assert late.num_nodes < late.num_nodes_if_inlined == early.num_nodes_if_inlined
    assert early.num_nodes > early.num_nodes_if_inlined  # the one call on it counts too
    assert late.num_block_calls == 3
    assert early.num_block_calls == 0
    assert early.num_launches == 2  # forward and backward


def test_numbers_equal_eager(report: lazyinline.MeasureReport) -> None:
    for side in report.sides.values():
        assert side.errors.max_abs_error is not None and side.errors.max_abs_error < 1e-6
        assert side.errors.max_rel_grad_error is not None
        assert side.errors.max_rel_grad_error < 1e-5


def test_json_has_the_fields(report: lazyinline.MeasureReport) -> None:
    row = json.loads(report.to_json())
    assert row.keys() >= ROW_FIELDS
    assert row == report.to_dict()
    assert row["peak_bytes"] is None and row["lower_bound_bytes"] is None
    for side in ("late", "early"):
        assert [p["name"] for p in row["passes"][side]] == PASSES
        assert row["compile_cpu_s"][side] > 0
    assert row["step_ms"].keys() == {"eager", "late", "early"}
    assert all(row["step_ms"][n] >= row["step_min_ms"][n] > 0 for n in row["step_ms"])


def test_a_measurement_read_from_its_json_says_the_same(
    report: lazyinline.MeasureReport, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "report.json"
    for one in (report, replace(report, eager=None, late=replace(report.late, step=None))):
        path.write_text(one.to_json())
        saved = read_saved(path)
        assert isinstance(saved, Saved)
        (found,) = saved.reports
        assert found.to_dict() == one.to_dict()
    path.write_text(report.to_json())
    assert str(read_saved(path)) == str(report)


def test_json_of_a_wrong_result_is_valid(report: lazyinline.MeasureReport) -> None:
    errors = replace(report.late.errors, max_abs_error=math.inf)
    wrong = replace(report, late=replace(report.late, errors=errors))
    assert json.loads(wrong.to_json())["max_abs_error"]["late"] == "inf"


class Small(nn.Module):
    """A loss of a few operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x).tanh()).square().mean()


def test_a_planned_step_holds_what_was_predicted() -> None:
    for micro_batches in (1, 2):
        x = torch.randn(32, 64)
        found = lazyinline.measure(Small(), (x,), micro_batches=micro_batches)
        for side in found.sides.values():
            assert side.held_bytes == pytest.approx(side.compiled.held_bytes, rel=0.01, abs=512)
        assert found.eager_held_bytes is not None and found.eager_held_bytes > 0


def test_the_profiler_that_measures_memory_is_not_heard(capfd: pytest.CaptureFixture[str]) -> None:
    before_the_run = [torch.empty(70)]

    def run() -> torch.Tensor:
        torch.empty(5000)
        before_the_run.clear()
        os.write(2, b"the user's own line\n")
        return torch.empty(1000)

    assert taken_bytes(run, {torch.device("cpu")}) == 4 * 5000
    assert capfd.readouterr().err == "the user's own line\n"
    assert taken_bytes(run, {torch.device("meta")}) is None


def test_second_compile_is_told(report: lazyinline.MeasureReport) -> None:
    assert not report.late.compiled_again and not report.early.compiled_again
    assert not report.warnings()
    wrong = replace(report, early=replace(report.early, compiled_again=True))
    assert "early was compiled again" in str(wrong)


def test_text_names_all_passes_and_sides(report: lazyinline.MeasureReport) -> None:
    text = str(report)
    for word in (*PASSES, "late", "early", "eager", "warm-up", "Net: training", "gradient"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100


def test_inference() -> None:
    found = measure_net(Net().eval(), train=False)
    assert found.late.errors.max_abs_error == 0.0
    assert found.late.errors.max_rel_grad_error is None
    assert "gradient" not in str(found)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.sweep(keep="0.5")
def test_micro_batches_are_compared_with_a_loop_over_them(dropout: float) -> None:
    net, x = Net(dropout=dropout), torch.randn(8, 8)
    net(x).backward()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    gradients = {name: (p.grad, p.grad.clone()) for name, p in net.named_parameters()}
    found = lazyinline.measure(net, (x,), micro_batches=4, backend="eager")
    for side in found.sides.values():
        assert side.errors.max_abs_error is not None and side.errors.max_abs_error < 1e-6
        assert side.errors.max_rel_grad_error is not None
        assert side.errors.max_rel_grad_error < 1e-5
        assert not side.compiled_again
    late, early = found.late.compiled, found.early.compiled
    assert late.num_nodes < early.num_nodes
    assert found.peak_bytes == late.peak_bytes and late.peak_bytes and early.peak_bytes
    assert found.to_dict()["micro_batches"] == 4
    assert "Net: training of 4 micro-batches" in str(found) and "arena, bytes" in str(found)
    assert all(torch.equal(t, state[name]) for name, t in net.state_dict().items())
    for name, parameter in net.named_parameters():
        assert parameter.grad is gradients[name][0]
        assert torch.equal(parameter.grad, gradients[name][1])


@pytest.mark.sweep
def test_micro_batches_of_a_model_without_data_are_compiled() -> None:
    with torch.device("meta"):
        net, x = Net(2, 4096), torch.empty(8, 4096)
    found = lazyinline.measure(net, (x,), micro_batches=4, execute=False, backend="eager")
    assert found.late.compiled.num_block_calls == 2
    assert found.micro_batches == 4
    assert found.eager is None


def test_micro_batches_need_a_loss() -> None:
    with pytest.raises(lazyinline.PlanError, match="scalar loss"):
        lazyinline.measure(
            Net(), (torch.randn(4, 8),), {"loss": False}, micro_batches=2, backend="eager"
        )


@pytest.mark.sweep
def test_a_wrong_gradient_of_micro_batches_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from lazyinline.frontend.training_step import TrainingStep

    original = TrainingStep.__call__

    def wrong(self: TrainingStep, *args: object) -> torch.Tensor:
        loss = original(self, *args)
        self._model.enter.weight.grad.mul_(1.01)
        return loss

    monkeypatch.setattr(TrainingStep, "__call__", wrong)
    found = measure_net(micro_batches=2)
    assert found.late.errors.worst_gradient == "enter.weight"
    assert found.late.errors.max_rel_grad_error == pytest.approx(0.01, rel=1e-2)


def test_without_execution_nothing_is_run() -> None:
    net = Net()
    found = measure_net(net, execute=False)
    row = found.to_dict()
    assert row["step_ms"] == {"eager": None, "late": None, "early": None}
    assert row["max_abs_error"] == {"late": None, "early": None}
    assert [p.name for p in found.late.compiled.passes] == PASSES
    assert "one step" not in str(found)
    assert int(net.norm.num_batches_tracked) == 0


def test_large_model_without_data() -> None:
    with torch.device("meta"):
        net, x = Net(2, 4096), torch.empty(4, 4096)
    found = lazyinline.measure(net, (x,), execute=False, backend="eager")
    assert found.late.compiled.num_block_calls == 2
    with pytest.raises(lazyinline.PlanError, match="meta device"):
        lazyinline.measure(net, (x,), backend="eager")


@pytest.mark.sweep
def test_model_is_left_as_found() -> None:
    torch.manual_seed(1)
    net, x = Net(dropout=0.5), torch.randn(4, 8, requires_grad=True)
    net(x).backward()
    generator = torch.get_rng_state()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    gradients = {name: p.grad for name, p in net.named_parameters()}
    copies = {name: g.clone() for name, g in gradients.items() if g is not None}
    lazyinline.measure(net, (x,), backend="eager")
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(t, state[name]) for name, t in net.state_dict().items())
    for name, parameter in net.named_parameters():
        assert parameter.grad is gradients[name]
        assert parameter.grad is not None and torch.equal(parameter.grad, copies[name])
    assert net.training


@pytest.mark.sweep
def test_dropout_is_compared_under_one_seed() -> None:
    found = measure_net(Net(dropout=0.5))
    for side in found.sides.values():
        assert side.errors.max_rel_grad_error is not None
        assert side.errors.max_rel_grad_error < 1e-5


@pytest.mark.sweep
def test_model_without_a_loss_has_gradients() -> None:
    torch.manual_seed(0)
    found = lazyinline.measure(Net(), (torch.randn(4, 8),), {"loss": False}, backend="eager")
    assert found.late.errors.max_rel_grad_error is not None
    assert found.late.errors.max_rel_grad_error < 1e-5


def test_unmarked_model_is_told_so() -> None:
    found = lazyinline.measure(nn.Linear(4, 4), (torch.ones(2, 4),), backend="eager")
    assert any("no block is marked" in note for note in found.notes())


@pytest.mark.sweep
def test_blocks_that_are_not_shared_are_named() -> None:
    net = Net()
    net.blocks[1].scale = 3  # not read by forward
    net.blocks[2].linear.bias = None
    assert any("blocks.2: not shared" in note for note in measure_net(net, execute=False).notes())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"micro_batches": 2, "train": False}, lazyinline.PlanError, "goes with training"),
        ({"micro_batches": 0}, lazyinline.PlanError, "at least one"),
        ({"micro_batches": 3}, lazyinline.PlanError, "cannot be split into 3"),
        ({"backend": "gpu"}, lazyinline.PlanError, "'gpu' is unknown"),
        ({"reuse": "always"}, lazyinline.ReuseError, "'always' is unknown"),
    ],
)
def test_options_that_do_not_exist(
    options: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        measure_net(**options)


def test_arguments_of_the_wrong_kind() -> None:
    with pytest.raises(lazyinline.PlanError, match="write \\(x,\\)"):
        lazyinline.measure(Net(), torch.ones(4, 8), backend="eager")
    with pytest.raises(lazyinline.PlanError, match="not function"):
        lazyinline.measure(lambda x: x, (1,), backend="eager")


def test_nothing_to_train() -> None:
    net = Net().requires_grad_(False)
    with pytest.raises(lazyinline.PlanError, match="train=False"):
        measure_net(net)


# ---- comparing and timing ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.inf], [math.inf], 0.0),
        ([math.nan], [1.0], math.inf),
        ([1.0], [1.0, 2.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_output_error(actual: list[float], expected: list[float], error: float) -> None:
    found = compare(
        StepResult({"y": torch.tensor(actual)}, {}), StepResult({"y": torch.tensor(expected)}, {})
    )
    assert found.max_abs_error == error


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        (None, [3.0, 4.0], 1.0),
        ([0.0, 0.0], None, 0.0),
        (None, None, 0.0),
        ([math.nan], [1.0], math.inf),
    ],
)
def test_gradient_error(
    actual: list[float] | None, expected: list[float] | None, error: float
) -> None:
    a, b = (None if g is None else torch.tensor(g) for g in (actual, expected))
    found = compare(
        StepResult({}, {"w": a, "v": torch.ones(1)}), StepResult({}, {"w": b, "v": torch.ones(1)})
    )
    assert found.max_rel_grad_error == pytest.approx(error)
    assert found.worst_gradient == "w"


def test_gradient_where_there_should_be_none_is_large() -> None:
    found = compare(StepResult({}, {"w": torch.ones(2)}), StepResult({}, {"w": None}))
    assert found.max_rel_grad_error is not None and found.max_rel_grad_error > 1e30


def test_rounds_are_interleaved() -> None:
    order: list[str] = []

    def step(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    times = time_steps({name: step(name) for name in "abc"}, set(), Rounds(most=5, settled=0.0))
    assert "".join(order[:9]) == "abcbcacab"
    assert {t.rounds for t in times.steps.values()} == {5}


def timed_with(monkeypatch: pytest.MonkeyPatch, seconds: list[float], rounds: Rounds) -> StepTime:
    """Times a step that takes these seconds, over and over, on a clock that only it moves."""
    clock, taken = [0.0], itertools.cycle(seconds)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def step() -> None:
        clock[0] += next(taken)

    return time_steps({"step": step}, set(), rounds).steps["step"]


def test_rounds_end_when_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    found = timed_with(monkeypatch, [0.010], Rounds(fewest=5, most=100))
    assert found == StepTime(pytest.approx(10), pytest.approx(10), pytest.approx(10), 5)
    assert not found.is_noisy


def test_rounds_go_on_while_they_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    found = timed_with(monkeypatch, [0.010, 0.030, 0.031], Rounds(most=40, budget_s=100))
    assert found.rounds == 40
    assert (found.minimum_ms, found.maximum_ms) == (pytest.approx(10), pytest.approx(31))
    assert found.is_noisy and found.spread == pytest.approx(3)


def test_rounds_end_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = timed_with(monkeypatch, [1.0, 3.0, 3.0], Rounds(fewest=3, most=99, budget_s=10))
    assert found.rounds == 5  # which take 11 s


def test_a_busy_machine_is_named() -> None:
    quiet, loud = StepTime(10, 10.2, 11, 5), StepTime(10, 31, 90, 12)
    assert not noise([quiet], 0.05) and not noise([quiet], None)
    assert "median 3.1 x minimum" in noise([loud, quiet], None)
    assert "others used 60% of" in noise([quiet], 0.6)


def test_inputs_want_gradients_too() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    work = Workload(Net(), (x,), {}, train=True)
    assert "input 0.0" in work.wanted()
    gradient = work.step(work.model).gradients["input 0.0"]
    assert gradient is not None and gradient.abs().sum() > 0
    assert x.grad is None

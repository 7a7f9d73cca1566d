"""measure(): what it reports, what it leaves alone, what it refuses."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from memory_events import memory_use
from torch import nn
from torch.utils.benchmark import Measurement

import lazyinline
from lazyinline.frontend.measure import measure
from lazyinline.frontend.measure.workload import Workload, largest_error

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
def short_rounds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "ROUND_S", 0.001)
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
    late, early = report.late, report.early
    assert late.num_nodes < late.num_nodes_if_inlined == early.num_nodes_if_inlined
    assert early.num_nodes > early.num_nodes_if_inlined  # the one call on it counts too
    assert late.num_block_calls == 3
    assert early.num_block_calls == 0
    assert early.num_launches == 2  # forward and backward


def assert_near_eager(found: lazyinline.MeasureReport) -> None:
    assert found.errors.keys() == {"late", "early"}
    for errors in found.errors.values():
        assert errors.output < 1e-6
        assert errors.gradient is not None and errors.gradient < 1e-5


def test_numbers_equal_eager(report: lazyinline.MeasureReport) -> None:
    assert_near_eager(report)


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


def test_json_of_a_wrong_result_is_valid(report: lazyinline.MeasureReport) -> None:
    errors = report.errors | {"late": report.errors["late"]._replace(output=math.inf)}
    assert json.loads(replace(report, errors=errors).to_json())["max_abs_error"]["late"] == "inf"


class Small(nn.Module):
    """A loss of a few operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x).tanh()).square().mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_planned_step_holds_what_was_predicted(micro_batches: int) -> None:
    model, x = Small(), torch.randn(32, 64)
    step = lazyinline.compile_step(model, micro_batches=micro_batches)
    step(x)
    report = step.last_report
    assert report is not None and report.held_bytes is not None
    held = memory_use(lambda: step(x)).peak_bytes + (report.arena_bytes or 0)
    assert held == pytest.approx(report.held_bytes, rel=0.01, abs=512)


def test_text_names_all_passes_and_sides(report: lazyinline.MeasureReport) -> None:
    text = str(report)
    for word in (*PASSES, "late", "early", "eager", "Net: training", "gradient"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100


def test_inference() -> None:
    found = measure_net(Net().eval(), train=False)
    assert found.errors["late"] == (0.0, None, "")
    assert "gradient" not in str(found)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.sweep(keep="0.5")
def test_micro_batches_are_compared_with_a_loop_over_them(dropout: float) -> None:
    net, x = Net(dropout=dropout), torch.randn(8, 8)
    net(x).backward()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    gradients = {name: (p.grad, p.grad.clone()) for name, p in net.named_parameters()}
    found = lazyinline.measure(net, (x,), micro_batches=4, backend="eager")
    assert_near_eager(found)
    assert found.late.num_nodes < found.early.num_nodes
    assert found.late.peak_bytes and found.early.peak_bytes
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
    assert found.late.num_block_calls == 2
    assert found.micro_batches == 4
    assert not found.steps and not found.errors


def test_micro_batches_need_a_loss() -> None:
    with pytest.raises(lazyinline.CaptureError, match="must be a scalar tensor"):
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
    _, error, worst = found.errors["late"]
    assert (worst, error) == ("enter.weight", pytest.approx(0.01, rel=1e-2))


def test_without_execution_nothing_is_run() -> None:
    net = Net()
    found = measure_net(net, execute=False)
    row = found.to_dict()
    assert row["step_ms"] == row["max_abs_error"] == {}
    assert [p.name for p in found.late.passes] == PASSES
    assert "one step" not in str(found)
    assert int(net.norm.num_batches_tracked) == 0


def test_large_model_without_data() -> None:
    with torch.device("meta"):
        net, x = Net(2, 4096), torch.empty(4, 4096)
    found = lazyinline.measure(net, (x,), execute=False, backend="eager")
    assert found.late.num_block_calls == 2
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
    assert_near_eager(measure_net(Net(dropout=0.5)))


@pytest.mark.sweep
def test_model_without_a_loss_has_gradients() -> None:
    torch.manual_seed(0)
    found = lazyinline.measure(Net(), (torch.randn(4, 8),), {"loss": False}, backend="eager")
    assert_near_eager(found)


def test_a_model_without_blocks_is_told_so() -> None:
    found = lazyinline.measure(nn.Linear(4, 4), (torch.ones(2, 4),), backend="eager")
    assert any("no block is shared" in note for note in found.notes())


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
    tensors = {"y": torch.tensor(actual)}, {"y": torch.tensor(expected)}
    assert largest_error(*tensors, relative=False) == (error, "y")


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
    one = torch.ones(1)
    found = largest_error({"w": a, "v": one}, {"w": b, "v": one}, relative=True)
    assert found == (pytest.approx(error), "w")


def test_gradient_where_there_should_be_none_is_large() -> None:
    error, _ = largest_error({"w": torch.ones(2)}, {"w": None}, relative=True)
    assert error > 1e30


def test_steps_are_timed_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def step(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    monkeypatch.setattr(measure, "ROUND_S", 1e-6)
    times = measure._timed({name: step(name) for name in "abc"})
    turns = [a for a, b in zip(order, [*order[1:], ""], strict=True) if a != b]
    assert "".join(turns) == "abc" * measure.ROUNDS
    assert all(min(time.times) > 0 for time in times.values())


def test_a_busy_machine_is_named(report: lazyinline.MeasureReport) -> None:
    def noise(seconds: list[float]) -> str:
        step = Measurement(1, seconds, report.steps["late"].task_spec)
        return replace(report, steps={"eager": step, "late": step, "early": step}).noise

    assert not noise([0.010, 0.0102, 0.011])
    assert "do not trust step times" in noise([0.010, 0.031, 0.090])


def test_inputs_want_gradients_too() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    _, gradients = Workload(Net(), (x,), {}, train=True).step()
    gradient = gradients["input 0.0"]
    assert gradient is not None and gradient.abs().sum() > 0
    assert x.grad is None

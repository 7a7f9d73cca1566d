"""measure(): what it reports, what it leaves alone, what it refuses."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from models import MarkedBlock
from torch import Tensor, nn
from torch.utils.benchmark import Measurement

import lazyinline
from lazyinline.frontend import measure
from lazyinline.frontend.measure import Workload, difference, errors
from lazyinline.frontend.page.page import measured_page


class Net(nn.Module):
    """Blocks, a normalization whose buffers change in every step, and a loss if asked for."""

    def __init__(self, layers: int = 2, size: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        blocks = (MarkedBlock(size, dropout=dropout) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.enter = nn.Linear(size, size)
        self.norm = nn.BatchNorm1d(size)

    def forward(self, x: Tensor, loss: bool = True) -> Tensor:
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


def assert_near_eager(found: lazyinline.MeasureReport) -> None:
    assert found.errors.keys() == {"late", "early"}
    for off in found.errors.values():
        assert off.output < 1e-6
        assert off.gradient is not None and off.gradient < 1e-5


def test_a_report_has_both_sides_as_text_and_as_json(
    report: lazyinline.MeasureReport, golden: Callable[[str, str], None]
) -> None:
    assert_near_eager(report)
    late, early = report.late, report.early
    assert late.num_nodes < late.num_nodes_if_inlined == early.num_nodes_if_inlined
    assert early.num_nodes > early.num_nodes_if_inlined  # the one call on it counts too
    assert (late.num_block_calls, early.num_block_calls, early.num_launches) == (2, 0, 2)
    row = report.to_dict()
    assert json.loads(report.to_json()) == row
    assert all(row["step_ms"][n] >= row["step_min_ms"][n] > 0 for n in row["step_ms"])
    one = Measurement(1, [0.01], report.steps["late"].task_spec)
    quiet = replace(report, steps=dict.fromkeys(report.steps, one))
    keys = [f"{name}: {', '.join(x)}" if isinstance(x, dict) else name for name, x in row.items()]
    text = re.sub(r" *\(? *\d[\d.e+-]*\)?", " #", str(quiet)).replace("threads", "thread")
    golden("measured", "\n".join([text, "", *keys]))


def test_json_of_a_wrong_result_is_valid(report: lazyinline.MeasureReport) -> None:
    off = report.errors | {"late": report.errors["late"]._replace(output=math.inf)}
    assert json.loads(replace(report, errors=off).to_json())["max_abs_error"]["late"] == "inf"


@pytest.mark.sweep
def test_torch_compile_is_measured_beside_and_its_refusal_is_part_of_the_report() -> None:
    found = measure_net(against=["torch.compile", "per-block"])
    assert list(found.others) == list(found.steps)[3:] == ["torch.compile", "per-block"]
    assert all(other.cpu_s > 0 and not other.refused for other in found.others.values())
    # Not its gradients: the true one of this norm's bias is zero, so all of it is rounding.
    assert all(off.output < 1e-5 for off in found.errors.values())
    assert "per-block:" in str(found) and "of which late takes" in str(found)
    labels = [
        tile["label"]
        for tile in measured_page([(found.to_dict(), found.sides)], "")["verdict"]["tiles"]
    ]
    assert labels[:2] == ["Compile against torch.compile", "Step against torch.compile"]


def test_inference() -> None:
    found = measure_net(nn.Sequential(nn.Linear(8, 8), nn.Tanh()).eval(), train=False)
    assert found.errors["late"] == (0.0, None, "")
    assert "gradient" not in str(found)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.sweep(keep="4")
def test_a_model_with_dropout_is_compared_and_left_as_found(micro_batches: int) -> None:
    net, x = Net(dropout=0.5), torch.randn(8, 8, requires_grad=micro_batches == 1)
    net(x).backward()
    generator = torch.get_rng_state()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    gradients = {name: (p.grad, p.grad.clone()) for name, p in net.named_parameters()}
    found = lazyinline.measure(net, (x,), micro_batches=micro_batches, backend="eager")
    assert_near_eager(found)
    assert torch.equal(torch.get_rng_state(), generator) and net.training
    assert all(torch.equal(t, state[name]) for name, t in net.state_dict().items())
    for name, parameter in net.named_parameters():
        assert parameter.grad is gradients[name][0]
        assert torch.equal(parameter.grad, gradients[name][1])
    if micro_batches > 1:
        assert found.late.num_nodes < found.early.num_nodes
        assert found.late.peak_bytes and found.early.peak_bytes
        assert "Net: training of 4 micro-batches" in str(found) and "arena, bytes" in str(found)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.sweep(keep="1")
def test_a_model_without_data_is_compiled_and_not_run(micro_batches: int) -> None:
    with torch.device("meta"):
        net, x = Net(2, 4096), torch.empty(8, 4096)
    options = {"micro_batches": micro_batches, "backend": "eager"}
    found = lazyinline.measure(net, (x,), execute=False, **options)
    row = found.to_dict()
    assert found.late.num_block_calls == 2 and row["micro_batches"] == micro_batches
    assert row["step_ms"] == row["max_abs_error"] == {} and "one step" not in str(found)
    with pytest.raises(lazyinline.PlanError, match="meta device"):
        lazyinline.measure(net, (x,), **options)


def test_notes_say_what_is_not_shared() -> None:
    found = lazyinline.measure(nn.Linear(4, 4), (torch.ones(2, 4),), execute=False, backend="eager")
    assert any("no block is shared" in note for note in found.notes())
    net = Net(3)
    net.blocks[1].scale = 3  # not read by forward
    net.blocks[2].down.bias = None
    assert any("blocks.2: not shared" in note for note in measure_net(net, execute=False).notes())
    assert int(net.norm.num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"against": ["jax"]}, lazyinline.PlanError, "'jax' is not known"),
        ({"against": ["per-block"], "execute": False}, lazyinline.PlanError, "runs nothing"),
        ({"micro_batches": 2, "train": False}, lazyinline.PlanError, "goes with training"),
        ({"micro_batches": 0}, lazyinline.PlanError, "at least one"),
        ({"micro_batches": 3}, lazyinline.PlanError, "cannot be split into 3"),
        ({"backend": "gpu"}, lazyinline.PlanError, "'gpu' is unknown"),
        ({"reuse": "always"}, lazyinline.ReuseError, "'always' is unknown"),
        ({"net": Net().requires_grad_(False)}, lazyinline.PlanError, "train=False"),
        (
            {"micro_batches": 2, "kwargs": {"loss": False}},
            lazyinline.CaptureError,
            "must be a scalar tensor",
        ),
    ],
)
def test_no_measurement(options: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        measure_net(**options)


@pytest.mark.parametrize(
    ("actual", "expected", "absolute", "relative"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5, 0.5 / math.hypot(1.0, 2.5)),
        ([3.0, 4.5], [3.0, 4.0], 0.5, 0.1),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0, None),
        ([math.inf], [math.inf], 0.0, None),
        ([math.nan], [1.0], math.inf, math.inf),
        ([1.0], [1.0, 2.0], math.inf, math.inf),
        ([], [], 0.0, 0.0),
        (None, [3.0, 4.0], 4.0, 1.0),
        ([0.0, 0.0], None, 0.0, 0.0),
        (None, None, 0.0, 0.0),
    ],
)
def test_differences(
    actual: list[float] | None,
    expected: list[float] | None,
    absolute: float,
    relative: float | None,
) -> None:
    a, b = (None if x is None else torch.tensor(x) for x in (actual, expected))
    assert difference(a, b, relative=False) == absolute
    if relative is not None:
        assert difference(a, b, relative=True) == pytest.approx(relative)


def test_the_worst_gradient_is_named_and_one_where_there_should_be_none_is_large() -> None:
    one = torch.ones(1)
    found = errors(({"y": one}, {"v": one, "w": one}), ({"y": one}, {"v": one, "w": None}))
    assert found.output == 0.0 and found.worst == "w"
    assert found.gradient is not None and found.gradient > 1e30


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

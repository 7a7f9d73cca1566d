"""Taylor mode or reverse mode: whichever costs less, as counted; both give the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_func import by_pytorch
from torch import Tensor, nn

import lazyinline
from lazyinline import func
from lazyinline.autodiff.higher_order.modes import ModeChoice, Trial, Way, weighed
from lazyinline.reuse.errors import CaptureError, PlanError
from lazyinline.reuse.ir.costs import Cost, OperatorCosts, ProgramCosts


class Field(nn.Module):
    """The size of a derivative of a small network's results."""

    def __init__(self, by: str, mode: Any = "auto", *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = [nn.Linear(5, 5), nn.Tanh(), nn.Dropout(dropout)] if dropout else []
        layers = [nn.Linear(3, 5), nn.Tanh(), *middle, nn.Linear(5, 5), nn.SiLU(), nn.Linear(5, 1)]
        self.net = nn.Sequential(*layers).double()
        self.by, self.mode = by, mode

    def derived(self, x: Tensor) -> Tensor:
        """The derivative."""
        if self.by == "laplacian":
            return func.laplacian(self.net, mode=self.mode)(x)
        return func.derivative(self.net, x, self.by, mode=self.mode)

    def forward(self, x: Tensor) -> Tensor:
        """The mean of its square."""
        return self.derived(x).square().mean()


def points(num: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(num, 3, dtype=torch.float64, generator=generator)


def trained(model: nn.Module, x: Tensor, **options: Any) -> tuple[list[Tensor], Any]:
    """Returns the loss and every gradient, and the report."""
    compiled = lazyinline.compile(model, backend="eager", fallback="error", **options)
    loss = compiled(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], (
        compiled.last_report
    )


def by_torch_func(model: Field, x: Tensor, sums: list[list[int]]) -> list[Tensor]:
    """Returns the same as `trained`, for a sum of derivatives by some coordinates."""

    def at(point: Tensor, places: list[int]) -> Tensor:
        function: Any = model.net
        for _ in places:
            function = torch.func.jacrev(function)
        found: Tensor = function(point)[(slice(None), *places)]
        return found

    zero = torch.zeros(1, dtype=torch.float64)
    loss = torch.stack([sum((at(p, places) for places in sums), zero) for p in x]).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def choice_of(report: Any) -> ModeChoice:
    (choice,) = report.modes
    return choice  # type: ignore[no-any-return]


def cost_of_programs(report: Any) -> Cost:
    costs = ProgramCosts(OperatorCosts(fused=False))
    return costs.program(report.made.forward) + costs.program(report.made.backward)


@pytest.mark.sweep
@pytest.mark.parametrize(("by", "mode"), [("laplacian", "taylor"), ("xyz", "reverse")])
def test_the_mode_with_fewer_flops_is_taken(by: str, mode: str) -> None:
    _, report = trained(Field(by), points())
    flops = {m: cost_of_programs(trained(Field(by, m), points())[1]).flops for m in _MODES}
    assert flops[mode] < min(f for m, f in flops.items() if m != mode)
    choice = choice_of(report)
    assert choice.mode == mode
    assert choice.candidates[0].way.mode == mode
    assert choice.candidates[0].cost is not None
    assert f"{mode} mode, " in str(report)
    assert "test_modes.py" in str(report)


_MODES = ("taylor", "reverse")


@pytest.mark.parametrize("by", ["xx", "xy"])
def test_what_is_counted_is_what_the_programs_do(by: str) -> None:
    """The backward is counted before it is there: its products exactly, the bytes about."""
    wide = Field(by)
    wide.net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), wide.net[0])
    wide.net[-1] = nn.Linear(32, 1)
    wide.net.double()
    choice = choice_of(trained(wide, points(64))[1])
    assert {c.counted for c in choice.candidates} == {"made"}
    for candidate in choice.candidates:
        model = copy.deepcopy(wide)
        model.mode = candidate.way.mode
        wanted, cost = cost_of_programs(trained(model, points(64))[1]), candidate.cost
        assert cost is not None
        assert cost.flops == pytest.approx(wanted.flops, rel=0.02)
        assert cost.moved_bytes == pytest.approx(wanted.moved_bytes, rel=0.25)


@pytest.mark.parametrize(
    "by",
    [
        "x",
        "xy",
        "laplacian",
        *(
            pytest.param(by, marks=pytest.mark.sweep)
            for by in ("xyz", "xxy", "xxyy", "xxxxx", "xxxyy")
        ),
    ],
)
def test_every_mode_equals_torch_func(by: str) -> None:
    x = points(3)
    places = [[i, i] for i in range(3)] if by == "laplacian" else [["xyz".index(c) for c in by]]
    wanted = by_torch_func(Field(by), x, places)
    for mode in ("auto", *_MODES):
        found, _ = trained(Field(by, mode), x)
        torch.testing.assert_close(found, wanted)


def test_inlined_early_the_choice_is_the_same() -> None:
    late, early = (trained(Field("xx"), points(), reuse=reuse) for reuse in ("auto", "off"))
    torch.testing.assert_close(late[0], early[0])
    found = [choice_of(report) for _, report in (late, early)]
    assert found[0].mode == found[1].mode
    flops = [[c.cost.flops for c in choice.candidates if c.cost] for choice in found]
    assert flops[0] == flops[1]


def test_without_gradients_the_backward_is_not_counted() -> None:
    compiled = lazyinline.compile(Field("laplacian"), backend="eager", fallback="error")
    with torch.no_grad():
        compiled(points())
    alone = choice_of(compiled.last_report).candidates[0].cost
    both = choice_of(trained(Field("laplacian"), points())[1]).candidates[0].cost
    assert alone is not None and both is not None
    assert 2 * alone.flops < both.flops <= 3 * alone.flops


def test_where_one_mode_cannot_follow_the_other_is_taken() -> None:
    """Taylor mode would have to draw the same mask twice."""
    model = Field("laplacian", dropout=0.5)
    expected, x = copy.deepcopy(model), points()
    torch.manual_seed(3)
    found, report = trained(model, x)
    torch.manual_seed(3)
    with by_pytorch():
        wanted = expected(x)
    wanted.backward()
    gradients = [p.grad for p in expected.parameters() if p.grad is not None]
    torch.testing.assert_close(found, [wanted.detach(), *gradients])
    assert choice_of(report).mode == "reverse"
    assert "taylor cannot be made" in str(report) and "draws random numbers" in str(report)


@pytest.mark.smoke
def test_derivatives_of_derivatives_choose_each_for_itself() -> None:
    class Twice(Field):
        def derived(self, x: Tensor) -> Tensor:
            return func.derivative(func.laplacian(self.net), x, "x")

    found, report = trained(Twice(""), points(2))
    wanted = by_torch_func(Field(""), points(2), [[i, i, 0] for i in range(3)])
    torch.testing.assert_close(found, wanted)
    assert [choice.what for choice in report.modes] == ["laplacian", "derivative by 'x'"]


def test_a_product_with_a_hessian_in_each_mode() -> None:
    """Of several inputs: all its parts are computed in one mode."""
    net = Field("").net
    inputs, vectors = (points(2), points(3)), (points(2) + 1, points(3) - 1)

    def value(x: Tensor, y: Tensor) -> Tensor:
        return net(x).sin().sum() * net(y).cos().sum()

    class Product(nn.Module):
        def __init__(self, mode: Any) -> None:
            super().__init__()
            self.net, self.mode = net, mode

        def forward(self, inputs: Any, vectors: Any) -> Any:
            return func.hvp(value, inputs, vectors, mode=self.mode)

    wanted = torch.autograd.functional.hvp(value, inputs, vectors)
    reports = {}
    for mode in ("auto", "forward", "reverse"):
        compiled = lazyinline.compile(Product(mode), backend="eager", fallback="error")
        with torch.no_grad():
            torch.testing.assert_close(compiled(inputs, vectors), wanted)
        reports[mode] = compiled.last_report
    choice = choice_of(reports["auto"])
    assert not reports["forward"].modes and not reports["reverse"].modes
    assert {c.way.mode for c in choice.candidates} == {"forward", "reverse"}
    assert all(c.counted == "made" for c in choice.candidates)
    costs = ProgramCosts(OperatorCosts(fused=False))
    taken, forced = (costs.program(reports[mode].made.forward) for mode in ("auto", choice.mode))
    assert taken.flops == forced.flops
    with pytest.raises(PlanError, match="'taylor' is none of auto, forward, reverse"):
        func.hvp(value, inputs, vectors, mode="taylor")  # type: ignore[arg-type]


def test_a_way_with_far_more_passes_is_not_made() -> None:
    made: list[int] = []

    def make(number: int) -> Trial:
        made.append(number)
        return Trial(Cost(100, 10, (3.0, 2.0)[number]))

    def taken(passes: tuple[int, int], order: int = 2) -> tuple[str, list[int]]:
        made.clear()
        ways = Way("taylor", passes[0]), Way("reverse", passes[1])
        return weighed("it", "here", order, ways, make)[1].mode, list(made)

    assert taken((4, 16)) == ("taylor", [0])
    assert taken((13, 8)) == ("reverse", [1])
    assert taken((3, 4)) == ("reverse", [0, 1])  # fewer seconds
    assert taken((17, 16), order=4) == ("taylor", [0])
    _, choice = weighed("it", "here", 2, (Way("taylor", 4), Way("reverse", 16)), make)
    assert choice.candidates[1].cost == Cost(400, 40, 12.0)
    assert "reverse about 400 FLOP" in str(choice)


def test_where_no_way_can_be_made_the_first_reason_is_told() -> None:
    def make(number: int) -> Trial:
        raise CaptureError(f"way {number} is closed")

    with pytest.raises(CaptureError, match="way 0 is closed"):
        weighed("it", "here", 2, (Way("taylor", 2), Way("reverse", 2)), make)

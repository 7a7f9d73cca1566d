"""Taylor mode or reverse mode: the one with fewer passes; both give the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import Made
from test_func import by_pytorch
from torch import Tensor, nn

import lazyinline
from lazyinline import func
from lazyinline.frontend.capture.regions import ModeChoice
from lazyinline.reuse.errors import PlanError
from lazyinline.reuse.ir.costs import OperatorCosts, ProgramCosts


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


def flops_of(report: Any) -> int:
    costs = ProgramCosts(OperatorCosts())
    return costs.program(report.made.forward).flops + costs.program(report.made.backward).flops


_MODES = ("taylor", "reverse")


@pytest.mark.parametrize(
    ("by", "best"),
    [
        *(("laplacian", "taylor"), ("xy", "reverse"), ("xxx", "taylor"), ("xyz", "reverse")),
        *((by, "") for by in ("x", "xxy", "xxyy", "xxxxx", "xxxyy")),
    ],
)
@pytest.mark.sweep(keep="laplacian")
def test_every_mode_equals_torch_func_and_that_of_fewer_flops_is_taken(by: str, best: str) -> None:
    x = points(3)
    places = [[i, i] for i in range(3)] if by == "laplacian" else [["xyz".index(c) for c in by]]
    wanted = by_torch_func(Field(by), x, places)
    reports = {}
    for mode in ("auto", *_MODES):
        found, reports[mode] = trained(Field(by, mode), x)
        torch.testing.assert_close(found, wanted)
    report = reports.pop("auto")
    flops = {mode: flops_of(of) for mode, of in reports.items()}
    assert flops_of(report) == min(flops.values())
    if best:
        assert flops[best] == flops_of(report)
        assert choice_of(report).mode == best
        assert f"{best} mode, " in str(report) and " passes against " in str(report)
        assert "test_modes.py" in str(report)


def test_inlined_early_the_choice_is_the_same() -> None:
    late, early = (trained(Field("xx"), points(), reuse=reuse) for reuse in ("auto", "off"))
    torch.testing.assert_close(late[0], early[0])
    assert choice_of(late[1]) == choice_of(early[1])


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
    choice = choice_of(report)
    assert choice.mode == "reverse"
    assert "taylor mode cannot be made" in choice.why and "draws random numbers" in choice.why


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
        return net(x).sin().sum() * y.cos().sum()

    def product(self: Any, inputs: Any, vectors: Any) -> Any:
        return func.hvp(value, inputs, vectors, mode=self.mode)

    wanted = torch.autograd.functional.hvp(value, inputs, vectors)
    reports = {}
    for mode in ("auto", "forward", "reverse"):
        compiled = lazyinline.compile(
            Made(product, net=net, mode=mode), backend="eager", fallback="error"
        )
        with torch.no_grad():
            torch.testing.assert_close(compiled(inputs, vectors), wanted)
        reports[mode] = compiled.last_report
    assert choice_of(reports["auto"]).mode == "forward"
    assert not reports["forward"].modes and not reports["reverse"].modes
    flops = [ProgramCosts(OperatorCosts()).program(r.made.forward).flops for r in reports.values()]
    assert flops[0] == flops[1] <= flops[2]
    with pytest.raises(PlanError, match="'taylor' is none of auto, forward, reverse"):
        func.hvp(value, inputs, vectors, mode="taylor")  # type: ignore[arg-type]

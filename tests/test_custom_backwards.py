"""The backward of a ``torch.autograd.Function`` is watched as the forward is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comparing import assert_equals_eager
from models import Made
from torch import Tensor, nn

import lazyinline
from lazyinline import lazy_inline

STATE = SimpleNamespace(strength=1.0, log=[])


def function_of(name: str, forward: Any, backward: Any, **attributes: Any) -> Any:
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), {**methods, **attributes})


def saving(forward: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Returns a forward that saves its operand."""

    def saved(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return forward(x)

    return saved


def in_place(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x)
    return x.mul_(2)


def through_another(ctx: Any, g: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    with torch.enable_grad():
        again = x.detach().requires_grad_()
        result = WithSetup.apply(again) * 2
    return torch.autograd.grad(result, again, g)[0]


def saves_apart(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


# Each reads its strength: from its class or a global, in the backward alone or in the forward; by
# another function that it applies; under other names of operators; beside a change in place.
Scaled = function_of(
    "Scaled", lambda ctx, x: x.view_as(x), lambda ctx, g: -Scaled.strength * g, strength=1.0
)
WithSetup = function_of(
    "WithSetup",
    lambda x: x.sin(),
    lambda ctx, g: STATE.strength * g * ctx.saved_tensors[0].cos(),
    setup_context=staticmethod(saves_apart),
)
InForward = function_of("InForward", lambda ctx, x: x * STATE.strength, lambda ctx, g: g * 2)
Outer = function_of("Outer", saving(lambda x: WithSetup.apply(x) * 2), through_another)
Converts = function_of(
    "Converts",
    saving(lambda x: (x.double().T.float().t_() * 2).to(x.dtype)),
    lambda ctx, g: g.double().mul(2 * STATE.strength).type_as(*ctx.saved_tensors),
)
InPlace = function_of("InPlace", in_place, lambda ctx, g: g * 2 * STATE.strength)
# Their backwards do more than compute.
NeedsAValue = function_of(
    "NeedsAValue", lambda ctx, x: x * 1, lambda ctx, g: g / max(float(g.norm()), 1.0)
)
Logs = function_of(
    "Logs", lambda ctx, x: x * 1, lambda ctx, g: (STATE.log.append("backward"), g * 2)[1]
)
Prints = function_of("Prints", lambda ctx, x: x * 1, lambda ctx, g: (print("backward"), g * 2)[1])


def applies(self: Any, x: Tensor) -> Tensor:
    return self.function.apply(self.linear(x)) + x


def model_of(function: Any, kind: type[nn.Module] = Made) -> nn.Module:
    torch.manual_seed(0)
    blocks = (kind(applies, linear=nn.Linear(4, 4), function=function) for _ in range(2))
    return Made(lambda self, x: self.blocks(x).square().mean(), blocks=nn.Sequential(*blocks))


def set_strength(value: float) -> None:
    Scaled.strength = STATE.strength = value


@pytest.fixture(autouse=True)
def as_before() -> Any:
    yield
    set_strength(1.0)
    STATE.log.clear()


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("function", [Scaled, WithSetup, InForward, Outer, Converts, InPlace])
@pytest.mark.sweep(
    keep=["Scaled-True", "WithSetup-False", "InForward-True", "Outer-True", "InPlace-True"]
)
def test_what_a_function_reads_may_follow_a_schedule(function: Any, marked: bool) -> None:
    def use(run: Any, strength: float, x: Tensor) -> Tensor:
        set_strength(strength)
        return run(x)  # type: ignore[no-any-return]

    kind = lazy_inline(type("Marked", (Made,), {})) if marked else Made
    batches = [(strength, torch.randn(3, 4)) for strength in (1.0, 2.0, 2.0)]
    options: Any = {"fallback": "error", "tolerance": 1e-6}
    assert_equals_eager(model_of(function, kind), batches=batches, use=use, **options)


@pytest.mark.parametrize("function", [NeedsAValue, Logs, Prints])
def test_a_backward_that_does_more_than_compute_runs_eagerly(
    function: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def use(run: Any, x: Tensor) -> list[Any]:
        STATE.log.clear()
        run(x).backward()
        return [len(STATE.log), capsys.readouterr().out]

    batches = [(torch.randn(3, 4),) for _ in range(3)]
    found = assert_equals_eager(model_of(function), batches=batches, use=use, tolerance=1e-6)
    assert found.told.ran_eagerly


def scripted_source(x: Tensor, w: Tensor) -> Tensor:
    """Returns what ``torch.jit`` makes a graph of with a derivative of its own."""
    y = torch.stack([x, x * x, x * w], -1)
    return y.tanh() * y


def test_a_scripted_function_has_the_gradients_of_its_python() -> None:
    scripted = torch.jit.script(scripted_source)

    def calls(self: Any, x: Tensor) -> Tensor:
        return scripted(x, self.weight).mul_(3).sum()

    model, given = Made(calls, weight=nn.Parameter(torch.ones(4))), torch.arange(4.0)
    for _ in range(3):  # from the second call on it is another graph
        model(given).backward()
    model.zero_grad()
    assert_equals_eager(model, (given,), fallback="error", tolerance=1e-6)


def test_a_function_that_was_traced_by_torch_jit_runs_eagerly() -> None:
    traced = torch.jit.trace(lambda x: x.sin(), torch.ones(2))
    compiled: Any = lazyinline.compile(Made(lambda self, x: traced(x) * 2), backend="eager")
    torch.testing.assert_close(compiled(torch.ones(2)), torch.ones(2).sin() * 2)
    assert "torch.jit" in compiled.last_report.ran_eagerly

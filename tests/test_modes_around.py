"""Calls inside what sees or changes every operator, or differentiates in another way."""

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_close, assert_equals_eager, gradients
from models import Made, batch
from test_compile import WAYS, make, net, sides_of
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lazyinline
from lazyinline import CaptureError


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model that was compiled, with a wrapper or in place, and its twin for eager."""
    way: str = request.param
    ours, theirs = sides_of(way)
    return ours.run, theirs.run


def why_eager(compiled: Any) -> str:
    return lazyinline.last_report(compiled).ran_eagerly  # type: ignore[union-attr]


@pytest.mark.sweep(keep="eager")
def test_forward_mode_runs_the_model_itself_and_says_so(pair: tuple[Any, Any]) -> None:
    compiled, expected = pair
    x, tangent = batch(), batch(seed=1)
    compiled(x)
    found = torch.func.jvp(compiled, (x,), (tangent,))
    for ours, theirs in zip(found, torch.func.jvp(expected, (x,), (tangent,)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert "a transform of torch.func is active" in why_eager(compiled)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        assert torch.autograd.forward_ad.unpack_dual(compiled(dual)).tangent is not None
    assert "forward-mode differentiation is active" in why_eager(compiled)


@pytest.mark.sweep(keep="eager")
def test_what_parametrizations_keep_inside_cached_is_eagers(pair: tuple[Any, Any]) -> None:
    for model in pair:
        torch.manual_seed(0)
        linear = next(part for part in model.modules() if isinstance(part, nn.Linear))
        nn.utils.parametrizations.spectral_norm(linear)  # each computation changes its buffers
    found: list[Any] = []
    for model in pair:
        model(batch()).sum().backward()
        with parametrize.cached():
            linear = next(part for part in model.modules() if hasattr(part, "parametrizations"))
            found.append((model(batch()), model(batch()), linear.weight.detach().clone()))
        found[-1] += (*(b.clone() for b in model.buffers()),)
    assert_close(*found)
    assert "cached() is active" in why_eager(pair[0])


class Doubling(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is F.linear else result


class DoublingProducts(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.ops.aten.addmm.default else result


@pytest.mark.sweep(keep="eager")
def test_a_mode_that_sees_operators_sees_the_models_own(pair: tuple[Any, Any]) -> None:
    compiled, expected = pair
    with torch.no_grad():
        for _ in range(2):  # what is compiled between knows nothing of the mode
            for mode in (Doubling, DoublingProducts):
                with mode():
                    assert torch.equal(compiled(batch()), expected(batch())), mode
            torch.testing.assert_close(compiled(batch()), expected(batch()))


@pytest.mark.parametrize("mode", [Doubling, DoublingProducts])
def test_a_mode_that_the_forward_enters_sees_the_operators_inside(mode: Any) -> None:
    def entering(self: Any, x: Tensor) -> Tensor:
        with mode():
            return self.inner(x)

    assert_equals_eager(Made(entering, inner=net()), (batch(),))
    if mode is DoublingProducts:
        with pytest.raises(CaptureError, match=r"enters a TorchDispatchMode \(DoublingProducts\)"):
            lazyinline.capture(Made(entering, inner=net()), (batch(),))


def test_the_default_device_is_part_of_what_a_program_was_compiled_for() -> None:
    compiled = lazyinline.compile(Made(lambda self, x: (x * 2, torch.zeros(3))), backend="eager")
    assert compiled(batch())[1].device.type == "cpu"
    with torch.device("meta"):
        assert compiled(batch())[1].device.type == "meta"
    assert compiled(batch())[1].device.type == "cpu"


@pytest.mark.sweep(keep="eager")
def test_torch_compile_around_it_runs_a_wrapper_and_the_own_python_of_what_is_in_place(
    pair: tuple[Any, Any],
) -> None:
    compiled, expected = pair
    around = torch.compile(lambda x: compiled(x) * 2, backend="eager")
    for run in (around, lambda x: expected(x) * 2):
        run(batch()).square().sum().backward()
    found, wanted = (gradients(model).values() for model in (compiled, expected))
    assert_close([*found], [*wanted])
    assert (lazyinline.last_report(compiled) is None) is (type(compiled) is type(expected))
    assert_close(torch.compile(compiled, backend="eager")(batch()), expected(batch()))


def of_another_layout(self: Any, x: Tensor) -> Tensor:
    """Has a gradient that PyTorch's kernel gives in other strides than those of the trace."""
    y = torch.exp(self.factor * F.softplus(self.linear(x))).transpose(-1, -2)
    return x + (y.unsqueeze(1) * x.unsqueeze(-1)[:, :, :2]).sum((1, 2, 3))[:, None, None]


def test_a_kernel_that_lays_its_result_out_in_another_way_stops_no_backward() -> None:
    held = [{"linear": nn.Linear(8, 2), "factor": nn.Parameter(torch.randn(2))} for _ in range(2)]
    model = nn.Sequential(*(Made(of_another_layout, **one) for one in held))
    assert_equals_eager(model, (torch.randn(2, 8, 8),), calls=1)


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.sweep(keep=["compiled-eager", "in place-eager-False"])
def test_what_traces_the_model_traces_itself(called_before: bool, pair: tuple[Any, Any]) -> None:
    compiled, expected = pair
    if called_before:
        compiled(batch())
    other = batch(seed=5)
    for traced in (
        torch.jit.trace(compiled, (batch(),)),
        make_fx(compiled)(batch()),
        torch.export.export(compiled, (batch(),)).module(),
    ):
        torch.testing.assert_close(traced(other), expected(other))
    both = torch.stack([batch(), other])
    torch.testing.assert_close(torch.vmap(compiled)(both), torch.vmap(expected)(both))
    assert "torch.func" in why_eager(compiled)


def test_no_property_of_what_is_compiled_raises() -> None:
    (compiled, model), _ = make(net, "eager")
    assert compiled.last_report is None
    step = lazyinline.compile_step(model, loss_fn=lambda y: y.sum(), backend="eager")
    assert step.last_report is None
    assert step.stats is None
    inspect.getmembers(compiled), inspect.getmembers(step)

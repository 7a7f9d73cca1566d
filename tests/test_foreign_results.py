"""Operators of somebody else: what their fake kernels say is checked in every run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from comparing import Door, assert_equals_eager
from models import Around, block
from torch import Tensor, nn

import lazyinline
from lazyinline import CaptureError, PlanError
from lazyinline.backend.kernels.torch_recorder import record_graph
from lazyinline.reuse.errors import VerifyError


def _operator(name: str, kernel: Any) -> Any:
    """An operator whose fake kernel says that the result is laid out as the operand is."""
    made = torch.library.custom_op(f"lazyinline_tests::{name}", kernel, mutates_args=())
    made.register_fake(lambda x: torch.empty_like(x))
    made.register_autograd(lambda context, gradient: gradient * 2)
    return made


def _transposed(x: Tensor) -> Tensor:
    return (x * 2).t().contiguous().t()


def _smaller(x: Tensor) -> Tensor:
    return x[:1].clone()


def _wider(x: Tensor) -> Tensor:
    return x.double()


class Using(nn.Module):
    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator, self.linear = operator, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.operator(self.linear(x))
        return (doubled.relu() + 1).square().sum() + (doubled.reshape(-1) * 3).sum()


@pytest.mark.parametrize(
    ("how", "backend"),
    [("compile", "inductor"), ("no_grad", "inductor"), ("compile_step", "eager")],
)
def test_a_result_laid_out_otherwise_than_its_fake_kernel_says_is_read_rightly(
    how: str, backend: str
) -> None:
    operator = _operator(f"transposed_{how}", _transposed)
    model, expected = Using(operator), Using(operator)
    expected.load_state_dict(model.state_dict())
    door: Door = "step" if how == "compile_step" else "compile"
    with torch.set_grad_enabled(how != "no_grad"):
        assert_equals_eager(
            model, [torch.randn(5, 8)], door=door, backend=backend, reference=expected
        )


@pytest.mark.parametrize(("kernel", "found"), [(_smaller, r"f32\[1,8\]"), (_wider, r"f64\[5,8\]")])
def test_a_result_of_another_shape_or_type_names_its_operator(kernel: Any, found: str) -> None:
    name = f"wrong{kernel.__name__}"
    model = Using(_operator(name, kernel))
    text = rf"operator lazyinline_tests\.{name} returned {found}.*register_fake"
    with pytest.raises(PlanError, match=text), torch.no_grad():
        lazyinline.compile(model, backend="inductor")(torch.randn(5, 8))
    with pytest.raises(PlanError, match=text):
        lazyinline.compile_step(model, backend="eager")(torch.randn(5, 8))


@pytest.mark.parametrize("one", ["number", "tensor"])
@pytest.mark.sweep
def test_a_factor_of_one_leaves_a_spread_cotangent_as_it_was_traced(one: str) -> None:
    """Inductor drops the factor, so that the cotangent is one number, read as many."""

    def body(layers: Any, x: Tensor) -> Tensor:
        y = layers[0](x)
        return y * (1.0 if one == "number" else torch.ones(4, 3)) + 2  # type: ignore[no-any-return]

    kind = block(lambda self, x: self.linear(x))
    model, x = Around(body, kind(linear=nn.Linear(3, 3))), torch.randn(4, 3)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    lazyinline.compile_step(model, loss_fn=torch.sum, backend="inductor")(x)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_generated_code_that_returns_another_layout_is_refused() -> None:
    leaf = lazyinline.capture(Using(torch.relu), (torch.randn(4, 8),)).calls[0].closure
    types = tuple(replace(t, shape=(2,), stride=(1,)) for t in leaf.output_types)
    with pytest.raises(VerifyError, match="its type says"):
        record_graph(replace(leaf, output_types=types))


# ---- operators that change their operands ------------------------------------------------------


@torch.library.custom_op("lazyinline_tests::shift_", mutates_args=("x",))
def shift_(x: Tensor, by: Tensor) -> None:
    x.add_(by)


class Changing(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "input":
            shift_(x, torch.ones(4))
        hidden = self.linear(x) * 2
        if self.what == "activation":
            shift_(hidden, torch.ones(4))
        elif self.what == "part of an activation":
            shift_(hidden[1:], torch.ones(4))
        elif self.what == "buffer":
            shift_(self.count, hidden.detach().mean(0))
        return (hidden + self.count + x).relu()


@pytest.mark.parametrize("what", ["activation", "part of an activation", "buffer", "input"])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.sweep(keep=["True-buffer", "True-activation", "False-input"])
def test_what_an_operator_changes_is_changed(what: str, train: bool) -> None:
    model, batches = Changing(what), [(torch.randn(3, 4),) for _ in range(2)]
    with torch.set_grad_enabled(train):
        outcome = assert_equals_eager(model, batches=batches, backend="eager")
    assert "lazyinline_tests.shift_" in outcome.compiled.last_report.ran_eagerly
    step = lazyinline.compile_step(Changing(what), loss_fn=torch.sum, backend="eager")
    with pytest.raises(CaptureError, match=r"shift_.* at test_foreign_results\.py:\d+"):
        step(*batches[0])

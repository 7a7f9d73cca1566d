"""`@lazyinline.decomposition(operator)`: one rule makes an operator of the user's PyTorch's own.

Eager PyTorch is the measure, with the operator itself; where that has no derivative, with the rule
in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_equals_eager, sgd
from models import Around
from torch import Tensor, nn

import lazyinline
from lazyinline import DecompositionError, lazy_inline
from lazyinline.autodiff.traces.torch_user_rules import rule_of

WIDTH = 8
Operator = Any


def gate(x: Tensor, y: Tensor, scale: float = 2.0) -> Tensor:
    return torch.sigmoid(x) * y * scale


def gate_backward(g: Tensor, x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    p = torch.sigmoid(x)
    return g * y * scale * p * (1 - p), g * p * scale


def new_operator(name: str, kernel: Callable[..., Any] = gate, **options: Any) -> Operator:
    """An operator whose kernel PyTorch cannot look into, without a derivative."""
    made = torch.library.custom_op(f"lazyinline_rules::{name}", kernel, mutates_args=(), **options)
    if "schema" not in options:
        made.register_fake(lambda x, *rest, **named: torch.empty_like(x))
    return made


def with_derivative(name: str, *, rules: bool = True) -> Operator:
    """The gate, its derivative another operator; both with rules."""
    made = new_operator(name)
    backward = new_operator(f"{name}_backward", gate_backward)
    backward.register_fake(lambda g, x, y, scale: (torch.empty_like(x), torch.empty_like(y)))

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.scale = inputs[2]

    def differentiate(context: Any, gradient: Tensor) -> Any:
        return (*backward(gradient, *context.saved_tensors, context.scale), None)

    made.register_autograd(differentiate, setup_context=setup)
    if rules:
        lazyinline.decomposition(made)(gate)
        lazyinline.decomposition(backward)(gate_backward)
    return made


def without_derivative(name: str) -> Operator:
    made = new_operator(name)
    lazyinline.decomposition(made)(gate)
    return made


MADE = {"own derivative": with_derivative, "none": without_derivative}
both = pytest.mark.parametrize("derivative", MADE)


@lazy_inline
class Block(nn.Module):
    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.operator(self.first(x), self.second(x), scale=1.5))
        return x + y


class Net(nn.Module):
    def __init__(self, operator: Operator, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block(operator) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(x)
        return (y.square() + y.cos()).mean()


def of(forward: Callable[[Any, Tensor], Tensor], operator: Operator) -> nn.Module:
    """Returns a model whose forward is a function of an operator and the input."""
    return Around(lambda _, x: forward(operator, x))


def using(operator: Operator, model: nn.Module) -> nn.Module:
    """Returns a copy of a model that calls another operator in its blocks."""
    made = type(model)(operator)  # type: ignore[call-arg]
    made.load_state_dict(model.state_dict())
    return made


def points(rows: int = 4) -> Tensor:
    return torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH)


@both
@pytest.mark.sweep(keep="eager-own derivative")
def test_a_model_trains_as_in_eager(derivative: str, backend: str) -> None:
    model = Net(MADE[derivative](f"trains_{backend}"))
    outcome = assert_equals_eager(
        model, [points()], calls=3, backend=backend, optimizer=sgd, reference=using(gate, model)
    )
    with torch.no_grad():
        assert_close(outcome.compiled(points()), using(gate, model)(points()))


@both
@pytest.mark.sweep(keep="own derivative")
def test_a_rule_is_fused_and_planned(derivative: str) -> None:
    whole = lazyinline.compile_step(Net(with_derivative("whole", rules=False), depth=1))
    whole(points())
    assert "lazyinline_rules.whole" in whole.stats.unplaced_launches
    assert whole.stats.allocations_per_step > 0
    model = Net(MADE[derivative]("fused"), depth=1)
    step = lazyinline.compile_step(model)
    loss = step(points())
    assert step.stats.unplaced_launches == ()
    assert step.stats.allocations_per_step == 0
    assert step.stats.kernels < whole.stats.kernels
    assert_close(loss, Net(gate, depth=1)(points()).detach())


@pytest.mark.smoke
@pytest.mark.parametrize("own", [False, True])
def test_an_operator_may_have_several_results(own: bool) -> None:
    def both_ways(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    operator = new_operator(f"several_{own}", both_ways)
    operator.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    if own:

        def setup(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*output)

        def differentiate(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
            sin, cos = ctx.saved_tensors
            return first * cos - second * sin

        operator.register_autograd(differentiate, setup_context=setup)

    @lazyinline.decomposition(operator)
    def in_a_list(x: Tensor) -> list[Tensor]:
        return [x.sin(), x.cos()]

    def forward(function: Callable[..., Any], x: Tensor) -> Tensor:
        first, second = function(x)
        return (first * second.exp()).sum()

    expected = of(forward, both_ways)
    assert_equals_eager(of(forward, operator), [points().requires_grad_()], reference=expected)


def rounding(operator: Operator) -> nn.Module:
    torch.manual_seed(0)
    return Around(
        lambda layers, x: (operator(4 * layers[0](x)) * x).square().sum(), nn.Linear(WIDTH, WIDTH)
    )


def penalty(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the norm of a gradient."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), list(model.parameters()), allow_unused=True)


def test_a_derivative_of_its_own_is_kept_at_every_order() -> None:
    def rounded(x: Tensor) -> Tensor:
        return x.round()

    operator = new_operator("straight", rounded)
    operator.register_autograd(lambda context, gradient: gradient)
    lazyinline.decomposition(operator, check="values")(rounded)
    for use in (None, penalty):
        model = rounding(operator)
        assert_equals_eager(model, [points()], calls=1, use=use)
        gradient = model.get_parameter("layers.0.weight").grad
        assert use or (gradient is not None and gradient.any())


@both
def test_second_derivatives_go_through_rules(derivative: str) -> None:
    # The backward's own operator has no derivative, so that eager has no second one here.
    model, expected = (Net(one, depth=1) for one in (MADE[derivative]("second"), gate))
    assert_equals_eager(model, [points()], calls=1, use=penalty, reference=expected)


@pytest.mark.parametrize("train", [False, True])
@both
@pytest.mark.sweep(keep="own derivative-True")
def test_it_is_written_as_onnx(derivative: str, train: bool, tmp_path: Any) -> None:
    model = Net(MADE[derivative](f"onnx_{train}"))
    report = lazyinline.export_onnx(model, (points(),), tmp_path / "model.onnx", train=train)
    assert report.max_relative_error is not None
    assert report.max_relative_error < 1e-4


@both
@pytest.mark.sweep(keep="none")
def test_it_is_kept_on_disk_and_not_mistaken_for_a_changed_rule(derivative: str) -> None:
    def losses(factor: float) -> tuple[Tensor, Any]:
        def rule(x: Tensor, y: Tensor, scale: float) -> Tensor:
            return gate(x, y, scale) * factor

        operator = new_operator("kept", rule)
        if derivative == "own derivative":
            operator.register_autograd(lambda context, gradient: (gradient * factor, None, None))
        lazyinline.decomposition(operator, check="values")(rule)
        model = Net(operator, depth=1)
        compiled = lazyinline.compile(model, backend="inductor")
        compiled(points()).backward()
        weight = model.get_parameter("blocks.0.first.weight")
        assert weight.grad is not None
        return weight.grad, compiled.last_report.cache

    first, cold = losses(1.0)
    assert not cold.not_kept
    again, warm = losses(1.0)
    assert warm.num_made == 0
    assert warm.num_loaded == cold.num_made + cold.num_loaded
    assert torch.equal(again, first)
    other, changed = losses(0.5)
    assert changed.num_made > 0
    assert not torch.allclose(other, first)


def adding(operator: Operator, x: Tensor) -> Tensor:
    y = operator(x)
    y.add_(1)
    return x * y + operator(x).t().reshape(-1)[:1]  # type: ignore[no-any-return]


OUTSIDE = torch.tensor([0.5])
Rule = Callable[..., Any]


def contiguous(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


# A rule; its operator's kernel, the rule itself unless given; how the rule is checked.
ODD: dict[str, tuple[Rule, Rule | None, Any]] = {
    "returned itself": (lambda x: x.contiguous(), contiguous, True),
    "transposed": (lambda x: x.t().contiguous().exp().t(), torch.exp, False),
    "another shape": (lambda x: x.exp()[:1], torch.exp, False),
    "of literals": (lambda x: x * torch.tensor([2.0]), None, "values"),
    "of another tensor": (lambda x: x * OUTSIDE, None, "values"),
    "by value": (lambda x: x * 2 if x.sum() > 0 else x * 3, None, "values"),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_whatever_a_rule_does_results_are_those_of_the_operator(name: str, own: bool) -> None:
    """New memory in the operator's layout; what is more than its operands runs as in eager."""
    rule, kernel, check = ODD[name]
    kernel = kernel or rule
    schema = "(Tensor x) -> Tensor"
    operator = new_operator(f"{name.replace(' ', '_')}_{own}", kernel, schema=schema)
    is_dense = kernel is contiguous
    operator.register_fake(lambda x: x.new_empty(x.shape) if is_dense else torch.empty_like(x))
    if own:
        operator.register_autograd(lambda context, gradient: gradient)
    lazyinline.decomposition(operator, check=check)(rule)
    compiled = lazyinline.compile(of(adding, operator), backend="eager")
    for x in (points(), -points() - 1):
        before = x.clone()
        with torch.no_grad():
            assert_close(compiled(x), of(adding, operator)(x))
        assert torch.equal(x, before)
    if own and check == "values":
        x = points().requires_grad_()
        compiled(x).sum().backward()
        said = " ".join(str(compiled.last_report).split())
        assert re.search(r"The rule of .*test_decomposition\.py:\d+ <lambda>", said)
        assert "While executing" not in said
    if name == "another shape" and not own:
        with pytest.raises(lazyinline.CaptureError, match=r"gives f32\[1,8\].*f32\[4,8\]"):
            lazyinline.capture(of(adding, operator), (points(),))


def laid_out_by_columns(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x


WRONG: dict[str, tuple[Rule, str]] = {
    "values": (
        lambda x, y, scale=2.0: gate(x, y, scale * 1.001),
        r"another result: .*Greatest absolute difference: 0\.00\d+.*x=float32\[4",
    ),
    "default only": (lambda x, y, scale=2.0: gate(x, y, 2.0), r"another result: .*scale=1\.75"),
    "strides": (
        lambda x, y, scale=2.0: laid_out_by_columns(gate(x, y, scale)),
        r"gives strides \[\(1, 4\)\], the operator \[\(4, 1\)\]",
    ),
    "type": (
        lambda x, y, scale=2.0: gate(x, y, scale) * torch.ones(1, dtype=torch.float64),
        "another result: .*dtype.*torch.float64 != torch.float32",
    ),
    "shape": (
        lambda x, y, scale=2.0: gate(x, y, scale).flatten(),
        r"another result: .*shape.*\[16\].* != .*\[4, 4\]",
    ),
    "changing": (lambda x, y, scale=2.0: x.sigmoid_() * y * scale, "changes an operand in place"),
    "raising": (lambda x, y, scale=2.0: [][1], r"raises IndexError \(list index"),
    "in a tuple": (lambda x, y, scale=2.0: (gate(x, y, scale),), "another result: "),
    "no gradient": (
        lambda x, y, scale=2.0: gate(x, y.detach(), scale),
        "another gradient .*say check='values'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_refused(name: str) -> None:
    rule, said = WRONG[name]
    operator = with_derivative(f"wrong_{name.replace(' ', '_')}", rules=False)
    with pytest.raises(DecompositionError, match=said) as raised:
        lazyinline.decomposition(operator)(rule)
    assert re.search(r"test_decomposition\.py:\d+ <lambda>", str(raised.value))
    assert rule_of(operator._opoverload) is None


def test_examples_are_what_a_rule_is_checked_on() -> None:
    def product(x: Tensor, y: Tensor, places: list[int]) -> Tensor:
        return (x @ y)[places]

    operator = new_operator("examples", product)
    with pytest.raises(DecompositionError, match=r"nothing is made for places .*examples="):
        lazyinline.decomposition(operator)(product)
    operator.register_fake(lambda x, y, places: x.new_empty(len(places), y.shape[1]))
    x, y = torch.randn(3, 5), torch.randn(5, 2)

    def first(x: Tensor, y: Tensor, places: list[int]) -> Tensor:
        return product(x, y, [0])

    lazyinline.decomposition(operator, examples=[(x, y, [0])])(first)
    operator = new_operator("examples", product)
    with pytest.raises(DecompositionError, match=r"x=float32\[3, 5\].*places=\[1\]"):
        lazyinline.decomposition(operator, examples=[{"x": x, "y": y, "places": [1]}])(first)
    with pytest.raises(DecompositionError, match=r"itself: RuntimeError.* Given x=float32\[5, 2\]"):
        lazyinline.decomposition(operator, examples=[(y, y, [1])])(first)
    with pytest.raises(DecompositionError, match=r"examples=\[\(x,\)\]"):
        lazyinline.decomposition(operator, examples=[x])(first)


def test_an_operator_that_takes_nothing_that_can_be_made_asks_for_examples() -> None:
    def picky(x: Tensor) -> Tensor:
        raise ValueError("only on Tuesdays")

    with pytest.raises(DecompositionError, match=r"only on Tuesdays.*examples="):
        lazyinline.decomposition(new_operator("picky", picky))(picky)


def test_an_operator_whose_own_schema_or_fake_kernel_is_wrong_has_no_rule() -> None:
    def bump(x: Tensor) -> Tensor:
        return x.add_(1).clone()

    with pytest.raises(DecompositionError, match=r"itself: .*mutated"):
        lazyinline.decomposition(new_operator("bumping", bump))(lambda x: x + 1)

    operator = new_operator("halved", lambda x: x[:1] * 1, schema="(Tensor x) -> Tensor")
    rule = lazyinline.decomposition(operator)  # it need have no fake kernel
    rule(lambda x: x[:1] * 1)
    operator = new_operator("halved", lambda x: x[:1] * 1, schema="(Tensor x) -> Tensor")
    operator.register_fake(torch.empty_like)
    with pytest.raises(DecompositionError, match=r"itself: .*FakeTensor.*Shapes"):
        lazyinline.decomposition(operator)(lambda x: x[:1] * 1)


def test_a_rule_takes_what_the_operator_takes() -> None:
    operator = new_operator("signature")
    for rule in (
        lambda x, y: x,
        lambda y, x, scale=2.0: x,
        lambda x, y, *, scale=2.0: x,
        lambda *args: args[0],
    ):
        with pytest.raises(DecompositionError, match=r"does not take what .* float scale=2"):
            lazyinline.decomposition(operator)(rule)


def test_only_an_operator_that_leaves_its_operands_has_a_rule() -> None:
    bump = torch.library.custom_op(
        "lazyinline_rules::bump", lambda x: None, mutates_args=("x",), schema="(Tensor(a!) x) -> ()"
    )
    for target, said in (
        (bump, "changes what it is given"),
        (gate, "'gate' is no operator"),
        ("aten::add", "'str' is no operator"),
        (torch.ops.aten.add, r"has \d+ overloads .*torch|aten.*name one"),
        (torch.ops.aten.add.Tensor, "is PyTorch's"),
    ):
        with pytest.raises(DecompositionError, match=said):
            lazyinline.decomposition(target)
    with pytest.raises(DecompositionError, match="check='gradients' is unknown"):
        lazyinline.decomposition(new_operator("choice"), check="gradients")  # type: ignore[arg-type]


def test_a_second_rule_is_refused_and_the_first_run_again_is_not() -> None:
    operator = new_operator("twice")

    def defined(factor: float) -> Callable[..., Tensor]:
        def rule(x: Tensor, y: Tensor, scale: float = 2.0) -> Tensor:
            return gate(x, y, scale) * factor

        return rule

    lazyinline.decomposition(operator)(defined(1.0))
    again = defined(1.0)
    lazyinline.decomposition(torch.ops.lazyinline_rules.twice)(again)
    held = rule_of(torch.ops.lazyinline_rules.twice.default)
    assert held is not None
    assert held.function is again
    with pytest.raises(DecompositionError, match=r"has a rule already \(test_decomposition\.py:\d"):
        lazyinline.decomposition(operator)(gate)
    assert rule_of(new_operator("twice")._opoverload) is None  # the operator's cell, run again

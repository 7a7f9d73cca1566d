"""Contracts with private PyTorch: autograd, the minimum cut and optimizers."""

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.fx
from contracts import contract, passing, traced
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lazyinline.autodiff.forward_mode.torch_rules import _WRONG_NESTED
from lazyinline.autodiff.traces.joint_trace import CHANGED_IN_PLACE
from lazyinline.autodiff.traces.torch_interpreters import NOT_DIFFERENTIABLE
from lazyinline.frontend.torch_optimizer import StepOptimizer, _make_state, _settings_of
from lazyinline.reuse.ir.torch_updates import ADAM_STATE, SGD_STATE, adam_, sgd_

pytestmark = pytest.mark.smoke

aten = torch.ops.aten


@contract("torch._C._autograd._get_current_graph_task_keep_graph")
def test_a_running_backward_knows_whether_the_graph_is_kept() -> None:
    seen, is_kept = [], torch._C._autograd._get_current_graph_task_keep_graph
    ask = passing(lambda gradient: seen.append(is_kept()) or gradient)
    loss = ask.apply(torch.ones(2, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [True, False]


@contract("torch._C._will_engine_execute_node")
def test_a_running_backward_knows_where_it_goes_and_raises_for_what_was_asked_for() -> None:
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    seen: list[object] = []

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            return inputs[0].clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            seen.clear()
            for node, _ in ctx.next_functions:
                try:
                    seen.append(torch._C._will_engine_execute_node(node))
                except RuntimeError as error:
                    assert "leaf node" in str(error)
                    seen.append("asked")
            return gradient, gradient, gradient

    loss = Asking.apply(a, b, a.view_as(a)).sum()
    torch.autograd.grad(loss, b, retain_graph=True)
    assert seen == [False, "asked", False]
    torch.autograd.grad(loss, a, retain_graph=True)
    assert seen == ["asked", False, True]
    loss.backward()
    assert seen == [True, True, True]


@contract("torch._C._current_graph_task_id")
def test_each_backward_has_a_number() -> None:
    x, numbers = torch.ones(2, requires_grad=True), list[int]()
    for one in (x.sin(), x.cos()):
        one.register_hook(lambda _: numbers.append(torch._C._current_graph_task_id()))
        one.exp().sum().backward()
    assert len(set(numbers)) == 2
    assert torch._C._current_graph_task_id() == -1


@contract("._is_view")
def test_a_view_that_a_function_returns_refuses_changes_in_place() -> None:
    class Passed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x) if x._is_view() else x.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    x = torch.ones(2, requires_grad=True).sin()
    Passed.apply(x).mul_(2)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        Passed.apply(x[:1]).mul_(2)


@contract(
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch._C: _vmapmode_increment_nesting _vmapmode_decrement_nesting",
)
def test_cotangents_in_a_batch_are_told_and_may_be_left() -> None:
    seen, is_batched = list[Any](), torch._C._functorch.is_legacy_batchedtensor

    def backward(gradient: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="random"):
            torch.rand(2)
        torch._C._vmapmode_decrement_nesting()
        seen.append((is_batched(gradient), torch.rand(2)))
        torch._C._vmapmode_increment_nesting()
        return gradient * 2

    x, rows = torch.randn(3, requires_grad=True), torch.randn(2, 3)
    (found,) = torch.autograd.grad(passing(backward).apply(x), x, rows, is_grads_batched=True)
    torch.testing.assert_close(found, rows * 2)
    ((batched, drawn),) = seen
    assert batched and not is_batched(rows) and not is_batched(drawn)


def test_forward_mode_that_is_wrong_nested_is_still_so() -> None:
    """One that is right by now can have forward mode again: take its name off the list."""
    torch.manual_seed(0)
    lower = torch.eye(3).double() * 2 + torch.rand(3, 3).double().tril()
    reflections, scales = torch.geqrf(torch.randn(3, 3).double())
    direction, start = torch.randn(3, 3).double().tril(), torch.zeros((), dtype=torch.double)
    cases: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "cholesky_inverse": (torch.cholesky_inverse, lower),
        "linalg_householder_product": (
            lambda x: torch.linalg.householder_product(x, scales),
            reflections,
        ),
    }
    assert set(_WRONG_NESTED) == set(cases)

    def second(function: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
        def along(t: Tensor) -> Tensor:
            return function(point + t * direction).sin().sum()

        def slope(t: Tensor) -> Tensor:
            return torch.func.jvp(along, (t,), (torch.ones_like(t),))[1]

        nested = torch.func.jvp(slope, (start,), (torch.ones_like(start),))[1]
        return nested, torch.func.grad(torch.func.grad(along))(start)

    for name, case in cases.items():
        assert not torch.allclose(*second(*case)), name


@contract("torch.ops.aten: _linalg_det.default _linalg_slogdet.default")
def test_the_traced_derivative_of_a_determinant_is_by_singular_values() -> None:
    """Once it is not, no other operators need stand for it where gradients are differentiated.

    Before 2.15 the second one is then no number where singular values are equal to the bit.
    """
    det, logarithm = aten._linalg_det.default, aten._linalg_slogdet.default

    def second(operator: Callable[[Tensor], Tensor]) -> Any:
        def run(x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (first,) = torch.autograd.grad(operator(x), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), x)[0]

        return traced(run, torch.eye(3))

    by_singular_values = aten._linalg_svd.default
    assert by_singular_values in {node.target for node in second(lambda x: det(x)[0]).graph.nodes}
    by_logarithm = second(lambda x: logarithm(x)[1])
    assert by_singular_values not in {node.target for node in by_logarithm.graph.nodes}
    assert by_logarithm(torch.eye(3)).isfinite().all()
    x = torch.randn(2, 3, 3)
    (value, *factors), (sign, log, *others) = det(x), logarithm(x)
    torch.testing.assert_close((value, *factors), (sign * log.exp(), *others))


def test_the_functional_random_relu_has_a_derivative_of_the_wrong_slopes() -> None:
    """Once it has that of the slopes that it drew, no product needs to stand for it."""
    functional = aten.rrelu_with_noise_functional.default
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    result, slopes = functional(x, torch.full_like(x, 7.0), 0.1, 0.3, True)
    (found,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(result, x * slopes)
    assert not slopes.requires_grad and not torch.allclose(found, slopes)


@contract("torch.autograd._engine_run_backward")
def test_every_backward_passes_one_function_of_autograd() -> None:
    module: Any = torch.autograd
    x, seen, engine = torch.ones(2, requires_grad=True), [], module._engine_run_backward
    noting = lambda *args, **kwargs: seen.append((len(args), *kwargs)) or engine(*args, **kwargs)  # noqa: E731
    with mock.patch.object(module, "_engine_run_backward", noting):
        (x * 2).sum().backward()
        torch.autograd.backward((x * 2).sum())
        torch.autograd.grad((x * 2).sum(), x)
    of_backward = (5, "allow_unreachable", "accumulate_grad")
    assert seen == [of_backward, of_backward, (6, "accumulate_grad")]


@contract("torch._functorch.eager_transforms.grad_and_value_impl")
def test_gradients_of_torch_func_pass_one_function_however_imported() -> None:
    seen: list[Any] = []
    module = torch._functorch.eager_transforms
    noting = lambda *args: seen.append(args[1:3]) or (torch.ones(()), (torch.ones(()), None))  # noqa: E731
    kept, kept_both = (
        torch.func.grad(torch.sum, (0,)),
        torch.func.grad_and_value(torch.sum, 0, True),
    )
    with mock.patch.object(module, "grad_and_value_impl", noting):
        kept(torch.ones(2))
        kept_both(torch.ones(2))
    assert seen == [((0,), False), (0, True)]


def test_what_cannot_be_differentiated_is_refused_in_known_words() -> None:
    x, statistics = torch.randn(3, 2), torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match=NOT_DIFFERENTIABLE):
        torch.batch_norm(x, None, None, statistics, statistics, False, 0.1, 1e-5, False)
    x = torch.ones(2, requires_grad=True) * 1
    y = x.sin()
    x.mul_(2)
    with pytest.raises(RuntimeError, match=CHANGED_IN_PLACE):
        y.sum().backward()


def test_of_hooks_on_saved_tensors_the_innermost_count() -> None:
    seen = []
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda t: seen.append(t) or t, lambda t: t):
        with hooks(lambda t: t, lambda t: t):
            torch.ones(2, requires_grad=True).exp()
        assert not seen
        torch.ones(2, requires_grad=True).exp()
    assert len(seen) == 1


@contract("._use_count")
def test_a_node_that_adds_to_a_gradient_owns_the_tensor() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    other_names = [parameter, parameter.detach(), parameter.data]
    assert parameter._use_count() == 1
    node = parameter.expand(2, 2).grad_fn.next_functions[0][0]
    assert parameter._use_count() == 2
    handle = node.register_hook(lambda *_: None)
    del node
    assert parameter._use_count() == 1, "nobody holds the node, so its hooks are gone with it"
    parameter.sum().backward()
    parameter.grad.add_(1)
    assert parameter._use_count() == 1
    del handle, other_names


@contract("._backward_hooks", "._post_accumulate_grad_hooks")
def test_tables_of_hooks_on_a_tensor() -> None:
    """There is none before the first hook; one that was emptied stays, and is used again."""
    tensor = torch.zeros(2, requires_grad=True)
    for name, put in (
        ("_backward_hooks", tensor.register_hook),
        ("_post_accumulate_grad_hooks", tensor.register_post_accumulate_grad_hook),
    ):
        assert getattr(tensor, name) is None
        handle = put(lambda _: None)
        table = getattr(tensor, name)
        assert len(table) == 1
        handle.remove()
        assert not table and getattr(tensor, name) is table


def joint(flat: list[Tensor]) -> list[Tensor]:
    """A forward ``sin(x * rand) @ w``, and its backward."""
    x, w, tangent = flat
    noise = torch.rand(2, 2)
    h = torch.sin(x * noise)
    grad_h = tangent @ w.t()
    return [h @ w, grad_h * torch.cos(x * noise) * noise, h.t() @ tangent]


def named_as_partitioners_ask(module: torch.fx.GraphModule) -> None:
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, name in zip(placeholders, ("primals_1", "primals_2", "tangents_1"), strict=True):
        node.name = node.target = name
    for node in module.graph.nodes:
        if "tangents_1" in [n.name for n in node.all_input_nodes]:
            break
        node.meta["partitioner_tag"] = "is_forward"
    module.recompile()


@contract("torch._functorch.partitioners.min_cut_rematerialization_partition")
def test_a_minimum_cut_splits_a_joint_graph_and_draws_once() -> None:
    inputs = [torch.randn(2, 2) for _ in range(3)]
    module = traced(joint, inputs)
    named_as_partitioners_ask(module)
    split = torch._functorch.partitioners.min_cut_rematerialization_partition
    forward, backward = split(module, (), num_fwd_outputs=1)
    torch.manual_seed(0)
    output, *saved = forward(*inputs[:2])
    torch.manual_seed(0)
    expected = joint(inputs)
    torch.manual_seed(1)  # what the backward drew would be other numbers
    names = [n.name for n in forward.graph.output_node().args[0]][1:]
    known = dict(zip(("primals_1", "primals_2", "tangents_1"), inputs, strict=True))
    known |= dict(zip(names, saved, strict=True))
    given = backward.graph.find_nodes(op="placeholder")
    assert all("val" in n.meta for n in given) and "tangents_1" in [n.name for n in given]
    torch.testing.assert_close([output, *backward(*(known[n.name] for n in given))], expected)


@contract("torch: _fused_adam_ _fused_adamw_ _fused_sgd_ _foreach_add_")
def test_our_updates_in_place_have_the_bits_of_fused_optimizers() -> None:
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"maximize": True}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ]
    for kind, options in kinds:
        theirs = nn.Parameter(torch.randn(7, 33))
        ours = theirs.detach().clone()
        optimizer = kind([theirs], lr=1e-2, fused=True, **options)
        state: dict[str, Any] = {}
        (group,) = optimizer.param_groups
        is_adam = "betas" in group
        names = ADAM_STATE if is_adam else SGD_STATE
        for name in names:
            _make_state(state, name, ours)
        numbers = torch.tensor(_settings_of(group), dtype=torch.float64)
        for _ in range(3):
            theirs.grad = torch.randn(7, 33)
            rows = [[ours], [theirs.grad], *([state[name]] for name in names)]
            flags = (kind is torch.optim.AdamW if is_adam else group["nesterov"], group["maximize"])
            (adam_ if is_adam else sgd_)(*rows, numbers, *flags)
            optimizer.step()
        assert torch.equal(theirs, ours)
        found = optimizer.state[theirs]
        assert found.keys() == state.keys()
        for name in names:
            assert torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


@contract("._wrapped_by_lr_sched")
def test_a_scheduler_marks_its_wrapper_of_step_and_asks_whether_that_was_called() -> None:
    optimizer = sgd()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert hasattr(vars(optimizer)["step"], "_wrapped_by_lr_sched")
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer._opt_called = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


@contract("._found_inf_per_device")
def test_a_scaler_skips_an_update_for_what_is_set_among_what_it_found() -> None:
    for gradient in (torch.ones(2), None):  # also where it found nothing to look at
        optimizer, scaler = sgd(), torch.amp.GradScaler("cpu", init_scale=8.0)
        (parameter,) = optimizer.param_groups[0]["params"]
        scaler.scale(torch.ones(()))
        parameter.grad = gradient
        scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        assert len(found) == (gradient is not None)
        found.setdefault(torch.device("cpu"), torch.zeros(())).fill_(1)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0 and torch.equal(parameter, torch.ones(2))


def test_hooks_of_an_optimizer_are_in_two_tables_and_those_of_all_in_two() -> None:
    optimizer = sgd()
    assert not StepOptimizer(optimizer)._have_hooks()
    registers: list[Any] = [
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ]
    for register in registers:
        handle = register(lambda *_: None)
        assert StepOptimizer(optimizer)._have_hooks()
        handle.remove()

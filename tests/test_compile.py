"""A compiled module in place of its model: the same numbers, the same contract with autograd."""

import copy
import functools
import gc
import io
import itertools
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from apart import in_threads
from comparing import (
    assert_close,
    assert_equals_eager,
    assert_same_gradients,
    gradient_errors,
    gradients,
    relative_error,
    seed_all,
    sgd,
    twin,
)
from decoders import DecoderBlock, GptBlock, gpt, llama
from models import Made, MarkedBlock, Net, batch, block
from torch import Tensor, distributions, nn
from torch.utils.checkpoint import checkpoint

import lazyinline
from lazyinline import CompileReport, lazy_inline
from lazyinline.backend.link import placement
from lazyinline.frontend.compiled_module import CompiledModule
from lazyinline.frontend.compiler import Compiler
from lazyinline.frontend.dispatch.dispatcher import dispatcher_of
from lazyinline.frontend.options import Options

lazy_inline(DecoderBlock)
lazy_inline(GptBlock)

SIZES: dict[str, Any] = {"hidden": 32, "num_heads": 2, "vocab": 61, "seq": 8, "batch": 2}
Compiles = list[CompileReport]
Make = Callable[[], nn.Module]


def normed() -> nn.Module:
    return MarkedBlock(norm=True)


def net(num_blocks: int = 2) -> Net:
    """Calls of one closure, and a head."""
    return Net(normed, num_blocks, num_outputs=4)


def then(run: Callable[[Any, Tensor], Any], **attributes: Any) -> Make:
    """Makes models with a forward that uses a block; keywords become attributes."""
    return lambda: block(run, mark=False)(block=normed(), linear=None, **attributes)


COMPILERS = {name: Compiler(Options(backend=name)) for name in ("eager", "inductor")}


class Side(NamedTuple):
    """What runs a model, compiled or by eager, and the model."""

    run: Callable[..., Any]
    model: Any

    def train(self, *args: Any) -> Tensor:
        loss = self.run(*args).square().mean()
        loss.backward()
        return loss.detach()


def make(model_class: Make, backend: str, *, in_place: bool = False) -> tuple[Side, Side]:
    """Returns a compiled model, and a twin for eager.

    All of them take their kernels from one compiler, which makes each only once.
    """
    torch.manual_seed(0)
    model = model_class()
    expected = twin(model)
    compiled = lazyinline.compile(model, backend=backend, in_place=in_place)  # type: ignore[call-overload]
    calls = dispatcher_of(compiled)
    assert calls is not None
    calls._compiler = COMPILERS[backend]
    return Side(compiled, model), Side(expected, expected)


def assert_trained_alike(sides: tuple[Side, Side], *args: Any) -> None:
    found, wanted = (side.train(*args) for side in sides)
    assert_close(found, wanted)
    assert_same_gradients(sides[0].model, sides[1].model)


# AdamW's first steps move every weight by about lr times the sign of its gradient, and where the
# gradient is nothing but rounding, the sign is noise. On this decoder eager itself, run in float32
# and in float64, drifts apart by lr * 0.01 in five steps (1.4e-6 at 1e-4, 9e-6 at 1e-3). So float32
# is compared at a lr whose noise is well below the tolerance, and the same training is compared in
# float64 at a hundred times that lr, where nothing hides a wrong gradient. The gradient of the bias
# of keys is rounding alone (1e-9), whose sign depends on the CPU: eps lies far above it, and far
# below all others.
@pytest.mark.parametrize(
    ("build", "dtype", "lr", "tolerance"),
    [
        (llama, torch.float32, 1e-4, 1e-5),
        (gpt, torch.float32, 1e-4, 1e-5),
        (gpt, torch.float64, 1e-2, 1e-9),
    ],
)
@pytest.mark.smoke
@pytest.mark.sweep(keep=["eager-llama", "eager-gpt-dtype2"])
def test_loss_and_gradients_equal_eager_in_steps_of_adamw(
    backend: str, build: Callable[..., Any], dtype: torch.dtype, lr: float, tolerance: float
) -> None:
    model, args = build(3, **SIZES)
    adamw = functools.partial(torch.optim.AdamW, lr=lr, eps=1e-6)
    options: dict[str, Any] = {"backend": backend, "tolerance": tolerance}
    assert_equals_eager(model.to(dtype), args, calls=6, optimizer=adamw, **options)


def norm_of_channels(self: Any, image: Tensor) -> Tensor:
    """An image whose channels are normalised where they lie, as ConvNeXt and Swin begin."""
    return self.norm(self.patches(image).permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * self.weight


# Kernels that read one operand along rows and another along columns go through tiles: with 16
# channels and 64 places nothing is left beside the tiles, with 7 or 8 channels something is.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("channels", [7, 8, 16])
@pytest.mark.sweep(keep=["7-torch.float32", "16-torch.float64"])
def test_kernels_across_rows_sum_gradients_as_eager(channels: int, dtype: torch.dtype) -> None:
    seed_all()
    image = torch.randn(2, 3, 32, 32, dtype=dtype)
    model = Made(
        norm_of_channels,
        patches=nn.Conv2d(3, channels, 4, 4),
        norm=nn.LayerNorm(channels),
        weight=nn.Parameter(torch.randn(2, channels, 8, 8)),
    ).to(dtype)
    assert_equals_eager(model, (image,), backend="inductor", optimizer=sgd)


def test_a_module_with_a_forward_of_its_own_is_compiled_once() -> None:
    """As libraries give it one, to run something around it."""
    model = Net()
    own = model.blocks[0].forward
    model.blocks[0].forward = lambda x: own(x) + 1  # type: ignore[method-assign, assignment]
    compiled = lazyinline.compile(model, backend="eager")
    for seed in range(3):
        assert_close(compiled(batch(seed=seed)), model(batch(seed=seed)))
    assert compiled.last_report is not None and compiled.last_report.num_compiles == 1


def relative_shift(self: Any, x: Tensor) -> Tensor:
    """Shifts scores in place and reads them through two reshapes, as Funnel does."""
    shifted = self.scores(x).reshape(32, 16)[1:].reshape(16, 31)[:, :16]
    shifted *= self.mask
    return shifted.softmax(-1)


def test_a_tensor_that_is_padded_and_reshaped_again_and_again_is_compiled() -> None:
    seed_all()
    # With four dimensions, as in Funnel, its backward's kernel was not written in ten minutes.
    options: Any = {"backend": "inductor", "optimizer": sgd, "fallback": "error"}
    assert_equals_eager(
        Made(relative_shift, scores=nn.Linear(8, 32), mask=nn.Parameter(torch.ones(16, 16))),
        (torch.randn(16, 8),),
        **options,
    )


@pytest.mark.sweep(keep="eager")
def test_an_assertion_in_a_forward_that_trains_raises_as_in_eager(backend: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        torch._assert_async((x > 0).all(), "not positive")
        return self.linear(x).tanh()  # type: ignore[no-any-return]

    model = Made(forward, linear=nn.Linear(4, 4))
    compiled = assert_equals_eager(model, (batch().abs(),), backend=backend).compiled
    assert not compiled.last_report.ran_eagerly
    step = lazyinline.compile_step(twin(model), loss_fn=torch.sum, backend=backend)
    step(batch().abs())
    for run in (compiled, step, model):
        with pytest.raises(RuntimeError, match="not positive"):
            run(-batch().abs())


@pytest.mark.sweep(keep="eager")
def test_a_distribution_in_a_forward_is_compiled_with_its_checks(backend: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        scale = self.linear(x).exp()
        drawn = distributions.Normal(x, scale, validate_args=True).rsample()
        around = distributions.Uniform(-scale, scale, validate_args=True)
        return (drawn + around.log_prob(x * 0)).mean()

    model = Made(forward, linear=nn.Linear(4, 4))
    compiled = assert_equals_eager(model, (batch(),), backend=backend).compiled
    assert not compiled.last_report.ran_eagerly
    step = lazyinline.compile_step(twin(model), backend=backend)
    step(batch())
    for run in (compiled, step, model):
        with pytest.raises(ValueError, match=r"(?s)Expected .*loc .*Normal.* invalid values"):
            run(torch.full_like(batch(), math.nan))
    assert step(batch()).isfinite()


def test_a_distributions_error_that_a_forward_catches_is_caught() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.linear(x).exp().sin()
        try:
            return distributions.Normal(h, h + 2, validate_args=True).mean * 2
        except ValueError:
            return h.nan_to_num()

    model = Made(forward, linear=nn.Linear(4, 4))
    compiled = lazyinline.compile(model, backend="eager")
    for x in (batch(), torch.full_like(batch(), math.nan), batch()):
        assert_close(compiled(x), model(x))


def test_a_covariance_is_checked_in_the_program() -> None:
    def forward(self: Any, x: Tensor, matrix: Tensor) -> Tensor:
        return distributions.MultivariateNormal(
            self.linear(x), matrix, validate_args=True
        ).rsample()

    model, bent, whole = Made(forward, linear=nn.Linear(4, 4)), torch.eye(4), torch.eye(4) + 0.1
    bent[0, 1] = 0.5
    compiled = assert_equals_eager(model, (batch(), whole), backend="eager").compiled
    assert not compiled.last_report.ran_eagerly
    for run in (compiled, model):
        for matrix in (bent, -whole, torch.stack([whole, bent])):
            with pytest.raises(ValueError, match=r"to satisfy.* PositiveDefinite"):
                run(batch(1)[0], matrix)


class Asking(distributions.Distribution):
    """A user's distribution that asks for the setting itself."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = distributions.constraints.positive

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return -value


DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "made": lambda x: distributions.Normal(x, x).mean,
    "held": distributions.Exponential(torch.ones(4)).log_prob,
    "own": Asking().log_prob,
}


@pytest.mark.parametrize("way", DISTRIBUTIONS)
def test_a_change_of_whether_distributions_check_is_followed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Made(lambda self, x: self.linear(x) + DISTRIBUTIONS[way](x), linear=nn.Linear(4, 4))
    runs = (
        lazyinline.compile(model, backend="eager"),
        lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager"),
    )
    for checks in (False, True, False):
        monkeypatch.setattr(distributions.Distribution, "_validate_args", checks)
        for run in (model, *runs):
            said = pytest.raises(ValueError, match=r"GreaterThan|support")
            with said if checks else nullcontext():
                run(-batch().abs())


def test_a_model_without_distributions_is_not_compiled_again_where_their_checks_end(
    monkeypatch: pytest.MonkeyPatch, compiles: Compiles
) -> None:
    model = nn.Linear(4, 4)
    compiled = lazyinline.compile(model, backend="eager")
    for checks in (True, False):  # as the first use of Dynamo ends them
        monkeypatch.setattr(distributions.Distribution, "_validate_args", checks)
        assert_close(compiled(batch()), model(batch()))
    assert len(compiles) == 1


def test_modes_and_shapes_are_compiled_once_each_and_reused(compiles: Compiles) -> None:
    model = Net(lambda: MarkedBlock(norm=True, dropout=0.5))
    compiled = lazyinline.compile(model, backend="eager", dynamic=False)
    x, short, bias = batch(), batch(2), batch(1)[0]

    def visit() -> None:
        model.train()
        compiled(x, bias=bias)
        compiled(short, bias=bias)
        compiled.eval()
        assert not model.training and not model.blocks[0].training
        assert_close(compiled(x, bias=bias), model(x, bias=bias))
        with torch.no_grad():
            assert_close(compiled(x), model(x))
        with torch.inference_mode():
            assert_close(compiled(x), model(x))

    for _ in range(2):
        visit()
        assert len(compiles) == 5
    assert [report.train for report in compiles] == [True, True, True, False, False]
    model.blocks[0].train()  # one block alone
    compiled(x, bias=bias)
    assert len(compiles) == 6


def test_layouts_that_differ_only_in_strides_or_grad_are_told_apart(compiles: Compiles) -> None:
    ours, theirs = make(net, "eager")
    x = batch(4)
    for variant in (x, x.t(), x.t().contiguous().t(), x[::2], x.clone().requires_grad_()):
        assert_close(ours.run(variant), theirs.run(variant))
    assert len(compiles) == 4  # the first and the third are one layout


def two_forwards_before_a_backward_in_any_order(side: Side) -> None:
    outs = [side.run(batch(seed=seed)).square().mean() for seed in (1, 2, 3)]
    outs[1].backward()
    outs[0].backward()
    fourth = side.run(batch(seed=1)).exp().sum()
    outs[2].backward()
    fourth.backward()


def retaining_the_graph_twice_and_then_freeing_it(side: Side) -> None:
    loss = side.run(batch()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    other = side.run(batch(seed=2)).sum()  # may not disturb what is retained
    loss.backward()
    other.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def a_second_backward_without_retaining(side: Side) -> None:
    out = side.run(batch())
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def a_loss_made_of_two_calls(side: Side) -> None:
    (side.run(batch(seed=1)) * side.run(batch(seed=2))).sum().backward()


def gradients_accumulated_over_micro_batches(side: Side) -> None:
    for seed in range(3):
        (side.run(batch(seed=seed)).square().mean() / 3).backward()


def an_input_that_requires_grad_and_is_no_leaf(side: Side) -> Any:
    x, bias = batch().requires_grad_(), batch(1, seed=4)[0].requires_grad_()
    side.run(x * 2, bias=bias).square().sum().backward()
    return x.grad, bias.grad


def one_tensor_passed_twice_gets_the_sum(side: Side) -> Any:
    x = batch().requires_grad_()
    side.run(x, bias=x).square().sum().backward()
    return x.grad


def autograd_grad_for_a_few_parameters(side: Side) -> Any:
    wanted = [side.model.head.weight, side.model.blocks[0].up.bias]
    found = torch.autograd.grad(side.run(batch()).exp().sum(), wanted)
    assert all(p.grad is None for p in side.model.parameters())
    return found


def an_output_used_three_times_in_the_loss(side: Side) -> None:
    out = side.run(batch())
    (out.exp().sum() + out.square().mean() + out[0].sum()).backward()


def a_hook_on_a_parameter_that_changes_its_gradient(side: Side) -> None:
    handle = side.model.head.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    side.train(batch())
    handle.remove()


def gradients_clipped_once_each(side: Side) -> None:
    side.train(batch())
    torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1e-3)


def a_call_inside_a_checkpoint(side: Side) -> None:
    x = batch().requires_grad_()
    checkpoint(side.run, x * 2, use_reentrant=False).square().sum().backward()


def a_call_inside_a_reentrant_checkpoint(side: Side) -> None:
    x = batch().requires_grad_()
    checkpoint(side.run, x * 2, use_reentrant=True).square().sum().backward()


def hooks_on_saved_tensors_that_see_tensors_only(side: Side) -> None:
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = side.run(batch()).square().sum()
    loss.backward()
    assert all(type(tensor) in (Tensor, nn.Parameter) for tensor in seen)


def anomaly_mode(side: Side) -> None:
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        side.train(batch())
        with pytest.raises(RuntimeError, match="nan"):
            side.run(batch() * float("nan")).sum().backward()
    side.model.zero_grad()
    side.train(batch())


CONTRACT = [
    *(two_forwards_before_a_backward_in_any_order, retaining_the_graph_twice_and_then_freeing_it),
    *(a_second_backward_without_retaining, a_loss_made_of_two_calls, gradients_clipped_once_each),
    *(gradients_accumulated_over_micro_batches, an_input_that_requires_grad_and_is_no_leaf),
    *(one_tensor_passed_twice_gets_the_sum, autograd_grad_for_a_few_parameters),
    *(an_output_used_three_times_in_the_loss, a_hook_on_a_parameter_that_changes_its_gradient),
]
# These want a model of their own: what compiles it meets what stands around the call.
AROUND_THE_FIRST_CALL = [
    *(a_call_inside_a_checkpoint, a_call_inside_a_reentrant_checkpoint, anomaly_mode),
    hooks_on_saved_tensors_that_see_tensors_only,
]
WAYS = {"compiled-eager": False, "compiled-inductor": False, "in place-eager": True}


def sides_of(way: str) -> tuple[Side, Side]:
    return make(net, way.partition("-")[2], in_place=WAYS[way])


@functools.cache
def compiled_once(way: str) -> tuple[Side, Side]:
    if way != "overlaid":
        return sides_of(way)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_MIN_HOST_BYTES", "ALIGNMENT"):
            patch.setattr(placement, name, 4)
        sides = make(net, "inductor")
        sides[0].train(batch())
    dispatcher: Any = dispatcher_of(sides[0].run)
    assert dispatcher.entries.first._compiled.runtime.program.overlay.guests
    return sides


@pytest.mark.parametrize(
    ("does", "way"),
    [
        *itertools.product([*CONTRACT, *AROUND_THE_FIRST_CALL], WAYS),
        *((does, "overlaid") for does in CONTRACT),  # activations lie where gradients will
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
@pytest.mark.sweep(
    keep=[
        *("compiled-eager", "any_order-in place", "reentrant_checkpoint-in place"),
        *(f"{does.__name__}-overlaid" for does in CONTRACT[:6]),
    ]
)
def test_autograd_is_kept_to_as_by_eager(does: Callable[[Side], Any], way: str) -> None:
    ours, theirs = (sides_of if does in AROUND_THE_FIRST_CALL else compiled_once)(way)
    ours.model.zero_grad(), theirs.model.zero_grad()
    found, wanted = does(ours), does(theirs)
    assert_close(found, wanted)
    errors = gradient_errors(gradients(ours.model), gradients(theirs.model))
    assert all(error <= 1e-5 for error in errors.values()), errors
    assert wanted is not None or any(p.grad is not None for p in theirs.model.parameters())
    reason = lazyinline.last_report(ours.run).ran_eagerly
    around = "torch.utils.checkpoint is around it" if does is a_call_inside_a_checkpoint else ""
    assert reason.partition(":")[0] == around


@pytest.mark.sweep(keep="eager")
def test_gradients_with_one_memory_are_given_out_apart(backend: str) -> None:
    # Eager itself is no reference: it hands out views of one gradient, adds to each in place, and
    # gives each parameter the gradients of all.
    add = lambda self, x: x + self.a.view(3, 4) + self.b.view(3, 4) + self.c  # noqa: E731
    a, b, c = (nn.Parameter(torch.randn(shape)) for shape in ((2, 6), (12,), (3, 4)))
    ours, _ = make(lambda: Made(add, a=a, b=b, c=c), backend)
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    kept = first.clone()
    for seed in (first, second, first):
        ours.run(batch()).backward(seed)
    assert torch.equal(first, kept), "the caller's own gradient was added to"
    for parameter in ours.model.parameters():
        assert relative_error(parameter.grad.view(3, 4), 2 * first + second) <= 1e-6
    addresses = {p.grad.untyped_storage().data_ptr() for p in ours.model.parameters()}
    assert len(addresses) == 3


def change_parameter(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model.head.weight.mul_(2)


def change_block_parameter(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model.blocks[1].down.weight.add_(1)


def step_optimizer(model: nn.Module, x: Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    sgd(model.parameters()).step()
    model.zero_grad()


def change_input(model: nn.Module, x: Tensor) -> None:
    x.mul_(2)


class FlatNet(Net):
    """The input and the first weights are needed only through views of them."""

    def __init__(self) -> None:
        super().__init__(normed)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.head(x.view(1, -1, 4).flatten(0, 1)).tanh()


def is_refused(loss: Tensor) -> bool:
    """Says whether a backward finds that something it needs was changed."""
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return True
    return False


@pytest.mark.parametrize("model_class", [net, FlatNet])
@pytest.mark.parametrize(
    "change", [change_parameter, change_block_parameter, step_optimizer, change_input]
)
@pytest.mark.sweep(keep=["eager", "inductor-change_parameter-net"])
def test_a_saved_tensor_changed_before_backward_is_refused_as_in_eager(
    backend: str, change: Callable[..., None], model_class: Make
) -> None:
    refused = []
    for side in make(model_class, backend):
        h = batch().requires_grad_() * 1
        out = side.run(h)
        change(side.model, h.detach())
        refused.append(is_refused(out.square().sum()))
    # Refusing more than eager does is safe; fewer is a wrong gradient.
    assert refused[0] or not refused[1]
    assert refused[1] or change in (change_block_parameter, change_input)


@pytest.mark.sweep(keep="eager")
def test_a_dropped_forward_frees_what_it_kept(backend: str) -> None:
    ours, _ = make(net, backend)
    ours.train(batch())
    gc.collect()
    gc.disable()  # freed by reference counts, not by luck
    try:
        x = batch()
        kept, result = weakref.ref(x), ours.run(x)
        node = weakref.ref(result.grad_fn)
        del x
        assert kept() is not None
        del result
        assert kept() is None and node() is None
        x = batch()
        kept = weakref.ref(x)
        loss = ours.run(x).sum()
        del x
        loss.backward()
        assert kept() is None, "freed with the graph, although the loss still lives"
    finally:
        gc.enable()


def gradients_of(side: Side, x: Tensor) -> Any:
    return torch.autograd.grad(side.run(x).square().sum(), list(side.model.parameters()))


@pytest.mark.sweep(keep="inductor")
def test_threads_share_a_compiled_module(backend: str, compiles: Compiles) -> None:
    ours, theirs = make(net, backend)
    wanted = [gradients_of(theirs, batch(seed=i)) for i in range(3)]

    def work(index: int) -> list[Any]:
        return [gradients_of(ours, batch(seed=index)) for _ in range(5)]

    for index, found in enumerate(in_threads(work)):
        for grads in found:
            assert_close(grads, wanted[index])
    assert len(compiles) == 1, "threads that wait for a compile use what it made"


def test_threads_compile_different_modules_at_once() -> None:
    made = [make(net, "eager") for _ in range(3)]
    in_threads(lambda index: assert_trained_alike(made[index], batch(seed=index)))


def through_a_file(compiled: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_a_copy_is_a_module_of_its_own_with_the_same_options(copied: Callable[..., Any]) -> None:
    ours, theirs = make(net, "eager")
    wanted = theirs.run(batch())
    ours.run(batch())
    other = copied(ours.run)
    assert isinstance(other, CompiledModule)
    assert_close(other(batch()), wanted)
    assert other.last_report.backend == "eager"
    assert other.last_report.num_block_calls == 2
    with torch.no_grad():
        other.head.weight.zero_()
        other.head.bias.fill_(7)
    assert_close(ours.run(batch()), wanted)
    assert torch.equal(other(batch()), torch.full((3, 4), 7.0))

"""What a forward's Python may do: it gives eager's numbers or is refused, never silently wrong.

Each model below is run twice on the same inputs, by eager and compiled, and all that can be seen
afterwards is compared: results, gradients, buffers, parameters, inputs, and both random states.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from comparing import assert_close, assert_same_buffers, gradient_errors, gradients, twin
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import lazyinline
from lazyinline import CaptureError, LazyInlineError
from lazyinline.reuse import torch_pytree


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.log: list[Any] = []
        self.cache: dict[Any, Any] = {}


Forward = Callable[[Any, Tensor], Any]


def model_of(forward: Forward) -> nn.Module:
    """Returns two linear layers with this forward."""
    torch.manual_seed(1)
    model = type("Model", (Linears,), {"forward": forward})()
    assert isinstance(model, nn.Module)
    return model


class Seen(NamedTuple):
    results: list[Any]
    gradients: dict[str, Tensor | None]
    inputs: list[Tensor]
    parameters: list[Tensor]
    generator: Tensor
    python_random: float


def run_twice(run: Callable[..., Any], model: nn.Module, x: Tensor) -> Seen:
    torch.manual_seed(5)
    random.seed(5)
    x = x.clone()
    results = []
    for _ in range(2):
        leaves, _ = torch_pytree.flatten(run(x))
        parts = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        weighted = [(t * torch.linspace(1, 2, t.numel()).view(t.shape)).sum() for t in parts]
        if weighted:
            torch.stack(weighted).sum().abs().backward()
        results.append([t.detach().clone() if isinstance(t, Tensor) else t for t in leaves])
    parameters = [p.detach() for p in model.parameters()]
    generator = torch.get_rng_state()
    return Seen(results, gradients(model), [x], parameters, generator, random.random())


def assert_equals_eager(model: nn.Module, x: Tensor, backend: str) -> None:
    expected = twin(model)
    want = run_twice(expected, expected, x)
    seen = run_twice(lazyinline.compile(model, backend=backend), model, x)
    assert_close(seen.results, want.results)
    wrong = {
        name: error
        for name, error in gradient_errors(seen.gradients, want.gradients).items()
        if not error <= 2e-5
    }
    assert not wrong, f"gradients differ: {wrong}"
    assert_close([seen.inputs, seen.parameters], [want.inputs, want.parameters])
    assert_same_buffers(model, expected)
    assert torch.equal(seen.generator, want.generator), "the generator moved differently"
    assert seen.python_random == want.python_random


# ---- in-place operators -----------------------------------------------------------------------


def assign_to_a_slice(self: Any, x: Tensor) -> Tensor:
    out = torch.zeros(4, 16)
    out[:, :8] = self.first(x)
    return out * 2


def write_through_a_view(self: Any, x: Tensor) -> Tensor:
    h = torch.zeros(8, 8)
    h[2:6].copy_(self.first(x))
    return (h * 2).tanh()


def read_through_a_view_made_before(self: Any, x: Tensor) -> Tensor:
    h = x.clone()
    view = h.view(-1)
    h.add_(self.first(x))
    return view * 2


def write_under_no_grad(self: Any, x: Tensor) -> Tensor:
    h = self.first(x).clone()
    with torch.no_grad():
        h[:, :2] = 0
    return self.second(h)


def change_the_input(self: Any, x: Tensor) -> Tensor:
    x.mul_(2)
    y: Tensor = self.first(x)
    return y


def fill_where(self: Any, x: Tensor) -> Tensor:
    h: Tensor = self.first(x)
    return h.masked_fill_(x > 0, 0.5).exp()


def relu_in_place(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    result: Tensor = self.second(F.relu_(h)) + h
    return result


def transpose_in_place(self: Any, x: Tensor) -> Tensor:
    h: Tensor = self.first(x)
    return h.t_().exp()


def count_in_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.count.add_(1)
    y: Tensor = self.first(x) * self.count
    return y


def count_with_augmented_assignment(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    y: Tensor = self.first(x) * self.count
    return y


def read_a_buffer_before_and_after_a_write(self: Any, x: Tensor) -> Any:
    before = self.first(x) + self.count
    with torch.no_grad():
        self.count.mul_(0.9).add_(x.mean())
    return before, self.second(x) + self.count


def scatter_and_accumulate(self: Any, x: Tensor) -> Tensor:
    index = torch.arange(8).expand(4, 8).contiguous() // 2
    h = torch.zeros(4, 8).scatter_add_(1, index, self.first(x))
    rows = torch.tensor([0, 1])
    return h + torch.zeros(4, 8).index_put_((rows,), self.second(x)[:2], accumulate=True)


# ---- random numbers ---------------------------------------------------------------------------


def draw_many_kinds(self: Any, x: Tensor) -> Tensor:
    a, b = torch.rand(4, 8), torch.randn(8)
    h = F.dropout(self.first(x) * a + b, 0.3)
    order = torch.randint(0, 8, (4,))
    h = F.dropout(self.second(h).tanh(), 0.5)[:, order]
    return h + torch.rand_like(h) + torch.bernoulli(torch.full((4,), 0.5)) + torch.randperm(4)


def draw_what_nobody_reads(self: Any, x: Tensor) -> Tensor:
    torch.rand(3)
    return F.dropout(self.first(x).tanh().exp(), 0.5)


def draw_early_and_use_late(self: Any, x: Tensor) -> Any:
    a = torch.rand(4, 8)
    h = self.first(x).tanh().exp()
    b = torch.rand(4, 8)
    return (h * b).exp().sum(0) + (a * 2).exp(), F.dropout(h, 0.5) * b


def draw_in_place(self: Any, x: Tensor) -> Tensor:
    noise = torch.empty(4, 8).uniform_() + torch.empty(8).bernoulli_(0.5)
    result: Tensor = self.first(x) * noise + torch.zeros(4, 8).normal_()
    return result


def drop_in_another_layout(self: Any, x: Tensor) -> Tensor:
    h = F.dropout(self.first(x).t(), 0.5)  # the mask is drawn in the order of the memory
    return F.dropout(h.t(), 0.3, inplace=True)


def draw_in_another_type_or_layout(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    odds = h.detach().t().double().sigmoid()
    mask = torch.bernoulli(odds) + torch.bernoulli(
        odds * 2, p=0.3
    )  # in a contiguous tensor's order
    mask = mask + torch.empty(4, 8).t().bernoulli_(0.4) + torch.empty(4, 8).t().random_(1, 5)
    mask = mask + torch.empty(8, 4).random_(3, None).log()
    result: Tensor = h * mask.t() + torch.bernoulli(torch.ones(8, dtype=torch.int32), p=0.5)
    return result


def draw_for_gumbel_and_alpha(self: Any, x: Tensor) -> Tensor:
    h = F.gumbel_softmax(self.first(x), hard=True) + F.rrelu(self.second(x), training=True)
    return F.alpha_dropout(h, 0.3, training=True)


def attend_with_dropout(self: Any, x: Tensor) -> Tensor:
    q = self.first(x).view(1, 2, 4, 4)
    k = self.second(x).view(1, 2, 4, 4)
    return F.scaled_dot_product_attention(q, k, q, dropout_p=0.3, is_causal=True)


# ---- autograd ---------------------------------------------------------------------------------


def round_straight_through(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    result: Tensor = h + (h.round() - h).detach() + self.second(h.detach())
    return result


def switch_grad_off_and_on(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        t = self.first(x).tanh()
    torch.set_grad_enabled(False)
    u = self.first(x).exp()
    torch.set_grad_enabled(True)
    result: Tensor = self.second(x) * t + self.first(x) * u
    return result


def compute_in_inference_mode(self: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        t = self.first(x).tanh()
    result: Tensor = self.second(x) * t.clone()
    return result


def return_a_tensor_and_its_detached_self(self: Any, x: Tensor) -> Any:
    h = self.first(x).exp()
    return h, h.detach(), h.view(-1), h[0], h


def return_weights_and_views_of_them(self: Any, x: Tensor) -> Any:
    return self.first(x), self.first.weight.t(), self.second.weight, self.second.weight[0]


def return_the_input_and_views_of_it(self: Any, x: Tensor) -> Any:
    return self.first(x), x, x.view(-1)


class Cube(torch.autograd.Function):
    """A backward that is not the derivative, so that it shows which one ran."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.factor = factor
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x**3, positive

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x * ctx.factor, None


def apply_a_custom_function(self: Any, x: Tensor) -> Tensor:
    h, positive = Cube.apply(self.first(x), 7.0)
    other, _ = Cube.apply(self.second(h), -2.0)
    return torch.where(positive, h, other)


def checkpoint_a_sequence(self: Any, x: Tensor) -> Tensor:
    parts = [self.first, self.second, self.first]
    result: Tensor = checkpoint_sequential(parts, 2, self.second(x), use_reentrant=False)
    return result


# ---- values and modes -------------------------------------------------------------------------


def make_tensors_from_data(self: Any, x: Tensor) -> Tensor:
    column = torch.tensor([1.0, 2.0, 3.0, 4.0]).unsqueeze(1)
    table = torch.from_numpy(np.linspace(0, 1, 8).astype("f4"))
    h = self.first(x) * table + column * torch.arange(8) + torch.as_tensor(2.5)
    return h + torch.full((8,), 0.5) + x.new_ones(8)


def nest_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = self.first(x)
        with torch.autocast("cpu", enabled=False):
            h = self.second(h.float())
    result: Tensor = self.second(h)
    return result


def return_plain_values(self: Any, x: Tensor) -> Any:
    return {"y": self.first(x), "size": x.shape[0], "dtype": x.dtype, "none": None, "f": 0.5}


def sort_and_search(self: Any, x: Tensor) -> Any:
    order = self.first(x).sort(-1)
    top = self.second(x).topk(3)
    return order.values, order.indices, top.values, top.indices, self.first(x).max(1)


def go_through_complex_numbers(self: Any, x: Tensor) -> Any:
    spectrum = torch.fft.rfft(self.first(x)) * torch.fft.rfft(self.second(x))
    return torch.fft.irfft(spectrum), spectrum.abs()


def differentiate_inside(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = self.first(x).exp().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
    result: Tensor = energy + force.square().sum()
    return result


EQUAL: list[Forward] = [
    differentiate_inside,
    assign_to_a_slice,
    write_through_a_view,
    read_through_a_view_made_before,
    write_under_no_grad,
    change_the_input,
    fill_where,
    relu_in_place,
    transpose_in_place,
    count_in_a_buffer,
    count_with_augmented_assignment,
    read_a_buffer_before_and_after_a_write,
    scatter_and_accumulate,
    draw_many_kinds,
    draw_what_nobody_reads,
    draw_early_and_use_late,
    draw_in_place,
    drop_in_another_layout,
    draw_in_another_type_or_layout,
    draw_for_gumbel_and_alpha,
    attend_with_dropout,
    round_straight_through,
    switch_grad_off_and_on,
    compute_in_inference_mode,
    return_a_tensor_and_its_detached_self,
    return_weights_and_views_of_them,
    return_the_input_and_views_of_it,
    apply_a_custom_function,
    checkpoint_a_sequence,
    make_tensors_from_data,
    nest_autocast,
    return_plain_values,
    sort_and_search,
    go_through_complex_numbers,
]
# Where a code generator may put things in another order.
INDUCTOR: list[Forward] = [
    assign_to_a_slice,
    read_through_a_view_made_before,
    change_the_input,
    count_in_a_buffer,
    read_a_buffer_before_and_after_a_write,
    draw_many_kinds,
    draw_what_nobody_reads,
    draw_early_and_use_late,
    drop_in_another_layout,
    draw_in_another_type_or_layout,
    attend_with_dropout,
    round_straight_through,
    return_a_tensor_and_its_detached_self,
    return_weights_and_views_of_them,
    return_the_input_and_views_of_it,
    apply_a_custom_function,
    return_plain_values,
]


@pytest.mark.parametrize("forward", EQUAL, ids=lambda forward: forward.__name__)
def test_forward_equals_eager(forward: Forward) -> None:
    assert_equals_eager(model_of(forward), values(4, 8), "eager")


@pytest.mark.parametrize("forward", INDUCTOR, ids=lambda forward: forward.__name__)
@pytest.mark.sweep(
    keep=["assign_to_a_slice", "draw_early_and_use_late", "return_weights_and_views_of_them"]
)
def test_forward_equals_eager_with_generated_kernels(forward: Forward) -> None:
    assert_equals_eager(model_of(forward), values(4, 8), "inductor")


# ---- PyTorch's own layers ---------------------------------------------------------------------


def layers() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(1)
    norms = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(4, 2, 2, stride=2, bias=False),
        nn.Dropout2d(0.3),
        nn.InstanceNorm2d(2, track_running_stats=True),
        nn.GroupNorm(1, 2),
    )
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    transposed = nn.Linear(8, 8)
    transposed.weight = nn.Parameter(values(8, 8).t())
    return {
        "attention": (nn.TransformerEncoder(encoder, 2), values(2, 5, 8)),
        "convolutions": (norms, values(2, 3, 8, 8)),
        "channels_last": (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU()).to(memory_format=torch.channels_last),
            values(2, 3, 8, 8).to(memory_format=torch.channels_last),
        ),
        "embedding": (nn.Embedding(10, 8, padding_idx=1, scale_grad_by_freq=True), torch.arange(6)),
        "bag": (nn.EmbeddingBag(10, 8, mode="mean"), torch.arange(6).view(2, 3)),
        "weight_norm": (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), values(4, 8)),
        "orthogonal": (nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), values(4, 8)),
        "transposed_weight": (transposed, values(4, 8)),
        "nothing": (nn.Identity(), values(4, 8)),
        "empty_batch": (nn.Sequential(nn.Linear(8, 8), nn.Tanh()), values(0, 8)),
    }


@pytest.mark.parametrize("name", list(layers()))
def test_layer_equals_eager(name: str) -> None:
    model, x = layers()[name]
    assert_equals_eager(model, x, "eager")


@pytest.mark.parametrize("name", ["attention", "convolutions", "transposed_weight", "empty_batch"])
@pytest.mark.sweep(keep=["transposed", "empty"])
def test_layer_equals_eager_with_generated_kernels(name: str) -> None:
    model, x = layers()[name]
    assert_equals_eager(model, x, "inductor")


# ---- what is refused --------------------------------------------------------------------------


def use_data(self: Any, x: Tensor) -> Tensor:
    h: Tensor = self.first(x)
    return h + (h.round() - h).data


def change_data(self: Any, x: Tensor) -> Tensor:
    h: Tensor = self.first(x)
    h.data.mul_(2)
    return h.exp()


def hook_a_gradient(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    h.register_hook(lambda gradient: gradient * 3)
    y: Tensor = self.second(h)
    return y


def transform_inside(self: Any, x: Tensor) -> Tensor:
    y: Tensor = torch.func.grad(lambda t: self.first(t).exp().sum())(x)
    return y + self.second(x)


def map_inside(self: Any, x: Tensor) -> Tensor:
    y: Tensor = torch.func.vmap(lambda row: self.first(row).exp())(x)
    return y + self.second(x)


def draw_in_python(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.first(x) * random.random()
    return y


def draw_in_numpy(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.first(x) * float(np.random.rand())
    return y


def draw_from_its_own_generator(self: Any, x: Tensor) -> Tensor:
    noise = torch.rand(4, 8, generator=torch.Generator().manual_seed(3))
    y: Tensor = self.first(x) * noise
    return y


def count_in_python(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    y: Tensor = self.first(x) * self.calls
    return y


def replace_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.count = self.count + 1
    y: Tensor = self.first(x) * self.count
    return y


def keep_a_tensor(self: Any, x: Tensor) -> Tensor:
    self.last = self.first(x)
    y: Tensor = self.second(self.last)
    return y


def append_to_a_list(self: Any, x: Tensor) -> Tensor:
    self.log.append(1.0)
    y: Tensor = self.first(x) * len(self.log)
    return y


def fill_a_cache(self: Any, x: Tensor) -> Tensor:
    if x.shape not in self.cache:
        self.cache[x.shape] = torch.ones(x.shape)
    y: Tensor = self.first(x) * self.cache[x.shape]
    return y


def branch_on_data(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.first(x) if x.sum() > 0 else self.second(x)
    return y


def take_an_item(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.first(x) * x.max().item()
    return y


def select_by_mask(self: Any, x: Tensor) -> Tensor:
    h: Tensor = self.first(x)
    return h[x[:, 0] > 0]


def change_a_weight(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.first.weight.mul_(0.5)
    y: Tensor = self.first(x).tanh()
    return y


REFUSED: list[tuple[Forward, str]] = [
    (use_data, "detach"),
    (change_data, "detach"),
    (hook_a_gradient, "hook"),
    (transform_inside, "cannot be captured"),
    (map_inside, "cannot be followed"),
    (draw_in_python, "random"),
    (draw_in_numpy, "random"),
    (draw_from_its_own_generator, "Generator"),
    (count_in_python, "'calls'"),
    (replace_a_buffer, "'count'"),
    (keep_a_tensor, "'last'"),
    (append_to_a_list, "list"),
    (fill_a_cache, "dictionary"),
    (branch_on_data, "value of a tensor"),
    (take_an_item, "value of a tensor"),
    (select_by_mask, "value of a tensor"),
    (change_a_weight, "in place"),
]


@pytest.mark.parametrize(("forward", "reason"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_forward_is_refused_and_leaves_the_model_as_it_was(forward: Forward, reason: str) -> None:
    model = model_of(forward)
    before = twin(model)
    state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()
    with pytest.raises(CaptureError, match=reason):
        if forward is change_a_weight:
            lazyinline.compile(model, backend="eager", fallback="error")(values(4, 8))
        lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager")(values(4, 8))
    assert model.state_dict().keys() == before.state_dict().keys()
    assert_close(dict(model.state_dict()), dict(before.state_dict()))
    assert vars(model).keys() == vars(before).keys()
    assert (model.calls, model.log, model.cache) == (0, [], {})
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    assert np.array_equal(np.random.get_state()[1], numpy_state[1])
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    want = before(values(4, 8))
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    assert torch.equal(model(values(4, 8)), want), "the model itself no longer works"


@pytest.mark.parametrize(
    "model",
    [
        nn.Embedding(10, 8, sparse=True),
        nn.Embedding(10, 8, max_norm=1.0),
        nn.Sequential(nn.Embedding(10, 8), nn.BatchNorm1d(2, momentum=None)),
    ],
    ids=["sparse_gradient", "renormalized_weight", "momentum_from_data"],
)
def test_layer_is_refused(model: nn.Module) -> None:
    with pytest.raises(CaptureError):
        lazyinline.compile(model, backend="eager", fallback="error")(torch.tensor([[1, 2], [3, 4]]))


def test_one_tensor_passed_twice_and_changed_is_equal_or_refused() -> None:
    class Change(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return x * y

    compiled = lazyinline.compile(Change(), backend="eager")
    x = values(4)
    assert_close(compiled(x.clone(), x.clone()), Change()(x.clone(), x.clone()))
    shared, expected = x.clone(), x.clone()
    want = Change()(expected, expected)
    try:
        out = compiled(shared, shared)
    except LazyInlineError:
        return
    assert_close([out, shared], [want, expected])

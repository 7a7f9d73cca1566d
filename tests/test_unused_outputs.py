"""What a backward is given: no cotangents of unused outputs; what hooks on saved tensors return.

Undefined is not zero; hooks may give back other layouts, and other types are an error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_equals_eager, assert_same_gradients, twin
from models import Made
from torch import Tensor, nn

import lazyinline
from lazyinline import PlanError, lazy_inline
from lazyinline.autodiff.missing_cotangents import MissingCotangents


@lazy_inline
class Block(nn.Module):
    """Has a second result whose derivative is infinite."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(size, size)
        self.down = nn.Linear(size, size)

    def forward(self, x: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.up(x))
        return self.down(h) + x, metric + (h - h.detach()).abs().sqrt()


class Net(nn.Module):
    """A loss, logits that it is made of, metrics of all blocks, and a branch of its own."""

    def __init__(self, size: int = 8, kinds: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for _ in range(2))
        self.head = nn.Linear(size, kinds)
        self.own = nn.Linear(size, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first, metric = x, torch.zeros_like(x)
        for block in self.blocks:
            x, metric = block(x, metric)
        logits = self.head(x)
        parts = x.chunk(2, dim=-1)
        return {
            "loss": logits.square().mean(),
            "logits": logits,
            "metric": metric.sum(),
            "half": parts[0],
            "own": torch.tanh(self.own(first)),
        }


def made(model: nn.Module, **options: Any) -> tuple[Any, Any, Any]:
    """Returns a model, its twin for eager, and the model as it is compiled."""
    return model, twin(model), lazyinline.compile(model, **{"backend": "eager", **options})


def use(outputs: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.stack([outputs[name].sum() for name in names]).sum()


# Gradients of the larger are memory for activations; what can be used is the same on both.
ALL = ["loss", "logits", "metric", "half", "own"]
USES = [["loss"], ["loss"], ["logits", "half"], ["half"], ["own"], ["loss", "own"], ["loss"]]
USES += [ALL, ["metric"], ["loss"]]
FEW_USES = [["loss"], ["loss"], ["logits", "half"], ["own"], ["loss"], ALL, ["loss"]]
AT_LENGTHS = [["loss"], ["loss"], ["logits", "half"], ["loss", "own"], ["loss"], ["loss"]]
LENGTHS = (4, 6, 4, 6, 9, 11)


@pytest.mark.parametrize(
    ("backend", "dynamic", "size", "lengths", "uses"),
    [
        ("eager", False, 8, [4] * len(USES), USES),
        ("inductor", False, 160, [4] * len(FEW_USES), FEW_USES),
        ("eager", None, 8, LENGTHS, AT_LENGTHS),
        ("eager", True, 8, LENGTHS, AT_LENGTHS),
        ("inductor", True, 8, LENGTHS, AT_LENGTHS),
    ],
)
@pytest.mark.sweep(keep="eager-False")
def test_gradients_equal_eager_whatever_a_loss_uses(
    backend: str, dynamic: bool | None, size: int, lengths: Sequence[int], uses: list[list[str]]
) -> None:
    """Where lengths vary, it is one program of symbols, and a backward of it for each use."""
    model, expected, compiled = made(Net(size), backend=backend, dynamic=dynamic)
    runs: list[Any] = [(m, torch.optim.SGD(m.parameters(), lr=0.01)) for m in (compiled, expected)]
    for length, names in zip(lengths, uses, strict=True):
        x = torch.randn(length, size)
        for run, optimizer in runs:
            optimizer.zero_grad()
            use(run(x), names).backward()
        gradients = [p.grad for p in expected.parameters() if p.grad is not None]
        finite = all(bool(g.isfinite().all()) for g in gradients)
        assert finite == ("metric" not in names)
        if finite:
            assert_same_gradients(model, expected)
            for _, optimizer in runs:
                optimizer.step()
    report = compiled.last_report
    assert report.num_compiles == (2 if dynamic is None else 1)
    if dynamic is not False:
        assert report.num_links == (2 if dynamic is None else 3) and not report.why_static
        assert report.num_backwards == 2
    else:
        assert report.num_backwards == len({tuple(names) for names in uses})


@pytest.mark.parametrize(
    ("backend", "dynamic", "lengths"),
    [("eager", False, [4]), ("inductor", False, [4]), ("eager", True, [4, 6])],
)
@pytest.mark.sweep(keep="eager-False")
def test_kept_graphs_take_loss_after_loss(backend: str, dynamic: bool, lengths: list[int]) -> None:
    model, expected, compiled = made(Net(), backend=backend, dynamic=dynamic)
    for _ in range(2):
        inputs = [torch.randn(length, 8) for length in lengths]
        for run in (compiled, expected):
            run.zero_grad()
            outs = [run(x) for x in inputs]
            for names in (["loss"], ["half", "logits"], ["loss", "own"]):
                for out in outs:
                    use(out, names).backward(retain_graph=True)
            for out in outs:
                use(out, ["half"]).backward()
        assert_same_gradients(model, expected)


def test_a_change_between_two_such_backwards_is_refused() -> None:
    def towers(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x).sigmoid(), self.right(x).tanh()

    _, _, compiled = made(Made(towers, left=nn.Linear(4, 4), right=nn.Linear(4, 4)))
    a, b = compiled(torch.randn(3, 4))
    a.sum().backward()
    with torch.no_grad():
        b.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        b.sum().backward()


class Twofold(torch.autograd.Function):
    """Has two results; autograd gives its backward zeros, or None, for one that is unused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, materialize: bool = True) -> Any:
        ctx.set_materialize_grads(materialize)
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Any:
        gradients = (first, 2), (second, 3)
        return *(g if g is None else g * factor for g, factor in gradients), None


class NoGradient(torch.autograd.Function):
    """Adds tensors, and gives the second no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Positive(torch.autograd.Function):
    """Tells where a tensor is positive, in its dtype and without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise AssertionError


def written_and_detached(x: Tensor) -> Tensor:
    x = x.clone()
    x[0] = x[1] * 2
    return x.detach()


CUSTOM: dict[str, Callable[[nn.Parameter, nn.Parameter], Any]] = {
    "zeros for an unused result": lambda x, y: Twofold.apply(x, y),
    "None for an unused result": lambda x, y: Twofold.apply(x, y, False),
    "None always": lambda x, y: (NoGradient.apply(x, y * 2), y),
    "None to a function, which makes zeros of it": lambda x, y: (
        NoGradient.apply(x, Twofold.apply(x, y)[1]),
        y,
    ),
    "marked as without a gradient": lambda x, y: (x * Positive.apply(y), y * 2),
    "a size alone": lambda x, y: (x + torch.zeros_like(y * 2) + y.new_ones(3), y * 2),
    "a size to take": lambda x, y: ((x * 2).expand_as(y * 2), y * 2),
    "detached after a write in place": lambda x, y: (x * written_and_detached(y), y * 2),
    "an operator without a derivative": lambda x, y: (x + torch.histc(y, 3), y * 2),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_a_gradient_is_none_or_zero_as_in_eager(name: str) -> None:
    """An optimizer decays a weight whose gradient is zero, and leaves one without a gradient."""
    x, y = (nn.Parameter(torch.arange(3.0)) for _ in range(2))
    model = Made(lambda m: CUSTOM[name](m.x, m.y), x=x, y=y)
    why = assert_equals_eager(model, calls=1, use=lambda run: run()[0]).told.ran_eagerly
    assert (y.grad is None) == ("zeros" not in name)
    assert bool(why) == ("None" in name) and ("returns None as" in why or not why)


def run_parts(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Results that are cut out of one tensor: their cotangents are put together, or are zeros."""
    a, b, c, d = torch.tanh(self.linear(x)).chunk(4, dim=-1)
    infinite = (a - a.detach()).abs().sqrt()
    return a.square().mean(), b.sum(), (c * 2).t().contiguous(), d, infinite


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("eager", None), ("eager", False), ("inductor", True)]
)
@pytest.mark.sweep(keep="eager-None")
def test_zeros_of_any_layout_stand_for_unused_parts(backend: str, dynamic: bool | None) -> None:
    def loss(run: Any, x: Tensor, *used: int) -> Tensor:
        out = run(x)
        return torch.stack([out[i].cos().sum() for i in used]).sum()

    rows = [torch.randn(length, 4) for length in ((3,) if dynamic is False else (3, 5))]
    batches = [(x, *used) for x in rows for used in ((0,), (2, 3))]
    options: Any = {"dynamic": dynamic, "note": lambda run: run.last_report.num_backwards}
    model = Made(run_parts, linear=nn.Linear(4, 12))
    found = assert_equals_eager(model, batches=batches, use=loss, backend=backend, **options)
    assert found.seen[1::2] == [3] * len(rows)


def test_zeros_that_make_no_numbers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where there is no backward without a cotangent.
    monkeypatch.setattr(MissingCotangents, "without", lambda self, unused, kernels="backend": None)
    model, expected, compiled = made(Net(), dynamic=False)
    x = torch.randn(4, 8)
    with pytest.raises(PlanError, match="not a number, and logits, metric, half, own"):
        use(compiled(x), ["loss"]).backward()
    use(compiled(x), ["own"]).backward()
    use(expected(x), ["own"]).backward()
    assert_same_gradients(model, expected)


Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def mixed() -> nn.Module:
    """Needs its input, a parameter and a result again."""
    run = lambda self, x: torch.tanh(self.down(torch.sigmoid(self.up(x)) * 2).t())  # noqa: E731
    return Made(run, up=nn.Linear(6, 8), down=nn.Linear(8, 6))


def strided(tensor: Tensor) -> Tensor:
    """The same numbers, in another order in memory."""
    return tensor.clone().t().contiguous().t() if tensor.dim() == 2 else tensor.clone()


KEEPING: dict[str, Pair] = {
    "same": (lambda t: t, lambda t: t),
    "contiguous": (lambda t: t.contiguous(), lambda t: t),
    "turned": (lambda t: t, strided),
    "negated": (lambda t: torch.neg(t), lambda t: torch._neg_view(t)),
    "through half": (lambda t: t.double(), lambda t: t.float()),
    "through numpy": (lambda t: t.detach().numpy().copy(), torch.from_numpy),
    # As PyTorch's own hook, which pins memory, lays out anew.
    "to contiguous memory": (lambda t: torch.empty(t.size(), dtype=t.dtype).copy_(t), lambda t: t),
}
CHANGING: dict[str, tuple[Pair, str]] = {
    "half": ((lambda t: t.half(), lambda t: t), "f16"),
    "flat": ((lambda t: t, lambda t: t.flatten()), r"f32\[\d+\]"),
    "meta": ((lambda t: t, lambda t: t.to("meta")), "meta"),
}


@pytest.mark.sweep(keep="inductor")
def test_what_hooks_give_back_in_another_layout_is_read_right(backend: str) -> None:
    torch.manual_seed(0)
    model = mixed()
    expected = twin(model)
    compiled = lazyinline.compile(model, backend=backend)
    # Longer steps let rounding grow: eager then is as far from float64 as from any other order.
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, expected)]
    for pack, unpack in KEEPING.values():
        inputs = [torch.randn(6, 5).t().requires_grad_() for _ in range(2)]
        inputs[1].data = inputs[0].data.clone(memory_format=torch.preserve_format)
        for run, x in zip((compiled, expected), inputs, strict=True):
            run.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                loss = run(x).square().sum()
            loss.backward()
            with torch.autograd.graph.save_on_cpu():
                run(x).square().sum().backward()
        assert_same_gradients(model, expected)
        assert_close(inputs[0].grad, inputs[1].grad)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("kind", CHANGING)
def test_what_hooks_give_of_another_type_is_an_error_and_the_next_step_is_right(kind: str) -> None:
    model = mixed()
    expected = twin(model)
    compiled = lazyinline.compile(model, backend="eager")
    x = torch.randn(5, 6)
    (pack, unpack), message = CHANGING[kind]
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = compiled(x).sum()
    with pytest.raises(PlanError, match=message):
        loss.backward()
    compiled(x).sum().backward()
    expected(x).sum().backward()
    assert_same_gradients(model, expected)


def unpacked(self: Any, x: Tensor) -> Tensor:
    """Saves a part of its input for the backward, which is handed the whole of it."""
    taken = SAVED_PARTS[self.part](x)
    return (taken * self.weight).sin() @ taken.T


SAVED_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the first row": lambda x: x[:1],
    "the second row": lambda x: x[1:2],
    "of unpacked rows": lambda x: [*x][-1][None],
    "of a half": lambda x: x.chunk(2)[1],
    "columns": lambda x: x.view(3, 4)[:, 1:],
    "turned": lambda x: x.view(3, 4)[1:].T[1:, :1].T,
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("part", SAVED_PARTS)
@pytest.mark.sweep(keep=["second row-eager", "columns-eager", "turned-eager", "unpacked rows"])
def test_a_part_of_an_input_that_is_saved_is_that_part(part: str, backend: str) -> None:
    def x() -> Tensor:
        return torch.linspace(-1, 2, 12).reshape(4, 3)

    model = Made(unpacked, part=part, weight=nn.Parameter(torch.linspace(0.1, 1, 3)))
    assert_equals_eager(model, (x().requires_grad_(),), backend=backend, calls=1)
    if backend == "eager":  # which of them is saved is decided before kernels are made
        assert_equals_eager(model, (x(),), door="step", calls=1)

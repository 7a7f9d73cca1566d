"""What capture makes of a model's Python: values, gradients, state, and what it refuses."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from comparing import assert_equals_eager
from models import Around, Stack, block, example
from torch import nn
from values import HELPERS
from worlds import assert_as_eager

import lazyinline
from lazyinline import CaptureError
from lazyinline.frontend.capture.capture import Subject, capture_model


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: Any = None


torch.export.register_dataclass(Output)


class Opaque:
    """A result that PyTorch's tree registry does not know."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


# What a block returns of its input x and its hidden state h; how the next block's x is taken of it.
Row = tuple[Callable[[Any, Any, Any], Any], Callable[[Any], Any]]
RESULTS: dict[str, Row] = {
    "a nested tuple": (lambda self, x, h: (h, (h * 2, (h.sum(),))), lambda out: out[1][0]),
    "a list and a dict": (lambda self, x, h: [{"a": h, "b": [h * 2]}], lambda out: out[0]["b"][0]),
    "a named tuple": (lambda self, x, h: Pair(h, (h * 2,)), lambda out: out.second[0]),
    "a dataclass": (lambda self, x, h: Output(h, (h * 2, None)), lambda out: out.extra[0]),
    "sizes": (lambda self, x, h: (h, list(h.shape), h.dim()), lambda out: out[0] * out[1][0]),
    "the same tensor twice": (lambda self, x, h: (h, h), sum),
    "a view of its own result": (lambda self, x, h: (h, h[0]), sum),
    "a strided result": (lambda self, x, h: h.t().contiguous().t(), lambda out: out.contiguous()),
    "an expanded result": (lambda self, x, h: h[:1].expand(3, 4), lambda out: out.contiguous()),
    "detached": (lambda self, x, h: (h, h.detach()), lambda out: out[0] * out[1]),
    "its parameter": (lambda self, x, h: (h, self.linear.bias), sum),
    "only its input": (lambda self, x, h: x, lambda out: out * 2),
}
VIEWS: dict[str, Row] = {
    "a view of its input": (lambda self, x, h: (x.t(), h), lambda out: out[0].t() + out[1]),
    "its input reshaped": (lambda self, x, h: x.reshape(4, 3), lambda out: out.reshape(3, 4)),
}


def of_two_blocks(make: Callable[[Any, Any, Any], Any], take: Callable[[Any], Any]) -> Any:
    def body(layers: Any, x: torch.Tensor) -> Any:
        x, results = torch.sin(x), []
        for layer in layers:
            results.append(layer(x))
            x = take(results[-1])
        return x, [r.hidden if isinstance(r, Opaque) else r for r in results]

    kind = block(lambda self, x: make(self, x, torch.tanh(self.linear(x)) + x))
    return assert_equals_eager(Around(body, kind(), kind()), [example()])


@pytest.mark.parametrize("name", RESULTS)
def test_block_may_return(name: str) -> None:
    assert of_two_blocks(*RESULTS[name]).shared == 1


@pytest.mark.parametrize("name", VIEWS)
def test_block_that_returns_a_view_of_what_it_is_given_is_not_shared(name: str) -> None:
    outcome = of_two_blocks(*VIEWS[name])
    assert outcome.shared == 0
    assert "returns a view of what it is given" in outcome.reasons[0]


def test_block_that_returns_an_object_is_not_shared() -> None:
    outcome = of_two_blocks(lambda self, x, h: Opaque(h), lambda out: out.hidden)
    assert outcome.shared == 0
    assert "neither a tensor nor plain data" in outcome.reasons[0]


def test_model_that_returns_an_object_full_of_tensors_is_refused() -> None:
    model = Around(lambda _, x: Opaque(x * 2))
    with pytest.raises(CaptureError, match="Opaque"):
        lazyinline.compile(model, backend="eager", fallback="error")(example())


def test_model_arguments_may_be_nested_and_mixed() -> None:
    def body(layers: Any, x: Any, *rest: Any, options: Any = None, scale: float = 1.0) -> Any:
        y = layers[0](x["a"]) * scale + rest[0][0]
        return y if options is None else y * options["flag"]

    kind = block(lambda self, x: torch.tanh(self.linear(x)))
    args = [{"a": example(seed=1), "b": None}, (example(seed=2), 3)]
    for kwargs in ({}, {"scale": 2.0}, {"options": {"flag": 4, "unused": "text"}}):
        assert_equals_eager(Around(body, kind()), args, kwargs)


def test_scalars_that_are_equal_but_not_the_same_are_told_apart() -> None:
    model = Around(lambda _, x, scale: x * scale if scale is not True else x * 5)
    compiled, x = lazyinline.compile(model, backend="eager"), torch.ones(2, dtype=torch.float64)
    for scale in (1, True, 1.0, 0.0, -0.0, 0, False, float("nan")):
        found, expected = compiled(x, scale), model(x, scale)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(found), torch.signbit(expected)), scale


def test_object_passed_again_with_other_contents_is_looked_at_anew() -> None:
    text = """
SETTINGS = NS(factor=2.0, inner={"shift": torch.ones(4)})
def inputs(): return [example(), SETTINGS]
model = block(lambda self, x, s: self.linear(x) * s.factor + s.inner["shift"])()
"""
    scene = ["", "SETTINGS.factor = 3.0", "SETTINGS.factor = torch.full((4,), 4.0)"]
    assert_as_eager(HELPERS, text, scene=[*scene, "SETTINGS.inner['shift'] = torch.zeros(4)"])


def test_arguments_that_share_memory_are_told_apart_from_those_that_do_not() -> None:
    def forward(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.add_(1) * y

    compiled = lazyinline.compile(Around(forward), backend="eager")
    makes: list[Callable[[], Any]] = [
        lambda: (torch.ones(3), torch.ones(3)),
        lambda: (t := torch.ones(3), t),
        lambda: ((t := torch.ones(4))[:3], t[1:]),
    ]
    for make in (*makes, makes[0]):
        with contextlib.suppress(CaptureError):  # refusing is right, another number is not
            assert torch.equal(compiled(*make()), forward(None, *make()))


def running(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x)
    with torch.no_grad():
        self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        self.count += 1
    return y - self.mean / self.count


def with_buffers(forward: Callable[..., Any]) -> type[nn.Module]:
    kind = block(forward)
    init = kind.__init__

    def extended(self: Any, **attributes: Any) -> None:
        init(self, **attributes)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    kind.__init__ = extended  # type: ignore[method-assign]
    return kind


def fill(y: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    change(y)
    return y


def entry(value: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    return lambda y: y.__setitem__(slice(1, 3), value[1:])


def double_without_gradient(y: torch.Tensor) -> None:
    with torch.no_grad():
        y.mul_(2)


@torch.no_grad()
def without_gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


def gradient_inside_no_grad(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        with torch.enable_grad():
            y = self.linear(x)
        z = torch.tanh(y)
    return y * z


def checkpointed(use_reentrant: bool) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        function = lambda y: torch.tanh(self.linear(y))  # noqa: E731
        return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=use_reentrant)

    return forward


GRADIENTS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "detach": lambda self, x: self.linear(x) * torch.tanh(self.linear(x)).detach(),
    "no_grad region": lambda self, x: self.linear(x) * without_gradient(self.linear(x)),
    "enable_grad in no_grad": gradient_inside_no_grad,
    "checkpoint": checkpointed(use_reentrant=False),
    "reentrant checkpoint": checkpointed(use_reentrant=True),
    "fan-out": lambda self, x: (y := self.linear(x)) * y.sum() + y.t().contiguous().t() * x,
    # ---- in place
    "on a temporary": lambda self, x: self.linear(x).mul_(2).tanh_(),
    "through a view": lambda self, x: fill(self.linear(x), lambda y: y[0].mul_(3)),
    "an entry of zeros": lambda self, x: fill(torch.zeros_like(x.detach()), entry(self.linear(x))),
    "under no_grad": lambda self, x: fill(self.linear(x), double_without_gradient) * 2,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_equal_eager(name: str) -> None:
    kind = block(GRADIENTS[name])
    assert assert_equals_eager(Stack(kind(), kind()), [example()]).shared == 1


def what_is_patched() -> list[Any]:
    names = ("__call__", "__getattr__", "__setattr__", "__delattr__", "__getattribute__")
    apply = vars(torch.autograd.Function)["apply"]
    return [*(getattr(nn.Module, n) for n in names), torch.Tensor.register_hook, apply]


@pytest.mark.smoke
def test_capture_leaves_no_trace() -> None:
    kind = with_buffers(running)
    model = Stack(kind(), kind())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    x, random_state = example(), torch.get_rng_state()
    patched = what_is_patched()
    lazyinline.capture(model, (x,), train=True)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
    assert patched == what_is_patched()


@pytest.mark.parametrize("reuse", ["marked", "off"])
def test_program_says_where_its_inputs_come_from(reuse: str) -> None:
    kind = with_buffers(running)
    model = Stack(kind(), kind())
    captured = capture_model(Subject(model, (example(),)), reuse=reuse, train=False)
    sources = captured.program.sources
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert sources[0].name == "x"
    assert {s.name for s in sources[1:]} == set(tensors)
    assert all(s.tensor is tensors[s.name] for s in sources[1:])  # type: ignore[union-attr]
    kinds = {s.name.rpartition(".")[2]: s.kind for s in sources[1:]}  # type: ignore[union-attr]
    of_kinds = {"parameter": ("weight", "bias"), "buffer": ("mean", "count")}
    assert kinds == {name: kind for kind, names in of_kinds.items() for name in names}
    written = sorted(sources[target].name for _, target in captured.program.writes)
    assert written == sorted(f"layers.{i}.{n}" for i in range(2) for n in ("mean", "count"))

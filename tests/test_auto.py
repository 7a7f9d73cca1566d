"""``reuse="auto"``: repeated modules are found by structure, and evidence decides as ever."""

import itertools
from typing import Any

import torch
from comparing import assert_equals_eager
from models import Around, Stack, example, linear
from printed import unfolded
from torch import nn

import lazyinline
from lazyinline.frontend.capture.blocks import Reuse
from lazyinline.reuse.ir.printer import text_to_compare


class Layer(nn.Module):
    """A layer of about ten operators that nobody marked."""

    def __init__(self, scale: float = 1.0, bias: bool = True) -> None:
        super().__init__()
        self.scale = scale
        self.inner = Mixer()
        self.out = linear(bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x).sigmoid() * self.scale
        return x + self.out(h.cos()).relu().tanh()


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a(x).sin() * self.b(x).exp().neg()).softmax(-1)


def calls(model: nn.Module) -> dict[str, list[int]]:
    """Trains a model as in eager; returns how often each closure is called, if more than once."""
    options: Any = {"calls": 1, "reuse": "auto", "tolerance": 1e-12}
    found: dict[str, list[int]] = {}
    for closure in assert_equals_eager(model, (example(),), **options).told.closures:
        if closure.num_calls > 1:
            found.setdefault(closure.name, []).append(closure.num_calls)
    return found


def test_repeated_layers_are_found_without_a_mark_and_left_without_one() -> None:
    model = Stack(*(Layer() for _ in range(4)))
    before = [dict(vars(m)) for m in model.modules()], dict(vars(Layer))
    assert calls(model) == {"Layer": [4]}
    assert ([dict(vars(m)) for m in model.modules()], dict(vars(Layer))) == before


def test_a_model_without_repetition_is_captured_as_with_off() -> None:
    sizes = (4, 5, 6, 7, 4)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(a, b, dtype=torch.float64), nn.Tanh(), nn.LayerNorm(b).double())
            for a, b in itertools.pairwise(sizes)
        )
    )
    programs = [lazyinline.capture(model, (example(),), reuse=r) for r in ("auto", "off")]
    assert text_to_compare(programs[0]) == text_to_compare(programs[1])


def test_what_is_too_small_is_no_closure() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.weight

    assert calls(Stack(*(Scale() for _ in range(8)))) == {}


class Experts(nn.Module):
    """Its experts share inside of it; the outer ones are shared as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mixer() for _ in range(4))
        self.gate = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        parts = [e(x) * weights[:, i : i + 1] for i, e in enumerate(self.experts)]
        return x + torch.stack(parts).sum(0)


def test_inside_a_shared_layer_what_repeats_again_is_shared_again() -> None:
    model = Stack(*(Experts() for _ in range(3)))
    assert calls(model) == {"Experts": [3], "Mixer": [4]}


def test_inside_layers_that_differ_the_inner_module_is_shared() -> None:
    class Special(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.number: int
            return super().forward(x) * torch.ones(self.number, 1, dtype=x.dtype).sum(0)

    layers = [Special() for _ in range(4)]
    for number, layer in enumerate(layers):
        layer.number = number + 1
    assert calls(Stack(*layers))["Mixer"][0] >= 3


def test_one_layer_that_runs_repeatedly_is_one_closure() -> None:
    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = layers[0](x)
        return x

    assert calls(Around(forward, Layer())) == {"Layer": [4]}


def test_what_repeats_is_shared_by_default_in_every_way_in() -> None:
    model = Stack(*(Layer() for _ in range(3)))
    x = example()
    compiled = lazyinline.compile(model, backend="eager")
    compiled(x)
    step = lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager")
    step(x.detach())
    programs = [lazyinline.capture(model, (x,))]
    measured = lazyinline.measure(model, (x,), backend="eager", execute=False)
    reports = [compiled.last_report, step.last_report, measured.late]
    assert all(r.num_shared_calls for r in reports)
    assert all(r.reuse == "auto" and not r.nothing_shared for r in reports)
    assert str(compiled.last_report).startswith("3 Layer share one graph: ")
    # Of the step's input nobody wants a gradient, so the first block has another backward.
    assert str(step.last_report).startswith("3 Layer share 2 graphs: ")
    assert all(p.num_nodes() < p.num_nodes_if_inlined() for p in programs)


class Counting(Layer):
    """A layer that differs from instance to instance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).flip(int(self.scale) % 2) * len("x" * int(self.scale))


def report_of(model: nn.Module, reuse: Reuse) -> str:
    compiled = lazyinline.compile(model, backend="eager", reuse=reuse)
    compiled(example())
    return unfolded(compiled.last_report)


def test_a_report_begins_with_what_repeats_where_nothing_is_shared() -> None:
    alike = Stack(*(Layer() for _ in range(3)))
    assert report_of(alike, "marked").startswith(
        "nothing is shared: Layer occurs 3 times and is not marked. Use reuse='auto', or "
        "lazy_inline(Layer). training, backend eager"
    )
    assert report_of(alike, "auto").startswith("3 Layer share one graph: ")
    different = Stack(Counting(1.0), Counting(2.0))
    assert report_of(different, "auto").startswith(
        "nothing is shared: layers.1 (Counting) is not like layers.0: attribute scale is 2.0, not "
    )
    assert report_of(different, "off").startswith("all is inlined: ")
    small = Stack(*(nn.Sequential(linear(), nn.ReLU()) for _ in range(3)))
    assert report_of(small, "auto").startswith(
        "nothing is shared: Sequential occurs 3 times, and has too few operators to pay as a "
        "block. training, backend eager"
    )
    assert report_of(Stack(linear()), "auto").startswith("no block repeats: ")


def test_a_compiled_module_says_in_one_line_what_it_is() -> None:
    model = Stack(*(Layer() for _ in range(3)))
    compiled = lazyinline.compile(model, backend="eager")
    first, *rest = repr(compiled).splitlines()
    assert first == "CompiledModule(Stack, reuse auto, backend eager, not compiled yet)"
    assert rest == repr(model).splitlines()
    compiled(example())
    first = repr(compiled).splitlines()[0]
    assert first == "CompiledModule(Stack, reuse auto, backend eager, 1 program, 2 shared calls)"

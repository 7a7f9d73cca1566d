"""``torch.compile(model, backend="lazyinline")`` shares repeated regions of Dynamo's graphs."""

import copy
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_close, assert_equals_eager
from models import Made
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lazyinline.frontend.dynamo.torch_dynamo_backend import (
    CompiledGraph,
    HandedOnWarning,
    compile_graph,
)

WIDTH = 8


class Layer(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class InModes(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.up(self.norm(x))
        return x + self.down(F.gelu(y.float())) * scale


class Normed(Layer):
    """Changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # Past a tanh the next norm does not take a bias out again, whose gradient would be 0.
        return torch.tanh(super().forward(self.mean(x.mT).mT))


class Drops(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


class Again(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Net(nn.Module):
    """Layers one after another; ``between`` is done to the hidden state in the middle."""

    def __init__(self, *layers: nn.Module, between: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.between = between

    def forward(self, x: Tensor, power: int = 1) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.between is not None and index == len(self.layers) // 2:
                x = self.between(x)
            x = layer(x)
        return x * power


def net(count: int = 4, layer: Callable[[], nn.Module] = Layer, **options: Any) -> Net:
    return Net(*(layer() for _ in range(count)), **options)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Compiled:
    """A model under ``torch.compile``, and what became of each graph.

    The backend is passed as a function, so that a bare checkout can run this; its name is tested
    below.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.graphs: list[Any] = []
        given = {"backend": "eager", **options.pop("options", {})}
        self.run = torch.compile(model, backend=self._compile, options=given, **options)

    def _compile(self, module: Any, inputs: Any, **options: Any) -> Any:
        self.graphs.append(compile_graph(module, inputs, **options))
        return self.graphs[-1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    @property
    def reports(self) -> list[Any]:
        return [graph.last_report for graph in self.graphs]

    def shared(self, graph: int = 0) -> list[bool]:
        return [decision.shared for decision in self.reports[graph].decisions]


def assert_trains_like_eager(model: nn.Module, *batches: Tensor, **options: Any) -> Compiled:
    """Takes an AdamW step for each batch, beside eager."""
    found: Compiled = assert_equals_eager(
        model,
        batches=[(batch,) for batch in batches],
        door=lambda model, backend: Compiled(model, **options),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    ).compiled
    return found


def batch(length: int = 5, count: int = 3) -> Tensor:
    return torch.randn(count, length, WIDTH)


def called_four_times() -> nn.Module:
    layer = Layer()
    return Net(layer, layer, layer, layer)


NETS: dict[str, tuple[Callable[[], nn.Module], list[bool] | int]] = {
    "a flat graph": (net, [False, False, True, True]),
    "a constant that differs": (
        lambda: Net(*(Layer(scale) for scale in [1.0] * 4 + [0.5] * 4)),
        [False, False, True, True, False, True, True, True],
    ),
    "a module that is called again": (called_four_times, 2),
    "modes": (lambda: net(layer=InModes), 2),
    "buffers that are changed": (lambda: net(layer=Normed), 2),
    "dropout": (lambda: net(layer=Drops), 2),
}


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.sweep(keep=["a flat graph", "constant", "again"])  # nested regions show the others
def test_layers_share_a_closure_and_train_like_eager(kind: str) -> None:
    make, shared = NETS[kind]
    compiled = assert_trains_like_eager(make(), batch(), batch())
    found = compiled.shared()
    assert (found if isinstance(shared, list) else sum(found)) == shared
    if kind == "a flat graph":
        assert compiled.reports[0].decisions[-1].path == "layers.3"


def test_layers_inside_layers_are_shared_inside() -> None:
    compiled = assert_trains_like_eager(Net(net(), net()), batch())
    assert compiled.reports[0].num_nodes < 4 * 9 * 2


@pytest.mark.parametrize(
    "option", [{"layer": Again}, {"options": {"recompute": "full"}}], ids=["checkpoint", "option"]
)
@pytest.mark.sweep(keep="checkpoint")
def test_what_is_computed_again_is_not_saved_and_is_shared(option: dict[str, Any]) -> None:
    model = net(layer=option.pop("layer", Layer))
    compiled = assert_trains_like_eager(model, batch(), batch(), **option)
    plain = Compiled(net())
    plain(batch())
    assert compiled.reports[0].saved_bytes < plain.reports[0].saved_bytes
    assert sum(compiled.shared()) >= 2


class RegionLayer(Normed):
    """A layer that Dynamo traces once; it draws, writes a buffer and switches modes."""

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.up(self.norm(x))
        y = self.mean(self.down(F.gelu(y.float())).mT).mT
        return x + F.dropout(y, 0.3, self.training) * scale


@torch.compiler.nested_compile_region
def gate(x: Tensor, weight: Tensor) -> Tensor:
    return torch.sigmoid(x @ weight) * x


class Gates(nn.Module):
    """Regions that are plain functions, and smaller than what repeats unmarked would have to be."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = gate(x, weight)
        return x


REGIONS = {"layers": (lambda count: net(count, RegionLayer), 3), "gates": (Gates, 3, 4)}


@pytest.mark.parametrize("kind", REGIONS)
def test_a_nested_compile_region_is_a_call_and_is_compiled_once(kind: str) -> None:
    make, *counts = REGIONS[kind]
    work = []
    for count in counts:
        torch._dynamo.reset()
        compiled = assert_trains_like_eager(make(count), batch(), batch())
        report = compiled.reports[0]
        # Dynamo inlines the first call: its input needs no gradient, which no other's is like.
        assert report.num_block_calls == count - 1
        assert sum(compiled.shared()) == count - 2
        work.append((report.num_closures, report.num_kernels, report.num_operators))
    assert work[0] == work[-1]
    torch._dynamo.reset()
    model, x = make(2).eval(), batch()
    with torch.no_grad():
        assert_close(Compiled(model)(x), model(x))


def test_nested_compile_regions_take_sizes_that_vary() -> None:
    compiled = assert_trains_like_eager(Gates(4), *(batch(length) for length in (5, 6, 8)))
    assert (compiled.reports[1].num_compiles, compiled.reports[1].num_links) == (1, 1)
    assert sum(compiled.shared(1)) == 2


def test_a_region_with_options_for_another_compiler_is_handed_on() -> None:
    def backend(module: Any, inputs: Any) -> Any:
        regions = [m for m in module.modules() if isinstance(m, torch.fx.GraphModule)]
        regions[-1].meta["nested_region_config"] = object()
        return compile_graph(module, inputs, options={"backend": "eager"})

    model, x = Gates(3), batch()
    with pytest.warns(HandedOnWarning, match="options for another compiler"):
        assert_close(torch.compile(model, backend=backend)(x), model(x))


def halves(self: Any, x: Tensor) -> Tensor:
    """Two stacks, and in between what Dynamo does not capture."""
    x = self.first(x)
    torch._dynamo.graph_break()
    return self.second(x)


def test_graph_breaks_are_dynamos() -> None:
    compiled = assert_trains_like_eager(Made(halves, first=net(), second=net()), batch())
    assert len(compiled.graphs) == 2
    assert all(any(compiled.shared(number)) for number in range(2))


def test_a_length_that_varies_is_compiled_once_and_linked() -> None:
    batches = [batch(length) for length in (5, 6, 7, 9, 6)]
    compiled = assert_trains_like_eager(net(3), *batches)
    assert len(compiled.graphs) == 2  # Dynamo's second graph is for all lengths
    report = compiled.reports[1]
    assert (report.num_compiles, report.num_links, report.why_static) == (1, 2, "")


def test_a_number_that_varies_and_is_no_size_is_handed_on() -> None:
    model, x = net(2), batch()
    compiled = Compiled(model)
    compiled(x, 3)
    with pytest.warns(HandedOnWarning, match="symbolic number, and no input has this size"):
        assert_close(compiled(x, 4), model(x, 4))
    assert_close(compiled(x, 7), model(x, 7))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def with_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.transpose(1, 2) @ x).float()


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "autocast": with_autocast,
    "sizes": lambda x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None] / x.shape[1],
    "an autograd function": Doubled.apply,
    "a transform": lambda x: torch.func.vmap(lambda row: row * row.sum())(x),
}


@pytest.mark.parametrize("kind", BETWEEN)
@pytest.mark.sweep(keep="transform")
def test_what_stands_between_layers_is_right(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HandedOnWarning)
        batches = [batch(length) for length in (5, 6, 8)[: 3 if kind == "sizes" else 1]]
        assert_trains_like_eager(net(2, between=BETWEEN[kind]), *batches)


def test_a_mode_that_is_left_switched_is_handed_on() -> None:
    def leave(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return x * 2

    with pytest.warns(HandedOnWarning, match="mode"):
        out = Compiled(net(2, between=leave))(batch())
    was_switched = not torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert was_switched
    assert not out.requires_grad


def run_writes(self: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Changes an input, and returns a view of one."""
    y.add_(x.sum())
    return x.transpose(0, 1), self.view(y)


@pytest.mark.filterwarnings(
    "ignore::lazyinline.frontend.dynamo.torch_dynamo_backend.HandedOnWarning"
)
@pytest.mark.parametrize(
    ("view", "is_ours"), [(lambda y: y * 2, True), (lambda y: y[0], False)], ids=["none", "changed"]
)
def test_an_input_that_is_changed_and_a_view_of_one_are_the_users_own(
    view: Callable[[Tensor], Tensor], is_ours: bool
) -> None:
    model, x = Made(run_writes, view=view), torch.randn(3, 4)
    ours, theirs = torch.zeros(2, 2), torch.zeros(2, 2)
    compiled = Compiled(model)
    found, expected = compiled(x, ours), model(x, theirs)
    assert_close(found, expected)
    assert_close(ours, theirs)
    assert found[0].data_ptr() == x.data_ptr()
    assert (found[1].data_ptr() == ours.data_ptr()) == (expected[1].data_ptr() == theirs.data_ptr())
    assert isinstance(compiled.graphs[0], CompiledGraph) == is_ours  # or it is handed on


@pytest.mark.parametrize("wrong", [{"options": {"colour": 1}}, {"mode": "reduce-overhead"}])
def test_an_option_that_does_not_exist_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="does not know"):
        torch.compile(net(1), backend=compile_graph, **wrong)(batch())


def test_the_name_is_registered_where_pytorch_looks_and_what_it_made_can_be_copied() -> None:
    (found,) = entry_points(group="torch_dynamo_backends", name="lazyinline")
    assert found.load() is compile_graph
    assert "lazyinline" in torch._dynamo.list_backends()
    model, x = net(2), batch()
    compiled = torch.compile(model, backend="lazyinline", options={"backend": "eager"})
    assert_close(compiled(x), model(x))
    assert_close(copy.deepcopy(model)(x), model(x))

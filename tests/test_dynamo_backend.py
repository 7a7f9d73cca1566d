"""``torch.compile(model, backend="lazyinline")`` shares repeated regions of Dynamo's graphs."""

import copy
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_close, assert_same_buffers, assert_same_gradients, twin
from decoders import llama
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

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


class Net(nn.Module):
    """Layers one after another; ``between`` is done to the hidden state in the middle."""

    def __init__(self, *layers: nn.Module, between: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.between is not None and index == len(self.layers) // 2:
                x = self.between(x)
            x = layer(x)
        return x


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


def layers(count: int, scale: float = 1.0) -> list[Layer]:
    return [Layer(scale) for _ in range(count)]


def assert_trains_like_eager(model: nn.Module, *batches: Tensor, **options: Any) -> Compiled:
    """Takes an AdamW step for each batch, beside eager."""
    expected = twin(model)
    compiled = Compiled(model, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, expected)]
    for batch in batches:
        results = []
        for run, optimizer in zip((compiled, expected), optimizers, strict=True):
            torch.manual_seed(1)
            optimizer.zero_grad()
            results.append(run(batch))
            results[-1].square().mean().backward()
        assert_close(results[0].detach(), results[1].detach())
        assert_same_gradients(model, expected)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_buffers(model, expected)
    return compiled


def batch(length: int = 5, count: int = 3) -> Tensor:
    return torch.randn(count, length, WIDTH)


# ---- sharing -------------------------------------------------------------------------------


def test_layers_of_a_flat_graph_share_a_closure_and_train_like_eager() -> None:
    compiled = assert_trains_like_eager(Net(*layers(4)), batch(), batch(), batch())
    (report,) = compiled.reports
    assert [d.shared for d in report.decisions] == [False, False, True, True]
    assert report.decisions[-1].path == "layers.3"


@pytest.mark.sweep
def test_work_does_not_grow_with_depth() -> None:
    held = []
    for count in (4, 12):
        torch._dynamo.reset()
        compiled = Compiled(Net(*layers(count)))
        compiled(batch()).sum().backward()
        held.append((compiled.reports[0].num_closures, compiled.reports[0].num_kernels))
    assert held[0] == held[1]


def test_a_constant_that_differs_keeps_layers_apart() -> None:
    net = Net(*layers(4), *layers(4, 0.5))
    compiled = assert_trains_like_eager(net, batch())
    shared = [d.shared for d in compiled.reports[0].decisions]
    assert shared == [False, False, True, True, False, True, True, True]


def test_a_module_that_is_called_again_is_a_call_again() -> None:
    layer = Layer()
    compiled = assert_trains_like_eager(Net(layer, layer, layer, layer), batch())
    assert sum(d.shared for d in compiled.reports[0].decisions) == 2


def test_layers_inside_layers_are_shared_inside() -> None:
    groups = [Net(*layers(4)) for _ in range(2)]
    compiled = assert_trains_like_eager(Net(*groups), batch())
    assert compiled.reports[0].num_nodes < 4 * 9 * 2


@pytest.mark.sweep
def test_the_own_decoder_is_like_eager() -> None:
    model, args = llama(4)
    expected = twin(model)
    compiled = Compiled(model)
    for run in (compiled, expected):
        run(*args).backward()
    assert_same_gradients(model, expected)
    assert sum(d.shared for d in compiled.reports[0].decisions) >= 2


# ---- torch.compiler.nested_compile_region -----------------------------------------------------


class RegionLayer(Layer):
    """A layer that Dynamo traces once; it draws, writes a buffer and switches modes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.BatchNorm1d(WIDTH)

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


REGIONS = {"layers": lambda count: Net(*(RegionLayer() for _ in range(count))), "gates": Gates}


@pytest.mark.parametrize("kind", REGIONS)
def test_a_nested_compile_region_is_a_call_and_is_compiled_once(kind: str) -> None:
    work = []
    for count in (4, 8):
        torch._dynamo.reset()
        compiled = assert_trains_like_eager(REGIONS[kind](count), batch(), batch())
        report = compiled.reports[0]
        # Dynamo inlines the first call: its input needs no gradient, which no other's is like.
        assert report.num_block_calls == count - 1
        assert sum(d.shared for d in report.decisions) == count - 2
        work.append((report.num_closures, report.num_kernels, report.num_operators))
    assert work[0] == work[1]
    torch._dynamo.reset()
    net, x = REGIONS[kind](4).eval(), batch()
    with torch.no_grad():
        assert_close(Compiled(net)(x), net(x))


def test_nested_compile_regions_take_sizes_that_vary() -> None:
    compiled = assert_trains_like_eager(Gates(4), *(batch(length) for length in (5, 6, 8)))
    assert (compiled.reports[1].num_compiles, compiled.reports[1].num_links) == (1, 1)
    assert sum(d.shared for d in compiled.reports[1].decisions) == 2


def test_a_region_with_options_for_another_compiler_is_handed_on() -> None:
    def backend(module: Any, inputs: Any) -> Any:
        regions = [m for m in module.modules() if isinstance(m, torch.fx.GraphModule)]
        regions[-1].meta["nested_region_config"] = object()
        return compile_graph(module, inputs, options={"backend": "eager"})

    net, x = Gates(3), batch()
    with pytest.warns(HandedOnWarning, match="options for another compiler"):
        assert_close(torch.compile(net, backend=backend)(x), net(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_is_like_eager(mode: Callable[[], Any]) -> None:
    net = Net(*layers(4)).eval()
    compiled, x = Compiled(net), batch()
    with mode():
        assert_close(compiled(x), net(x))
    assert any(d.shared for d in compiled.reports[0].decisions)


@pytest.mark.sweep
def test_gpt2_with_its_defaults_is_like_eager() -> None:
    config = GPT2Config(vocab_size=67, n_positions=32, n_embd=32, n_layer=3, n_head=4)
    model = GPT2LMHeadModel(config)
    expected, ids = twin(model), torch.randint(0, 67, (2, 6))
    compiled = Compiled(model)
    losses = []
    for run in (compiled, expected):
        torch.manual_seed(3)
        losses.append(run(ids, labels=ids).loss)
        losses[-1].backward()
    assert_close(losses[0], losses[1])
    assert_same_gradients(model, expected)
    assert all(isinstance(graph, CompiledGraph) for graph in compiled.graphs)
    assert any(d.shared for report in compiled.reports for d in report.decisions)


# ---- what Dynamo does ----------------------------------------------------------------------


class Halves(nn.Module):
    """Two stacks, and in between what Dynamo does not capture."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(*layers(4)), Net(*layers(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_graph_breaks_are_dynamos() -> None:
    compiled = assert_trains_like_eager(Halves(), batch(), batch())
    assert len(compiled.graphs) == 2
    assert all(any(d.shared for d in report.decisions) for report in compiled.reports)


def test_a_length_that_varies_is_compiled_once_and_linked() -> None:
    batches = [batch(length) for length in (5, 6, 7, 9, 6)]
    compiled = assert_trains_like_eager(Net(*layers(4)), *batches)
    assert len(compiled.graphs) == 2  # Dynamo's second graph is for all lengths
    report = compiled.reports[1]
    assert (report.num_compiles, report.num_links, report.why_static) == (1, 2, "")


@pytest.mark.sweep
def test_a_size_in_arithmetic_is_asked_of_the_tensor() -> None:
    def shifted(x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1], dtype=x.dtype)[:, None] / x.shape[1]

    batches = [batch(length) for length in (5, 6, 8)]
    assert_trains_like_eager(Net(*layers(4), between=shifted), *batches)


def test_a_number_that_varies_and_is_no_size_is_handed_on() -> None:
    class Powers(Net):
        def forward(self, x: Tensor, power: int) -> Tensor:  # type: ignore[override]
            return super().forward(x) * power

    net = Powers(*layers(2))
    compiled, x = Compiled(net), batch()
    compiled(x, 3)
    with pytest.warns(HandedOnWarning, match="varies and no size of an input"):
        assert_close(compiled(x, 4), net(x, 4))
    assert_close(compiled(x, 7), net(x, 7))


# ---- modes, mutations, checkpoints -----------------------------------------------------------


def test_modes_in_the_graph_hold_for_what_they_surround() -> None:
    class Mixed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = x.abs().mean()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.up(self.norm(x))
            return x + self.down(F.gelu(y.float())) * scale

    def halved(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ x.transpose(1, 2) @ x).float()

    net = Net(*(Mixed() for _ in range(4)), between=halved)
    compiled = assert_trains_like_eager(net, batch(), batch())
    assert any(d.shared for d in compiled.reports[0].decisions)


@pytest.mark.sweep
def test_autocast_around_the_call_is_that_of_the_call() -> None:
    net = Net(*layers(4))
    expected, x = twin(net), batch()
    compiled = Compiled(net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(compiled(x), expected(x))
    assert_close(compiled(x), expected(x))


def test_a_mode_that_is_left_switched_is_handed_on() -> None:
    def leave(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return x * 2

    net = Net(*layers(2), between=leave)
    with pytest.warns(HandedOnWarning, match="mode"):
        out = Compiled(net)(batch())
    was_switched = not torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert was_switched
    assert not out.requires_grad


@pytest.mark.sweep
def test_buffers_that_the_forward_changes_are_changed() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.layer = Layer()

        def forward(self, x: Tensor) -> Tensor:
            # Past a tanh the next norm does not take a bias out again, whose gradient would be 0.
            return torch.tanh(self.layer(self.norm(x.transpose(1, 2)).transpose(1, 2)))

    assert_trains_like_eager(Net(*(Norm() for _ in range(4))), batch(), batch())


class Writes(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y.add_(x.sum())
        return x.transpose(0, 1), y * 2


class WritesAndViews(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y.add_(x.sum())
        return x.transpose(0, 1), y[0]


@pytest.mark.filterwarnings(
    "ignore::lazyinline.frontend.dynamo.torch_dynamo_backend.HandedOnWarning"
)
@pytest.mark.parametrize("kind", [Writes, WritesAndViews])
def test_an_input_that_is_changed_and_a_view_of_one_are_the_users_own(
    kind: type[nn.Module],
) -> None:
    model, x = kind(), torch.randn(3, 4)
    ours, theirs = torch.zeros(2, 2), torch.zeros(2, 2)
    compiled = Compiled(model)
    found, expected = compiled(x, ours), model(x, theirs)
    assert_close(found, expected)
    assert_close(ours, theirs)
    assert found[0].data_ptr() == x.data_ptr()
    assert (found[1].data_ptr() == ours.data_ptr()) == (expected[1].data_ptr() == theirs.data_ptr())
    is_ours = isinstance(compiled.graphs[0], CompiledGraph)
    assert is_ours == (kind is Writes)  # the other is handed on


def test_dropout_draws_as_eager_does() -> None:
    class Drops(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.3, self.training)

    assert_trains_like_eager(Net(*(Drops() for _ in range(4))), batch(), batch())


def test_a_checkpoint_is_computed_again_and_shared() -> None:
    class Again(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    compiled = assert_trains_like_eager(Net(*(Again() for _ in range(4))), batch(), batch())
    (report,) = compiled.reports
    plain = Compiled(Net(*layers(4)))
    plain(batch())
    assert report.saved_bytes < plain.reports[0].saved_bytes
    assert sum(d.shared for d in report.decisions) >= 2


@pytest.mark.sweep
def test_recompute_is_an_option() -> None:
    compiled = assert_trains_like_eager(Net(*layers(4)), batch(), options={"recompute": "full"})
    plain = Compiled(Net(*layers(4)))
    plain(batch())
    assert compiled.reports[0].saved_bytes < plain.reports[0].saved_bytes


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def test_an_autograd_function_keeps_its_own_derivative() -> None:
    net = Net(*layers(2), between=_Doubled.apply)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HandedOnWarning)
        assert_trains_like_eager(net, batch())


def test_a_transform_of_torch_func_is_right() -> None:
    def mapped(x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: row * row.sum())(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HandedOnWarning)
        assert_trains_like_eager(Net(*layers(2), between=mapped), batch())


# ---- options and the name ------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"options": {"colour": 1}}, {"mode": "reduce-overhead"}])
def test_an_option_that_does_not_exist_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="does not know"):
        torch.compile(Net(*layers(1)), backend=compile_graph, **wrong)(batch())


def test_the_name_is_registered_where_pytorch_looks() -> None:
    (found,) = entry_points(group="torch_dynamo_backends", name="lazyinline")
    assert found.load() is compile_graph
    assert "lazyinline" in torch._dynamo.list_backends()
    net, x = Net(*layers(2)), batch()
    assert_close(torch.compile(net, backend="lazyinline", options={"backend": "eager"})(x), net(x))


def test_a_compiled_model_can_be_copied() -> None:
    net, x = Net(*layers(2)), batch()
    Compiled(net)(x)
    assert_close(copy.deepcopy(net)(x), net(x))

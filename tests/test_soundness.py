"""What is easily shared wrongly: each case equals eager PyTorch, and says whether it is shared.

Cases about attributes, configurations, classes and outside values are in ``test_evidence.py``;
changes after compiling in ``test_model_state.py``; random combinations of all of them in
``test_random_models.py``.
"""

import copy
import functools
import gc
import operator
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import WIDTH, Around, Stack, block, example, linear
from equality import assert_equals_eager
from printed import unfolded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lazyinline
from lazyinline import CompileReport, lazy_inline
from lazyinline.frontend.checks.torch_state import TensorLayouts
from lazyinline.reuse import torch_pytree


def tanh(self: Any, x: Tensor) -> Tensor:
    result: Tensor = torch.tanh(self.linear(x))
    return result


def stack(count: int = 2, forward: Callable[..., Any] = tanh, **attributes: Any) -> Stack:
    kind = block(forward)
    return Stack(*(kind(**copy.deepcopy(attributes)) for _ in range(count)))


# ---- gradients under no_grad -----------------------------------------------------------------

RETURNS_ITS_OPERAND: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda x: x.to(torch.float64),
    "contiguous": lambda x: x.contiguous(),
    "dropout in eval mode": lambda x: torch.dropout(x, 0.5, False),
    "flatten": lambda x: x.flatten(1),
    "type_as": lambda x: x.type_as(x),
    "expand_as": lambda x: x.expand_as(x),
}


@pytest.mark.parametrize("name", RETURNS_ITS_OPERAND)
@pytest.mark.parametrize("marked", [True, False])
def test_operator_that_returns_its_operand_under_no_grad_takes_no_gradient_away(
    name: str, marked: bool
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = self.linear(RETURNS_ITS_OPERAND[name](x))
        return x + z

    kind = block(forward, mark=marked)
    assert assert_equals_eager(Stack(kind(), kind()), [example()]).shared == int(marked)


# ---- backward hooks --------------------------------------------------------------------------


def doubling(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g * 2 for g in inputs)


def doubling_first(module: nn.Module, outputs: Any) -> Any:
    return tuple(g * 2 for g in outputs)


HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "full backward": ("register_full_backward_hook", doubling),
    "full backward, before": ("register_full_backward_pre_hook", doubling_first),
    "old backward": ("register_backward_hook", doubling),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("place", ["layers.1", "layers.1.linear", ""])
@pytest.mark.sweep(
    keep=["layers.1-full backward]", "layers.1.linear-old backward", "-full backward, before"]
)
def test_backward_hook_runs_and_the_reason_is_reported(name: str, place: str) -> None:
    register, hook = HOOKS[name]
    model = stack(3)
    getattr(model.get_submodule(place), register)(hook)
    outcome = assert_equals_eager(model, [example()])
    assert outcome.shared == 0
    report = outcome.compiled.last_report
    assert f"{place or 'The model'} (" in report.ran_eagerly
    assert "backward hook" in unfolded(report)
    model.zero_grad()
    with torch.no_grad():  # no backward, so nothing stands in the way
        found = assert_equals_eager(model, [example(grad=False)])
    assert found.shared == (1 if place else 2)
    assert not found.compiled.last_report.ran_eagerly


def test_backward_hook_sees_at_each_backward_what_it_sees_in_eager() -> None:
    seen: dict[str, list[Any]] = {}

    def watched(name: str, model: Stack) -> Stack:
        log = seen.setdefault(name, [])
        hook = lambda module, inputs, outputs: log.append((*inputs, *outputs))  # noqa: E731
        model.layers[1].register_full_backward_hook(hook)
        return model

    model = stack(3)
    reference = watched("eager", copy.deepcopy(model))
    assert_equals_eager(watched("compiled", model), [example()], reference=reference, calls=3)
    assert len(seen["compiled"]) == len(seen["eager"]) == 3
    for ours, theirs in zip(seen["compiled"], seen["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("everywhere", [False, True])
def test_backward_hook_that_comes_and_goes_is_noticed(everywhere: bool) -> None:
    model = stack(3)
    reference = copy.deepcopy(model)
    compiled = lazyinline.compile(model, backend="eager")

    def gradient(run: nn.Module) -> Tensor:
        x = example()
        run(x).sum().backward()
        assert x.grad is not None
        return x.grad

    plain = gradient(reference)
    torch.testing.assert_close(gradient(compiled), plain, rtol=1e-12, atol=0)
    if everywhere:
        handles = [nn.modules.module.register_module_full_backward_hook(doubling)]
    else:
        handles = [m.layers[2].register_full_backward_hook(doubling) for m in (model, reference)]
    try:
        hooked = gradient(reference)
        assert not torch.equal(hooked, plain)
        torch.testing.assert_close(gradient(compiled), hooked, rtol=1e-12, atol=0)
    finally:
        for handle in handles:
            handle.remove()
    torch.testing.assert_close(gradient(compiled), plain, rtol=1e-12, atol=0)


def test_hook_on_all_modules_keeps_blocks_apart_and_is_noticed() -> None:
    model = stack(3)
    compiled = lazyinline.compile(model, backend="eager")
    plain = compiled(example())
    register = nn.modules.module.register_module_forward_hook
    handle = register(lambda module, args, out: out * 2)
    try:
        outcome = assert_equals_eager(model, [example()])
        assert outcome.shared == 0
        assert "it has forward hooks" in outcome.reasons[0]
        torch.testing.assert_close(compiled(example()), model(example()), rtol=1e-12, atol=0)
    finally:
        handle.remove()
    torch.testing.assert_close(compiled(example()), plain, rtol=1e-12, atol=0)


# ---- a mark never makes a model fail ----------------------------------------------------------


def view_before_a_change(layers: Any, x: Tensor) -> Tensor:
    y = torch.sin(x)
    view = y[0]
    result: Tensor = layers[1](layers[0](y)) + view
    return result


def test_model_that_no_closure_can_express_is_captured_without_blocks() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        result: Tensor = self.linear(x)
        return result

    kind = block(forward)
    outcome = assert_equals_eager(Around(view_before_a_change, kind(), kind()), [example()])
    assert outcome.shared == 0
    assert all("nothing is shared" in reason for reason in outcome.reasons)
    assert "seen through a view" in outcome.reasons[0]
    assert outcome.compiled.last_report.num_block_calls == 2


# ---- what else a layer may be made of --------------------------------------------------------


class Lora(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(example(WIDTH, 2, seed=1, grad=False))
        self.up = nn.Parameter(example(2, WIDTH, seed=2, grad=False))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + x @ self.down @ self.up
        return result


def lora_in(*places: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = stack(4)
        for place in places:
            layer = model.layers[place]
            layer.linear = Lora(layer.linear.requires_grad_(False))
        return model

    return make


def normed(way: Callable[[nn.Module], Any], *places: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = stack(4)
        for place in places:
            way(model.layers[place].linear)
        return model

    return make


def tied_embedding_and_head() -> nn.Module:
    def body(layers: Any, x: Tensor) -> Tensor:
        h = layers[0](torch.arange(3))
        for layer in layers[1:3]:
            h = layer(h)
        result: Tensor = layers[3](h) + x.sum()
        return result

    kind = block(tanh)
    embedding, head = nn.Embedding(9, WIDTH, dtype=torch.float64), nn.Linear(WIDTH, 9, bias=False)
    head.weight = embedding.weight
    return Around(body, embedding, kind(), kind(), head)


def flags_inside(*flags: bool) -> Callable[[], nn.Module]:
    """A Python flag per layer, read in a block inside a block (pytorch#192905)."""

    def make() -> nn.Module:
        def forward(self: Any, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) if self.flag else self.linear(x) * 3

        inner, outer = block(forward), block(lambda self, x: self.linear(self.inner(x)))
        return Stack(*(outer(inner=inner(flag=flag)) for flag in flags))

    return make


def recursive() -> nn.Module:
    def forward(self: Any, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(self.linear(x))
        return self(x, depth - 1) if depth else x

    return stack(2, forward)


def many_that_hold_their_number() -> nn.Module:
    kind = block(tanh)
    return Stack(*(kind(layer_idx=i) for i in range(10)))


def drop_in_checkpoint() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        run = lambda v: torch.dropout(torch.tanh(self.linear(v)), 0.5, True)  # noqa: E731
        result: Tensor = checkpoint(run, x, use_reentrant=False)
        return result * torch.rand_like(x)

    return stack(3, forward)


def buffer_and_generator_in_training() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.dropout(self.norm(self.linear(x)), 0.25, self.training)

    return stack(3, forward, norm=nn.BatchNorm1d(WIDTH, dtype=torch.float64))


def weight_norm(layer: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(layer)


def spectral_norm(layer: nn.Module) -> None:
    nn.utils.parametrizations.spectral_norm(layer)


MODELS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "adapters on some layers": (lora_in(1, 3), 2, ""),
    "adapters on all layers": (lora_in(0, 1, 2, 3), 3, ""),
    "weight norm on some layers": (normed(weight_norm, 1, 3), 1, ""),
    "spectral norm, which counts": (normed(spectral_norm, 0), 2, ""),
    "embedding and head tied": (tied_embedding_and_head, 1, ""),
    "flags inside a nested block": (flags_inside(True, False, True), 1, "attribute flag"),
    "a block that calls itself": (recursive, 1, ""),
    "ten layers with a number": (many_that_hold_their_number, 9, ""),
    "dropout in a checkpoint": (drop_in_checkpoint, 2, ""),
    "running statistics and dropout": (buffer_and_generator_in_training, 2, ""),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_equals_eager_and_shares(name: str) -> None:
    make, shared, reason = MODELS[name]
    torch.manual_seed(0)
    outcome = assert_equals_eager(make(), [example()], calls=3)
    assert outcome.shared == shared, outcome.reasons
    if reason:
        assert any(reason in found for found in outcome.reasons), outcome.reasons


# ---- inputs ----------------------------------------------------------------------------------

INPUTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "transposed": (lambda x: x.t().contiguous().t(), 0),  # the second gets another layout
    "expanded": (lambda x: x[:1].expand(3, WIDTH), 0),
    "strided": (lambda x: torch.cat([x, x], 1)[:, ::2], 0),
    "flipped": (lambda x: x.flip(0), 1),
    "with an offset": (lambda x: torch.cat([x, x])[3:], 0),
}


@pytest.mark.parametrize("name", INPUTS)
def test_input_in_another_layout(name: str) -> None:
    """The first block is called with that layout, the second with a plain result of the first."""
    change, shared = INPUTS[name]
    model = Around(lambda layers, x: layers[1](layers[0](change(x))), *stack().layers)
    assert assert_equals_eager(model, [example()]).shared == shared
    assert_equals_eager(stack(), [change(example(grad=False))])


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128]
)
def test_blocks_in_another_dtype(dtype: torch.dtype) -> None:
    def body(layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x.to(dtype))
        return torch.view_as_real(x) if dtype.is_complex else x

    kind = block(lambda self, x: self.linear(x) * 0.5)
    model = Around(body, kind(), kind(), kind()).to(dtype)
    x = example(grad=False).to(dtype)
    tolerance = 1e-10 if dtype.to_real() == torch.float64 else 1e-2
    assert assert_equals_eager(model, [x], tolerance=tolerance).shared == 1


def test_blocks_of_integers() -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        return (ids * 3 + self.shift) % 7

    kind = block(forward)
    layers = [kind(shift=torch.tensor(s)) for s in (1, 2)]
    body = lambda layers, ids, x: x * layers[1](layers[0](ids)).sum()  # noqa: E731
    assert assert_equals_eager(Around(body, *layers), [torch.arange(5), example()]).shared == 1


def test_half_precision_and_autocast_on_one_block() -> None:
    def body(layers: Any, x: Tensor) -> Tensor:
        x = layers[0](x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = layers[1](x)
        x = layers[2](x.half()).float()
        result: Tensor = layers[4](layers[3](x))
        return result

    kind = block(lambda self, x: self.linear(x))
    model = Around(body, *(kind() for _ in range(5))).float()
    model.layers[2].half()
    x = example(grad=False).float()
    assert assert_equals_eager(model, [x], tolerance=1e-2).shared == 1


# ---- random numbers --------------------------------------------------------------------------


def test_dropout_masks_of_micro_batches_equal_eagers_under_one_seed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack(3, lambda self, x: torch.dropout(self.linear(x), 0.5, True)).layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().sum()

    model, x = Model(), example(6, WIDTH, grad=False)
    reference = copy.deepcopy(model)
    step = lazyinline.compile_step(model, micro_batches=3, backend="eager")
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        torch.manual_seed(5)
        step(x)
        after = torch.get_rng_state()
        torch.manual_seed(5)
        for part in x.chunk(3):
            (reference(part) / 3).backward()
        assert torch.equal(torch.get_rng_state(), after)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    assert sum(d.shared for d in step.last_report.decisions) == 1


# ---- copies ----------------------------------------------------------------------------------


@lazy_inline
class Cell(nn.Module):
    """On module level, so that it can be pickled."""

    def __init__(self, width: int = WIDTH, *, scale: float = 2.0) -> None:
        super().__init__()
        self.linear = linear(width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.linear(x)) * self.scale
        return result


class Deeper(Cell):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_marked_modules_and_subclasses_share(way: Callable[[Any], Any]) -> None:
    model = Stack(Cell(), Cell(WIDTH, scale=2.0), Deeper(), Deeper(width=WIDTH))
    model.layers.append(way(model.layers[3]))
    outcome = assert_equals_eager(way(model), [example()], reference=model)
    assert outcome.shared == 3


# ---- the cost of noticing --------------------------------------------------------------------


@pytest.mark.sweep
def test_noticing_takes_few_lines_of_python_per_block() -> None:
    """Of a Hugging Face Llama block: 13 modules, 9 tensors, 16 attributes read.

    Counted where no word of memory answers for them: two lines for each, a loop's and a check's.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    kind = lazy_inline(type("Layer", (LlamaDecoderLayer,), {}))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "use_cache": False}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}

    def guard(layers: int) -> Callable[[], bool]:
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes, **heads))
        for layer in model.model.layers:
            layer.__class__ = kind
        ids = torch.zeros(1, 4, dtype=torch.long)
        compiled = lazyinline.compile(model, backend="eager")
        compiled(ids, labels=ids)
        (entry,) = vars(compiled)["_lazyinline_calls"].entries
        leaves, tree = torch_pytree.flatten(((ids,), {"labels": ids}))
        assert entry.guard.accepts(leaves, tree)
        return functools.partial(entry.guard.accepts, leaves, tree)

    few, many = (num_lines(guard(layers)) for layers in (2, 34))
    assert 0 < many - few <= 32 * 2 * (13 + 9 + 16), (few, many)


def num_lines(function: Callable[[], object]) -> int:
    """Counts the lines of Python that a function runs, its own and those of what it calls."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    function()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_layouts_are_compared_exactly_whatever_the_callers_modes() -> None:
    tensors = [torch.ones(3, 3, requires_grad=True), torch.ones(2)]
    layouts = TensorLayouts(tensors)
    assert layouts.same(tensors)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with mode:
            assert layouts.same(tensors)
            assert TensorLayouts(tensors).same(tensors)
            assert not layouts.same([tensors[0].detach(), tensors[1]])
    tensors[0].requires_grad_(False)
    assert not layouts.same(tensors)
    with torch.no_grad():
        assert not layouts.same(tensors)


# ---- what lies outside the model and changes after compiling ---------------------------------

SHIFT = 1.0
OPTIONS = {"shift": [1.0]}
HOLDER = types.SimpleNamespace(shift=1.0)


class Settings:
    shift = 1.0


class Held:
    def __init__(self) -> None:
        self.shift = 1.0

    def __call__(self) -> float:
        return self.shift


HELD = Held()
ANCHOR = example(seed=4, grad=False)


def helper() -> float:
    return 1.0


def set_global(name: str) -> Callable[[Any], None]:
    return lambda value: globals().update({name: value})


OUTSIDE: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "a global number": (lambda: SHIFT, set_global("SHIFT")),
    "an entry of a global": (
        lambda: OPTIONS["shift"][0],
        lambda value: operator.setitem(OPTIONS["shift"], 0, value),
    ),
    "an attribute of a global": (
        lambda: HOLDER.shift,
        lambda value: setattr(HOLDER, "shift", value),
    ),
    "an attribute of a class": (
        lambda: Settings.shift,
        lambda value: setattr(Settings, "shift", value),
    ),
    "an object that is called": (lambda: HELD(), lambda value: setattr(HELD, "shift", value)),
    "a global function": (
        lambda: helper(),
        lambda value: globals().update(helper=lambda: value),
    ),
    "a global tensor": (
        lambda: ANCHOR,
        lambda value: globals().update(ANCHOR=example(seed=int(value), grad=False)),
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("where", ["block", "model"])
@pytest.mark.sweep(
    keep=["block-a global number", "block-an attribute of a class", "model-a global function"]
)
def test_outside_value_changed_after_compiling_counts_at_the_next_call(
    name: str, where: str, compiles: list[CompileReport]
) -> None:
    read, write = OUTSIDE[name]
    if where == "block":
        model: nn.Module = stack(2, lambda self, x: torch.tanh(self.linear(x)) + read())
    else:
        model = Around(lambda layers, x: layers[1](layers[0](x)) + read(), *stack().layers)
    compiled, x = lazyinline.compile(model, backend="eager"), example()
    before = read()
    try:
        for value in (1.0, 1.0, 2.0, 3.0):
            write(value)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=0)
        assert len(compiles) <= 4
    finally:
        write(4.0 if isinstance(before, Tensor) else 1.0)


@pytest.mark.sweep
def test_captured_variable_is_watched_where_the_garbage_collector_sees_nothing() -> None:
    shift = 1.0
    kind = block(lambda self, x: self.linear(x) + shift)
    model, x = Stack(kind(), kind()), example()
    gc.freeze()
    try:
        compiled = lazyinline.compile(model, backend="eager", fallback="error")
        if sys.version_info < (3, 11):  # no frame tells which function it ran
            with pytest.raises(lazyinline.CaptureError, match=r"Call gc\.unfreeze"):
                compiled(x)
            return
        for value in (1.0, 2.0, 2.0, 3.0):
            shift = value
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=0)
    finally:
        gc.unfreeze()


def test_captured_variable_and_method_changed_after_compiling_count() -> None:
    shift = 1.0

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) + shift

    kind = block(forward)
    kind.act = lambda self, x: torch.tanh(x)  # type: ignore[attr-defined]
    model, x = Stack(kind(), kind()), example()
    compiled = lazyinline.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=0)
    shift = 2.0
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=0)
    kind.act = lambda self, x: torch.sin(x)  # type: ignore[attr-defined]
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=0)
    kind.forward = lambda self, x: self.linear(x)  # type: ignore[method-assign]
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=0)


class ReadsAll(nn.Module):
    """Looks for an attribute in its ``__dict__``, where most instances have none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * vars(self).get("extra", 1.25)


@pytest.mark.parametrize("reuse", ["marked", "off"])
@pytest.mark.sweep(keep="marked")
def test_a_name_that_appears_in_a_dictionary_read_as_a_whole(reuse: str) -> None:
    lazyinline.lazy_inline(ReadsAll)
    model = nn.Sequential(*(ReadsAll() for _ in range(4)))
    model[2].extra = 2.0
    compiled, x = lazyinline.compile(model, backend="eager", reuse=reuse), torch.randn(2, 4)
    x.requires_grad_()
    torch.testing.assert_close(compiled(x), model(x))
    decisions = {d.path: d for d in compiled.last_report.decisions}
    if reuse == "marked":
        assert decisions["1"].shared and not decisions["2"].shared
        assert decisions["2"].reason == "__dict__ is read, and differs in extra"
    for place, value in ((3, 3.0), (0, 5.0), (2, 7.0)):
        model[place].extra = value
        torch.testing.assert_close(compiled(x), model(x))
    del model[2].extra
    torch.testing.assert_close(compiled(x), model(x))


class WritesARow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x[0] = 0.5  # of an expanded tensor: every row
        return x + torch.tanh(self.linear(x))


class Expands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WritesARow() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = layer((x * 2)[:1].expand(3, 4))
        return x


def test_a_write_into_an_expanded_input_reaches_every_row() -> None:
    lazyinline.lazy_inline(WritesARow)
    model, x = Expands(), torch.randn(3, 4)
    compiled = lazyinline.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    assert not any(d.shared for d in compiled.last_report.decisions)


# ---- what lies on a class, a module or another object that an attribute leads to -----------------

OWNERS: dict[str, Callable[[], Any]] = {
    "a class": lambda: type("Owner", (), {"__module__": "users", "count": 0}),
    "a Python module": lambda: types.ModuleType("users"),
    "a function": lambda: types.FunctionType(tanh.__code__, {"__name__": "users"}),
    "an object": lambda: type("Owner", (), {"__module__": "users"})(),
    "the class of an object": lambda: type("Owner", (), {"__module__": "users", "count": 0})(),
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda owner: owner,
    "item": lambda owner: [owner],
    "entry": lambda owner: {"owner": [owner]},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.sweep(keep="True")
def test_blocks_that_count_on_something_that_an_attribute_leads_to_are_not_shared(
    name: str, way: str, marked: bool
) -> None:
    def owner(self: Any) -> Any:
        held = self.held
        while isinstance(held, (list, dict)):
            held = held["owner"] if isinstance(held, dict) else held[0]
        return type(held) if name == "the class of an object" else held

    class Counts(nn.Module):
        def __init__(self, held: Any) -> None:
            super().__init__()
            self.linear, self.held = linear(), held

        def forward(self, x: Tensor) -> Tensor:
            owner(self).count += 1
            return self.linear(x) * owner(self).count

    class Resets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            held, kind = WAYS[way](OWNERS[name]()), lazy_inline(Counts) if marked else Counts
            self.blocks = nn.ModuleList([kind(held) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            owner(self.blocks[0]).count = 0
            for one in self.blocks:
                x = one(x)
            owner(self.blocks[0]).count = 0
            return x

    model = Resets()
    compiled = lazyinline.compile(model, backend="eager")
    for _ in range(2):
        x = example()
        torch.testing.assert_close(compiled(x), model(x))

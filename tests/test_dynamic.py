"""Sizes that vary: a second shape makes symbols of them, a further one costs a link."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import decoders as own
import hugging_face
import pytest
import torch
from comparing import assert_close, assert_equals_eager, assert_same_gradients
from test_caches import gpt2, llama
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from transformers import BertConfig, BertForMaskedLM

import lazyinline
from lazyinline import Budget, PlanError, lazy_inline
from lazyinline.frontend.dispatch.dispatcher import ModuleDispatcher
from lazyinline.frontend.options import Options
from lazyinline.reuse.ir.torch_symbols import (
    SizeLiteral,
    symbols_of,
    tensor_type_at,
    with_size_inputs,
)

lazy_inline(own.DecoderBlock)

Shape = tuple[int, ...]


def decoder(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return own.llama(layers, hidden=32, num_heads=2, vocab=50, seq=64)[0]


def ids(shape: Shape) -> Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(sum(shape)))


def counts(compiled: Any) -> tuple[int, int]:
    return compiled.last_report.num_compiles, compiled.last_report.num_links


class Wrapped(nn.Module):
    """A function of the input and a weight, as a model."""

    def __init__(self, function: Callable[..., Any], hidden: int = 8) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(hidden, hidden, generator=torch.Generator()))

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        return self.function(x @ self.weight, *rest)


def train_at(
    model: nn.Module, shapes: Sequence[Shape], data: Callable[[Shape], Any], **options: Any
) -> list[tuple[int, int]]:
    """Trains a compiled model beside eager, a step per shape; returns what was made after each."""
    batches = [data(shape) for shape in shapes]
    return assert_equals_eager(model, batches=batches, optimizer=sgd, note=counts, **options).seen


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-4)  # of a sum over all elements


# ---- what is compiled, what is linked -----------------------------------------------------------


@pytest.mark.smoke
def test_a_third_length_costs_a_link() -> None:
    found = train_at(decoder(), [(2, 8), (2, 12), (2, 16), (2, 8), (2, 64)], lambda s: [ids(s)])
    assert found == [(1, 0), (2, 0), (2, 1), (2, 1), (2, 2)]


def test_batch_and_length_vary_and_may_coincide_with_each_other_and_with_the_model() -> None:
    shapes = [(2, 8), (3, 12), (4, 4), (32, 32), (8, 2), (12, 3)]
    found = train_at(decoder(), shapes, lambda s: [ids(s)])
    assert found[-1] == (2, 4)


@pytest.mark.parametrize("second", [(4, 4), (8, 8), (32, 32)], ids=str)
@pytest.mark.sweep
def test_sizes_that_coincide_while_compiling_mean_nothing(second: Shape) -> None:
    found = train_at(decoder(), [(2, 16), second, (3, 5), (7, 2)], lambda s: [ids(s)])
    assert found[-1] == (2, 2)


def test_size_one_is_compiled_for_itself() -> None:
    shapes = [(2, 8), (2, 12), (1, 12), (2, 1), (2, 9), (1, 1)]
    found = train_at(decoder(1), shapes, lambda s: [ids(s)])
    assert found[1] == (2, 0) and found[4][1] == found[3][1] + 1


@pytest.mark.sweep
def test_dimensions_that_were_equal_and_no_longer_are_get_symbols_of_their_own() -> None:
    found = train_at(decoder(), [(4, 4), (6, 6), (4, 6), (7, 5), (9, 9)], lambda s: [ids(s)])
    assert found == [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)]


@pytest.mark.sweep
def test_a_mark_for_recompute_is_honoured_at_every_length() -> None:
    model = decoder()
    lazyinline.recompute(model.blocks[0], "full")
    compiled = lazyinline.compile(model, backend="eager")
    saved = []
    for shape in [(2, 8), (2, 12), (2, 16)]:
        compiled(ids(shape)).sum().backward()
        report = compiled.last_report
        saved.append(report.saved_bytes)
        assert any(row.recomputed_flops for row in report.recompute)
    assert saved[0] < saved[1] < saved[2]
    assert counts(compiled) == (2, 1), compiled.last_report.why_static
    assert report.recompute_chosen_for == ((2, 12),) and "inputs of (2, 12)" in str(report)


class Gate(nn.Module):
    """A part that drops at random."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(self.up(x).tanh(), 0.2, self.training))


class GateBlock(Gate):
    """The same as a block in a block."""


class Mixing(nn.Module):
    """Mixes the positions of texts of any length."""

    def __init__(self, gate: type[nn.Module]) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(8, 8), gate()

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        x = x + (h @ h.mT / x.shape[1]).softmax(-1) @ h
        return x + self.gate(x)


lazy_inline(GateBlock)
lazy_inline(Mixing)


@pytest.mark.parametrize("gate", [Gate, GateBlock])
@pytest.mark.parametrize("policy", ["full", "selective", Budget(fraction=0.5)], ids=str)
@pytest.mark.sweep(keep="full-GateBlock]")
def test_a_policy_of_recompute_is_kept_at_every_length(policy: Any, gate: type[nn.Module]) -> None:
    def data(shape: Shape) -> list[Tensor]:
        return [torch.randn(*shape, 8, generator=torch.Generator().manual_seed(1))]

    torch.manual_seed(0)
    model = nn.Sequential(*(Mixing(gate) for _ in range(3)))
    shapes = [(2, 8), (3, 12), (2, 16), (5, 31), (2, 8)]
    options = {"recompute": policy, "reuse": "marked"}
    found = train_at(model, shapes, data, **options)
    assert found == [(1, 0), (2, 0), (2, 1), (2, 2), (2, 2)]
    model.eval()  # with symbols, dropout is another operator, which saves more
    for shape in shapes[2:3] if isinstance(policy, str) else ():
        reports = []
        for known in ([], shapes[:2]):  # alone it is compiled for its numbers
            compiled = lazyinline.compile(model, backend="eager", **options)
            for one in (*known, shape):
                compiled(*data(one)).sum().backward()
            reports.append(compiled.last_report)
        assert reports[0].saved_bytes == reports[1].saved_bytes
        assert reports[0].recomputed_flops == reports[1].recomputed_flops


@pytest.mark.sweep
def test_a_budget_in_bytes_is_kept_at_every_length() -> None:
    model = decoder()
    plain = lazyinline.compile(model, backend="eager")
    plain(ids((2, 16))).sum().backward()
    limit = plain.last_report.saved_bytes
    policy = Budget(saved_bytes=limit)
    shapes = [(2, 8), (2, 16), (2, 12), (2, 24), (2, 20), (2, 14)]
    compiled = lazyinline.compile(model, backend="eager", recompute=policy)
    saved = []
    for shape in shapes:
        model.zero_grad()
        compiled(ids(shape)).sum().backward()
        report = compiled.last_report
        saved.append(report.saved_bytes)
        assert_same_gradients(model, grown(copy.deepcopy(model), shape))
    assert max(saved) <= limit and report.why_static == ""
    # What was chosen for 16 serves 12 and 14, and 24 is too long for it: what is chosen then, 20.
    assert counts(compiled) == (3, 3)
    assert report.recompute_chosen_for == ((2, 16),) and report.recomputed_flops == 0


def grown(model: nn.Module, shape: Shape) -> nn.Module:
    """Returns a model with the gradients of one backward in eager."""
    model.zero_grad()
    model(ids(shape)).sum().backward()
    return model


def test_dynamic_true_compiles_once() -> None:
    found = train_at(decoder(1), [(2, 8), (3, 12), (5, 5)], lambda s: [ids(s)], dynamic=True)
    assert found == [(1, 0), (1, 1), (1, 2)]


def test_dynamic_false_compiles_each_shape() -> None:
    found = train_at(decoder(1), [(2, 8), (2, 12), (2, 16)], lambda s: [ids(s)], dynamic=False)
    assert found == [(1, 0), (2, 0), (3, 0)]


def test_another_value_of_dynamic_is_refused() -> None:
    with pytest.raises(PlanError, match="dynamic='yes'"):
        lazyinline.compile(decoder(), dynamic="yes")  # type: ignore[arg-type]


@pytest.mark.sweep
def test_inference_and_training_learn_apart() -> None:
    model = decoder()
    compiled = lazyinline.compile(model, backend="eager")
    for length in (8, 12, 16):
        with torch.no_grad():
            assert_close(compiled(ids((2, length))), model(ids((2, length))))
        assert_close(compiled(ids((2, length))), model(ids((2, length))))
    assert counts(compiled) == (4, 2)


@pytest.mark.slow
@pytest.mark.sweep
def test_planned_inductor_kernels_take_sizes() -> None:
    shapes = [(2, 8), (2, 12), (2, 16), (2, 33)]
    found = train_at(decoder(), shapes, lambda s: [ids(s)], backend="inductor")
    assert found == [(1, 0), (2, 0), (2, 1), (2, 2)]


# ---- what Python does with sizes ------------------------------------------------------------


def branch(h: Tensor) -> Tensor:
    return h.tanh() if h.shape[1] > 16 else h * 2


def masked(h: Tensor) -> Tensor:
    length = h.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return (h @ h.mT).masked_fill(~mask, -1.0) / length**0.5 + torch.arange(length)


def arithmetic(h: Tensor) -> tuple[Tensor, int, float]:
    batch, length = h.shape[:2]
    pooled = h.reshape(batch * length, -1).sum(0) / (batch * length)
    return pooled * batch**0.5 + (length // 3) % 2, length * 2 + 1, length / 2


def halves(h: Tensor) -> Tensor:
    if h.shape[1] % 2:
        h = h[:, :-1]
    left, right = h.chunk(2, dim=1)
    return left * right


PYTHON: dict[str, Any] = {f.__name__: f for f in (branch, masked, arithmetic, halves)}


@pytest.mark.parametrize(
    "of",
    [
        lambda n: n / 8,
        lambda n: 1 / (n - 1),
        lambda n: math.floor(n / 3),
        lambda n: math.ceil(n / 3),
        lambda n: math.trunc(n / 3),
        lambda n: round(n / 3),
    ],
    ids=["quotient", "reciprocal", "floor", "ceil", "trunc", "round"],
)
def test_quotients_of_sizes_and_their_roundings_can_be_computed_by_a_graph(of: Any) -> None:
    graph, env = torch.fx.Graph(), ShapeEnv()
    symbol = env.create_symbol(8, ConstantSource("n"), dynamic_dim=DimDynamic.DYNAMIC)
    size = SizeLiteral(of(env.create_symintnode(symbol, hint=8)))
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), size)))
    module = torch.fx.GraphModule(nn.Module(), graph)
    sized = with_size_inputs(module, symbols_of(module), "last")
    for n in (8, 9, 10, 11, 13):
        assert torch.equal(sized(torch.ones(2), n), torch.ones(2) * of(n))


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.sweep(keep=["branch", "arithmetic"])
def test_python_on_sizes_is_right_at_each_shape(name: str) -> None:
    shapes = [(2, n, 8) for n in (6, 10, 16, 17, 30, 12, 8, 2, 1, 9, 13)]
    found = train_at(Wrapped(PYTHON[name]), shapes, lambda s: [torch.randn(s)])
    assert found[-1][1] >= 4


def test_the_last_position_is_taken_at_every_length() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x[:, -1]) + self.inner(x).mean(1)

    # What is taken has numbers for sizes, and a stride that is none.
    found = train_at(Last(), [(2, n, 8) for n in (6, 10, 7, 3)], lambda s: [torch.randn(s)])
    assert found[-1] == (2, 2)


def test_a_size_that_python_needs_as_a_number_is_compiled_for_itself() -> None:
    model = Wrapped(lambda h: h * math.sqrt(h.shape[1]))
    shapes = [(2, n, 8) for n in (6, 10, 12, 14, 6)]
    compiled = lazyinline.compile(model, backend="eager")
    for shape in shapes:
        x = torch.randn(shape)
        assert_close(compiled(x), model(x))
    assert counts(compiled)[0] == 4


def test_inputs_that_share_a_length_share_a_symbol() -> None:
    def data(shape: Shape) -> list[Tensor]:
        return [torch.randn(*shape, 8), torch.randn(shape), torch.randn(shape[1])]

    model = Wrapped(lambda h, a, b: (h * a[..., None]).sum(-1) + b)
    found = train_at(model, [(2, 5), (2, 7), (2, 9), (3, 9), (4, 3)], data)
    assert found == [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]


@pytest.mark.sweep
def test_a_batch_is_open_once_a_length_varied() -> None:
    found = train_at(decoder(), [(4, 8), (4, 12), (4, 9), (3, 9), (7, 5)], lambda s: [ids(s)])
    assert found[-1] == (2, 3)


def test_a_batch_that_cannot_be_a_symbol_leaves_lengths_open() -> None:
    model = Wrapped(lambda h: h * (h.shape[0] * 0.3))  # a float that symbols may compute otherwise
    found = train_at(model, [(4, 8), (4, 12), (4, 9), (3, 9)], lambda s: [torch.randn(*s, 8)])
    assert found == [(1, 0), (2, 0), (2, 1), (3, 1)]


def test_shapes_that_were_not_used_for_long_are_linked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lazyinline.frontend.guards.kept_programs.MAX_LINKED", 2)
    model = Wrapped(torch.tanh)
    compiled = lazyinline.compile(model, backend="eager")
    for length in (3, 4, 5, 6, 5, 6, 4):
        x = torch.randn(2, length, 8)
        assert_close(compiled(x), model(x))
    assert counts(compiled) == (2, 3)


@pytest.mark.parametrize("numbers", [(1.0, 0.5, 3.0), (1, 2, 3), (True, False, True)])
def test_an_argument_that_is_no_tensor_counts_at_every_shape(numbers: tuple[Any, ...]) -> None:
    model = Wrapped(lambda h, number: h * number + (1 if number else 2))
    compiled = lazyinline.compile(model, backend="eager")
    for length in (3, 4, 5):
        for number in numbers:
            x = torch.randn(2, length, 8)
            assert_close(compiled(x, number), model(x, number))


def test_sizes_that_are_named_from_the_start_may_meet_numbers_and_further_shapes() -> None:
    """As Dynamo names them: of what is no tensor it says nothing."""
    model = Wrapped(lambda h, number: h * number)
    options = Options(reuse="off", backend="eager", recompute=None, cache="off")
    run = ModuleDispatcher(model, options, names=(("s0", "", ""), ()))
    for batch in (4, 6, 1, 3):
        x = torch.randn(batch, 2, 8)
        assert_close(run(x, 3), model(x, 3))


def test_one_tensor_passed_twice_has_one_shape() -> None:
    def pair(first: int, second: int) -> list[Tensor]:
        a = torch.randn(first, 8)
        return [a, a if first == second else torch.randn(second, 8)]

    model = Wrapped(lambda h, b: (h.sum(0), b * 2))
    compiled = lazyinline.compile(model, backend="eager")
    for sizes in ((3, 3), (3, 5), (6, 6), (9, 11), (7, 7), (4, 2)):
        inputs = pair(*sizes)
        assert_close(compiled(*inputs), model(*inputs))
    families = compiled.__dict__["_lazyinline_calls"]._shapes._compiles
    symbolic = [family.linker for family in families if family.linker is not None]
    assert len(symbolic) == 3  # one tensor and two learn apart: the first of each has numbers
    for program in symbolic:  # each symbol stands for one size of what is passed
        a, b = torch.randn(9, 8), torch.randn(11, 8)
        values = program.sizes.values([a, b])
        types = [v.type for v in program.lowered.captured.program.inputs][:2]
        if values is not None:
            assert [tensor_type_at(t, values).shape[0] for t in types] == [9, 11]


def test_an_input_that_is_not_contiguous_is_compiled_for_itself() -> None:
    model = Wrapped(torch.tanh)
    compiled = lazyinline.compile(model, backend="eager")
    for length in (4, 6, 7):
        for x in (torch.randn(2, length, 8), torch.randn(length, 2, 8).transpose(0, 1)):
            out = compiled(x)
            assert_close(out, model(x))
    assert counts(compiled)[1] == 1


def in_layouts(shape: Shape) -> list[Tensor]:
    """One tensor of four dimensions in each layout that views of the same shape may have."""
    wide = torch.randn(shape[0], 9, *shape[2:], generator=torch.Generator().manual_seed(0))
    plain = wide[:, 2 : 2 + shape[1]].contiguous()
    orders = [plain.transpose(a, b).contiguous().transpose(a, b) for a, b in ((0, 1), (1, 2))]
    channels_last = plain.to(memory_format=torch.channels_last)
    gaps = [wide[:, 2 : 2 + shape[1]], torch.stack([plain, plain], -1)[..., 0]]
    return [plain, *orders, channels_last, *gaps]


@pytest.mark.parametrize("first", [0, 3, 5])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.sweep(keep="[eager-3]")
def test_where_one_input_varies_another_has_its_own_layout_at_every_length(
    backend: str, first: int
) -> None:
    """As images beside texts, and the cache of a window, which is as large at each token."""

    def mixed(h: Tensor, image: Tensor) -> Tensor:
        return h.sum((0, 1)) * image.tanh()

    model = Wrapped(mixed)
    compiled = lazyinline.compile(model, backend=backend)
    layouts = in_layouts((2, 3, 2, 8))
    lengths = iter(range(3, 99))
    with torch.no_grad():
        for image in (layouts[first], layouts[first], *layouts):
            x = torch.randn(3, next(lengths), 8)
            assert_close(compiled(x, image), model(x, image))


def test_a_linked_program_notices_what_the_model_became() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = 2.0, nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale + x.shape[1]

    model = Scaled()
    compiled = lazyinline.compile(model, backend="eager")
    for scale in (2.0, 3.0):
        model.scale = scale
        for length in (4, 6, 7, 9):
            assert_close(compiled(torch.ones(2, length, 8)), model(torch.ones(2, length, 8)))
    model.inner.weight = nn.Parameter(torch.ones(8, 8))
    for length in (9, 11, 4):
        assert_close(compiled(torch.ones(2, length, 8)), model(torch.ones(2, length, 8)))


def test_dropout_draws_as_eager_does() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    found = train_at(model, [(4, 8), (6, 8), (9, 8)], lambda s: [torch.randn(s)])
    assert found[-1] == (2, 1)


DROPS_ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda x: nn.functional.dropout(x, 1.0),
    "module": nn.Dropout(1.0),
    "in place": lambda x: nn.functional.dropout(x * 2, 1.0, inplace=True),
    "channels": lambda x: nn.functional.dropout1d(x[None], 1.0)[0],
    "alpha": lambda x: nn.functional.alpha_dropout(x, 1.0, training=True),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(
        x[None], x[None], x[None], dropout_p=1.0
    )[0],
}


@pytest.mark.parametrize("grad", [False, True])
def test_dropout_of_everything_leaves_the_generator_as_eager_does(grad: bool) -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            found = [(drops(x) + x, torch.rand(3)) for drops in DROPS_ALL.values()]
            return [tensor for pair in found for tensor in pair]

    model = Drops()
    compiled = lazyinline.compile(model, backend="eager", dynamic=True, fallback="error")
    for size in (3, 15, 16, 17):
        x, seen = torch.randn(size, 2, requires_grad=grad), []
        for run in (model, compiled):
            torch.manual_seed(5)
            results = [*run(x), torch.get_rng_state()]
            if grad:
                results += torch.autograd.grad(sum(r.sum() for r in results[:-1:2]), x)
            seen.append(results)
        torch.testing.assert_close(*seen, equal_nan=True)


# ---- training steps ---------------------------------------------------------------------------


class Reader(nn.Module):
    """Reads texts with a mean over what came before; counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner = nn.Embedding(50, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        self.calls.add_(1)
        h = self.embed(ids)
        past = h.cumsum(1) / torch.arange(1, 1 + ids.shape[1])[:, None]
        logits = self.inner(past).tanh() @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def texts(shape: Shape) -> list[Tensor]:
    """Texts of several lengths, and what comes next; nothing after their ends."""
    following = ids(shape).roll(-1, dims=1)
    for row in range(shape[0]):
        following[row, max(1, shape[1] - row) :] = -100
    return [ids(shape), following]


def step_at(
    model: nn.Module,
    shapes: Sequence[Shape],
    data: Callable[[Shape], list[Tensor]],
    *,
    micro_batches: int = 1,
    **options: Any,
) -> tuple[Any, list[tuple[int, int]]]:
    """Trains by compiled steps beside a twin in eager; compares losses, gradients and buffers."""
    twin = copy.deepcopy(model)
    options = {"backend": "eager", **options}
    step = lazyinline.compile_step(model, micro_batches=micro_batches, **options)
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (model, twin)]
    found = []
    for shape in shapes:
        batch = data(shape)
        torch.manual_seed(1)
        loss = step(*batch)
        torch.manual_seed(1)
        optimizers[1].zero_grad()
        parts = zip(*(tensor.chunk(micro_batches) for tensor in batch), strict=True)
        results = [twin(*part) for part in parts]
        loss_fn = options.get("loss_fn", lambda result: result)
        expected = torch.stack([loss_fn(result) for result in results]).mean()
        expected.backward()
        assert_close(loss, expected.detach())
        assert_same_gradients(model, twin)
        for optimizer in optimizers:
            optimizer.step()
        assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
        found.append(counts(step))
    return step, found


@pytest.mark.parametrize(
    ("micro_batches", "lengths", "rows", "last"),
    [(1, [9, 13, *range(4, 21), 30], 4, 3), (2, [9, 13, 20, 5], 8, 6)],
)
@pytest.mark.sweep(keep="[2-")
def test_an_epoch_of_steps_costs_two_compiles(
    micro_batches: int, lengths: list[int], rows: int, last: int
) -> None:
    shapes = [*((rows, n) for n in lengths), (last, 11), (rows, 9), (rows, 20)]
    step, found = step_at(Reader(), shapes, texts, micro_batches=micro_batches)
    assert found[:3] == [(1, 0), (2, 0), (2, 1)]
    assert found[-1] == (2, len({*lengths}) - 1), step.last_report.why_static
    if micro_batches > 1:
        with pytest.raises(PlanError, match="cannot be split into 2"):
            step(*texts((5, 11)))


def test_micro_batches_of_one_row_are_compiled_for_themselves() -> None:
    _, found = step_at(Reader(), [(4, 5), (4, 7), (2, 9), (4, 9)], texts, micro_batches=2)
    assert found[-2:] == [(3, 0), (3, 1)]


@pytest.mark.parametrize("policy", ["full", Budget(fraction=0.5)], ids=str)
@pytest.mark.sweep(keep="Budget")
def test_a_step_that_computes_again_is_linked_for_a_further_length(policy: Any) -> None:
    shapes = [(2, 8), (2, 12), (2, 16), (2, 9), (2, 8)]
    step, found = step_at(decoder(), shapes, texts, recompute=policy, order="one_by_one")
    assert found[-1] == (2, 2), step.last_report.why_static
    assert step.last_report.recompute_chosen_for


@pytest.mark.slow
@pytest.mark.parametrize("build", [decoder, Reader])
@pytest.mark.sweep(keep="Reader")
def test_kernels_of_steps_take_sizes(build: Callable[[], nn.Module]) -> None:
    shapes = [(4, 8), (4, 12), (6, 16), (4, 33), (4, 12)]
    _, found = step_at(build(), shapes, texts, backend="inductor", micro_batches=2)
    assert found[-1] == (2, 2)


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.sweep(keep=["branch", "arithmetic"])
def test_python_on_sizes_is_right_in_steps_of_each_shape(name: str) -> None:
    def loss_fn(result: Any) -> Tensor:
        return sum((t.float() ** 2).sum() for t in result if torch.is_tensor(t))

    shapes = [(2, n, 8) for n in (6, 10, 16, 17, 1, 9)]
    model = Wrapped(lambda h: result if isinstance(result := PYTHON[name](h), tuple) else [result])
    _, found = step_at(model, shapes, lambda s: [torch.randn(s)], loss_fn=loss_fn)
    assert found[-1][1] >= 2


def test_steps_with_one_tensor_for_two_arguments_are_linked_as_others() -> None:
    class Same(Reader):
        def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
            return super().forward(ids, targets.where(targets > 0, -100))

    _, found = step_at(Same(), [(4, n) for n in (5, 7, 9, 9, 5)], lambda s: [ids(s)] * 2)
    assert found[-1] == (2, 1)


def test_a_linked_step_draws_as_eager_does() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    shapes = [(4, 8), (6, 8), (9, 8)]
    _, found = step_at(model, shapes, lambda s: [torch.randn(s)], loss_fn=torch.sum)
    assert found[-1] == (2, 1)


def test_a_linked_step_notices_what_the_model_became() -> None:
    class Scaled(Reader):
        scale = 2.0

        def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
            return super().forward(ids, targets) * self.scale

    model = Scaled()
    step = lazyinline.compile_step(model, backend="eager")
    for scale in (2.0, 3.0):
        model.scale = scale
        for length in (4, 6, 7):
            batch = texts((2, length))
            assert_close(step(*batch), model(*batch).detach())


# ---- Hugging Face models --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.sweep(keep="gpt2")
def test_hugging_face_models_at_several_shapes(name: str) -> None:
    model, _ = hugging_face.example(name, layers=2)
    twin = copy.deepcopy(model)
    model(
        **hugging_face.tokens(2, 8), labels=torch.ones(2, 8, dtype=torch.long)
    )  # its first run leaves notes of what it warned about
    compiled = lazyinline.compile(model, backend="eager")
    for shape in [(2, 8), (2, 12), (3, 12), (4, 9), (5, 5), (32, 32)]:
        batch = hugging_face.tokens(*shape)
        batch["labels"] = batch["input_ids"]
        results = []
        for module in (compiled, twin):
            torch.manual_seed(0)
            results.append(module(**batch))
            results[-1].loss.backward()
        assert_close(results[0].loss, results[1].loss)
        assert_close(results[0].logits, results[1].logits)
        assert_same_gradients(model, twin)
        model.zero_grad(), twin.zero_grad()
    assert not compiled.last_report.why_static
    assert counts(compiled) == (2, 4)


def bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=67, num_hidden_layers=2, **sizes))


def epoch(rows: int, lengths: Sequence[int], last: int) -> list[dict[str, Tensor]]:
    """Batches padded to their longest text; the last one has fewer rows."""
    found = []
    for number, length in enumerate(lengths):
        is_last = number == len(lengths) - 1
        batch = hugging_face.tokens(last if is_last else rows, length, seed=number)
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        found.append(batch)
    return found


@pytest.mark.parametrize("build", [gpt2, llama, bert], ids=lambda build: build.__name__)
@pytest.mark.sweep
def test_an_epoch_of_real_batches_costs_two_compiles(build: Callable[[], nn.Module]) -> None:
    """Models as they are configured by default; the smaller last batch is no third compile."""
    model = build()
    expected = copy.deepcopy(model)
    compiled = lazyinline.compile(model, reuse="auto", backend="eager")
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, expected)]
    for batch in epoch(4, [9, 13, *range(4, 20, 3), 24, 11], last=3):
        results = []
        for module in (compiled, expected):
            torch.manual_seed(1)
            results.append(module(**batch))
            results[-1].loss.backward()
        assert_close(*results)
        assert_same_gradients(model, expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert counts(compiled) == (2, 7), compiled.last_report.why_static

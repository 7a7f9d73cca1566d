"""Sizes that vary: a second shape makes symbols of them, a further one costs a link."""

import functools
import math
import pathlib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import hugging_face
import pytest
import sympy
import torch
from comparing import Door, as_it_is, assert_close, assert_equals_eager
from models import Made, Stack
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy import functions

import lazyinline
from lazyinline import Budget, PlanError, lazy_inline
from lazyinline.autodiff.traces import joint_trace
from lazyinline.backend.kernels import torch_decompositions, torch_inductor
from lazyinline.frontend.dispatch.dispatcher import ModuleDispatcher
from lazyinline.frontend.options import Options
from lazyinline.reuse.ir.torch_symbols import (
    SizeLiteral,
    Values,
    symbols_of,
    value_of,
    with_size_inputs,
)

Shape = tuple[int, ...]
Counts = tuple[int, int]


def ids(shape: Shape) -> list[Tensor]:
    return [torch.randint(50, shape, generator=torch.Generator().manual_seed(sum(shape)))]


def numbers(shape: Shape) -> list[Tensor]:
    return [torch.randn(*shape, 8)]


def counts(compiled: Any) -> Counts:
    return compiled.last_report.num_compiles, compiled.last_report.num_links


def wrapped(function: Callable[..., Any]) -> nn.Module:
    """Returns a function of the input and a weight, as a model."""
    weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator()))
    return Made(lambda self, x, *rest: function(x @ self.weight, *rest), weight=weight)


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

    def __init__(self, gate: type[nn.Module] = Gate) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(8, 8), gate()

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        x = x + (h @ h.mT / x.shape[1]).softmax(-1) @ h
        return x + self.gate(x)


lazy_inline(GateBlock)
lazy_inline(Mixing)


def last(self: Any, x: Tensor) -> Tensor:
    """Takes the last position: it has numbers for sizes, and a stride that is none."""
    return self.inner(x[:, -1]) + self.inner(x).mean(1)


class Reader(nn.Module):
    """Reads texts with a mean over what came before; counts its calls in a buffer."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner = nn.Embedding(50, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        self.calls.add_(1)
        targets = targets.where(targets > 0, -100)
        h = self.embed(ids)
        past = h.cumsum(1) / torch.arange(1, 1 + ids.shape[1])[:, None]
        logits = self.inner(past).tanh() @ self.embed.weight.T
        return self.scale * nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def texts(shape: Shape) -> list[Tensor]:
    """Texts of several lengths, and what comes next; nothing after their ends."""
    following = ids(shape)[0].roll(-1, dims=1)
    for row in range(shape[0]):
        following[row, max(1, shape[1] - row) :] = -100
    return [*ids(shape), following]


def dropping() -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    return Made(lambda self, x: self.layers(x).sum(), layers=layers)


def train_at(
    model: nn.Module, shapes: Iterable[Any], data: Callable[[Any], Any], **options: Any
) -> list[Counts]:
    """Trains a compiled model beside eager, a step per shape; returns what was made after each."""
    batches = [data(shape) for shape in shapes]
    return assert_equals_eager(model, batches=batches, optimizer=sgd, note=counts, **options).seen


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-4)  # of a sum over all elements


class Case(NamedTuple):
    """A model at one shape after another, and the compiles and links after each or the last."""

    model: Callable[[], nn.Module]
    data: Callable[[Any], Any]
    shapes: Sequence[Any]
    made: list[Counts] | Counts
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it


def with_a_length_shared(shape: Shape) -> list[Tensor]:
    return [*numbers(shape), torch.randn(shape), torch.randn(shape[1])]


def mixing() -> nn.Module:
    """The same in one layer."""
    return wrapped(lambda h: (h @ h.mT / h.shape[1]).softmax(-1) @ h)


CASES = {
    "a third length": Case(
        mixing, numbers, [(2, 8), (2, 12), (2, 16), (2, 8), (2, 64)],
        [(1, 0), (2, 0), (2, 1), (2, 1), (2, 2)],
    ),
    "sizes that coincide with each other and with the model's": Case(
        Mixing, numbers, [(2, 8), (3, 12), (4, 4), (8, 8), (32, 32), (8, 2), (12, 3)], (2, 5)
    ),
    "size one": Case(
        mixing, numbers, [(2, 8), (2, 12), (1, 12), (2, 1), (2, 9), (1, 1)],
        [(1, 0), (2, 0), (3, 0), (4, 0), (4, 1), (5, 1)],
    ),
    "dynamic": Case(
        mixing, numbers, [(2, 6), (3, 12), (5, 5)], [(1, 0), (1, 1), (1, 2)], {"dynamic": True}
    ),
    "not dynamic": Case(
        mixing, numbers, [(2, 8), (2, 12), (2, 16)], [(1, 0), (2, 0), (3, 0)], {"dynamic": False}
    ),
    "a batch that is no symbol": Case(  # for it makes a float that symbols may compute otherwise
        lambda: wrapped(lambda h: h * (h.shape[0] * 0.3)),
        numbers, [(4, 8), (4, 12), (4, 9), (3, 9)], [(1, 0), (2, 0), (2, 1), (3, 1)],
    ),
    "a size that python needs as a number": Case(
        lambda: wrapped(lambda h: h * math.sqrt(h.shape[1])),
        numbers, [(2, 6), (2, 10), (2, 12), (2, 6)],
        [(1, 0), (2, 0), (3, 0), (3, 0)],
    ),
    "the last position": Case(
        lambda: Made(last, inner=nn.Linear(8, 8)),
        numbers, [(2, 6), (2, 10), (2, 7), (2, 3)], (2, 2)
    ),
    "inputs that share a length": Case(
        lambda: wrapped(lambda h, a, b: (h * a[..., None]).sum(-1) + b), with_a_length_shared,
        [(2, 5), (2, 7), (2, 9), (3, 9), (4, 3)], [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)],
    ),
    "dropout": Case(dropping, numbers, [(4,), (6,), (9,)], (2, 1)),
    "dropout in a step": Case(dropping, numbers, [(4,), (6,), (9,)], (2, 1), {"door": "step"}),
    "one tensor for two arguments of a step": Case(
        Reader, lambda shape: ids(shape) * 2, [(4, 5), (4, 9), (4, 5)], (1, 1),
        {"door": "step", "dynamic": True},
    ),
}  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize("kind", CASES)
def test_further_shapes_are_linked_where_they_can_be(kind: str) -> None:
    torch.manual_seed(0)
    model, data, shapes, made, options = CASES[kind]
    found = train_at(model(), shapes, data, **options)
    assert (found if isinstance(made, list) else found[-1]) == made


@pytest.mark.parametrize("gate", [Gate, GateBlock])
@pytest.mark.parametrize("policy", ["full", "selective", Budget(fraction=0.5)], ids=str)
@pytest.mark.sweep(keep="full-GateBlock]")
def test_a_policy_of_recompute_is_kept_at_every_length(policy: Any, gate: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Stack(*(Mixing(gate) for _ in range(2)))
    options = {"recompute": policy, "reuse": "marked"}
    found = train_at(model, [(2, 8), (3, 12), (2, 16)], numbers, **options)
    assert found == [(1, 0), (2, 0), (2, 1)]
    model.eval()  # with symbols, dropout is another operator, which saves more
    if isinstance(policy, str):
        reports = []
        for dynamic in (False, True):
            run: Any = lazyinline.compile(model, backend="eager", dynamic=dynamic, **options)
            run(*numbers((2, 16))).sum().backward()
            reports.append(run.last_report)
        assert reports[0].saved_bytes == reports[1].saved_bytes
        assert reports[0].recomputed_flops == reports[1].recomputed_flops


def arithmetic(h: Tensor) -> tuple[Tensor, int, float]:
    batch, length = h.shape[:2]
    pooled = h.reshape(batch * length, -1).sum(0) / (batch * length)
    return pooled * batch**0.5 + (length // 3) % 2, length * 2 + 1, length / 2


PYTHON: dict[str, Callable[[Tensor], Any]] = {
    "branch": lambda h: h.tanh() if h.shape[1] > 16 else h * 2,
    "arithmetic": arithmetic,
    "strided": lambda h: h.tanh().as_strided((2, 2), (2, 1)),
}


def test_quotients_of_sizes_and_their_roundings_can_be_computed_by_a_graph() -> None:
    for of in (
        lambda n: n / 8,
        lambda n: 1 / (n - 1),
        *(lambda n, to=to: to(n / 3) for to in (math.floor, math.ceil, math.trunc, round)),
    ):
        graph, env = torch.fx.Graph(), ShapeEnv()
        symbol = env.create_symbol(8, ConstantSource("n"), dynamic_dim=DimDynamic.DYNAMIC)
        size = SizeLiteral(of(env.create_symintnode(symbol, hint=8)))
        operands = graph.placeholder("x"), size
        graph.output(graph.call_function(torch.ops.aten.mul.Tensor, operands))
        module = torch.fx.GraphModule(nn.Module(), graph)
        sized = with_size_inputs(module, symbols_of(module), "last")
        for n in (8, 9, 10, 11, 13):
            assert torch.equal(sized(torch.ones(2), n), torch.ones(2) * of(n))


def test_the_value_of_a_size_is_a_number_of_python() -> None:
    n, m = sympy.symbols("n m", integer=True, positive=True)
    for of, value in (
        ("n + m * m", 407),
        ("Max(1, TruncToInt(ToFloat(n) * 0.5))", 3),
        ("floor(m / IntTrueDiv(n, 3))", 8),
    ):
        expression = sympy.sympify(of, {**vars(functions), "n": n, "m": m})
        found = value_of(expression, Values({n: 7, m: 20}))
        assert type(found) is int and found == value


@pytest.mark.parametrize("is_open", [True, False])
def test_inductors_kernels_take_images_of_any_size_that_it_keeps_open(
    is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_open:  # it makes numbers of sizes after it has compiled kernels that take them
        monkeypatch.setattr(torch_inductor, "kernels_for_any_size", nullcontext)

    def forward(self: Any, x: Tensor) -> Tensor:
        h = nn.functional.interpolate(self.conv(x), scale_factor=0.5)
        h = h + h.mean((2, 3), keepdim=True).expand_as(h) * 1.0  # Inductor takes out the product
        return nn.functional.adaptive_avg_pool2d(h.tanh(), 3)

    torch.manual_seed(0)
    model = Made(forward, conv=nn.Conv2d(2, 2, 3, padding=1)).requires_grad_(False)
    sizes = ((8, 10), (12, 18), (14, 16))[is_open:]
    found = assert_equals_eager(
        model,
        batches=[[torch.randn(2, 2, *size, requires_grad=is_open)] for size in sizes],
        backend="inductor",
        dynamic=True if is_open else None,
        note=lambda compiled: (*counts(compiled), compiled.last_report.why_static),
    ).seen
    if is_open:
        assert found[-1] == (1, 1, "")
    else:
        assert found[-1][:2] == (3, 0) and "Eq(TruncToInt(" in found[-1][2], found


def test_a_chain_of_reshapes_is_no_long_index_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:  # patches of four pixels, as MobileViT has them
        h = self.conv(x).sin()
        (b, c), (n, m) = h.shape[:2], (size // 2 for size in h.shape[2:])
        h = h.reshape(b * c * n, 2, m, 2).transpose(1, 2).reshape(b, c, n * m, 4)
        return h.transpose(1, 3).reshape(b * 4, n * m, c).exp()

    lines, known = list[str](), torch_inductor.kernel_source

    def noted(types: Any, text: str) -> Any:
        lines.extend(text.splitlines())
        return known(types, text)

    monkeypatch.setattr(torch_inductor, "kernel_source", noted)
    images = [[torch.randn(2, 2, *size)] for size in ((8, 12), (12, 20))]
    model = Made(forward, conv=nn.Conv2d(2, 2, 3, stride=2, padding=1)).requires_grad_(False)
    options: Any = {"backend": "inductor", "dynamic": True, "note": counts}
    with torch_inductor.graph_cache_off():
        run = assert_equals_eager(model, batches=images, **options)
    assert run.seen == [(1, 0), (1, 1)]
    # 1,265 with torch 2.14, 2,448 with 2.11; with each reshape of the chain in the index, or each
    # quotient of sizes written out, more than 5,600 with both.
    assert max(map(len, lines)) < 3000


def test_scores_that_are_shifted_by_reshapes_are_linked_for_further_lengths(
    tmp_path: pathlib.Path,
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:  # as XLNet does, which counts down in floats
        n = x.shape[1]
        scores = self.inner(x) * torch.arange(n, -n, -1.0).sin()
        shifted = scores.reshape(2, 2 * n, n)[:, 1:].reshape(2, n, 2 * n - 1)
        return torch.index_select(shifted, 2, torch.arange(n)).softmax(-1)

    model = Made(forward, inner=nn.Linear(6, 1)).requires_grad_(False)
    batches = [[torch.randn(2, length, 6)] for length in (7, 12)]
    run = assert_equals_eager(model, batches=batches, dynamic=True, note=counts)
    assert run.seen == [(1, 0), (1, 1)]
    lazyinline.save(run.compiled, tmp_path / "model")
    told = zipfile.ZipFile(tmp_path / "model").read("model.json")
    assert b"Mod(" in told and b"Ceil" not in told  # the count is of integers


def test_a_copy_whose_layout_is_unknown_is_refused_instead_of_copied_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = torch_decompositions.decompositions()[torch.ops.aten.index_put.default]
    monkeypatch.setattr(Tensor, "clone", lambda x: x)  # as symbols may tell no more of a copy
    with pytest.raises(PlanError, match="have gaps depends on the sizes"):
        rule(torch.zeros(3, 1).expand(3, 2), [torch.tensor([0])], torch.ones(2))


@pytest.mark.parametrize("is_as_captured", [True, False])
def test_a_gradient_is_laid_out_as_the_backward_reads_it_at_every_size(
    is_as_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_as_captured:  # what another layout would do is noticed before it runs

        def without_shape(one: Any, *, shape: Any = None, **new: Any) -> Any:
            return replace(one, **new)

        monkeypatch.setattr(joint_trace, "replace", without_shape)

    # Inductor pools twelve to four by windows of three: another expression for the same size.
    def forward(self: Any, x: Tensor) -> Tensor:
        return nn.functional.adaptive_max_pool1d(self.inner(x).mT, 4)

    model = Made(forward, inner=nn.Linear(6, 8))
    found = assert_equals_eager(
        model,
        batches=[[torch.randn(2, length, 6)] for length in (12, 7)[: 1 + is_as_captured]],
        backend="inductor",
        dynamic=True,
        note=lambda compiled: compiled.last_report.why_static,
    ).seen
    assert ("takes sizes and strides" in found[-1]) is not is_as_captured, found


@pytest.mark.parametrize("door", ["compile", "step"])
@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.sweep(keep="compile")
def test_python_on_sizes_is_right_at_each_shape(name: str, door: Door) -> None:
    def loss(h: Tensor) -> Any:
        result = PYTHON[name](h)
        tensors = result if isinstance(result, tuple) else (result,)
        return sum((t**2).sum() for t in tensors if isinstance(t, Tensor))

    shapes = [(2, n) for n in (6, 10, 16, 17, 30, 2, 1, 9)]
    model = wrapped(loss if door == "step" else PYTHON[name])
    found = train_at(model, shapes, numbers, door=door)
    assert found[-1][1] >= 3


def test_shapes_not_used_for_long_are_linked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyinline.frontend.guard.MAX_LINKED", 2)
    shapes = [(2, length) for length in (3, 4, 5, 6, 5, 6, 4)]
    assert train_at(wrapped(torch.tanh), shapes, numbers)[-1] == (2, 3)


def test_an_argument_that_is_no_tensor_counts_at_every_shape() -> None:
    model = wrapped(lambda h, number: h * number + (1 if number else 2))
    calls = [(length, number) for length in (3, 4, 5) for number in (1, 0.5, False)]
    train_at(model, calls, lambda call: [torch.randn(2, call[0], 8), call[1]])


def test_sizes_that_are_named_from_the_start_may_meet_numbers_and_further_shapes() -> None:
    # As Dynamo names them: of what is no tensor it says nothing.
    model = wrapped(lambda h, number: h * number)
    options = Options(reuse="off", backend="eager", recompute=None, cache="off")
    run = ModuleDispatcher(model, options, names=(("s0", "", ""), ()))
    for batch in (4, 6, 1, 3):
        x = torch.randn(batch, 2, 8)
        assert_close(run(x, 3), model(x, 3))


def test_an_input_that_is_not_contiguous_is_compiled_for_itself() -> None:
    inputs = [
        (x,)
        for length in (4, 6, 7)
        for x in (torch.randn(2, length, 8), torch.randn(length, 2, 8).transpose(0, 1))
    ]
    assert assert_equals_eager(wrapped(torch.tanh), batches=inputs).told.num_links == 1


def in_layouts(shape: Shape) -> list[Tensor]:
    """One tensor of four dimensions in each layout that views of the same shape may have."""
    wide = torch.randn(shape[0], 9, *shape[2:], generator=torch.Generator().manual_seed(0))
    plain = wide[:, 2 : 2 + shape[1]].contiguous()
    orders = [plain.transpose(a, b).contiguous().transpose(a, b) for a, b in ((0, 1), (1, 2))]
    channels_last = plain.to(memory_format=torch.channels_last)
    gaps = [wide[:, 2 : 2 + shape[1]], torch.stack([plain, plain], -1)[..., 0]]
    return [plain, *orders, channels_last, *gaps]


@pytest.mark.parametrize("first", [0, 3, 5])
@pytest.mark.sweep(keep="[eager-3]")
def test_where_one_input_varies_another_has_its_own_layout_at_every_length(
    backend: str, first: int
) -> None:
    # As images beside texts, and the cache of a window, which is as large at each token.
    model = wrapped(lambda h, image: h.sum((0, 1)) * image.tanh())
    layouts = in_layouts((2, 3, 2, 8))
    images = enumerate((layouts[first], layouts[first], *layouts), 3)
    batches = [(torch.randn(3, length, 8), image) for length, image in images]
    with torch.no_grad():
        assert_equals_eager(model, batches=batches, backend=backend)


@pytest.mark.parametrize("door", ["compile", "step"])
@pytest.mark.sweep(keep="step")
def test_a_linked_program_notices_what_the_model_became(door: str) -> None:
    model = Reader()
    open_ = lazyinline.compile if door == "compile" else lazyinline.compile_step
    run: Any = open_(model, backend="eager", dynamic=True)
    for number, lengths in enumerate([(4, 7), (7,), (7,)]):
        if number < 2:
            model.scale = 2.0 + number
        else:
            model.inner.weight = nn.Parameter(torch.ones(8, 8))
        for length in lengths:
            batch = texts((2, length))
            assert_close(run(*batch).detach(), model(*batch).detach())


DROPS_ALL: list[Callable[[Tensor], Tensor]] = [
    nn.Dropout(1.0),
    lambda x: nn.functional.dropout(x * 2, 1.0, inplace=True),
    lambda x: nn.functional.dropout1d(x[None], 1.0)[0],
    lambda x: nn.functional.alpha_dropout(x, 1.0, training=True),
    lambda x: nn.functional.scaled_dot_product_attention(*[x[None]] * 3, dropout_p=1.0)[0],
]


def drops(_: Any, x: Tensor) -> list[Tensor]:
    """Drops all in each way, and draws after each."""
    return [t for drop in DROPS_ALL for t in (drop(x) + x, torch.rand(3))]


def test_dropout_of_everything_leaves_the_generator_as_eager_does() -> None:
    inputs = [(torch.randn(size, 2, requires_grad=True),) for size in (3, 16)]
    assert_equals_eager(Made(drops), batches=inputs, dynamic=True, fallback="error")


def step_at(model: nn.Module, shapes: Sequence[Shape], **options: Any) -> tuple[Any, list[Counts]]:
    """Trains by compiled steps beside a twin in eager; returns what was made after each."""
    adam = functools.partial(torch.optim.Adam, lr=0.01)
    options = {"door": "step", "optimizer": adam, "loss_fn": as_it_is, **options}
    outcome = assert_equals_eager(model, batches=map(texts, shapes), note=counts, **options)
    return outcome.compiled, outcome.seen


@pytest.mark.parametrize(
    ("micro_batches", "lengths", "rows", "last"),
    [(1, [9, 13, *range(4, 21), 30], 4, 3), (2, [9, 13, 20], 8, 6)],
)
@pytest.mark.sweep(keep="[2-")
def test_an_epoch_of_steps_costs_two_compiles(
    micro_batches: int, lengths: list[int], rows: int, last: int
) -> None:
    shapes = [*((rows, n) for n in lengths), (last, 11), (rows, 9), (rows, 20)]
    step, found = step_at(Reader(), shapes, micro_batches=micro_batches)
    assert found[:3] == [(1, 0), (2, 0), (2, 1)]
    assert found[-1] == (2, len({*lengths}) - 1), step.last_report.why_static
    if micro_batches > 1:
        with pytest.raises(PlanError, match="cannot be split into 2"):
            step(*texts((5, 11)))


def test_micro_batches_of_one_row_are_compiled_for_themselves() -> None:
    _, found = step_at(Reader(), [(4, 5), (2, 9), (4, 9)], micro_batches=2, dynamic=True)
    assert found == [(1, 0), (2, 0), (2, 1)]


def test_a_step_that_computes_again_is_linked_for_a_further_length() -> None:
    options: Any = {"recompute": Budget(fraction=0.5), "order": "one_by_one", "reuse": "marked"}
    options |= {"batches": map(numbers, [(3, 9), (3, 12)]), "door": "step", "dynamic": True}
    options["loss_fn"] = lambda y: y.square().sum()
    told = assert_equals_eager(Stack(Mixing()), **options).told
    assert (told.num_compiles, told.num_links) == (1, 1), told.why_static
    assert told.recompute_chosen_for


@pytest.mark.slow
@pytest.mark.sweep
def test_kernels_of_steps_take_sizes() -> None:
    shapes = [(4, 8), (4, 12), (6, 16), (4, 12)]
    _, found = step_at(Reader(), shapes, backend="inductor", micro_batches=2)
    assert found[-1] == (2, 1)


def labelled(rows: int, length: int) -> dict[str, Tensor]:
    """Token ids, a mask, and labels where there is a token."""
    batch = hugging_face.tokens(rows, length, seed=length)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def loss_alone(run: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    output = run(**batch)
    tensors = torch.utils._pytree.tree_leaves(output)
    return [output.loss, *(t.detach() for t in tensors if isinstance(t, Tensor))]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
@pytest.mark.sweep
def test_an_epoch_of_real_batches_costs_two_compiles(kind: str) -> None:
    # Models as they are configured by default; the smaller last batch is no third compile.
    shapes = [(4, 9), (4, 13), (4, 20), (3, 11)]
    options: Any = {"optimizer": lambda p: torch.optim.SGD(p, 0.1), "reuse": "auto"}
    options |= {"batches": [(labelled(*shape),) for shape in shapes], "use": loss_alone}
    found = assert_equals_eager(hugging_face.build(kind, 1), **options)
    assert counts(found.compiled) == (2, 2), found.told.why_static


def test_an_input_that_is_another_one_or_of_another_dtype_is_noticed_at_another_length() -> None:
    def batch(length: int, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        x = numbers((length,))[0]
        return x, x if dtype is None else numbers((length,))[0].to(dtype)

    rows = [(3, None), (5, None), (6, torch.float32), (7, torch.float64), (8, torch.float32)]
    model = wrapped(lambda x, y: x.sin() * y)
    assert_equals_eager(model, batches=[batch(*row) for row in rows], dynamic=True)


def test_a_change_in_place_is_seen_by_another_input_on_the_same_memory() -> None:
    model = Made(lambda self, x, y: self.linear(x.add_(1)) + y, linear=nn.Linear(8, 8))
    model.requires_grad_(False)
    compiled = lazyinline.compile(model, backend="eager", dynamic=True)
    for rows in (6, 8, 10):
        for part in (slice(2, None), slice(None)):
            found, wanted = torch.ones(2, rows, 8)
            pairs = [(x[: rows - (part.start or 0)], x[part]) for x in (found, wanted)]
            assert_close(compiled(*pairs[0]), model(*pairs[1]))
            assert_close(found, wanted)


def test_windows_over_a_growing_text_run_eagerly_after_as_many_as_the_report_says() -> None:
    model = Made(lambda self, x: x.float() @ self.weight * x.stride(0), weight=torch.randn(4, 4))
    compiled = lazyinline.compile(model, backend="eager")
    for length in range(5, 17):
        text = torch.randint(9, (1, length))
        assert_close(compiled(text[:, -4:]), model(text[:, -4:]))
    report = compiled.last_report
    assert report is not None
    assert "slices of larger tensors had 8 values" in report.ran_eagerly
    assert "as x.clone(memory_format=torch.contiguous_format)" in report.ran_eagerly
    window = text[:, -4:].clone(memory_format=torch.contiguous_format)
    assert_close(compiled(window), model(window))
    assert not compiled.last_report.ran_eagerly

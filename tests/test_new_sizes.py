"""A further shape: the program that was linked once, with other numbers in it."""

import copy
import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
from comparing import as_it_is, assert_close, assert_equals_eager
from models import Made
from torch import Tensor, nn
from torch.utils._sympy.functions import Max

import lazyinline
from lazyinline import Budget, PlanError
from lazyinline.autodiff.traces import torch_make_fx
from lazyinline.backend.kernels import lower
from lazyinline.backend.run import planned
from lazyinline.frontend import compiler
from lazyinline.frontend.passes import link as link_pass
from lazyinline.frontend.sizes import torch_known_sizes
from lazyinline.frontend.sizes.torch_input_sizes import InputSizes
from lazyinline.frontend.torch_optimizer import StepOptimizer
from lazyinline.reuse.ir import torch_symbols
from lazyinline.reuse.ir.size_tape import SizeTape
from lazyinline.reuse.ir.torch_symbols import Values

WIDTH = 16
Shape = tuple[int, int]
SHAPES = ((9, 40), (9, 33), (9, 44), (WIDTH, WIDTH), (9, 2), (2, 9), (9, 300), (40, 3), (9, 41))
ZERO_AND_ONE = ((1, 0),)


class Interaction(nn.Module):
    """Messages along edges, added up where they end."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, basis: Tensor, source: Tensor, target: Tensor) -> Tensor:
        messages = x[source] * self.weigh(basis).sigmoid()
        return x + self.out(torch.zeros_like(x).index_add(0, target, messages)).tanh()


class Potential(nn.Module):
    """An energy of atoms and the edges between them."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.blocks = nn.ModuleList(Interaction() for _ in range(num_blocks))
        self.register_buffer("centers", torch.linspace(0, 2, 4))

    def forward(self, kinds: Tensor, places: Tensor, source: Tensor, target: Tensor) -> Tensor:
        distances = (places[source] - places[target]).square().sum(-1)
        basis = 2 * (-((distances[:, None] - self.centers) ** 2)).exp()
        basis[:, 2:] = distances.cos()[:, None]  # into a slice, which begins inside a tensor
        x = self.embedding(kinds)
        for block in self.blocks:
            x = block(x, basis, source, target)
        return x.square().mean()


def atoms(shape: Shape) -> tuple[Tensor, ...]:
    count, edges = shape
    draw = torch.Generator().manual_seed(count + 1000 * edges)
    ends = torch.randint(count, (2, edges), generator=draw)
    kinds = torch.randint(5, (count,), generator=draw)
    places = torch.randn(count, 3, generator=draw, dtype=torch.float64)
    return kinds, places, *ends.unbind()


def potential(num_blocks: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Potential(num_blocks).double()
    return model, copy.deepcopy(model)


@pytest.fixture
def alone() -> Iterator[mock.Mock]:
    """Counts links that are for one shape alone; the first compile has one."""
    with mock.patch.object(link_pass, "_linked_at", wraps=link_pass._linked_at) as links:
        yield links


def steps_at(shapes: Iterable[Shape], **options: Any) -> list[Any]:
    """Trains by compiled steps beside eager; returns what was noted after each."""
    options = {"door": "step", "loss_fn": as_it_is, "dynamic": True, **options}
    return assert_equals_eager(potential(1)[0], batches=map(atoms, shapes), **options).seen


def test_a_step_links_once_for_shapes_that_grow_and_shrink(alone: mock.Mock) -> None:
    def note(step: Any) -> tuple[int, int, int]:
        return step.stats.peak_bytes, step.last_report.num_compiles, alone.call_count

    shapes = (*SHAPES[:5], SHAPES[6], SHAPES[0])
    seen = steps_at((*shapes, *ZERO_AND_ONE), note=note)  # the last are compiled alone
    peaks, num_compiles, num_links = zip(*seen[: len(shapes)], strict=True)
    assert num_compiles[-1] == num_links[-1] == 1
    assert peaks[0] < peaks[1] == peaks[2], "one plan has room for others"


def test_sizes_that_keep_growing_are_given_more_room_each_time(alone: mock.Mock) -> None:
    with mock.patch.object(link_pass, "_MAX_PATTERNS", 3):
        steps_at((9, edges) for edges in (40, 48, 58, 70, 84))
    assert alone.call_count == 1


def test_a_module_with_inductor_links_once_and_a_new_size_runs_no_pass(alone: mock.Mock) -> None:
    def called(one: Any, shape: Shape) -> tuple[Tensor, Tensor]:
        kinds, places, *ends = atoms(shape)
        return one(kinds, places.requires_grad_(), *ends), places

    model, plain = potential(1)
    compiled = lazyinline.compile(model, dynamic=True)
    gradients = []
    for one in (compiled, plain):
        runs = [called(one, shape) for shape in SHAPES]
        for loss, _ in runs[::-1]:  # all forwards in flight, and the last ends first
            loss.backward()
        gradients.append(
            [*(places.grad for _, places in runs), *(p.grad for p in one.parameters())]
        )
    for own, other in zip(*gradients, strict=True):
        assert_close(own, other)
    assert compiled.last_report.num_compiles == 1
    assert alone.call_count == 1
    refused = {"side_effect": AssertionError("a new size")}
    with (
        mock.patch.object(compiler, "run", **refused),
        mock.patch.object(torch_symbols, "_computed", **refused),
        mock.patch.object(signal, "signal", **refused),
    ):
        for edges in (31, 20):
            for one in (compiled, plain):
                called(one, (9, edges))[0].backward()
    for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(own.grad, theirs.grad)


class Reshaped(Interaction):
    """Asks an argument for its size, which the first tensor of that size outside made known."""

    def forward(self, x: Tensor, basis: Tensor, source: Tensor, target: Tensor) -> Tensor:
        by_edge = basis.reshape(basis.shape[0], 2, 2).flatten(1)
        return super().forward(x, by_edge, source, target)


def test_blocks_share_whose_size_was_asked_of_a_tensor_outside() -> None:
    model, _ = potential(0)
    model.blocks = nn.ModuleList(Reshaped() for _ in range(3)).double()
    batches = [atoms(shape) for shape in SHAPES[:2]]
    outcome = assert_equals_eager(model, batches=batches, dynamic=True)
    assert outcome.shared == 2, outcome.reasons


def forces_at(model: nn.Module, *shapes: Shape, also: Any = ()) -> list[tuple[int, int, int]]:
    """Compares forces with eager's; returns what was made until then after each shape."""

    def note(run: Any) -> tuple[int, int, int]:
        report = run.last_report
        return report.num_gradients, report.num_compiles, report.num_links

    def forces(run: Any, kinds: Tensor, places: Tensor, *ends: Tensor) -> tuple[Tensor, Tensor]:
        energy = run(kinds, places, *ends)
        asked = [places, *map(run.get_parameter, also)]
        return energy, torch.autograd.grad(energy, asked, create_graph=True)[0]

    batches = [
        (kinds, places.requires_grad_(), *ends) for kinds, places, *ends in map(atoms, shapes)
    ]
    return assert_equals_eager(model, batches=batches, use=forces, note=note, dynamic=True).seen


def test_gradients_that_are_differentiated_are_compiled_once() -> None:
    made = forces_at(potential(1)[0], (9, 40), (WIDTH, WIDTH))
    assert [num for num, _, _ in made] == [1, 0]
    assert made[-1][1] == 1


@pytest.mark.filterwarnings("ignore:A gradient is differentiated operator by operator")
def test_gradients_that_settle_a_size_leave_it_open_in_the_forward() -> None:
    right = torch_make_fx._EmbeddingGradient.backward
    settling = lambda ctx, g: (int(ctx.saved_tensors[0].shape[0]), right(ctx, g))[1]  # noqa: E731
    with mock.patch.object(torch_make_fx._EmbeddingGradient, "backward", settling):
        model = Made(
            lambda self, kinds, places, *_: (self.embedding(kinds) * places.sin()).square().sum(),
            embedding=nn.Embedding(5, 3).double(),
        )
        made = forces_at(model, (9, 40), (10, 40), also=["embedding.weight"])
    assert made[-1] == (0, 1, 1)


class Lone(nn.Module):
    """Settles both sizes of its first input, the second one late; nothing else has symbols."""

    def forward(self, places: Tensor, ends: Tensor) -> Tensor:
        count, near = int(places.shape[0]), places[ends]
        return near.new_zeros(count, 3).index_add(0, ends, near * near).sum()


def test_a_gradient_may_have_a_symbol_where_its_leaf_has_numbers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAZYINLINE_VERIFY", "0")  # as users have it: else its sizes are numbers
    places, ends = torch.randn(2, 3, requires_grad=True), torch.zeros(0, dtype=torch.long)
    lazyinline.compile(Lone(), dynamic=True, backend="eager")(places, ends).backward()
    assert_close(places.grad, torch.zeros(2, 3))


def test_with_a_budget_each_shape_is_planned_for_itself(alone: mock.Mock) -> None:
    steps_at(SHAPES[:2], recompute=Budget(10**9))
    assert alone.call_count == 2


def test_launches_that_forgot_a_size_are_not_taken_for_other_shapes(alone: mock.Mock) -> None:
    number = lower.numbered

    def forgets(leaf: Any, kernels: Any, sizes: Values) -> Any:
        plain = {symbol: int.__int__(size) for symbol, size in sizes.items()}
        return number(leaf, kernels, Values(plain))

    with mock.patch.object(lower, "numbered", forgets):
        steps_at(SHAPES[:3])
    assert alone.call_count == 3


def test_a_new_size_of_a_step_looks_at_its_batch_alone() -> None:
    model, plain = potential(1)
    one, other = (torch.optim.Adam(m.parameters(), 1e-3, fused=True) for m in (model, plain))
    step = lazyinline.compile_step(model, backend="eager", dynamic=True, optimizer=one)

    parameters = list(zip(model.parameters(), plain.parameters(), strict=True))

    def train(shape: Shape) -> None:
        loss, expected = step(*atoms(shape)), plain(*atoms(shape))
        for _, theirs in parameters:
            theirs.grad = None
        expected.backward()
        other.step()
        assert_close(loss, expected.detach())
        for own, theirs in parameters:
            assert_close(own.detach(), theirs.detach())

    for shape in ((9, 40), (9, 33), (9, 44)):
        train(shape)
    looked: list[int] = []
    check_memory = planned.check_memory

    def counted(tensors: Any, names: Any = ()) -> None:
        looked.append(len(tensors))
        check_memory(tensors, names)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(planned, "check_memory", counted))
        for owner, name in (
            *((nn.Module, "named_parameters"), (compiler, "run"), (planned.Memory, "runner")),
            *((StepOptimizer, "bound"), (StepOptimizer, "hindrance"), (torch_symbols, "_computed")),
        ):
            refused = AssertionError(f"{name} of a new size")
            stack.enter_context(mock.patch.object(owner, name, side_effect=refused))
        for edges in (31, 20, 2):
            looked.clear()
            train((9, edges))
            assert looked == [5], "four inputs and the seed"
    # What the model and the optimizer hold may lie elsewhere at a new size.
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.data = parameter.data.clone()
    train((9, 21))
    for optimizer in (one, other):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train((9, 22))
    train((9, 40))
    train((9, 23))


@pytest.mark.parametrize("known", [True, False])
def test_questions_that_a_tape_would_forget_are_asked_again(known: bool) -> None:
    n, m = sympy.symbols("n m", integer=True, positive=True)
    exact, rounded = sympy.Ne(n * m % 4, 3), sympy.Le(Max(n, m), 12)
    answers = torch_known_sizes._Answers.of([exact, rounded], Values({n: 4, m: 12}))
    assert answers.others == [rounded]
    sizes = InputSizes([torch.zeros(4, 12)], (("n0", "n1"),))
    first, second = sizes._symbols.values()
    for text in (sympy.Le(Max(first, second), 12), sympy.Ne(first, 7)):
        sizes._env.guards.append(mock.Mock(expr=text))
    if known:
        assert sizes.are_right(Values({first: 4, second: 12}))
    assert sizes.are_right(Values({first: 12, second: 5}))
    assert not sizes.are_right(Values({first: 4, second: 13}))
    assert not sizes.are_right(Values({first: 7, second: 5}))
    assert sizes.are_right(Values({first: 8, second: 5}))


def test_sizes_remember_what_was_computed_and_compared() -> None:
    tape = SizeTape({"n": 12, "m": 5})
    n, m = tape.values.values()
    results = [4 * n + m * n, (n - m) // 2, n % m, -n, 3 - m, n**2, sum((n, m)), max(n, 7)]
    assert list(map(int, results)) == [108, 3, 2, -12, -2, 144, 17, 12]
    assert n != m
    assert n != 3
    numbers = tape.function()
    found = numbers(Values({"n": 20, "m": 6}))
    assert found is not None
    assert list(map(found.of, results)) == [200, 7, 2, -20, -3, 400, 26, 20]
    assert numbers(Values({"n": 6, "m": 5})) is None, "max would be 7"
    assert numbers(Values({"n": 8, "m": 8})) is None, "they were not equal"


def test_what_cannot_be_computed_again_is_refused() -> None:
    (n,) = SizeTape({"n": 12}).values.values()
    for forgets in (lambda: n / 2, lambda: float(n), lambda: n & 3, lambda: 1 << n):
        with pytest.raises(PlanError):
            forgets()


def test_what_no_program_can_take_is_not_taken_for_a_new_size() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    plain, called = copy.deepcopy(model), []
    compiled = lazyinline.compile(model, dynamic=True, backend="eager")
    rows = torch.randn(20, 3, dtype=torch.float64)
    for num in (5, 6):
        assert_close(compiled(rows[:num]), plain(rows[:num]))
    negative = torch._neg_view(rows[:7])  # type: ignore[attr-defined]
    assert_close(compiled(negative), plain(negative))
    for one in (model, plain):
        one[0].register_forward_hook(lambda module, given, result: 2 * result)
    assert_close(compiled(rows[:9]), plain(rows[:9]))
    for one in (model, plain):
        one[2].register_full_backward_hook(lambda module, *gradients: called.append(module))
        (compiled if one is model else one)(rows[:10]).sum().backward()
    assert called == [model[2], plain[2]]

"""Interatomic potentials as their authors write them: energies of graphs, forces, any edges."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from comparing import Door, assert_equals_eager, assert_same
from models import Around, Made
from torch import Tensor, nn

import lazyinline

WIDTH = 8
CUTOFF = 3.0
ATOMS = (4, 3)
EDGES = (13, 17, 11)


def graph(num_edges: int, atoms: Sequence[int] = ATOMS) -> tuple[Tensor, ...]:
    """Returns kinds, positions, edges and molecules of atoms; edges stay in one molecule."""
    generator = torch.Generator().manual_seed(num_edges)
    molecule = torch.repeat_interleave(torch.arange(len(atoms)), torch.tensor(atoms))
    num = len(molecule)
    positions = torch.randn(num, 3, dtype=torch.float64, generator=generator)
    is_pair = (molecule[:, None] == molecule) & ~torch.eye(num, dtype=torch.bool)
    pairs = is_pair.nonzero().T
    chosen = torch.randint(pairs.shape[1], (num_edges,), generator=generator)
    return torch.arange(num) % 3, positions, pairs[:, chosen], molecule


class Interaction(nn.Module):
    """Sums messages of neighbours, filtered by distance, with repeated indices."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(4, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, basis: Tensor, cut: Tensor, edges: Tensor) -> Tensor:
        to, of = edges
        messages = self.inner(x)[of] * self.filter(basis) * cut[:, None]
        return x + self.outer(torch.zeros_like(x).index_add_(0, to, messages)).tanh()


class Energy(nn.Module):
    """A small SchNet: the energy of each molecule."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, WIDTH)
        self.layers = nn.ModuleList(Interaction() for _ in range(num_layers))
        self.read = nn.Linear(WIDTH, 2)
        self.register_buffer("centers", torch.linspace(0, CUTOFF, 4))

    def forward(self, kinds: Tensor, positions: Tensor, edges: Tensor, molecule: Tensor) -> Tensor:
        to, of = edges
        return self.of_edges(kinds, positions[of] - positions[to], edges, molecule)

    def of_edges(self, kinds: Tensor, apart: Tensor, edges: Tensor, molecule: Tensor) -> Tensor:
        distance = apart.norm(dim=1)
        basis = torch.exp(-((distance[:, None] - self.centers) ** 2))
        cut = 0.5 * (torch.cos(distance * math.pi / CUTOFF) + 1) * (distance < CUTOFF)
        x = self.embed(kinds)
        for layer in self.layers:
            x = layer(x, basis, cut, edges)
        energies = torch.zeros(int(molecule[-1]) + 1, dtype=x.dtype)
        return energies.index_add_(0, molecule, self.read(x).sum(-1))


class Forces(nn.Module):
    """Takes the forces of an energy in its forward."""

    def __init__(self, want: Callable[[Tensor], Tensor], **asked: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.energy, self.want, self.asked = Energy(1).double(), want, asked

    def forward(self, kinds: Tensor, positions: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        positions = self.want(positions)
        energy = self.energy(kinds, positions, *rest)
        found = torch.autograd.grad(energy.sum(), positions, create_graph=True, **self.asked)
        return energy, -found[0]


FORCES: dict[str, Callable[[], nn.Module]] = {
    "of a copy": lambda: Forces(lambda x: x.detach().requires_grad_()),
    "of the input": lambda: Forces(lambda x: x.requires_grad_(), allow_unused=True),
}


@pytest.mark.parametrize(
    ("way", "dynamic", "door"),
    [("of a copy", None, "compile"), ("of a copy", True, "step"), ("of the input", True, "step")],
)
@pytest.mark.sweep(keep="of the input")
def test_forces_of_graphs_of_any_edges_are_compiled_once(
    way: str, dynamic: bool | None, door: Door
) -> None:
    told = assert_equals_eager(
        FORCES[way](),
        batches=[graph(num) for num in EDGES],
        door=door,
        optimizer=torch.optim.Adam,
        dynamic=dynamic,
    ).told
    num_compiles = 1 if dynamic else 2
    assert (told.num_compiles, told.num_links) == (num_compiles, len(EDGES) - num_compiles)


def test_forces_and_stress_are_taken_together_where_positions_come_of_the_strain() -> None:
    def stressed(self: Any, kinds: Tensor, positions: Tensor, *rest: Tensor) -> Any:
        strain = positions.new_zeros(3, 3).requires_grad_()
        moved = positions @ (torch.eye(3, dtype=positions.dtype) + strain)
        energy = self.energy(kinds, moved, *rest)
        self.seen = (moved.square().sum(), energy.sin())  # the first leads to the strain alone
        return energy, *torch.autograd.grad(energy.sum(), [moved, strain], create_graph=True)

    torch.manual_seed(0)
    model = Made(stressed, energy=Energy(1).double())
    told = assert_equals_eager(model, batches=[graph(9), graph(11)], dynamic=True).told
    assert (told.num_compiles, told.num_links, told.ran_eagerly) == (1, 1, "")


# ---- numbers that a forward asks of its inputs ---------------------------------------------------


class Pooled(nn.Module):
    """Sums over molecules, of which it counts how many there are."""

    def __init__(self, count: Callable[[Tensor], int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.count = nn.Linear(3, WIDTH).double(), count

    def forward(self, positions: Tensor, molecule: Tensor) -> Tensor:
        x = self.inner(positions).tanh()
        return x.new_zeros(self.count(molecule), WIDTH).index_add(0, molecule, x)


COUNTS: dict[str, Callable[[Tensor], int]] = {
    "the largest": lambda m: int(m.max()) + 1,
    "the last": lambda m: int(m[-1]) + 1,
    "different ones": lambda m: m.diff().ne(0).sum().item() + 1,
    "a way to go": lambda m: 4 if (m > 1).any() else 2,
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("door", ["compile", "step"])
@pytest.mark.sweep(keep="compile")
def test_a_number_asked_of_inputs_is_asked_at_each_call(name: str, door: Door) -> None:
    given = [graph(9, atoms)[1::2] for atoms in ((4, 3), (2, 5), (3, 2, 2), (4, 3), (2, 2, 3))]
    told = assert_equals_eager(Pooled(COUNTS[name]), batches=given, door=door).told
    assert told.num_compiles == 2, str(told)


def test_numbers_that_are_others_at_each_call_are_compiled_for_a_few_times() -> None:
    def counts(run: Any) -> tuple[int, str]:
        return run.last_report.num_compiles, run.last_report.ran_eagerly

    given = [(torch.ones(12, 3).double(), torch.arange(12) % n) for n in range(2, 7)]
    seen = assert_equals_eager(Pooled(COUNTS["the largest"]), batches=given, note=counts).seen
    assert [num for num, eager in seen if not eager] == [1, 2, 3, 4]
    assert "numbers that the forward reads" in seen[-1][1]


class Structure:
    """A class of the user's that nobody registered."""

    def __init__(self, num_atoms: int) -> None:
        self.held = {"atoms": torch.arange(3.0 * num_atoms).reshape(-1, 3)}


def test_objects_that_hold_tensors_are_compiled_for_a_few_times_and_the_reason_is_said() -> None:
    def of_structure(self: Any, structure: Any) -> Tensor:
        return self.linear(structure.held["atoms"].sin()).tanh().sum(0)  # type: ignore[no-any-return]

    model, same = Made(of_structure, linear=nn.Linear(3, 3)), Structure(9)
    given = [(one,) for one in (same, same, *map(Structure, (9, 11, 13, 9)), same)]
    note = lambda run: run.last_report.ran_eagerly  # noqa: E731
    reasons = assert_equals_eager(model, batches=given, note=note).seen
    assert list(map(bool, reasons)) == [False] * 4 + [True] * 2 + [False]
    assert "arguments that hold tensors (Structure) had 3 values" in reasons[4]
    assert "register" in reasons[4]


REFUSED: dict[str, Callable[[Tensor], int]] = {
    "of a float": lambda m: int(m.double().max()) + 1,
    "that it drew": lambda m: int(torch.randint_like(m, 2, 4).max()),
    "that it has changed": lambda m: int(m.mul_(1).max()) + 1,
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_numbers_run_eagerly_with_the_line(name: str) -> None:
    given = [graph(9, atoms)[1::2] for atoms in ((4, 3), (2, 3, 2))]
    told = assert_equals_eager(Pooled(REFUSED[name]), batches=given).told
    assert "needs the value of a tensor at test_forces.py" in told.ran_eagerly


def test_blocks_that_ask_are_each_captured_for_what_they_are_given() -> None:
    def three(layers: Any, positions: Tensor, *molecules: Tensor) -> Tensor:
        pairs = zip(layers, molecules, strict=True)
        return torch.cat([layer(positions, molecule) for layer, molecule in pairs])

    positions, one = graph(9, (4, 3))[1::2]
    model = Around(three, *(Pooled(COUNTS["the largest"]) for _ in range(3)))
    assert_equals_eager(model, (positions, one, one * 2, one * 3))


# ---- what a forward leaves in its arguments and in its modules -----------------------------------


def filling(act: Callable[..., Any]) -> nn.Module:
    """Returns a model that does what an act says, with a dictionary that it is given."""
    torch.manual_seed(0)
    return Made(act, first=nn.Linear(3, 3), second=nn.Linear(3, 3)).double()


def returns(model: Any, inputs: dict[str, Any], more: Any) -> dict[str, Any]:
    inputs["hidden"] = {"first": model.first(inputs["x"]), "num": inputs.pop("num")}
    inputs["x"] = inputs["hidden"]["first"].tanh()
    return inputs


def appends(model: Any, inputs: dict[str, Any], more: list[Tensor]) -> Tensor:
    more.append(model.first(inputs["x"]))
    more += [more[-1] * 2, inputs["x"]]
    return model.second(more[-2])


def stores(model: Any, inputs: dict[str, Any], more: Any) -> Tensor:
    model.features = {"first": model.first(inputs["x"]), "num": inputs["num"]}
    model.second.seen = model.features["first"].detach()
    return model.second(model.features["first"].tanh()) + model.second.seen


def takes_forces(model: Any, inputs: dict[str, Any], more: Any) -> dict[str, Any]:
    x = inputs["x"].requires_grad_()
    inputs["energy"] = model.second(model.first(x).tanh()).sum()
    inputs["forces"] = -torch.autograd.grad(inputs["energy"], x, create_graph=True)[0]
    return {"energy": inputs["energy"], "forces": inputs["forces"]}


def counts_up(model: Any, inputs: dict[str, Any], more: Any) -> Tensor:
    model.total = getattr(model, "total", 0.0) + model.first(inputs["x"])
    return model.second(model.total)


def fills_both(model: Any, inputs: dict[str, Any], more: dict[str, Any]) -> Tensor:
    inputs["y"] = model.first(inputs["x"])
    return model.second(more.get("y", more["x"]))


ACTS = (returns, appends, stores, takes_forces, counts_up, fills_both)


def told_of(model: Any) -> dict[str, Any]:
    """Returns the attributes that an act sets."""
    modules = model.named_modules()
    found = {f"{n}.{a}": vars(m).get(a) for n, m in modules for a in ("features", "seen", "total")}
    return {name: held for name, held in found.items() if held is not None}


@pytest.mark.parametrize("act", ACTS)
def test_what_a_forward_leaves_is_left_by_each_call(act: Callable[..., Any]) -> None:
    model = filling(act)
    twin = copy.deepcopy(model)
    compiled = lazyinline.compile(model, backend="eager", in_place=True)
    for num in (4, 4, 5, 6, 5):
        seen = []
        for run in (compiled, twin):
            run.zero_grad()
            held = graph(num)[1]
            inputs = {"x": held, "num": 3}
            more: Any = [] if act is appends else inputs if act is fills_both else None
            result = run(inputs, more)
            tensors = [result] if isinstance(result, Tensor) else result.values()
            total = sum(t.sum() for t in tensors if isinstance(t, Tensor) and t.requires_grad)
            if isinstance(total, Tensor):
                total.square().backward()
            own = (result is inputs, inputs["x"] is held, list(inputs))
            grads = {n: p.grad for n, p in run.named_parameters()}
            seen.append((result, inputs, more, told_of(run), own, grads))
            if act is counts_up:
                run.total = run.total.detach()
        assert_same(*seen, f"{num} edges", 1e-10)
    report: Any = lazyinline.last_report(compiled)
    if act in (counts_up, fills_both):
        assert report.ran_eagerly
    else:
        assert (report.num_compiles, report.ran_eagerly) == (1, ""), str(report)


@pytest.mark.parametrize("act", [takes_forces, stores])
def test_a_step_leaves_nothing_of_it_and_says_so(act: Callable[..., Any]) -> None:
    def loss_of(result: Any) -> Tensor:
        parts = [result] if isinstance(result, Tensor) else result.values()
        return torch.stack([part.square().sum() for part in parts]).sum()

    model = filling(act)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(m.parameters(), fused=True) for m in (model, twin)]
    step = lazyinline.compile_step(
        model, loss_fn=loss_of, optimizer=optimizers[0], backend="eager", dynamic=True
    )
    for num in (4, 5):
        inputs = {"x": graph(3, (num, 2))[1], "num": 3}
        loss = step(inputs, None)
        assert (list(inputs), told_of(model)) == (["x", "num"], {})
        optimizers[1].zero_grad()
        expected = loss_of(twin(inputs, None))
        expected.backward()
        optimizers[1].step()
        assert_same(loss, expected.detach(), "loss", 1e-10)
        assert_same(list(model.parameters()), list(twin.parameters()), "parameters", 1e-10)
    report = step.last_report
    assert (report.num_compiles, report.num_links) == (1, 1), report.why_static
    assert "what the forward leaves in" in str(report)


def test_a_size_that_the_forward_needs_as_a_number_is_named_with_its_line() -> None:
    def why(run: Any) -> str:
        return run.last_report.why_static  # type: ignore[no-any-return]

    data = [(torch.ones(num, 3).double(),) for num in range(4, 7)]
    model = Made(lambda self, x: self.inner(x) * int(x.shape[0]), inner=nn.Linear(3, 3).double())
    first, *rest = assert_equals_eager(model, batches=data, note=why).seen
    assert not first
    assert all("a size of" in text and "at test_forces.py" in text for text in rest), rest


def test_sizes_of_what_is_not_contiguous_are_numbers_and_the_report_says_so() -> None:
    model = Made(lambda self, kinds, positions, edges: positions[edges[0]] * kinds[edges[1], None])
    run = lazyinline.compile(model, backend="eager", dynamic=True)
    told = []
    for num in EDGES:
        kinds, positions, edges, _ = graph(num)
        run(kinds, positions, edges.T.contiguous().T)
        told.append(run.last_report.why_static)
    first, *rest = told
    assert not first
    needed = f"dimension 1 of input 2 is {EDGES[1]}, and has to be {EDGES[0]}"
    assert rest[0] == needed and "dimension 1 of input 2" in rest[1], rest


@torch.library.custom_op("lazyinline_forces::parts", mutates_args=())
def parts(x: Tensor) -> list[Tensor]:
    return [x.sin(), x.cos()]


@torch.library.custom_op("lazyinline_forces::slopes", mutates_args=())
def slopes(sine: Tensor, cosine: Tensor, x: Tensor) -> Tensor:
    return sine * x.cos() - cosine * x.sin()


def slopes_of_slopes(ctx: Any, along: Tensor) -> tuple[Tensor, ...]:
    sine, cosine, x = ctx.saved_tensors
    return along * x.cos(), -along * x.sin(), -along * (sine * x.sin() + cosine * x.cos())


def keep_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


parts.register_fake(lambda x: [torch.empty_like(x), torch.empty_like(x)])
slopes.register_fake(lambda sine, cosine, x: torch.empty_like(x))
parts.register_autograd(
    lambda ctx, along: slopes(*along, *ctx.saved_tensors), setup_context=keep_inputs
)
slopes.register_autograd(slopes_of_slopes, setup_context=keep_inputs)


def of_parts(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Calls operators of a package, with derivatives of two orders and lists of results."""
    x = x.detach().requires_grad_()
    sine, cosine = parts(self.linear(x).tanh())
    energy = (sine * cosine.square()).sum()
    return energy, torch.autograd.grad(energy, x, create_graph=True)[0]


def test_operators_with_lists_of_results_are_differentiated_twice() -> None:
    given = [(torch.randn(num, 3, dtype=torch.float64),) for num in (4, 5)]
    model = Made(of_parts, linear=nn.Linear(3, 3).double())
    told = assert_equals_eager(model, batches=given, dynamic=True).told
    assert not told.ran_eagerly and told.num_compiles == 1

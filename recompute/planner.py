"""Recompute policies, and the variant that each call of a program takes under one.

Also lists, closure by closure, what a derivative saves and what its backward recomputes.
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, Union, get_args

import torch.fx

from ..autodiff.derivative import Derivative, Differentiator
from ..autodiff.leaf_derivative import Choice, Cut, PerCall, Request, Whole
from ..autodiff.traces.torch_make_fx import SizesAt
from ..autodiff.traces.torch_partition import ancestors
from ..reuse.errors import PlanError
from ..reuse.ir import program as ir
from ..reuse.ir.costs import OperatorCosts, flops, is_free, is_heavy
from ..reuse.ir.leaf import flat_types
from ..reuse.ir.operators import is_view
from ..reuse.ir.types import TensorType
from ..reuse.once import once
from ..reuse.torch_names import RESHAPES
from . import solver
from .solver import CutProblem

PolicyName: TypeAlias = Literal["full", "selective"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True)
class Budget:
    """The least recomputed work within a number of bytes. Exactly one bound is given.

    The linked program keeps the bound: its memory at the peak (saved tensors, scratch, and in a
    training step the gradients) stays within it. What PyTorch's math libraries allocate inside a
    single product is not counted (oneDNN does in bfloat16): the amount depends on the CPU.

    Attributes:
        saved_bytes: the most bytes that the program's memory may hold at its peak.
        fraction: the same bound, relative: 0 is the peak with ``recompute="full"``, also outside
            of blocks, and 1 is the peak without recompute.

    Raises:
        PlanError: not exactly one bound, or one that makes no sense.

    Example:
        >>> lazyinline.compile(model, recompute=lazyinline.Budget(saved_bytes=2 * 2**30))
    """

    saved_bytes: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.saved_bytes, self.fraction) if v is not None]
        if len(given) != 1:
            raise PlanError("A Budget has one bound: give saved_bytes= or fraction=.")
        number = isinstance(given[0], numbers.Real) and not isinstance(given[0], bool)
        if not number or not given[0] >= 0:
            raise PlanError(f"Budget({given[0]!r}): give a number that is not negative.")
        if self.fraction is not None and self.fraction > 1:
            raise PlanError(f"Budget(fraction={self.fraction}): give a number from 0 to 1.")


Policy = Union[PolicyName, Budget, None]  # noqa: UP007


def check_policy(policy: object) -> Policy:
    """Returns a policy; raises PlanError if there is no such one."""
    if policy is None or isinstance(policy, Budget):
        return policy
    if isinstance(policy, str) and policy in POLICIES:
        return policy
    raise PlanError(
        f"recompute={policy!r} is unknown; give None, {', '.join(map(repr, POLICIES))}, "
        "Budget(saved_bytes=...) or Budget(fraction=...)."
    )


def policy_of(call: ir.Call, policy: ir.RecomputeMark) -> ir.RecomputeMark:
    """Returns the policy of a call: its own mark, or the given one if it is a block's call."""
    return call.recompute or (policy if call.path else "")


# ---- the choice of each call ---------------------------------------------------------------------


_NUM_POINTS = 16  # budgets solved for per leaf
_NUM_INNER_POINTS = 8  # and per composite


@dataclass(frozen=True)
class Variant:
    """One way to differentiate a closure."""

    choice: Choice | None  # what is saved; None is what the backend's recipe saves
    num_bytes: int  # bytes that one call saves on the device (values handed over not counted)
    extra_s: float  # estimated seconds of recompute and copies in one call
    extra_flops: int  # FLOPs of the recompute


@dataclass(frozen=True)
class Site:
    """A call that a gradient flows through, and the request for its derivative."""

    index: int
    call: ir.Call
    request: Request


class Planner:
    """Finds variants of closures, each closure once, with bytes and costs at the given sizes."""

    def __init__(
        self, differentiator: Differentiator, costs: OperatorCosts, sizes: SizesAt | None = None
    ) -> None:
        self._make = differentiator
        self._costs = costs
        self._sizes = sizes or SizesAt()

    # ---- policies ------------------------------------------------------------------------

    def choice(self, request: Request, policy: ir.RecomputeMark) -> Choice | None:
        """Returns what a policy chooses for a composite and inside it; ``""`` is marks alone."""
        found = {s.index: self._of_call(s, policy) for s in self.sites(request)}
        return _per_call(request, found)

    def sites(self, request: Request) -> list[Site]:
        """Returns the calls of a composite that have a gradient and a choice of variants."""
        closure = request.closure
        assert isinstance(closure, ir.Composite)
        asked = self._make.sites(replace(request, choice=None))
        pairs = zip(closure.program.calls, asked, strict=True)
        asked_of = [Site(i, call, r) for i, (call, r) in enumerate(pairs) if r is not None]
        # Control flow saves what its bodies' recipes save.
        return [s for s in asked_of if getattr(s.call.closure, "control", None) is None]

    def _of_call(self, site: Site, policy: ir.RecomputeMark) -> Choice | None:
        own = policy_of(site.call, policy)
        if own == "save":
            return None
        if own == "full":
            return self.full(site.request)
        if own == "selective":
            return self.selective(site.request)
        inside = isinstance(site.request.closure, ir.Composite)
        return self.choice(site.request, policy) if inside else None

    def full(self, request: Request) -> Choice | None:
        """Saves the fewest bytes: everything is recomputed but random draws."""
        closure = request.closure
        if isinstance(closure, ir.Leaf):
            return Cut(solver.fewest_bytes(self._problem(request)).saved)
        sites = self.sites(request)
        assert isinstance(closure, ir.Composite)
        if len(sites) > 1 or len(closure.program.calls) > 1:
            return Whole()  # saves nothing but inputs; a cut of a single call may save less
        return _per_call(request, {s.index: self.full(s.request) for s in sites})

    def selective(self, request: Request) -> Choice | None:
        """Saves the fewest bytes without a second matrix product, convolution or attention."""
        closure = request.closure
        if isinstance(closure, ir.Leaf):
            light = solver.fewest_bytes(self._problem(request), lambda value: not value.is_heavy)
            return Cut(light.saved)
        found = {s.index: self.selective(s.request) for s in self.sites(request)}
        return _per_call(request, found)

    # ---- variants ------------------------------------------------------------------------

    @once
    def frontier(self, request: Request) -> tuple[Variant, ...]:
        """Returns the Pareto-optimal variants of a closure, fewest bytes first."""
        if isinstance(request.closure, ir.Leaf):
            cuts = solver.frontier(self._problem(request), _NUM_POINTS)
            made = [
                Variant(Cut(c.saved, c.offloaded), c.num_bytes, c.extra_s, c.extra_flops)
                for c in cuts
            ]
            variants = [self.of_recipe(request), *made]
        else:
            variants = self._inner_variants(request)
        return tuple(solver.pareto(variants, lambda v: (v.num_bytes, v.extra_s)))

    def few(self, request: Request) -> tuple[Variant, ...]:
        """Returns at most three variants, for a closure that is called inside other composites."""
        # Each variant of those composites chooses one of these. So that no more than three are
        # compiled, all choose from the same few: the one that saves least, the backend's recipe
        # (which a composite that is recomputed whole uses, too), and the best one between them.
        points = self.frontier(request)
        if not isinstance(request.closure, ir.Leaf) or len(points) < 3:
            return points
        first, recipe = points[0], next((v for v in points if v.choice is None), None)
        if recipe is None or recipe is first:
            return (first, points[-1])
        between = [v for v in points[1:] if v.num_bytes < recipe.num_bytes]
        if not between:
            return (first, recipe)
        slope = (first.extra_s - recipe.extra_s) / (recipe.num_bytes - first.num_bytes)
        return (first, min(between, key=lambda v: v.extra_s + slope * v.num_bytes), recipe)

    def inside(self, request: Request) -> set[Request]:
        """Returns the requests inside the composite closures that a program calls."""
        found: set[Request] = set()
        todo = [s.request for s in self.sites(request)]
        while todo:
            asked = todo.pop()
            if isinstance(asked.closure, ir.Composite):
                new = {s.request for s in self.sites(asked)} - found
                found |= new
                todo += new
        return found

    def of_recipe(self, request: Request) -> Variant:
        """Returns the variant that saves what the backend's recipe saves."""
        if not isinstance(request.closure, ir.Leaf):
            inner = [self.of_recipe(s.request) for s in self.sites(request)]
            return self._composed(request, None, inner)
        derivative, joint = self._make.of(request), self._make.joint(request)
        assert derivative is not None
        assert joint is not None
        num_bytes = self._sizes.num_bytes(derivative.saved_type)
        assert isinstance(derivative.backward, ir.Leaf)
        assert isinstance(derivative.forward, ir.Leaf)
        # The recipe's cut is known only from the inputs of the backward that it made.
        needed = [n.name for n in ir.input_nodes(derivative.backward.module)]
        point = self._problem(request).evaluate(_bases(joint.graph_module, needed))
        if point is None:
            return Variant(None, num_bytes, 0.0, 0)
        return Variant(None, num_bytes, point.extra_s, point.extra_flops)

    def _inner_variants(self, request: Request) -> list[Variant]:
        """Returns variants of a composite: one per budget, and one that is recomputed whole."""
        sites = self.sites(request)
        if not sites:
            return [self.of_recipe(request)]
        frontiers = [self.few(s.request) for s in sites]
        groups = [
            solver.Group(1, tuple(v.num_bytes for v in f), tuple(v.extra_s for v in f))
            for f in frontiers
        ]
        low = sum(f[0].num_bytes for f in frontiers)
        high = sum(f[-1].num_bytes for f in frontiers)
        found = [self.of_recipe(request)]
        for step in range(_NUM_INNER_POINTS):
            budget = low + (high - low) * step // (_NUM_INNER_POINTS - 1)
            counts = solver.spread(groups, budget)
            assert counts is not None, "the smallest variants fit"
            chosen = [f[c.index(1)] for f, c in zip(frontiers, counts, strict=True)]
            by_call = {s.index: v.choice for s, v in zip(sites, chosen, strict=True)}
            found.append(self._composed(request, _per_call(request, by_call), chosen))
        if len(sites) > 1:
            found.append(self._composed(request, Whole(), [f[0] for f in frontiers]))
        return found

    def _composed(
        self, request: Request, choice: Choice | None, inner: Sequence[Variant]
    ) -> Variant:
        """Returns the variant of a composite whose calls take the ``inner`` variants."""
        derivative = self._make.of(replace(request, choice=choice))
        assert derivative is not None
        on_host = self._sizes.host_bytes(derivative.saved_type)
        num_bytes = self._sizes.num_bytes(derivative.saved_type) - on_host
        extra_s, extra_flops = sum(v.extra_s for v in inner), sum(v.extra_flops for v in inner)
        return Variant(choice, num_bytes, extra_s, extra_flops)

    @once
    def _problem(self, request: Request) -> CutProblem:
        joint = self._make.joint(request)
        assert joint is not None, "a site has a gradient"
        return CutProblem.of(joint.graph_module, joint.num_outputs, self._costs, self._sizes)


def _per_call(request: Request, found: Mapping[int, Choice | None]) -> Choice | None:
    """Returns the choice of a composite, given those of some of its calls."""
    assert isinstance(request.closure, ir.Composite)
    choices = tuple(found.get(i) for i in range(len(request.closure.program.calls)))
    return PerCall(choices) if any(c is not None for c in choices) else None


def _bases(joint: torch.fx.GraphModule, names: Sequence[str]) -> set[str]:
    """Returns the names of the values that the named ones are views of, or they themselves."""
    nodes = {n.name: n for n in joint.graph.nodes}
    found = set()
    for name in names:
        node = nodes.get(name)
        while node is not None and node.op == "call_function" and is_view(node):
            node = node.all_input_nodes[0]
        if node is not None:
            found.add(node.name)
    return found


# ---- reports -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that a call keeps for its backward."""

    name: str
    type: TensorType

    def __str__(self) -> str:
        return f"{self.name} {self.type}"


@dataclass(frozen=True)
class RecomputeRecord:
    """One closure under one choice."""

    closure: str  # its name
    choice: str  # ``"as the backend saves"``, ``"cut"``, ``"called again"``
    num_calls: int  # calls with this choice
    # The tensors that one call saves (those handed over are not among them).
    saved: tuple[SavedTensor, ...]
    saved_bytes: int  # their bytes
    # Operators that the backward runs again, with how often.
    recomputed: tuple[tuple[str, int], ...]
    recomputed_flops: int  # FLOPs of the matrix products and attentions among them
    offloaded_bytes: int = 0  # those of the saved bytes that are in host memory meanwhile

    def __str__(self) -> str:
        saved = ", ".join(map(str, self.saved)) or "nothing"
        again = ", ".join(f"{n} {op}" for op, n in self.recomputed) or "nothing"
        on_host = f", {self.offloaded_bytes} of them on the host" if self.offloaded_bytes else ""
        return (
            f"@{self.closure}, {self.num_calls} calls, {self.choice}\n"
            f"  saved per call       {self.saved_bytes:>12} bytes{on_host}: {saved}\n"
            f"  recomputed per call  {self.recomputed_flops:>12} FLOPs: {again}"
        )


def summarize(
    differentiator: Differentiator, request: Request, sizes: SizesAt
) -> list[RecomputeRecord]:
    """Returns a record for each closure and choice in a program, in order of first call."""
    counts: Counter[Request] = Counter()
    _count(differentiator, request, 1, counts)
    records = []
    for asked, num_calls in counts.items():
        derivative = differentiator.of(asked)
        if derivative is not None:
            records.append(_record(asked, derivative, num_calls, sizes))
    return records


def _count(make: Differentiator, request: Request, times: int, counts: Counter[Request]) -> None:
    """Counts the calls of leaves, and of composites that are recomputed whole."""
    if isinstance(request.closure, ir.Leaf) or isinstance(request.choice, Whole):
        counts[request] += times
        return
    # Equal requests are counted, and walked once.
    below = Counter(site for site in make.sites(request) if site is not None)
    for asked, number in below.items():
        _count(make, asked, times * number, counts)


def _record(
    request: Request, derivative: Derivative, num_calls: int, sizes: SizesAt
) -> RecomputeRecord:
    choice = "as the backend saves"
    if request.choice is not None:
        choice = "cut" if isinstance(request.choice, (Cut, PerCall)) else "called again"
    again = list(_computed_again(derivative, sizes))
    work = [n for n in again if not (is_free(n) or n.target in RESHAPES)]
    names = Counter(str(n.target).removeprefix("aten.").split(".")[0] for n in work)
    return RecomputeRecord(
        request.closure.name,
        choice,
        num_calls,
        tuple(_saved(request, derivative, sizes)),
        sizes.num_bytes(derivative.saved_type),
        tuple(names.most_common()),
        sum(flops(n) for n in again if is_heavy(n)),
        sum(sizes.num_bytes(derivative.saved_type.fields[i]) for i in derivative.offloaded),
    )


def _saved(request: Request, derivative: Derivative, sizes: SizesAt) -> Iterator[SavedTensor]:
    types = flat_types([sizes.type(derivative.saved_type)])
    if not isinstance(derivative.forward, ir.Leaf):
        name = "row" if isinstance(request.closure, ir.Leaf) else "draw"
        yield from (SavedTensor(f"{name}{i}", t) for i, t in enumerate(types))
        return
    outputs = ir.outputs_of(derivative.forward.module)
    for node, type_ in zip(outputs[len(outputs) - len(types) :], types, strict=True):
        yield SavedTensor(node.name, type_)


def _computed_again(derivative: Derivative, sizes: SizesAt) -> Iterator[torch.fx.Node]:
    """Yields the operators of the backward that the forward has run already."""
    if isinstance(derivative.backward, ir.Composite):
        first = derivative.backward.program.calls[0]
        yield from _operators(first.closure, sizes)
        return
    assert isinstance(derivative.backward, ir.Leaf)
    assert isinstance(derivative.forward, ir.Leaf)
    count = len(derivative.forward.output_types) - 1
    results = ir.outputs_of(derivative.forward.module)[:count]
    reached = ancestors(n for n in results if isinstance(n, torch.fx.Node))
    # Forward and backward are cuts of one joint graph, and nodes kept their names.
    known = {n.name: n.target for n in reached}
    for node in sizes.leaf(derivative.backward).nodes:
        if known.get(node.name) == node.target:
            yield node


def _operators(closure: ir.Closure, sizes: SizesAt) -> Iterator[torch.fx.Node]:
    if isinstance(closure, ir.Leaf):
        yield from sizes.leaf(closure).nodes
    elif isinstance(closure, ir.Composite):
        for call in closure.program.calls:
            yield from _operators(call.closure, sizes)

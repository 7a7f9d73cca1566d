"""Results kept per closure, so that each closure is decomposed and lowered once.

Of each call, :class:`Recompute` chooses what is saved for the backward.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

from ...autodiff.derivative import Differentiator
from ...autodiff.inner_gradients import InnerGradients
from ...autodiff.leaf_derivative import Choice, Request
from ...autodiff.torch_primitives import Reducer
from ...autodiff.traces.torch_make_fx import SizesAt
from ...autodiff.traces.torch_user_rules import rules_in
from ...autodiff.training_program import GradientPrograms
from ...backend.cache import CompileCache
from ...backend.gpu.targets import ALIGNMENT_BYTES, target_named
from ...backend.kernels.lower import (
    Backend,
    InductorBackend,
    Kernel,
    backend_named,
    closure_list,
    decompose_leaf,
    kernel_list,
    lower_leaves,
)
from ...backend.kernels.torch_recorder import record_graph
from ...backend.launches.kernel_list import KernelList
from ...backend.link.estimate import Estimates
from ...backend.link.link import FlatProgram, link
from ...backend.link.placement import Place, Tools
from ...backend.link.program_writer import record_control
from ...backend.run.planned import closures_run
from ...recompute.fit_budget import BudgetFit, ProgramPeaks
from ...recompute.planner import Budget, Planner, Policy, policy_of, summarize
from ...reuse.errors import PlanError
from ...reuse.ir.costs import CPU, OperatorCosts
from ...reuse.ir.leaf import FullKey, leaf_key
from ...reuse.ir.program import Composite, Leaf, Program, RecomputeMark, Run, walk_closures
from ...reuse.ir.rewrite import map_leaves
from ...reuse.ir.torch_symbols import Values
from ...reuse.ir.torch_updates import is_update
from ...reuse.once import once
from ..options import Options
from ..report import CompileReport, Progress


@dataclass(frozen=True, eq=False)
class Recompute:
    """Chooses what is saved, for all programs of one compiler, by its recompute policy."""

    _make: Differentiator
    _policy: Policy
    _costs: OperatorCosts
    _sizes: SizesAt = field(default_factory=SizesAt)

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self._make, self._costs, self._sizes)

    def at(self, values: Values) -> Recompute:
        """Returns the same policy, which measures symbolic sizes at these numbers."""
        return replace(self, _sizes=SizesAt(values))

    def chosen(self, request: Request, peaks: ProgramPeaks, policy: Policy = None) -> Request:
        """Returns the request with the choice that the policy and the program's marks demand.

        ``policy`` replaces the compiler's own. It raises PlanError if a budget cannot be met, or a
        policy finds no block.
        """
        closure = request.closure
        assert isinstance(closure, Composite)
        policy = policy or self._policy
        # Without recompute, what is saved is what autograd would save.
        if policy is None and not has_marks(closure):
            return request
        return replace(request, choice=self._choice(request, peaks, policy))

    def note(self, requests: Sequence[Request], report: CompileReport) -> None:
        """Notes in a report what is saved under requests, and what is recomputed."""
        found = (summarize(self._make, request, self._sizes) for request in requests)
        report.recompute = [record for records in found for record in records]
        report.recomputed_flops = sum(r.num_calls * r.recomputed_flops for r in report.recompute)
        derivatives = [self._make.of(request) for request in requests]
        types = [d.saved_type for d in derivatives if d is not None]
        report.saved_bytes = sum(map(self._sizes.num_bytes, types))

    def trade_offs(self, request: Request) -> list[tuple[int, float]]:
        """Returns the bytes that one call can save under the policy, and seconds of recompute."""
        if self._policy == "selective":
            derivative = self._make.of(replace(request, choice=self._planner.selective(request)))
            assert derivative is not None
            return [(derivative.saved_type.num_bytes, 0.0)]
        variants = self._planner.frontier(request)
        # Variants are sorted by bytes; the first is full recompute.
        return [(v.num_bytes, v.extra_s) for v in variants[: 1 if self._policy == "full" else None]]

    def frontiers(self, request: Request) -> list[dict[str, Any]]:
        """Returns the Pareto frontier of each block: bytes saved by one call against recompute.

        Points are sorted by bytes, fewest first.
        """
        # Calls with equal requests share one frontier.
        counts = Counter(
            site.request
            for site in self._planner.sites(request)
            if site.call.path and isinstance(site.request.closure, Leaf)
        )
        found = []
        for asked, number in counts.items():
            points = [
                {"saved_bytes": v.num_bytes, "extra_s": v.extra_s, "extra_flops": v.extra_flops}
                for v in self._planner.frontier(asked)
            ]
            found.append({"closure": asked.closure.name, "num_calls": number, "points": points})
        return found

    def _choice(self, request: Request, peaks: ProgramPeaks, policy: Policy) -> Choice | None:
        if isinstance(policy, Budget):
            return BudgetFit(self._planner, request, peaks).fit(policy)
        assert isinstance(request.closure, Composite)
        if policy and not _has_policies(request.closure, policy):
            raise PlanError(
                f"recompute={policy!r} is decided for each block, and the model has none. Mark its "
                "layer class with lazy_inline, or a module with lazyinline.recompute."
            )
        return self._planner.choice(request, policy or "")


def has_marks(closure: Composite) -> bool:
    """Whether any call in a program is marked for recompute."""
    return _has_policies(closure, "")


def _has_policies(closure: Composite, policy: RecomputeMark) -> bool:
    """Whether a call, at any depth, has a recompute policy; visits each closure once."""
    todo, seen = [closure], {closure}
    while todo:
        for call in todo.pop().program.calls:
            if policy_of(call, policy):
                return True
            if isinstance(call.closure, Composite) and call.closure not in seen:
                seen.add(call.closure)
                todo.append(call.closure)
    return False


class Context:
    """The state that all compiles of one compiler share."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.backend: Backend = backend_named(options.backend, options.target)
        target = options.target or ""
        found = CompileCache.of_user(options.backend, target) if options.cache == "disk" else None
        self.cache = found or CompileCache(None, options.backend)
        self.tools = Tools(self.cache.plan, self.cache.native)  # places buffers and runs launches
        gpu = None if options.target is None else target_named(options.target)
        if gpu is not None:
            place = Place(missing=gpu.name, target=gpu)
            self.tools = replace(self.tools, alignment=ALIGNMENT_BYTES, place=place)
        self.differentiator = Differentiator(self.backend.recipe, self.cache.derivative)
        costs = OperatorCosts(gpu.rates if gpu else CPU, fused=options.backend != "eager")
        self.recompute = Recompute(self.differentiator, options.recompute, costs)
        self.gradient_programs = GradientPrograms()  # gradients that can be differentiated again
        self.derive = InnerGradients()  # makes gradients that a forward takes calls of derivatives
        self.reducer = Reducer()  # reduces programs to primitives, for inspection
        self.kernels: dict[Leaf, Kernel] = {}  # the kernel of each leaf that was lowered
        self.recorded: dict[Leaf, KernelList] = {}  # of each leaf whose launches were recorded
        self.progress = Progress()  # the progress bar
        self.estimates = Estimates(fuses=options.backend == "inductor")
        self._leaves: dict[Any, Leaf] = {}
        self._unaligned: dict[Leaf, frozenset[int]] = {}

    def report(self, *, train: bool) -> CompileReport:
        """Returns the report of a compile that is about to begin."""
        return CompileReport(train, self.options.backend, self.options.reuse)

    @contextmanager
    def cached(self, report: CompileReport) -> Iterator[None]:
        """Reads the cache's settings anew for a compile, and notes in its report what was used."""
        self.cache.begin()
        yield
        report.cache = self.cache.finish()

    @property
    def cache_place(self) -> str:
        """Names the machine and the directory of the cache; "" without one."""
        return f"{platform.node()}:{self.cache.directory}" if self.cache.directory else ""

    def known(self, program: Program) -> Program:
        """Replaces leaves by equal leaves of an earlier compile, which compute the same."""

        def equal(leaf: Leaf) -> Leaf:
            key = FullKey((*leaf_key(leaf), rules_in(leaf.nodes)))
            return self._leaves.setdefault(key, leaf)

        return map_leaves(program, equal)

    def decomposed(self, program: Program) -> Program:
        """Decomposes the composite operators of each leaf."""
        return map_leaves(program, self._decomposed_leaf)

    @once
    def _decomposed_leaf(self, leaf: Leaf) -> Leaf:
        if leaf.level == "aten":
            return leaf
        if leaf.bodies:
            return replace(leaf, level="aten")
        return self.cache.decomposed(leaf, partial(decompose_leaf, leaf, self.backend))

    def lower(self, programs: Iterable[Program]) -> list[Leaf]:
        """Makes the kernels that programs need; returns the leaves that had none."""
        leaves = {c: None for p in programs for c in walk_closures(p) if isinstance(c, Leaf)}
        new = [c for c in leaves if c not in self.kernels and c not in self.recorded]
        self._lower_leaves(new)
        self._build(leaves)
        return new

    def _lower_leaves(self, new: Sequence[Leaf]) -> None:
        for leaf in new:
            if is_update(leaf):  # its launch is made from the graph, without a kernel to keep
                launches: KernelList | None = record_graph(leaf)
            elif leaf.bodies:
                launches = None
            else:
                launches = self.cache.kernels(leaf, self._unaligned.get(leaf, ()))
            if launches is not None:
                self.recorded[leaf] = launches
        self._make_kernels([leaf for leaf in new if leaf not in self.recorded])

    def _build(self, leaves: Iterable[Leaf]) -> None:
        """Compiles the Triton kernels of leaves for a GPU that is not here."""
        if isinstance(self.backend, InductorBackend) and self.options.target is not None:
            lists = [self.recorded.get(c) or self.kernels[c].launches for c in leaves]
            self.backend.build(lists, self.cache.machine_code)

    def lower_unaligned(self, inputs: Mapping[Leaf, frozenset[int]]) -> bool:
        """Makes kernels again for inputs that need not be aligned.

        Returns False if that cannot help: a leaf has no kernels, or they allow these already.
        """
        known = {**self.kernels, **self.recorded}
        if any(c not in known or n <= self._unaligned.get(c, n - n) for c, n in inputs.items()):
            return False
        for leaf, positions in inputs.items():
            self._unaligned[leaf] = self._unaligned.get(leaf, frozenset()) | positions
            self.forget(leaf)
        self._lower_leaves(list(inputs))
        self._build(inputs)
        return True

    def closures_of(self, flats: Sequence[FlatProgram]) -> Mapping[Leaf, KernelList]:
        """Returns each leaf as a kernel list of one launch, which calls its kernel's function."""
        leaves = leaves_of(flats)
        self._make_kernels(leaves)  # a kernel list from the cache comes without the function
        return {leaf: closure_list(leaf, self.kernels[leaf]) for leaf in leaves}

    def launches_of(self, flats: Sequence[FlatProgram]) -> Mapping[Leaf, KernelList]:
        """Returns the kernel list of each leaf, recorded at most once."""
        for leaf in leaves_of(flats):
            self.launches_of_leaf(leaf)
        return self.recorded

    def launches_of_leaf(self, leaf: Leaf) -> KernelList:
        """Returns the kernel list of a leaf, recorded at most once."""
        if leaf.bodies and leaf not in self.recorded:
            bodies = [link(body.program) for body in leaf.bodies]
            lists, function = self.launches_of(bodies), self.kernels[leaf].function
            self.recorded[leaf] = record_control(leaf, function, bodies, lists, self.tools)
        elif leaf not in self.recorded:
            self.recorded[leaf] = made = kernel_list(leaf, self.kernels[leaf])
            if not self.kernels[leaf].why_eager:  # else each process tries again, and warns
                self.cache.keep_kernels(leaf, made, self._unaligned.get(leaf, ()))
        return self.recorded[leaf]

    def _control_kernel(self, leaf: Leaf) -> Kernel:
        """Returns a kernel that runs a control-flow operator with the kernels of its bodies."""
        control = leaf.control
        assert control is not None

        @cache  # made on first use: a planned program runs the bodies in its native loop instead
        def bodies() -> list[Run]:
            flats = [link(body.program) for body in leaf.bodies]
            return [closures_run(flat, self.closures_of(flats)) for flat in flats]

        def run(*operands: Any) -> Sequence[Any]:
            return control.run(bodies(), operands)

        return Kernel(run, "plain", self.backend.name)

    def forget(self, leaf: Leaf) -> None:
        """Drops the kernel of a leaf that no other program uses."""
        self.kernels.pop(leaf, None)
        self.recorded.pop(leaf, None)

    def _make_kernels(self, leaves: Sequence[Leaf]) -> None:
        new = [leaf for leaf in leaves if leaf not in self.kernels and not leaf.bodies]
        self.kernels.update((leaf, self._control_kernel(leaf)) for leaf in leaves if leaf.bodies)
        advance = self.progress.parts(len(new), "closures")
        self.kernels.update(lower_leaves(new, self.backend, advance, self._unaligned))


def leaves_of(flats: Sequence[FlatProgram]) -> list[Leaf]:
    """Returns the different leaves that flat programs launch."""
    return list({launch.leaf: None for flat in flats for launch in flat.launches})

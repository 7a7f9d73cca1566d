"""What a compile did, in numbers: nodes held and if inlined, seconds per pass, who shares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...autodiff.higher_order.modes import ModeChoice
from ...backend.cache.results import CacheUse
from ...backend.kernels.lower import BackendName
from ...recompute.summary import RecomputeRecord
from ..capture.blocks import Reuse
from ..capture.regions import SharingDecision
from .gpu_record import GpuRecord
from .made import Made

_MAX_PATHS = 3  # that one line of parts names


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass of one compile."""

    name: str
    cpu_s: float
    wall_s: float
    num_nodes: int
    """Graph nodes held after the pass."""


@dataclass(frozen=True, slots=True)
class ClosureRecord:
    """One closure of a captured program."""

    name: str
    num_nodes: int
    num_calls: int


@dataclass(frozen=True, slots=True)
class PartRecord:
    """One module of a model that runs itself.

    Attributes:
        path: of the module.
        class_name: of the module.
        num_programs: how many programs there are for its calls.
        ran_eagerly: why its newest call ran its own Python, if it did.
        is_small: whether that is because a program would not pay.
    """

    path: str
    class_name: str
    num_programs: int
    ran_eagerly: str = ""
    is_small: bool = False

    @property
    def how(self) -> str:
        """What its calls ran."""
        return f"runs itself, {self.ran_eagerly}" if self.ran_eagerly else "compiled"


def part_lines(parts: Iterable[PartRecord]) -> Iterator[str]:
    """Yields a line for each kind of parts that were run in the same way."""
    alike: dict[tuple[str, str], list[PartRecord]] = {}
    for part in parts:
        alike.setdefault((part.class_name, part.how), []).append(part)
    for (class_name, how), group in alike.items():
        paths = ", ".join(part.path for part in group[:_MAX_PATHS])
        more = f" and {len(group) - _MAX_PATHS} more" if len(group) > _MAX_PATHS else ""
        yield f"{paths}{more} ({class_name}): {how}"


@dataclass
class CompileRecord:
    """The numbers of one compile, and what it made.

    Attributes:
        model: its class.
        passes: name, CPU-seconds (child processes included), wall seconds and nodes, in order.
        num_nodes: graph nodes held by the captured program.
        num_nodes_if_inlined: what they would be without sharing.
        num_closures: different closures in the captured program.
        num_block_calls: calls on marked blocks.
        num_kernels: closures compiled.
        num_operators: operators in them, which is what the backend had to work on.
        num_launches: kernel launches in one forward (and backward, if training).
        peak_bytes: most bytes that are planned at once; None if memory is not planned. That is the
            arena, and the gradients where activations lie in their memory (in ``compile``, unless a
            budget was given; in ``compile_step`` the arena holds the gradients).
        arena_bytes: the part of them that is kept from run to run.
        lower_bound_bytes: largest sum of live bytes, which no plan can go below.
        held_bytes: most bytes that a run holds, as predicted: what is planned, results that the
            user receives, and what launches allocate themselves; None if memory is not planned.
        unplanned: why memory is not planned, if it is not.
        saved_bytes: what one forward saves for its backward, in training.
        recomputed_flops: FLOPs that one backward spends on computing forward values again.
        recompute: per closure and variant, what is saved and what is computed again.
        recompute_chosen_for: where sizes are symbols, the shapes of inputs that it was chosen for.
        ran_eagerly: why the model itself ran, if so.
        parts: how the modules in a model that ran itself were run by then.
        num_compiles: compiles of the module so far, this one included.
        num_links: further shapes that only cost a link.
        num_backwards: backwards that there are by now: one for each set of outputs that a loss
            used, where it left some unused (their cotangents are undefined, which is not zero).
        num_gradients: programs of gradients by now, made for gradients that were differentiated.
        modes: where a derivative in the forward had several modes, which one was taken, what each
            costs and why.
        nested_forward: operators that have no rule in Taylor mode, with the user's lines: forward
            mode was nested for them.
        eager_kernels: closures whose operators PyTorch runs one by one, since the backend makes no
            kernels for them, each with what it says.
        why_static: why this shape was compiled on its own although others had come.
        closures: each different closure, callees first, with its calls.
        cache: what came from the on-disk cache, and why a closure cannot be kept there.
        nothing_shared: what repeats although nothing is shared, and what to do; else empty.
        decisions: for each block instance, whether it shares, and if not, why.
        gpu: what is known of a program for a GPU that is not here.
        made: what the compile made, for a page that draws it; no field, so that what lists the
            numbers does not list programs.
    """

    train: bool
    backend: BackendName
    reuse: Reuse
    model: str = ""
    passes: list[PassRecord] = field(default_factory=list)
    num_nodes: int = 0
    num_nodes_if_inlined: int = 0
    num_closures: int = 0
    num_block_calls: int = 0
    num_kernels: int = 0
    num_operators: int = 0
    num_launches: int = 0
    peak_bytes: int | None = None
    arena_bytes: int | None = None
    lower_bound_bytes: int | None = None
    held_bytes: int | None = None
    unplanned: str = ""
    saved_bytes: int | None = None
    recomputed_flops: int = 0
    recompute: list[RecomputeRecord] = field(default_factory=list)
    recompute_chosen_for: tuple[tuple[int, ...], ...] = ()
    ran_eagerly: str = ""
    parts: list[PartRecord] = field(default_factory=list)
    cache: CacheUse = field(default_factory=CacheUse)
    num_compiles: int = 1
    num_links: int = 0
    num_backwards: int = 1
    num_gradients: int = 0
    modes: list[ModeChoice] = field(default_factory=list)
    nested_forward: list[str] = field(default_factory=list)
    eager_kernels: list[str] = field(default_factory=list)
    why_static: str = ""
    closures: list[ClosureRecord] = field(default_factory=list)
    nothing_shared: str = ""
    decisions: list[SharingDecision] = field(default_factory=list)
    gpu: GpuRecord | None = None

    def __post_init__(self) -> None:
        self.made: Made | None = None

    @property
    def cpu_s(self) -> float:
        """CPU-seconds of all passes, child processes included."""
        return sum(p.cpu_s for p in self.passes)

    @property
    def wall_s(self) -> float:
        """Wall seconds of all passes."""
        return sum(p.wall_s for p in self.passes)

    @property
    def num_shared_calls(self) -> int:
        """Instances whose Python did not run, or whose graph turned out to be another's."""
        return sum(d.shared or bool(d.shares) for d in self.decisions)

    @property
    def recompute_shapes(self) -> str:
        """The shapes that recompute was chosen for, in words."""
        return ", ".join(str(shape) for shape in dict.fromkeys(self.recompute_chosen_for) if shape)

    def notes(self) -> Iterator[str]:
        """Yields what a reader should know of this compile and those before it."""
        if self.num_links or self.num_compiles > 1:
            yield f"{self.num_compiles} compiles and {self.num_links} links so far"
        if self.num_backwards > 1:
            yield f"{self.num_backwards} backwards: losses used only some of the outputs"
        if self.num_gradients:
            yield f"gradients compiled, for derivatives of them: {self.num_gradients}"
        yield from map(str, self.modes)
        yield from (f"no Taylor rule, forward mode nested: {one}" for one in self.nested_forward)
        yield from (f"run operator by operator, {one}" for one in self.eager_kernels)
        if self.why_static:
            yield f"sizes are numbers, because {self.why_static}"
        if self.recompute_chosen_for:
            yield f"recompute was chosen for inputs of {self.recompute_shapes}"

    def not_shared(self) -> list[SharingDecision]:
        """Instances that were traced although an earlier one of their class was known."""
        return [d for d in self.decisions if not (d.shared or d.shares) and d.reason]

    def shared_with_constants(self) -> list[SharingDecision]:
        """Instances that were traced again and share a closure that takes constants."""
        return [d for d in self.decisions if d.shares and d.reason]

"""Records of a compile: its numbers, who shares, its programs, and the needs of a GPU.

A record outlives what it reports on, so nothing here holds the model's tensors or an arena. A page
reads the programs only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..backend.arena.arena import ArenaPlan
from ..backend.cache.results import CacheUse
from ..backend.gpu.roofline import Prediction, predict
from ..backend.gpu.targets import CONTEXT_BYTES, MARGIN, Target
from ..backend.kernels.lower import BackendName, InductorBackend, triton_kernels
from ..backend.launches.kernel_list import KernelList
from ..backend.link.layout import Layout
from ..backend.link.placement import gradients_of
from ..backend.run.planned import PlannedProgram
from ..backend.run.rank_program import RankPlan
from ..recompute.planner import RecomputeRecord
from ..reuse.ir.printer import bytes_text
from ..reuse.ir.program import Leaf, Program
from .capture.blocks import Reuse
from .capture.regions import ModeChoice, SharingDecision
from .reuse_table import shared_classes

_MAX_PATHS = 3  # that one line of parts names
_MAX_CLASSES = 2  # that a headline names


@dataclass(frozen=True, slots=True)
class PassRecord:
    """Holds what one pass of one compile took."""

    name: str
    cpu_s: float
    wall_s: float
    num_nodes: int
    """Graph nodes held after the pass."""


@dataclass(frozen=True, slots=True)
class ClosureRecord:
    """Holds the size of one closure of a captured program, and how often it is called."""

    name: str
    num_nodes: int
    num_calls: int


@dataclass(frozen=True, slots=True)
class PartRecord:
    """Holds how one module was run, of a model that runs eagerly as a whole.

    Attributes:
        path: of the module.
        class_name: of the module.
        num_programs: how many programs there are for its calls.
        ran_eagerly: why its newest call ran eagerly, if it did.
        is_small: says that it did because a program would not pay.
    """

    path: str
    class_name: str
    num_programs: int
    ran_eagerly: str = ""
    is_small: bool = False

    @property
    def how(self) -> str:
        """Says how its calls run: compiled, or eagerly and why."""
        return f"runs eagerly, {self.ran_eagerly}" if self.ran_eagerly else "compiled"


def part_lines(parts: Iterable[PartRecord]) -> Iterator[str]:
    """Yields a line for each kind of parts that were run in the same way."""
    alike: dict[tuple[str, str], list[PartRecord]] = {}
    for part in parts:
        alike.setdefault((part.class_name, part.how), []).append(part)
    for (class_name, how), group in alike.items():
        paths = ", ".join(part.path for part in group[:_MAX_PATHS])
        more = f" and {len(group) - _MAX_PATHS} more" if len(group) > _MAX_PATHS else ""
        yield f"{paths}{more} ({class_name}): {how}"


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """Holds what a program on several devices has on one of them.

    Attributes:
        device: its name.
        tensors: names of the model's tensors there.
        arena_bytes: what is planned there.
    """

    device: str
    tensors: tuple[str, ...]
    arena_bytes: int

    def __str__(self) -> str:
        shown = ", ".join(self.tensors[:_MAX_PATHS]) or "no tensor of the model"
        more = len(self.tensors) - _MAX_PATHS
        and_more = f" and {more} more" if more > 0 else ""
        return f"on {self.device}: {shown}{and_more}; an arena of {self.arena_bytes:,} bytes"


@dataclass
class CompileRecord:
    """Holds the numbers of one compile, and what it made.

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
        why_no_graph: why a planned program on a GPU is not one CUDA graph, if it is not.
        saved_bytes: what one forward saves for its backward, in training.
        recomputed_flops: FLOPs that one backward spends on computing forward values again.
        recompute: per closure and variant, what is saved and what is computed again.
        recompute_chosen_for: where sizes are symbols, the shapes of inputs that it was chosen for.
        ran_eagerly: why the model ran eagerly, if it did.
        parts: how the modules of a model that ran eagerly were run by then.
        num_compiles: compiles of the module so far, this one included.
        num_links: further shapes that only cost a link.
        num_backwards: backwards compiled so far: one for each set of outputs that a loss
            used, where it left some unused (their cotangents are undefined, which is not zero).
        num_gradients: programs of gradients so far, made for gradients that were differentiated.
        modes: where the mode of a derivative in the forward was left open, which one was taken and
            why.
        devices: where a program on several devices has its tensors and arenas; the bytes above are
            those of the first, which is the GPU if there is one.
        copied_bytes: what one run copies from one device to another.
        num_copies: in how many copies.
        left_out: where the forward leaves what a step does not leave there.
        update_after: why the optimizer's update runs after the step's program, if it does.
        nested_forward: operators that have no rule in Taylor mode, with the user's lines: forward
            mode was nested for them.
        eager_kernels: closures whose operators PyTorch runs one by one, since the backend makes no
            kernels for them, each with what it says.
        why_static: why this shape was compiled on its own although others had come.
        closures: each different closure, callees first, with its calls.
        cache: what came from the on-disk cache, and why a closure cannot be kept there.
        fused_boundaries: how many boundaries of which blocks are fused, or why none is, where that
            was asked for.
        told_masks: how many attentions of which closures do without a mask that is a constant and
            means what ``is_causal`` says, or nothing.
        nothing_shared: what repeats although nothing is shared, and what to do; else empty.
        opened_from: says that a file was opened, and nothing compiled.
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
    why_no_graph: str = ""
    devices: tuple[DeviceRecord, ...] = ()
    copied_bytes: int = 0
    num_copies: int = 0
    update_after: str = ""
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
    left_out: Sequence[str] = ()
    nested_forward: list[str] = field(default_factory=list)
    eager_kernels: list[str] = field(default_factory=list)
    why_static: str = ""
    closures: list[ClosureRecord] = field(default_factory=list)
    nothing_shared: str = ""
    opened_from: str = ""
    fused_boundaries: list[str] = field(default_factory=list)
    told_masks: list[str] = field(default_factory=list)
    decisions: list[SharingDecision] = field(default_factory=list)
    gpu: GpuRecord | None = None

    def __post_init__(self) -> None:
        self.made: Made | None = None

    @property
    def cpu_s(self) -> float:
        """Returns the CPU-seconds of all passes, child processes included."""
        return sum(p.cpu_s for p in self.passes)

    @property
    def wall_s(self) -> float:
        """Returns the wall seconds of all passes."""
        return sum(p.wall_s for p in self.passes)

    @property
    def num_shared_calls(self) -> int:
        """Counts instances whose Python did not run, or whose graph turned out to be another's."""
        return sum(d.shared or bool(d.shares) for d in self.decisions)

    def headline(self) -> str:
        """Says in a sentence which blocks share graphs, and what the compile took."""
        shared = shared_classes(self.decisions)
        none = "all is inlined" if self.reuse == "off" else "no block repeats"
        what = self.opened_from or ", ".join(shared[:_MAX_CLASSES]) or none
        more = f", {len(shared) - _MAX_CLASSES} more classes" if len(shared) > _MAX_CLASSES else ""
        took = f"{self.cpu_s:.1f} CPU-s, {self.wall_s:.1f} s"
        kept = self.cache.directory and not self.cache.not_kept
        again = "; next time from cache" if self.cache.num_made and kept else ""
        return f"{what}{more}: {took}{again}"

    def notes(self) -> Iterator[str]:
        """Yields what a reader should know of this compile and those before it."""
        if self.num_links or self.num_compiles > 1:
            yield f"{self.num_compiles} compiles and {self.num_links} links so far"
        if self.num_backwards > 1:
            yield f"{self.num_backwards} backwards: losses used only some of the outputs"
        if self.num_gradients:
            yield f"gradients compiled, for derivatives of them: {self.num_gradients}"
        yield from map(str, self.modes)
        if self.left_out:
            yield f"what the forward leaves in {', '.join(self.left_out)} is not left by a step"
        yield from (f"no Taylor rule, forward mode nested: {one}" for one in self.nested_forward)
        yield from (f"run operator by operator, {one}" for one in self.eager_kernels)
        if self.fused_boundaries:
            yield f"boundaries fused: {', '.join(self.fused_boundaries)}"
        if self.told_masks:
            yield f"attention without a mask, which says no more: {', '.join(self.told_masks)}"
        yield from map(str, self.devices)
        if self.devices:
            yield (
                f"{self.num_copies} copies between devices in a run, {self.copied_bytes:,} bytes"
            )
        if self.why_no_graph:
            yield (
                f"{self.num_launches} launches come one by one from Python, in no CUDA graph, "
                f"because {self.why_no_graph}"
            )
        if self.update_after:
            yield f"the optimizer updates after the step, because {self.update_after}"
        if self.why_static:
            yield f"sizes are numbers, because {self.why_static}"
        if self.recompute_chosen_for:
            shapes = ", ".join(map(str, filter(None, dict.fromkeys(self.recompute_chosen_for))))
            yield f"recompute was chosen for inputs of {shapes}"

    def not_shared(self) -> list[SharingDecision]:
        """Returns instances that were traced although an earlier one of their class was known."""
        return [d for d in self.decisions if not (d.shared or d.shares) and d.reason]

    def shared_with_constants(self) -> list[SharingDecision]:
        """Returns instances that were traced again and share a closure that takes constants."""
        return [d for d in self.decisions if d.shares and d.reason]


@dataclass(frozen=True, eq=False)
class Memory:
    """Holds where the buffers of a linked program lie.

    Attributes:
        layout: every buffer and launch, on one timeline.
        offsets: in bytes, for each buffer that the plan places.
        plan: of all of them.
        arena_bytes: the part that is kept from run to run.
        hosts: whether the user's gradients follow the arena, for activations to lie in them.
    """

    layout: Layout
    offsets: Sequence[int]
    plan: ArenaPlan
    arena_bytes: int
    hosts: Literal["none", "gradients"] = "none"

    @property
    def gradients(self) -> dict[int, int]:
        """Returns the buffers that lie behind the arena, with their offset in bytes."""
        # A plan has one offset more for each of them, after those of the arena.
        found = gradients_of(self.layout) if self.hosts == "gradients" else []
        first = len(self.plan.offsets) - len(found)
        return dict(zip(found, self.plan.offsets[first:].tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Made:
    """Holds what one compile made, for a page to draw.

    Attributes:
        captured: the model as captured.
        forward, backward: what runs of it, in plain ATen; of a step, for one micro-batch.
        micro_batches: how often both run in one step.
        kernels: the launches of each leaf for which they are known.
        memory: the plan of it; None where memory is not planned.
        frontiers: finds what could be saved instead, as rows for a page; empty where recompute was
            not asked for.
    """

    captured: Program
    forward: Program
    backward: Program | None = None
    micro_batches: int = 1
    kernels: Mapping[Leaf, KernelList] | None = None
    memory: Memory | RankPlan | None = None
    frontiers: Callable[[], Sequence[Mapping[str, Any]]] = tuple

    def __deepcopy__(self, memo: object) -> Made:
        """Returns itself: nothing in it changes."""
        return self


@dataclass(frozen=True)
class GpuRecord:
    """Holds what is known of a program for a GPU, compiled and planned.

    Attributes:
        target: the GPU.
        num_kernels: different Triton kernels.
        num_built: those compiled to machine code.
        code_bytes: of that.
        given_bytes: parameters, buffers and inputs, which are the user's.
        arena_bytes: activations, gradients and scratch, as planned.
        outside_bytes: most bytes at one time in what launches allocate themselves.
        result_bytes: of results and gradients that the user gets in memory of their own.
        workspace_bytes: what cuBLAS works in.
        allocating: names of those launches, each once.
        prediction: of one run.
    """

    target: Target
    num_kernels: int
    num_built: int
    code_bytes: int
    given_bytes: int
    arena_bytes: int
    outside_bytes: int
    result_bytes: int
    workspace_bytes: int
    allocating: Sequence[str]
    prediction: Prediction

    @property
    def peak_bytes(self) -> int:
        """Returns the most bytes of GPU memory that a run holds, without the optimizer's state."""
        held = self.given_bytes + self.arena_bytes + self.result_bytes
        return held + self.outside_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool:
        """Says if the GPU has that much memory besides its context, and a margin."""
        return self.peak_bytes <= self.target.usable_bytes

    def lines(self) -> Iterator[str]:
        """Yields what a report says."""
        target, predicted, cost = self.target, self.prediction, self.prediction.cost
        yield f"for {target.name} ({target.board}): compiled and planned, not run"
        built = f"all {self.num_built}" if self.num_built == self.num_kernels else self.num_built
        others = predicted.num_launches - predicted.num_triton
        yield (
            f"  {predicted.num_launches} launches: {predicted.num_triton} of {self.num_kernels} "
            f"Triton kernels, {others} of PyTorch's"
        )
        yield f"  {built} kernels compiled to machine code, {self.code_bytes / 2**10:.0f} KiB"
        verdict = "fits in" if self.fits else "does NOT fit in"
        yield (
            f"  memory {bytes_text(self.peak_bytes)}, {verdict} {bytes_text(target.usable_bytes)}: "
            f"of {bytes_text(target.memory_bytes)}, as PyTorch reports it, "
            f"{bytes_text(CONTEXT_BYTES)} are CUDA's context, {MARGIN:.0%} a margin"
        )
        own = {"parameters and inputs": self.given_bytes, "arena": self.arena_bytes}
        own |= {"results and gradients": self.result_bytes, "cuBLAS": self.workspace_bytes}
        yield "    " + ", ".join(f"{name} {bytes_text(size)}" for name, size in own.items() if size)
        if self.allocating:
            yield (
                f"    allocated by launches {bytes_text(self.outside_bytes)}: "
                f"{', '.join(self.allocating)}"
            )
        yield (
            f"  predicted {cost.seconds * 1e3:.3g} ms at least, by the roofline, and "
            f"{predicted.expected_s * 1e3:.3g} ms as such kernels usually run: "
            f"{cost.flops / 1e12:.3g} TFLOP in products, {bytes_text(cost.moved_bytes)} moved"
        )


def gpu_record(
    program: PlannedProgram, lists: Sequence[tuple[KernelList, int]], backend: InductorBackend
) -> GpuRecord:
    """Returns what is known of a planned program."""
    assert backend.target is not None
    kernels = {kernel.content for kernel in triton_kernels(one for one, _ in lists)}
    built = [backend.built[content] for content in kernels if content in backend.built]
    given = [b for b in program.layout.instances if b.kind == "given"]
    return GpuRecord(
        target=backend.target,
        num_kernels=len(kernels),
        num_built=len(built),
        code_bytes=sum(map(len, built)),
        given_bytes=sum(b.num_bytes for b in given),
        arena_bytes=program.plan.peak_bytes,
        outside_bytes=program.outside_bytes - program.workspace_bytes,
        result_bytes=program.result_bytes,
        workspace_bytes=program.workspace_bytes,
        allocating=tuple(dict.fromkeys(program.foreign_launches())),
        prediction=predict(lists, backend.target),
    )

"""What :func:`lazyinline.measure` found: the numbers, and what a reader of them should know."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...backend.kernels.lower import BackendName
from ..report import CompileReport
from .timing import StepTime, noise
from .workload import Errors


@dataclass(frozen=True)
class Seconds:
    """CPU-seconds, child processes included, and wall seconds."""

    cpu_s: float = 0.0
    wall_s: float = 0.0


@dataclass(frozen=True)
class Side:
    """One way of compiling the model.

    Attributes:
        compiled: what the compile did, pass by pass.
        child_cpu_s: the part of its CPU-seconds that child processes, the C++ compiler, spent.
        step: time of one step; None if nothing was run.
        errors: against eager.
        held_bytes: most bytes that one step held: the arena, and what it took from PyTorch's
            allocator; None where that was not measured.
        compiled_again: a step with the same inputs did not find the program: a bug of ours, and
            the time of a step is then worthless.
    """

    compiled: CompileReport
    child_cpu_s: float
    step: StepTime | None = None
    errors: Errors = field(default_factory=Errors)
    held_bytes: int | None = None
    compiled_again: bool = False


@dataclass(frozen=True)
class Measurement:
    """Late against early inlining of one model, both against eager.

    Attributes:
        model: the model's class or, in ``lazyinline bench``, its name there.
        layers: number of layers, where known.
        late: blocks compiled once, inlined at link.
        early: everything inlined first (``reuse="off"``).
        eager: time of the model's own step; None if nothing was run.
        warm_up: a small compile before both, which pays for imports; on neither side.
        micro_batches: parts of the batch that a step runs one after another.
        peak_bytes: of the late program, as its report has it; None where memory is not planned.
        lower_bound_bytes: largest sum of live bytes, which no plan can go below; None likewise.
        others_share: the part of all cores that other programs used while steps were timed; None
            where nothing was run, or the system does not tell.
        eager_held_bytes: most bytes that a step of eager took; None where not measured.
    """

    model: str
    train: bool
    backend: BackendName
    late: Side
    early: Side
    eager: StepTime | None = None
    warm_up: Seconds = Seconds()
    micro_batches: int = 1
    layers: int | None = None
    threads: int = 1
    peak_bytes: int | None = None
    lower_bound_bytes: int | None = None
    others_share: float | None = None
    eager_held_bytes: int | None = None

    @property
    def noise(self) -> str:
        """Why the times of steps are not to be trusted; an empty text where they are."""
        steps = [s for s in (self.eager, self.late.step, self.early.step) if s is not None]
        return noise(steps, self.others_share)

    @property
    def sides(self) -> dict[str, Side]:
        """Both sides by name."""
        return {"late": self.late, "early": self.early}

    def title(self) -> str:
        """Says what was measured, in one line."""
        depth = f", {self.layers} layers" if self.layers is not None else ""
        kind = "training" if self.train else "inference"
        if self.micro_batches > 1:
            kind += f" of {self.micro_batches} micro-batches"
        threads = f"{self.threads} thread" + ("" if self.threads == 1 else "s")
        return f"{self.model}{depth}: {kind}, backend {self.backend}, {threads}"

    def notes(self) -> list[str]:
        """Says what a reader should know: noise, warm-up, C++, and :meth:`warnings`."""
        notes = [self.noise] if self.noise else []
        if self.warm_up.wall_s:
            notes.append(
                f"warm-up, on neither side: {self.warm_up.cpu_s:.1f} CPU s, "
                f"{self.warm_up.wall_s:.1f} wall s (imports and first use)"
            )
        if max(self.late.child_cpu_s, self.early.child_cpu_s) >= 0.05:
            notes.append(
                f"of the CPU s, the C++ compiler: late {self.late.child_cpu_s:.1f}, early "
                f"{self.early.child_cpu_s:.1f} (late comes first; kernels built by then are warm)"
            )
        return notes + self.warnings()

    def warnings(self) -> list[str]:
        """Says what is not as it should be: no mark, a block not shared, a second compile."""
        notes = []
        if not self.late.compiled.num_block_calls:
            notes.append(
                "no block is marked, so late and early are the same: "
                "put lazy_inline on the class of the repeated layer"
            )
        for name, side in self.sides.items():
            if side.compiled_again:
                notes.append(
                    f"{name} was compiled again for the same inputs, so its step time is not one: "
                    "please report this as a bug of lazyinline"
                )
        for decision in self.late.compiled.not_shared():
            notes.append(f"{decision.path or decision.class_name}: not shared, {decision.reason}")
        for decision in self.late.compiled.shared_with_constants():
            notes.append(f"{decision.path or decision.class_name}: {decision.shares}")
        return notes

    def size_rows(self) -> list[tuple[str, int, int]]:
        """What was compiled: name, late, early."""
        late, early = self.late.compiled, self.early.compiled
        rows = [
            ("graph nodes held", late.num_nodes, early.num_nodes),
            ("graph nodes if inlined", late.num_nodes_if_inlined, early.num_nodes_if_inlined),
            ("closures", late.num_closures, early.num_closures),
            ("block calls", late.num_block_calls, early.num_block_calls),
            ("operators compiled", late.num_operators, early.num_operators),
            ("launches in a step", late.num_launches, early.num_launches),
        ]
        if late.peak_bytes is not None and early.peak_bytes is not None:
            rows.append(("arena, bytes", late.peak_bytes, early.peak_bytes))
        return rows


def error_text(error: float | None) -> str:
    """An error in three digits."""
    return "-" if error is None else "0" if error == 0 else f"{error:.1e}"

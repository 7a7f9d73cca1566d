"""The data of pages on a compile, a measurement, and the plan of a pipeline.

A page has a verdict, tiles with compared figures, and sections.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ...pipeline_parallel.mesh.plan import MeshPlan
from ...pipeline_parallel.plan import PipelinePlan
from ...reuse.ir.printer import bytes_text, counted, flops_text, seconds_text
from ..compile_record import CompileRecord, GpuRecord, part_lines
from . import sections

if TYPE_CHECKING:  # importing DTensor takes as long as importing all of lazyinline
    from ...pipeline_parallel.mesh.traffic import Collective, RankMemory

Tile: TypeAlias = dict[str, str]
Numbers = Mapping[str, Any]  # the result of :meth:`lazyinline.MeasureReport.to_dict`
_EXACT = 1e-4  # relative errors above this are more than float32 rounding


def compile_page(record: CompileRecord, title: str = "") -> PageData:
    """Returns the data of a compile's page, with the name of the model as its title."""
    kind = "training" if record.train else "inference"
    tiles = () if record.ran_eagerly else _compile_tiles(record)
    return {
        "title": title or record.model or "Compiled model",
        "subtitle": f"{kind}, backend {record.backend}, reuse {record.reuse}",
        "verdict": {"sentence": _outcome(record), "tiles": [*tiles], "notes": notes(record)},
        **compile_sections(record, {"compile": record}),
    }


def measured_page(
    rows: Sequence[tuple[Numbers, Mapping[str, CompileRecord]]], subtitle: str
) -> PageData:
    """Returns the data of a page that compares late and early inlining, and both with eager.

    There is one row, or one for each number of layers, with its numbers and both compiles; the
    deepest is drawn. The subtitle names what was measured.
    """
    # Late and early differ most in the deepest model.
    found, sides = max(rows, key=lambda row: row[0]["layers"] or 0)
    late, early = sides["late"], sides["early"]
    return {
        "title": f"{found['model']}: late against early inlining",
        "subtitle": subtitle,
        "verdict": {
            "sentence": _comparison(found, late, early),
            "tiles": [*_measured_tiles(found, late, early)],
            "notes": [*found["notes"], *notes(late)],
        },
        **compile_sections(late, sides),
        "depth": sections.depth_section([(row["layers"] or 0, records) for row, records in rows]),
        "steps": sections.steps_section(found),
    }


def compile_sections(record: CompileRecord, sides: Mapping[str, CompileRecord]) -> PageData:
    """Returns the sections of a compile; the times of ``sides`` are shown side by side."""
    made = record.made  # None where the model ran eagerly
    memory = made.memory if made is not None else None
    return {
        "program": sections.program_section(made) if made is not None else None,
        "reuse": sections.reuse_section(record.decisions, record.nothing_shared),
        "passes": sections.passes_section(sides),
        "arena": sections.arena_section(memory) if memory is not None else None,
        "recompute": sections.recompute_section(record.recompute, made.frontiers() if made else ()),
        "predicted": sections.predicted_section(sections.compile_rows(record)),
        "about": about(),
    }


def notes(record: CompileRecord) -> list[str]:
    """Returns notes for the reader, in sentences."""
    found = []
    if record.ran_eagerly:
        found.append(f"The model ran eagerly: {record.ran_eagerly}")
        found += part_lines(part for part in record.parts if not part.is_small)
    if record.unplanned:
        found.append(f"Memory is not planned: {record.unplanned}.")
    found += [f"{note[0].upper()}{note[1:]}." for note in record.notes()]
    if record.cache.directory:
        found.append(" ".join(str(record.cache).split()))
    return found


# ---- sentences -------------------------------------------------------------------------------


def _outcome(record: CompileRecord) -> str:
    if record.ran_eagerly:
        return "This model is not compiled as a whole: it runs its own Python."
    if record.nothing_shared:
        return record.nothing_shared
    shared = record.num_shared_calls
    if not shared:
        return f"No block is shared; compiled in {record.cpu_s:.1f} CPU s."
    return (
        f"{counted(record.num_block_calls, 'block call')} needed "
        f"{counted(record.num_block_calls - shared, 'trace')}: the compiler worked on "
        f"{record.num_nodes:,} graph nodes in place of {record.num_nodes_if_inlined:,}, for "
        f"{record.cpu_s:.1f} CPU s."
    )


def _comparison(found: Numbers, late: CompileRecord, early: CompileRecord) -> str:
    text = (
        f"Inlining late, the compiler spent {times_less(late.cpu_s, early.cpu_s)} CPU time than "
        f"inlining early ({late.cpu_s:.1f} against {early.cpu_s:.1f} s)"
    ).replace("equal CPU time than", "the same CPU time as")
    if late.num_nodes < late.num_nodes_if_inlined:
        text += f", and held {late.num_nodes:,} graph nodes of {late.num_nodes_if_inlined:,}"
    if not found["step_ms"]:
        return f"{text}."
    end = " on a busy machine, which is not to be trusted." if found["noise"] else "."
    return f"{text}. A step takes {ratio_range(_against('eager', found))} the time of eager{end}"


def _against(name: str, found: Numbers) -> list[float]:
    """Returns late over another way, by the fastest step and by the median."""
    # Both, as a range, because on a busy machine they differ.
    return [found[time]["late"] / found[time][name] for time in ("step_min_ms", "step_ms")]


# ---- figures ---------------------------------------------------------------------------------


def tile(
    label: str, value: str, note: str, *, good: bool = False, otherwise: str = "plain"
) -> Tile:
    """Returns a tile: one figure at the head of a page, with a note on what it is compared with.

    The state of a tile that is not good is ``"plain"`` or ``"warn"``.
    """
    return {"label": label, "value": value, "note": note, "state": "good" if good else otherwise}


def program_tiles(record: CompileRecord) -> Iterator[Tile]:
    """Yields tiles on the number of graph nodes, and on the arena and its lower bound."""
    held, inlined = record.num_nodes, record.num_nodes_if_inlined
    note = f"{held:,} of {inlined:,} if inlined"
    yield tile("Graph nodes held", times_less(held, inlined), note, good=held < inlined)
    if record.peak_bytes is not None and record.lower_bound_bytes:
        over = record.peak_bytes / record.lower_bound_bytes - 1
        size = bytes_text(record.peak_bytes)
        yield tile("Planned memory", size, f"lower bound +{over:.1%}", good=over <= 0.01)


def _compile_tiles(record: CompileRecord) -> Iterator[Tile]:
    nodes, *arena = program_tiles(record)
    launches = f"{record.num_launches:,} launches in a run"
    yield nodes
    yield tile("Compile", f"{record.cpu_s:.2f} CPU s", f"{record.wall_s:.2f} s on the clock")
    yield tile("Operators compiled", f"{record.num_operators:,}", launches)
    yield from arena
    if record.saved_bytes is not None:
        again = record.recomputed_flops
        note = f"{flops_text(again)} computed again" if again else "nothing computed again"
        yield tile("Saved for backward", bytes_text(record.saved_bytes), note)
    yield from gpu_tiles(record.gpu)


def gpu_tiles(gpu: GpuRecord | None, variant: str = "") -> Iterator[Tile]:
    """Yields tiles on predicted memory and time, if the compile has a target GPU.

    ``variant`` names the program if there are several.
    """
    if gpu is None:
        return
    where = gpu.target.name + (f", {variant}" if variant else "")
    fits = "fits in" if gpu.fits else "more than"
    predicted = gpu.prediction
    yield tile(
        f"Memory on {where}",
        bytes_text(gpu.peak_bytes),
        f"{fits} {bytes_text(gpu.target.usable_bytes)}: parameters and inputs "
        f"{bytes_text(gpu.given_bytes)}, arena {bytes_text(gpu.arena_bytes)}, "
        f"outside {bytes_text(gpu.outside_bytes + gpu.result_bytes + gpu.workspace_bytes)}",
        good=gpu.fits,
        otherwise="warn",
    )
    # A roofline is a lower bound on the time of these launches.
    yield tile(
        f"Step on {where}",
        f"\u2265 {seconds_text(predicted.cost.seconds)}",
        f"predicted by the roofline, not measured: {flops_text(predicted.cost.flops)} "
        f"in products, {bytes_text(predicted.cost.moved_bytes)} moved",
    )
    yield tile(
        f"Kernels for {where}",
        f"{gpu.num_built} as machine code",
        f"of {gpu.num_kernels}; {predicted.num_triton:,} of {predicted.num_launches:,} launches",
        good=gpu.num_built == gpu.num_kernels,
        otherwise="warn",
    )


def _measured_tiles(found: Numbers, late: CompileRecord, early: CompileRecord) -> Iterator[Tile]:
    yield from _other_tiles(found, late)
    cpu_s = f"{late.cpu_s:.2f} s late, {early.cpu_s:.2f} s early"
    less = times_less(late.cpu_s, early.cpu_s)
    yield tile("Compile, CPU time", less, cpu_s, good=late.cpu_s < early.cpu_s)
    nodes, *arena = program_tiles(late)
    yield nodes
    operators = f"{late.num_operators:,} late, {early.num_operators:,} early"
    fewer = times_less(late.num_operators, early.num_operators)
    good = late.num_operators < early.num_operators
    yield tile("Operators compiled", fewer, operators, good=good)
    yield from arena
    if found["step_ms"]:
        yield from _run_tiles(found)


def _other_tiles(found: Numbers, late: CompileRecord) -> Iterator[Tile]:
    """Yields tiles that compare with ``torch.compile``, if it was measured."""
    for name, other in found["others"].items():
        if other["refused"]:
            yield tile(
                f"Against {name}", "compiles", f"{name} refuses: {other['refused']}", good=True
            )
            continue
        less, cpu_s = times_less(late.cpu_s, other["cpu_s"]), f"{other['cpu_s']:.2f} s {name}"
        good = late.cpu_s < other["cpu_s"]
        yield tile(f"Compile against {name}", less, f"{late.cpu_s:.2f} s late, {cpu_s}", good=good)
        ratios, theirs = _against(name, found), seconds_text(found["step_ms"][name] / 1e3)
        good = max(ratios) <= 1 and not found["noise"]
        yield tile(f"Step against {name}", ratio_range(ratios), f"{theirs} {name}", good=good)


def _run_tiles(found: Numbers) -> Iterator[Tile]:
    ratios, noisy = _against("eager", found), found["noise"]
    late, eager = (seconds_text(found["step_ms"][name] / 1e3) for name in ("late", "eager"))
    yield tile(
        "Step time against eager's",
        ratio_range(ratios),
        f"{'noisy: ' if noisy else ''}{late} late, {eager} eager (medians)",
        good=max(ratios) <= 1 and not noisy,
        otherwise="warn" if noisy else "plain",
    )
    kind = "max_rel_grad_error" if found["train"] else "max_abs_error"
    error, worst = found[kind]["late"], found["worst_gradient"]["late"]
    note = f"relative, of a gradient: {worst}" if found["train"] else "absolute, of an output"
    # An absolute error of an output has no scale, so only infinity is surely wrong.
    exact = float(error) <= _EXACT if found["train"] else error != "inf"
    label = "Largest difference from eager"
    yield tile(label, sections.error_text(error), note, good=exact, otherwise="warn")


# ---- a pipeline's plan ---------------------------------------------------------------------------


_LEAD = (
    "Measured is the mean of all steps so far; step and bubble put these times into the schedule. "
    "Memory held is the arena, and what launches allocate themselves."
)
_OF_A_RANK = (
    "Passes and memory are those of rank {}. The arena is in the order of its schedule; parameters "
    "and the sums of their gradients lie outside of it."
)


@dataclass(frozen=True)
class ShownPlan(PipelinePlan):
    """The plan of a pipeline. ``print(plan)`` shows it; ``save_html`` draws it."""

    # The record of this rank's compile; None for a plan without a compile.
    compiled: CompileRecord | None = None
    rank: int | None = None  # this rank; None for a plan without a compile
    layouts: MeshPlan | None = None  # the layouts of tensors, for a pipeline on a mesh
    # On a mesh, the collectives of one rank of each stage in a step.
    traffic: Mapping[int, tuple[Collective, ...]] = field(default_factory=dict)
    memory: RankMemory | None = None  # on a mesh, the memory of this rank, if it is planned

    @staticmethod
    def of(plan: PipelinePlan, compiled: CompileRecord | None = None, **more: Any) -> ShownPlan:
        """Returns the same plan, with what is known of this rank."""
        return ShownPlan(plan.table, plan.stages, plan.timeline, compiled, **more)

    def __str__(self) -> str:
        held = "" if self.memory is None else f"rank {self.rank}: {self.memory}"
        return "\n".join(filter(None, (super().__str__(), self.moved_text, held)))

    @property
    def moved_text(self) -> str:
        """The layouts, and the traffic of each stage, as text; empty without a mesh."""
        if self.layouts is None:
            return ""
        from ...pipeline_parallel.mesh.traffic import traffic_text

        moved = [f"stage {n}, {traffic_text(one)}" for n, one in self.traffic.items()]
        return "\n".join([str(self.layouts), *moved])

    def save_html(
        self, path: str | os.PathLike[str], measured_s: sections.Measured | None = None
    ) -> None:
        """Writes a page with the schedule in time, the memory of each rank, and the program.

        Args:
            path: the file to write.
            measured_s: the result of ``pipe.measured_s()``, which every rank calls; measured times
                are shown next to predicted ones.

        Example:
            >>> pipe.plan.save_html("pipeline.html", pipe.measured_s())
        """
        pathlib.Path(path).write_text(write_page(plan_page(self, measured_s)), encoding="utf-8")


def plan_page(plan: ShownPlan, measured_s: sections.Measured | None = None) -> PageData:
    """Returns the data of a pipeline's page."""
    table, record = plan.table, plan.compiled
    step, bubble = seconds_text(plan.step_s), f"{plan.bubble:.1%}"
    peaks = [plan.peak_bytes(rank) for rank in range(len(table.ranks))]
    fullest, emptiest = bytes_text(max(peaks)), bytes_text(min(peaks))
    ranks, stages = counted(len(table.ranks), "rank"), counted(table.num_stages, "stage")
    tiles = [
        tile("Step, predicted", step, f"{table.num_micro_batches} micro-batches"),
        tile("Bubble, predicted", bubble, "of all ranks' time they wait"),
        tile("Fullest rank", fullest, f"the emptiest has {emptiest}"),
    ]
    rows, said, compiled = [*sections.plan_rows(plan, measured_s)], list[str](), dict[str, Any]()
    if record is not None:
        tiles += program_tiles(record)
        held = f"memory held by a step of rank {plan.rank}"
        rows += [(held, "bytes", record.held_bytes, None), *sections.recompute_rows(record)]
        said = [_OF_A_RANK.format(plan.rank), *notes(record)]
        compiled = compile_sections(record, {f"rank {plan.rank}": record})
    # A rank has several stages in some schedules, so each is named in its rows.
    traffic = {f"stage {number}": moved for number, moved in plan.traffic.items()}
    sentence = (
        f"A step is predicted to take {step}; ranks wait for {bubble} of it. The fullest rank "
        f"holds {fullest}."
    )
    return {
        "title": f"Pipeline: {table.schedule}",
        "subtitle": f"{stages} on {ranks}, {table.num_micro_batches} micro-batches",
        "verdict": {"sentence": sentence, "tiles": tiles, "notes": said},
        "about": about(),
        **compiled,
        "pipeline": sections.pipeline_section(plan),
        "mesh": plan.layouts and sections.mesh_section(plan.layouts, traffic),
        "predicted": sections.predicted_section(rows, _LEAD),
    }


PageData: TypeAlias = dict[str, Any]
"""The data of a page: a title, and the data of each section. Plain values only."""

_ASSETS = resources.files(__package__) / "assets"
_CPU_INFO = pathlib.Path("/proc/cpuinfo")


def write_page(data: PageData) -> str:
    """Returns the text of a page."""
    import jinja2  # imported late, because only pages need it

    # The script draws a section for each name in the data.
    present = {name: section for name, section in data.items() if section is not None}
    files = {name: _asset(name) for name in ("page.css", "echarts.min.js", "page.js")}
    template = jinja2.Environment(autoescape=True).from_string(_asset("page.html.jinja"))
    return template.render(present, files=files, data=as_json(present))


def as_json(data: PageData) -> str:
    """Returns data as JSON for a script element; no string in it can close the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def about() -> dict[str, Any]:
    """Returns the machine, versions and command that made a page."""
    now = datetime.datetime.now(datetime.timezone.utc)
    from lazyinline import __version__

    return {
        "rows": [
            ["Processor", _processor()],
            ["Cores", f"{os.cpu_count()}, {torch.get_num_threads()} threads in PyTorch"],
            ["System", f"{platform.system()} {platform.machine()}"],
            ["Python", platform.python_version()],
            ["PyTorch", torch.__version__],
            ["lazyinline", __version__],
        ],
        # In a notebook or a console, the name of that program.
        "command": shlex.join([pathlib.Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]),
        "date": now.strftime("%Y-%m-%d %H:%M UTC"),
    }


def _processor() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


_EQUAL = 0.02  # ratios this close to one are called equal


def times_less(late: float, early: float) -> str:
    """Compares the first number with the second: ``2.4x less``, ``1.1x more``, ``equal``."""
    if not late or not early:
        return "equal" if late == early else "-"
    ratio = early / late
    if abs(ratio - 1) <= _EQUAL:  # so small a difference is noise
        return "equal"
    return f"{ratio:.3g}\u00d7 less" if ratio > 1 else f"{1 / ratio:.3g}\u00d7 more"


def ratio_range(ratios: list[float]) -> str:
    """Formats ratios as a range: ``0.9-1.1x``, or ``1.0x`` if they agree."""
    low, high = (f"{r:.2f}" if r < 10 else f"{r:.0f}" for r in (min(ratios), max(ratios)))
    return f"{low}\u00d7" if low == high else f"{low}\u2013{high}\u00d7"

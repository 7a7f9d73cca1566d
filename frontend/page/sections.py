"""The data of a page's sections, in plain values.

A section has numbers and names only; the script writes the text. A section with nothing to show is
None. The arena section has each buffer as a box over time and address, and the curve of live bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ...backend.arena import ALIGNMENT, Buffers, lower_bound
from ...backend.launches.kernel_list import KernelList
from ...backend.link.layout import Layout, buffers_of
from ...backend.run.rank_program import RankPlan
from ...pipeline_parallel.actions import ACTION_TEXT, BACKWARD, BACKWARD_WEIGHT, COMPUTE, FORWARD
from ...pipeline_parallel.mesh.plan import MeshPlan
from ...pipeline_parallel.plan import PipelinePlan
from ...recompute.planner import RecomputeRecord
from ...reuse.ir.leaf import stamp_of
from ...reuse.ir.printer import node_type, operator_name
from ...reuse.ir.program import Call, Closure, Composite, Leaf, Pack, Program, Unpack
from ...reuse.ir.types import StructType
from ..capture.regions import SharingDecision
from ..compile_record import CompileRecord, Made, Memory, alike, reuse_rows

if TYPE_CHECKING:
    from ...pipeline_parallel.mesh.traffic import Collective

IntArray: TypeAlias = npt.NDArray[np.int64]

MOST_BOXES = 20_000  # a browser draws so many boxes without delay; a page with them has 2 MB
MOST_POINTS = 1500
_BACKWARD = ".backward"  # part of the name of every backward closure
KINDS = (
    *("scratch of one call", "passed on", "saved for backward", "gradients and results"),
    "between stages",
)
_USES = {"part": 1, "flight": 2, "travels": 4}  # indices into KINDS, by the use of a rank's buffer


def arena_section(memory: Memory | RankPlan, most_boxes: int = MOST_BOXES) -> dict[str, Any] | None:
    """Returns the boxes and curves of an arena; None if it holds nothing."""
    of = _of_rank(memory) if isinstance(memory, RankPlan) else _of_program(memory)
    if of is None:
        return None
    rows, section = of
    drawn = rows
    if len(rows) > most_boxes:
        # Draws the largest ones, by bytes times launches. A screen would not show the others.
        area = (rows[:, 1] - rows[:, 0]) * rows[:, 3]
        drawn = rows[np.sort(np.argsort(-area, kind="stable")[:most_boxes])]
    # A box is birth, death, offset, size, kind, call and launch of a buffer.
    boxes = {"boxes": drawn.tolist(), "kinds": KINDS, "num_buffers": len(rows)}
    return boxes | section | {"left_out": len(rows) - len(drawn)}


class _Calls:
    """Finds the call and the launch at each moment, before the moment ``end``.

    Launches are in order: moment, a key that differs between calls, name of the call, name of the
    launch. A moment without a launch belongs to the launch before it.
    """

    def __init__(self, launches: Iterable[tuple[int, Hashable, str, str]], end: int) -> None:
        self.names: list[str] = []  # one for each call, in order
        launch_names = dict[str, int]()
        found, before = [(-1, 0, 0)], None
        for moment, call, name, launch_name in launches:
            if call != before:
                self.names.append(name)
                before = call
            launch = launch_names.setdefault(launch_name, len(launch_names))
            found.append((moment, len(self.names) - 1, launch))
        self._end, self._launch_names = end, list(launch_names)
        self._moments, self._calls, self._launches = np.array(found, np.int64).T

    def at(self, moment: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the numbers of call and launch at moments; the end counts as one more call."""
        found = np.searchsorted(self._moments, moment, side="right") - 1
        calls = np.where(moment >= self._end, len(self.names), self._calls[found])
        return calls, self._launches[found]

    def section(self) -> dict[str, Any]:
        """Returns the names that boxes refer to by number; each is held once."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(self.names))}
        return {
            "calls": [numbers[name] for name in self.names],
            "names": list(numbers),
            "launches": self._launch_names,
            "end": self._end,
        }


def _of_program(memory: Memory) -> tuple[IntArray, dict[str, Any]] | None:
    layout, gradients = memory.layout, memory.gradients
    own = [i for i, b in enumerate(layout.instances) if b.kind == "arena" and b.device is None]
    placed = {i: memory.offsets[i] for i in own}
    offsets = {i: x for i, x in (placed | gradients).items() if layout.instances[i].num_bytes}
    if not offsets:
        return None
    buffers = buffers_of([layout.instances[i] for i in offsets])
    # The user gets the gradients, so their memory is in use to the end.
    is_gradient = np.array([i in gradients for i in offsets])
    death = np.where(is_gradient, layout.time, buffers.death)
    calls = _Calls(_program_launches(layout), layout.time)
    (first, launch), (last, _) = calls.at(buffers.birth), calls.at(death - 1)
    backward = np.array([*(_BACKWARD in name for name in calls.names), True])
    kind = np.where(first == last, 0, 1)
    kind[~backward[first] & backward[last]] = 2
    kind[is_gradient | (death >= layout.time)] = 3
    size = buffers.aligned(ALIGNMENT).size
    offset = np.array([*offsets.values()], np.int64)
    rows = np.column_stack([buffers.birth, death, offset, size, kind, first, launch])
    return rows, calls.section() | {
        "num_launches": layout.time,
        "backward": len(layout.parts[0].launches) if len(layout.parts) > 1 else None,
        "arena_bytes": memory.arena_bytes,
        "peak_bytes": memory.plan.peak_bytes,
        "lower_bound_bytes": memory.plan.lower_bound_bytes,
        "live": _curve(Buffers(buffers.birth, death, size)),
        "outside": _outside(layout),
    }


def _program_launches(layout: Layout) -> Iterator[tuple[int, int, str, str]]:
    for part in layout.parts:
        for placed in part.launches:
            # Launches of one call share a table of bases.
            yield placed.time, id(placed.bases), placed.block or "between", placed.launch.name


def _outside(layout: Layout) -> list[list[Any]]:
    """Returns memory outside the arena: its kind, count, and the most bytes live at once."""
    foreign = [b for b in layout.instances if b.kind == "foreign" and b.num_bytes]
    most, within = (lower_bound(buffers_of(b)) for b in (foreign, list(layout.scratch)))
    work = [b.num_bytes for b in layout.workspaces]
    rows = [
        ["made by an operator that allocates its own result", len(foreign), most],
        ["scratch inside one launch", len(layout.scratch), within],
        ["workspace of cuBLAS", len(work), sum(work)],
    ]
    return [row for row in rows if row[1]]


def _of_rank(plan: RankPlan) -> tuple[IntArray, dict[str, Any]] | None:
    """Returns boxes and section of all runs of a rank's parts, in the order of its schedule."""
    found = [row for row in plan.rows() if row.num_bytes]
    if not found:
        return None
    starts, _ = plan.moments()
    calls = _Calls(_rank_launches(plan, starts), starts[-1])
    columns = [[r.birth, r.death, r.offset, r.num_bytes, _USES[r.use]] for r in found]
    birth, death, offset, num_bytes, kind = np.array(columns, np.int64).T
    (first, launch), (last, _) = calls.at(birth), calls.at(death - 1)
    kind[(kind == 1) & (first == last)] = 0  # a buffer of a part that only one call uses
    size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    foreign = plan.foreign_lives()
    outside = ["made or used inside one launch", len(foreign), plan.foreign_peak_bytes]
    rows = np.column_stack([birth, death, offset, size, kind, first, launch])
    return rows, calls.section() | {
        "num_launches": plan.num_launches,
        "backward": None,
        "arena_bytes": plan.arena.peak_bytes,
        "peak_bytes": plan.arena.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "live": _curve(plan.lives()),
        "outside": [outside] if len(foreign) else [],
    }


def _rank_launches(
    plan: RankPlan, starts: list[int]
) -> Iterator[tuple[int, tuple[int, int], str, str]]:
    for index, run, unit, number in plan.parts():
        where = f"micro-batch {run.flight}, stage {run.unit}"
        for moment, placed in unit.launches_of(number):
            call = (index, id(placed.bases))
            name = f"{where}: {placed.block or 'between'}"
            yield starts[index] + moment, call, name, placed.launch.name


def _curve(buffers: Buffers) -> list[list[int]]:
    """Returns live bytes over time; if there are many points, the maximum of each interval."""
    times: IntArray = np.unique(np.concatenate([buffers.birth, buffers.death]))
    change = np.zeros(len(times), np.int64)
    np.add.at(change, np.searchsorted(times, buffers.birth), buffers.size)
    np.add.at(change, np.searchsorted(times, buffers.death), -buffers.size)
    live = np.cumsum(change)
    if len(times) > MOST_POINTS:
        starts = np.linspace(0, len(times), MOST_POINTS, endpoint=False).astype(np.int64)
        times, live = times[starts], np.maximum.reduceat(live, starts)
    return np.column_stack([times, live]).tolist()


# ---- the other sections --------------------------------------------------------------------------


_LONGEST_PERIOD = 12  # the longest pattern of calls that is found to repeat
_MOST_OPERATORS = 600  # so many operators of a closure are listed; further ones are only counted
_MOST_PATHS = 4  # so many module paths of a group of calls are listed: the first ones, and the last

HELD = (
    "Memory held is the arena, what the user receives, and what launches allocate themselves; "
    "parameters and inputs are not in it."
)

Unit: TypeAlias = Literal["s", "bytes", "share"]
Row: TypeAlias = tuple[str, Unit, float | None, float | None]
"""Label, unit, predicted, measured; None if it was not predicted, or not measured."""
Measured: TypeAlias = Mapping[tuple[int, str], float]
"""Seconds of (stage, kind of action), as ``pipe.measured_s()`` returns them."""


def program_section(made: Made) -> dict[str, Any]:
    """Returns the calls of a program as groups of equal ones, and each closure once."""
    closures = _Closures(made.kernels or {})
    twins = _twins(made.captured, made.forward)
    lanes = [{"name": "forward", "items": closures.strip(made.forward, twins)}]
    if made.backward is not None:
        lanes.append({"name": "backward", "items": closures.strip(made.backward, {})})
    return {
        "lanes": lanes,
        "micro_batches": made.micro_batches,
        "nodes": made.captured.num_nodes(),
        "nodes_if_inlined": made.captured.num_nodes_if_inlined(),
        "closures": closures.described,
    }


def runs(keys: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Finds repetition: yields (start, length of the pattern, repeats), covering all keys."""
    start = 0
    while start < len(keys):
        best = (1, 1)
        for period in range(1, min(_LONGEST_PERIOD, (len(keys) - start) // 2) + 1):
            times = 1
            pattern = keys[start : start + period]
            while keys[start + times * period : start + (times + 1) * period] == pattern:
                times += 1
            # Strictly more, so that "aaaa" is four times "a", not twice "aa".
            if times > 1 and times * period > best[0] * best[1]:
                best = (period, times)
        yield (start, *best)
        start += best[0] * best[1]


class _Closures:
    """Describes each closure once; groups of calls refer to it by number."""

    def __init__(self, kernels: Mapping[Leaf, KernelList]) -> None:
        self.described: list[dict[str, Any]] = []
        self._kernels = kernels
        self._numbers: dict[Closure, int] = {}

    def strip(self, program: Program, twins: Mapping[Closure, Closure]) -> list[dict[str, Any]]:
        """Returns the groups of a program's calls, in order.

        ``twins`` has, for each closure, the captured one, with the user's source lines.
        """
        calls = _shown(program)
        numbers = [self._number(call.closure, twins.get(call.closure)) for call in calls]
        for number, call in zip(numbers, calls, strict=True):
            self.described[number]["calls"] += 1
            self.described[number]["is_block"] |= bool(call.path)
        groups = []
        for start, period, times in runs(numbers):
            members = [(at, calls[at::period][:times]) for at in range(start, start + period)]
            found = [{"closure": numbers[i], "paths": _paths(group)} for i, group in members]
            groups.append({"times": times, "calls": found})
        return groups

    def _number(self, closure: Closure, twin: Closure | None) -> int:
        if closure not in self._numbers:
            self._numbers[closure] = len(self.described)
            about: dict[str, Any] = {
                "name": closure.name,
                "nodes": closure.num_nodes,
                "calls": 0,
                "is_block": False,
                "inputs": len(closure.input_types),
                "saved_bytes": sum(
                    t.num_bytes for t in closure.output_types if isinstance(t, StructType)
                ),
            }
            self.described.append(about)
            if isinstance(closure, Leaf):
                about |= self._leaf(closure, twin)
            elif isinstance(closure, Composite):
                inner = twin.program if isinstance(twin, Composite) else None
                below = _twins(inner, closure.program) if inner is not None else {}
                about["strip"] = self.strip(closure.program, below)
        return self._numbers[closure]

    def _leaf(self, leaf: Leaf, twin: Closure | None) -> dict[str, Any]:
        # Only captured operators have the user's source lines; differentiated ones do not.
        body, kernels = twin if isinstance(twin, Leaf) else leaf, self._kernels.get(leaf)
        found: dict[str, Any] = {
            "operators": [
                [operator_name(node), node_type(node), stamp_of(node).source or ""]
                for node in body.nodes[:_MOST_OPERATORS]
            ],
            "num_operators": body.num_nodes,
        }
        if kernels is not None:
            found["kernels"] = {
                "launches": len(kernels.launches),
                "made_bytes": sum(b.num_bytes for b in kernels.buffers if b.kind != "input"),
                "rows": [*Counter(launch.name for launch in kernels.launches).items()],
            }
        return found


def _shown(program: Program) -> list[Call]:
    return [c for c in program.calls if not isinstance(c.closure, (Pack, Unpack))]


def _twins(captured: Program, runs_as: Program) -> dict[Closure, Closure]:
    """Maps closures of the program that runs to captured ones; empty if their calls differ."""
    a, b = _shown(runs_as), _shown(captured)
    # Recompute and constants may change calls.
    if len(a) != len(b) or any(x.path != y.path for x, y in zip(a, b, strict=True)):
        return {}
    return {x.closure: y.closure for x, y in zip(a, b, strict=True)}


def _paths(group: Sequence[Call | SharingDecision]) -> list[str]:
    paths = [one.path for one in group]
    if len(paths) <= _MOST_PATHS:
        return paths
    return [*paths[: _MOST_PATHS - 1], "\u2026", paths[-1]]


def reuse_section(
    decisions: Sequence[SharingDecision], nothing_shared: str
) -> dict[str, Any] | None:
    """Returns calls per key, and the state of each instance; None if the model has no block."""
    if not decisions and not nothing_shared:
        return None
    names = ("block", "state", "with", "why")
    return {
        "keys": [asdict(row) for row in reuse_rows(decisions)],
        "instances": [
            dict(zip(names, _fate(group[0]), strict=True))
            | {"count": len(group), "paths": _paths(group)}
            for group in alike(decisions, _fate)
        ],
        "nothing_shared": nothing_shared,
    }


def _fate(d: SharingDecision) -> tuple[str, str, str, str]:
    state = "shared" if d.shared or d.shares else "kept apart" if d.reason else "traced"
    return d.class_name, state, d.compared_with, d.shares or d.reason


def passes_section(sides: Mapping[str, CompileRecord]) -> dict[str, Any] | None:
    """Returns seconds and nodes of each pass, for each side; None if no pass ran."""
    names = list(dict.fromkeys(p.name for record in sides.values() for p in record.passes))
    if not names:
        return None
    found = [
        {"name": way, **_totals(record), "rows": [_pass_row(record, name) for name in names]}
        for way, record in sides.items()
    ]
    return {"passes": names, "sides": found}


def _totals(record: CompileRecord) -> dict[str, Any]:
    return {
        "cpu_s": record.cpu_s,
        "wall_s": record.wall_s,
        "nodes": record.num_nodes,
        "operators": record.num_operators,
        "launches": record.num_launches,
    }


def _pass_row(record: CompileRecord, name: str) -> dict[str, Any]:
    found = [p for p in record.passes if p.name == name]
    cpu_s, wall_s = sum(p.cpu_s for p in found), sum(p.wall_s for p in found)
    return {"cpu_s": cpu_s, "wall_s": wall_s, "nodes": found[-1].num_nodes if found else None}


def depth_section(rows: Sequence[tuple[int, Mapping[str, CompileRecord]]]) -> dict[str, Any] | None:
    """Returns the compile cost for each number of layers; None for fewer than two."""
    if len(rows) < 2:
        return None
    ways = [
        {"name": way, "compiles": [_totals(records[way]) for _, records in rows]}
        for way in rows[0][1]
    ]
    return {"layers": [layers for layers, _ in rows], "sides": ways}


def steps_section(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns step times and differences from eager; None if no step was run."""
    if not found["step_ms"]:
        return None
    columns = ("step_min_ms", "step_ms", "step_max_ms", "rounds")
    errors = ("max_abs_error", "max_rel_grad_error")
    return {
        "rows": [[n, *(found[column][n] for column in columns)] for n in found["step_ms"]],
        "errors": [
            [n, *(error_text(found[kind][n]) for kind in errors), found["worst_gradient"][n]]
            for n in found["max_abs_error"]
        ],
        "noise": found["noise"],
    }


def recompute_section(
    records: Sequence[RecomputeRecord], frontiers: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Returns what is saved, and the alternatives; None if nothing is saved or recomputed."""
    if not any(r.saved_bytes or r.recomputed_flops for r in records):
        return None
    return {
        "choices": [vars(record) | {"saved": len(record.saved)} for record in records],
        "frontiers": [*frontiers],
    }


def pipeline_section(plan: PipelinePlan) -> dict[str, Any]:
    """Returns the predicted step, action by action, and the memory of each rank over time."""
    table = plan.table
    return {
        "schedule": table.schedule,
        "micro_batches": table.num_micro_batches,
        "step_s": plan.step_s,
        "bubble": plan.bubble,
        "kinds": [[kind, ACTION_TEXT[kind]] for kind in COMPUTE],
        "slots": [
            [s.rank, s.start_s, s.end_s, s.action.kind, s.action.stage, s.action.micro_batch]
            for s in plan.timeline.slots
        ],
        "ranks": [_rank(plan, rank) for rank in range(len(table.ranks))],
        "stages": [asdict(stage) for stage in plan.stages],
    }


def _rank(plan: PipelinePlan, rank: int) -> dict[str, Any]:
    own = [s for s in plan.stages if s.rank == rank]
    parameters = sum(s.parameter_bytes for s in own)
    gradients = sum(s.gradient_bytes for s in own)
    slots = sorted((s for s in plan.timeline.slots if s.rank == rank), key=lambda s: s.start_s)
    busy = sum(s.end_s - s.start_s for s in slots)
    # What a stage saves for a micro-batch is held from its forward to its last backward.
    sizes = {s.index: s.flight_bytes for s in own}
    held = parameters + gradients
    points = {0.0: held}
    for slot in slots:
        if slot.action.kind == FORWARD:
            held += sizes[slot.action.stage]
            points[slot.start_s] = held
        elif slot.action.kind in (BACKWARD, BACKWARD_WEIGHT):
            held -= sizes[slot.action.stage]
            points[slot.end_s] = held
    return {
        "stages": [s.index for s in own],
        "parameter_bytes": parameters,
        "gradient_bytes": gradients,
        "peak_bytes": plan.peak_bytes(rank),
        "bubble": 1.0 - busy / plan.step_s if plan.step_s else 0.0,
        "held": [*points.items(), (plan.step_s, held)],
    }


def mesh_section(
    layouts: MeshPlan,
    traffic: Mapping[str, Sequence[Collective]],
    memory: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Returns the layouts of tensors on a mesh, and the traffic of one rank in a step, by stage.

    ``memory`` has the bytes of a rank, by purpose.
    """
    # Imported late: DTensor takes as long to import as all of lazyinline.
    from ...pipeline_parallel.mesh.traffic import traffic_rows

    return {
        "mesh": layouts.mesh_text,
        "num_collectives": sum(map(len, traffic.values())),
        "moved_bytes": sum(one.num_bytes for moved in traffic.values() for one in moved),
        "batch": list(dict.fromkeys(map(layouts.layout_text, layouts.batch))),
        "layouts": [[how, ", ".join(names)] for how, names in layouts.by_layout().items()],
        "moved": [
            {**asdict(row), "part": f"{stage} {row.part}".strip()}
            for stage, moved in traffic.items()
            for row in traffic_rows(moved)
        ],
        "memory": [[what, size] for what, size in (memory or {}).items() if size],
        "whole": ", ".join(layouts.whole),
        "table": layouts.table,
    }


def predicted_section(rows: Iterable[Row], lead: str = HELD) -> dict[str, Any] | None:
    """Returns the rows with a known figure, and how it was found; None if there is none."""
    known = [row for row in rows if row[2] is not None or row[3] is not None]
    return {"lead": lead, "rows": known} if known else None


def compile_rows(record: CompileRecord) -> Iterator[Row]:
    """Yields the predictions of a compile, without measured figures."""
    what = "memory held by a step" if record.train else "memory held by a run"
    yield what, "bytes", record.held_bytes, None
    if record.gpu is not None:
        name = record.gpu.target.name
        yield f"all memory on {name}, parameters too", "bytes", record.gpu.peak_bytes, None
        yield f"time on {name}, at least", "s", record.gpu.prediction.cost.seconds, None
        yield f"time on {name}, expected", "s", record.gpu.prediction.expected_s, None
    yield from recompute_rows(record)


def recompute_rows(record: CompileRecord) -> Iterator[Row]:
    """Yields the predicted time of recompute."""
    frontiers = record.made.frontiers() if record.made is not None else ()
    points = [(f["closure"], point) for f in frontiers for point in f["points"]]
    extra_s = {(closure, p["saved_bytes"]): p["extra_s"] for closure, p in points}
    again = [c for c in record.recompute if c.recomputed_flops]
    found = [(c.num_calls, extra_s.get((c.closure, c.saved_bytes))) for c in again]
    known = [times * seconds for times, seconds in found if seconds is not None]
    if known:
        yield "time of computing again, per micro-batch", "s", sum(known), None


def plan_rows(plan: PipelinePlan, measured_s: Measured | None) -> Iterator[Row]:
    """Yields predicted and measured seconds of the actions and of the step."""
    for (stage, kind), seconds in sorted((measured_s or {}).items()):
        what = f"stage {stage}, {ACTION_TEXT[kind]}"
        predicted = plan.stages[stage]
        whole = {FORWARD: predicted.forward_s, BACKWARD: predicted.backward_s}
        yield what, "s", whole.get(kind, predicted.backward_s / 2), seconds
    found = plan.simulated(dict(measured_s)) if measured_s else None
    yield "step", "s", plan.step_s, None if found is None else found.step_s
    yield "bubble", "share", plan.bubble, None if found is None else found.bubble


def error_text(error: float | str | None) -> str:
    """Formats an error in two digits: ``1.2e-07``, ``0``, or ``-`` if it is not known."""
    return "-" if error is None else "0" if error == 0 else f"{float(error):.1e}"

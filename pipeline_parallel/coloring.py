"""Assigns each call to a stage: by the user's marks, evenly by layers, or balanced by cost.

Balanced stages are the contiguous partition of layers that minimises ``sum(T) + (M - 1) * max(T)``,
the time of M micro-batches through stages that take T each; T is infinite if a stage does not fit
memory. (Zheng et al., "Alpa", 2022, minimise the same by trying every bound on ``max(T)``.) Costs
are those of :mod:`..reuse.ir.costs`, and only their ratios matter.
"""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..autodiff.derivative import Differentiator, Request
from ..reuse.errors import PipelineError
from ..reuse.ir.costs import Cost, ProgramCosts
from ..reuse.ir.program import Call, Closure, Composite, ModelTensor, Program, Value, count_calls
from .actions import ActionTable
from .cut import Colors, Stage, cut_program, stages_in

TradeOffs = Callable[[Request], Sequence[tuple[int, float]]]
"""Returns the bytes that a call may save, each with its recompute seconds; fewest first."""


@dataclass(frozen=True)
class CallCost:
    """The predicted seconds of one call with its backward, and its bytes per micro-batch.

    Its backward needs ``kept_bytes`` of other calls' results. The ``variants`` are the bytes that
    it may save, each with the seconds of recompute; fewest first.
    """

    seconds: float = 0.0
    kept_bytes: int = 0
    variants: tuple[tuple[int, float], ...] = ((0, 0.0),)


@dataclass(frozen=True)
class CallCosts:
    """Predicts the costs of calls with their backwards, and with recompute if given trade-offs."""

    differentiator: Differentiator
    costs: ProgramCosts
    trade_offs: TradeOffs | None = None

    def program(self, program: Program) -> Cost:
        """Returns the cost of a program."""
        return self.costs.program(program)

    def units(self, program: Program, opened: set[Path]) -> list[CallCost]:
        """Returns the cost of each unit (see ``coloring.units_of``)."""
        pairs = zip(program.inputs, program.sources, strict=True)
        models = ((v, s.tensor) for v, s in pairs if isinstance(s, ModelTensor))
        trained = {v for v, tensor in models if tensor.requires_grad}

        @functools.cache
        def costs_in(prefix: Path) -> list[CallCost]:
            body: Any = program
            for index in prefix:
                body = body.calls[index].closure.program
            return self._body(body, set(body.inputs) if prefix else trained)

        return [costs_in(path[:-1])[path[-1]] for path, _ in units_of(program, opened)]

    def _body(self, program: Program, active: set[Value]) -> list[CallCost]:
        """Returns the costs of calls; adds to ``active``, the values with a gradient."""
        costs = []
        made: set[Value] = set()
        for call in program.calls:
            wanted = [i for i, v in enumerate(call.args) if v in active]
            flags = tuple(v in active for v in call.args)
            results = self.differentiator.active_outputs(call.closure, flags) if wanted else ()
            active.update(v for v, flag in zip(call.results, results, strict=False) if flag)
            seeded = [i for i, flag in enumerate(results) if flag]
            request = Request(call.closure, tuple(wanted), tuple(seeded))
            costs.append(self._call(call, request, made))
            made.update(call.results)
        return costs

    def _call(self, call: Call, request: Request, made: set[Value]) -> CallCost:
        derivative = self.differentiator.of(request)
        if derivative is None:
            return CallCost(self.costs.closure(call.closure).seconds)
        both = (derivative.forward, derivative.backward)
        # Parameters exist in any case; only results of other calls are kept for this one.
        kept = {call.args[i] for i in derivative.kept_inputs} & made
        variants: Sequence[tuple[int, float]] = [(derivative.saved_type.num_bytes, 0.0)]
        if self.trade_offs is not None:
            variants = self.trade_offs(request)
        return CallCost(
            sum(self.costs.closure(one).seconds for one in both),
            sum(v.type.num_bytes for v in kept),
            tuple(variants),
        )


Path = tuple[int, ...]
"""A call: its position in the program or, in a composite, that of the outer call before it."""

# A closure of fewer operators is no layer: it goes with its neighbours.
_GLUE_NODES = 8


def color_evenly(program: Program, num_stages: int) -> Colors:
    """Gives each stage as many layers: calls of closures that are called repeatedly."""
    layers = _layers(program, num_stages)
    if len(layers) < num_stages:
        raise PipelineError(
            f"The model has {len(layers)} block(s) to spread and num_stages={num_stages}. Use "
            "fewer stages, or mark the repeated layer class with lazy_inline so that it is "
            "recognised."
        )
    bounds = [layers[len(layers) * s // num_stages] for s in range(1, num_stages)]
    return color_by_bounds(program, bounds)


def _layers(program: Program, num_stages: int) -> list[Path]:
    """Returns the paths of the layers; looks into composites only if there are too few."""
    counts = count_calls(program)
    opened: set[Path] = set()
    while True:
        units = units_of(program, opened)
        # A closure that is called once is no layer, however large: an embedding, a head.
        layers = [p for p, c in units if counts[c.closure] > 1 and _size(c.closure) >= _GLUE_NODES]
        if len(layers) >= num_stages:
            return layers
        shut = [p for p, c in units if isinstance(c.closure, Composite)]
        if not shut:
            return [p for p, c in units if _size(c.closure) > 0]
        opened.update(shut)


def _size(closure: Closure) -> int:
    if isinstance(closure, Composite):
        return closure.program.num_nodes_if_inlined()
    return closure.num_nodes


def units_of(program: Program, opened: set[Path]) -> list[tuple[Path, Call]]:
    """Lists calls in the order in which they run; those of opened composites replace the call."""
    found: list[tuple[Path, Call]] = []

    def visit(body: Program, prefix: Path) -> None:
        for index, call in enumerate(body.calls):
            path = (*prefix, index)
            if path in opened and isinstance(call.closure, Composite):
                visit(call.closure.program, path)
            else:
                found.append((path, call))

    visit(program, ())
    return found


def color_by_bounds(program: Program, bounds: Sequence[Path]) -> Colors:
    """Returns the stage of each call, given the first call of each stage but the first."""
    return _color_body(program, (), sorted(bounds))


def _color_body(body: Program, prefix: Path, bounds: Sequence[Path]) -> Colors:
    colors: list[int | Colors] = []
    for index, call in enumerate(body.calls):
        path = (*prefix, index)
        first = bisect.bisect_right(bounds, path)
        last = bisect.bisect_left(bounds, (*prefix, index + 1))
        inside = [b for b in bounds[first:last] if any(b[len(path) :])]
        if inside:
            assert isinstance(call.closure, Composite)
            colors.append(_color_body(call.closure.program, path, bounds))
        else:
            colors.append(last)
    return tuple(colors)


def color_by_marks(program: Program, marks: Mapping[str, int], num_stages: int) -> Colors:
    """Gives each call the stage of the innermost marked module that it is in, by path.

    A call outside of marked modules goes to the first stage that has its operands. Raises if a mark
    names a stage that does not exist, or a stage has no call.
    """
    for path, stage in marks.items():
        if not 0 <= stage < num_stages:
            raise PipelineError(
                f"{path} is marked for stage {stage}, and num_stages={num_stages}: stages are "
                f"numbered from 0 to {num_stages - 1}."
            )
    made_on: dict[Value, int] = {}
    colors = _mark_body(program, "", marks, made_on)
    missing = set(range(num_stages)) - stages_in(colors)
    if missing:
        raise PipelineError(
            f"No marked module puts anything on stage(s) {sorted(missing)}. Mark one with "
            "lazyinline.stage(module, number), or use fewer stages."
        )
    return colors


def _mark_body(
    body: Program, prefix: str, marks: Mapping[str, int], made_on: dict[Value, int]
) -> Colors:
    colors: list[int | Colors] = []
    for call in body.calls:
        path = ".".join(p for p in (prefix, call.path) if p)
        needs = max((made_on.get(v, 0) for v in call.args), default=0)
        stage = _mark_of(path, marks) if call.path else None
        inside = any(m.startswith(path + ".") for m in marks) if call.path else False
        if inside and isinstance(call.closure, Composite):
            inner = {
                v: made_on.get(a, 0)
                for v, a in zip(call.closure.program.inputs, call.args, strict=True)
            }
            color: int | Colors = _mark_body(call.closure.program, path, marks, inner)
            made = [inner.get(v, 0) for v in call.closure.program.outputs]
            if isinstance(color, tuple) and len(stages_in(color)) == 1:
                color = next(iter(stages_in(color)))
        else:
            color = needs if stage is None else stage
            made = [color] * len(call.results)
        colors.append(color)
        made_on.update(zip(call.results, made, strict=True))
    return tuple(colors)


def _mark_of(path: str, marks: Mapping[str, int]) -> int | None:
    while path:
        if path in marks:
            return marks[path]
        path = path.rpartition(".")[0]
    return marks.get("")


FloatArray = npt.NDArray[np.float64]


def partition(times: FloatArray, num_micro_batches: int) -> tuple[int, ...] | None:
    """Returns the unit at which each stage begins, and the number of units; None if none fits.

    Here ``times[s, i, j]`` is the time of stage s if it runs units i to j - 1; infinite if it
    cannot, or is empty.
    """
    # The longest stage takes one of the times, so these are the bounds to try.
    bounds = np.unique(times[np.isfinite(times)])
    sums = functools.cache(lambda number: float(_tables(_within(times, bounds[number]))[-1][-1]))
    last = len(bounds) - 1
    if last < 0 or not np.isfinite(sums(last)):
        return None

    def time_s(number: int, total: float) -> float:
        return total + (num_micro_batches - 1) * float(bounds[number])

    # A larger bound never gives a larger sum, so the last bound's is the smallest.
    best, chosen = time_s(last, sums(last)), last
    first = bisect.bisect_left(range(last), True, key=lambda i: bool(np.isfinite(sums(i))))
    for number in range(first, last):
        if time_s(number, sums(last)) >= best:
            break
        if (found := time_s(number, sums(number))) < best:
            best, chosen = found, number
    return _traced(_within(times, bounds[chosen]))


def _within(times: FloatArray, bound: Any) -> FloatArray:
    return np.where(times <= bound, times, np.inf)


def _tables(stages: FloatArray, joined: np.ufunc = np.add) -> list[FloatArray]:
    """Returns, by number of stages, the smallest total for each number of units.

    ``stages[s, i, j]`` is a number of stage s if it runs units i to j - 1; ``joined`` combines it
    with the total of the stages before.
    """
    tables = [np.where(np.arange(stages.shape[1]) == 0, 0.0, np.inf)]
    for stage in stages:
        tables.append(np.min(joined(tables[-1][:, None], stage), axis=0))
    return tables


def _traced(times: FloatArray) -> tuple[int, ...]:
    """Returns the starts of the stages in a best partition."""
    tables, found = _tables(times), [times.shape[1] - 1]
    for stage in reversed(range(len(times))):
        found.append(int(np.argmin(tables[stage] + times[stage][:, found[-1]])))
    return tuple(reversed(found))


# A call is cut inside only if it takes more than this multiple of an even share.
_SHARE = 1.05


class NoSplitError(PipelineError):
    """No split into stages fits memory; the best one needs ``least_bytes`` on a stage."""

    def __init__(self, table: ActionTable, memory_bytes: int, least_bytes: int) -> None:
        super().__init__(
            f"No split into {table.num_stages} stages fits memory_bytes_per_rank={memory_bytes}: "
            f"the best one still needs {least_bytes} bytes on one stage "
            "(parameters, gradients and saved tensors of the micro-batches in flight). Use more "
            "stages, smaller micro-batches, or a schedule with fewer of them in flight."
        )
        self.least_bytes = least_bytes


Pieces = Callable[[Sequence[Stage]], "tuple[list[CallCost], list[dict[int, int]]]"]
"""Returns the costs of pieces of a program, and the bytes of the tensors that each one owns."""


def color_balanced(
    program: Program,
    model: CallCosts,
    table: ActionTable,
    memory_bytes_per_rank: int | None,
    pieces: Pieces | None = None,
) -> tuple[Colors, float]:
    """Returns the stages with the least predicted time that fit memory, and that time.

    It includes the recompute that a stage needs to fit. Over a mesh, ``pieces`` returns the costs
    in place of ``model``. Raises if there are fewer calls than stages, or no split fits.
    """
    num_stages = table.num_stages
    opened = _opened(program, model, num_stages)
    units = units_of(program, opened)
    if len(units) < num_stages:
        raise PipelineError(
            f"The model has {len(units)} piece(s) to spread and num_stages={num_stages}. Use fewer "
            "stages, or mark the repeated layer class with lazy_inline."
        )
    if pieces is None:
        costs = model.units(program, opened)
        tensors = [_tensors(program, path) for path, _ in units]
    else:
        colors = color_by_bounds(program, [path for path, _ in units[1:]])
        costs, tensors = pieces(cut_program(program, colors, len(units)))
    times = _stage_times(costs, num_stages)
    owned, kept = _owned_bytes(tensors), _run_sums([c.kept_bytes for c in costs])
    flights = np.array(table.in_flight())[:, None, None]
    if memory_bytes_per_rank is not None:
        # The stages of a rank get even parts of its memory, because their needs depend on the cut.
        room = memory_bytes_per_rank / max(Counter(table.rank_of).values()) - owned
        times += extra_seconds([c.variants for c in costs], room[None] / flights - kept)
    found = partition(times, table.num_micro_batches)
    if found is None:
        smallest = _run_sums([c.variants[0][0] for c in costs]) + kept
        least = _least_bytes(owned[None] + flights * smallest[None])
        raise NoSplitError(table, memory_bytes_per_rank or 0, least)
    taken = times[range(num_stages), found[:-1], found[1:]]
    seconds = float(taken.sum() + (table.num_micro_batches - 1) * taken.max())
    return color_by_bounds(program, [units[b][0] for b in found[1:-1]]), seconds


def _opened(program: Program, model: CallCosts, num_stages: int) -> set[Path]:
    """Returns the composites to cut inside: those above an even share; all if units are too few."""
    opened: set[Path] = set()
    while True:
        units = units_of(program, opened)
        costs = [c.seconds for c in model.units(program, opened)]
        # All other stages would wait for a call that takes longer than that.
        share = _SHARE * sum(costs) / num_stages
        few = len(units) < num_stages
        found = [
            path
            for (path, call), cost in zip(units, costs, strict=True)
            if isinstance(call.closure, Composite) and (few or cost > share)
        ]
        if not found:
            return opened
        opened.update(found)


def _stage_times(costs: Sequence[CallCost], num_stages: int) -> np.ndarray:
    """Returns the times of every run of units, the same for every stage."""
    size = len(costs) + 1
    times = _run_sums([c.seconds for c in costs])
    times = np.broadcast_to(times, (num_stages, size, size)).copy()
    # No stage may be empty, because its rank would only pass values on.
    times[:, ~np.triu(np.ones((size, size), np.bool_), 1)] = np.inf
    return times


def _run_sums(numbers: Sequence[float]) -> np.ndarray:
    """Returns the sum over every run of units."""
    total = np.concatenate([[0.0], np.cumsum(numbers)])
    return total[None, :] - total[:, None]


def _owned_bytes(tensors: Sequence[Mapping[int, int]]) -> np.ndarray:
    """Returns the bytes of parameters and gradients of every run of units, each once."""
    size = len(tensors) + 1
    owned = np.zeros((size, size))
    for first in range(size - 1):
        held: dict[int, int] = {}
        for last in range(first, size - 1):
            held |= tensors[last]
            owned[first, last + 1] = sum(held.values())
    return owned


def extra_seconds(
    variants: Sequence[Sequence[tuple[int, float]]], room_bytes: np.ndarray
) -> np.ndarray:
    """Returns the recompute seconds with which the saved tensors of every run of units fit.

    Memory goes first to the units where a byte spares most seconds, and each unit takes whole steps
    of its variants. So these seconds can be reached, and exceed the minimum by at most one unit's.

    Units i to j - 1 may save ``room_bytes[s, i, j]`` on stage s. Where even the fewest bytes do not
    fit, the seconds are infinite.
    """
    room = room_bytes - _run_sums([v[0][0] for v in variants])[None]
    seconds = np.broadcast_to(_run_sums([v[0][1] for v in variants]), room.shape).copy()
    seconds[room < 0] = np.inf
    kinds: dict[tuple[tuple[int, float], ...], list[int]] = {}
    for unit, options in enumerate(variants):
        kinds.setdefault(tuple(options), []).append(unit)
    steps = [(step, units) for options, units in kinds.items() for step in hull_steps(options)]
    taken: dict[int, np.ndarray] = {}  # units of each kind that took the step before
    for (num_bytes, spared), units in sorted(steps, key=lambda s: -s[0][1] / s[0][0]):
        ones = np.zeros(len(variants))
        ones[units] = 1.0
        before = taken.get(units[0], _run_sums(list(ones))[None])
        count = np.clip(np.floor(room / num_bytes), 0.0, before)
        taken[units[0]] = count
        room = room - count * num_bytes
        seconds = seconds - count * spared
    return seconds


def hull_steps(options: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns the steps between variants that pay best: bytes added, seconds spared."""
    found, here = [], 0
    while here < len(options) - 1:
        rest = range(here + 1, len(options))
        slopes = [
            ((options[here][1] - options[i][1]) / (options[i][0] - options[here][0]), i)
            for i in rest
            if options[i][0] > options[here][0]
        ]
        slope, there = max(slopes, default=(0.0, 0))
        if slope <= 0.0:
            break
        found.append((options[there][0] - options[here][0], options[here][1] - options[there][1]))
        here = there
    return found


def _tensors(program: Program, path: Path) -> dict[int, int]:
    """Returns the bytes of the model's tensors, and of gradients, in a unit's outermost call."""
    sources = dict(zip(program.inputs, program.sources, strict=True))
    found = {}
    for value in program.calls[path[0]].args:
        source = sources.get(value)
        if isinstance(source, ModelTensor):
            # The gradient sum of a parameter has its size.
            copies = 2 if source.tensor.requires_grad else 1
            found[id(source)] = copies * value.type.num_bytes
    return found


def _least_bytes(bytes_: np.ndarray) -> int:
    """Returns the fewest bytes that the largest stage of a split can have."""
    allowed = np.where(np.triu(np.ones(bytes_.shape[1:], np.bool_), 1), bytes_, np.inf)
    return int(_tables(allowed, np.maximum)[-1][-1])

"""Which stage each call belongs to: by the user's marks, or by cutting the order of execution."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from ...reuse.errors import PipelineError
from ...reuse.ir.program import Call, Closure, Composite, Program, Value, count_calls
from .cut import Colors

Path = tuple[int, ...]
"""Where a call is: its position in the program, then in the composite it calls, and so on."""

# A closure of fewer operators is glue: it goes with its neighbours and is no layer.
_GLUE_NODES = 8


def color_evenly(program: Program, num_stages: int) -> Colors:
    """Gives each stage the same number of layers: of calls on closures that are called often.

    Raises:
        PipelineError: if there are fewer layers than stages.
    """
    layers = _layers(program, num_stages)
    if len(layers) < num_stages:
        raise PipelineError(
            f"The model has {len(layers)} block(s) to spread and num_stages={num_stages}. Use "
            "fewer stages, or mark the repeated layer class with lazy_inline so that it can be "
            "told apart."
        )
    bounds = [layers[len(layers) * s // num_stages] for s in range(1, num_stages)]
    return color_by_bounds(program, bounds)


def _layers(program: Program, num_stages: int) -> list[Path]:
    """Places of the layers; composites are looked into only where there are too few."""
    counts = count_calls(program)
    opened: set[Path] = set()
    while True:
        units = units_of(program, opened)
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
    """Lists the calls in execution order; a call at an opened place is replaced by its body's."""
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
    """Colours a program cut at places.

    Args:
        program: the program.
        bounds: for each stage but the first, where it begins, in order.
    """
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
    """Gives each call the stage of the marked module it is in.

    A call in no marked module goes to the first stage that has what it needs.

    Args:
        program: the program.
        marks: module path -> stage; the longest path that a call is in counts.
        num_stages: how many there are.

    Raises:
        PipelineError: if a mark names a stage that does not exist, or a stage has no call.
    """
    for path, stage in marks.items():
        if not 0 <= stage < num_stages:
            raise PipelineError(
                f"{path} is marked for stage {stage}, and num_stages={num_stages}: stages are "
                f"numbered from 0 to {num_stages - 1}."
            )
    made_on: dict[Value, int] = {}
    colors = _mark_body(program, "", marks, made_on)
    missing = set(range(num_stages)) - _stages_in(colors)
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
            if isinstance(color, tuple) and len(_stages_in(color)) == 1:
                color = next(iter(_stages_in(color)))
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


def _stages_in(colors: Colors) -> set[int]:
    found: set[int] = set()
    for color in colors:
        found |= {color} if isinstance(color, int) else _stages_in(color)
    return found

"""Cuts a program into one program per stage.

A value that a later stage needs, such as an encoder's output, is passed through all stages in
between, so that stages communicate with their neighbours only. Inputs of the user and tensors of
the model are never sent, because each rank has them.

A composite whose calls are on several stages is cut first, and values that cross the cut become
results and operands of its parts. Equal composites that are cut in the same way share their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Union

from ..autodiff.flows import in_closure, with_operands
from ..reuse.errors import PipelineError
from ..reuse.ir import program as ir
from ..reuse.ir.types import TensorType

Colors = tuple[Union[int, "Colors"], ...]
"""The stage of each call or, if it calls a composite that is cut, the colors of its calls."""


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a program."""

    index: int  # its number
    # Takes the received values, then ``sources``; returns the values to send (on the last stage the
    # results of the whole program), then new values of buffers.
    program: ir.Program
    num_received: int  # the number of inputs that come from the stage before
    num_sent: int  # the number of outputs that go to the stage after
    sources: tuple[ir.Source, ...]  # where the other inputs come from
    # Pairs of an output and the position in ``sources`` that it is written to.
    writes: tuple[tuple[int, int], ...]
    paths: tuple[str, ...]  # the module paths of its calls

    @property
    def received_types(self) -> tuple[TensorType, ...]:
        """Types of the received values."""
        return _tensor_types(self.program.inputs[: self.num_received])

    @property
    def sent_types(self) -> tuple[TensorType, ...]:
        """Types of the sent values."""
        return _tensor_types(self.program.outputs[: self.num_sent])

    @property
    def model_tensors(self) -> tuple[ir.ModelTensor, ...]:
        """The tensors of the model that it uses."""
        return tuple(s for s in self.sources if isinstance(s, ir.ModelTensor))

    @property
    def model_types(self) -> tuple[TensorType, ...]:
        """Types of these tensors; over a mesh, of this rank's shards."""
        own = zip(self.sources, self.program.inputs[self.num_received :], strict=True)
        return _tensor_types([v for source, v in own if isinstance(source, ir.ModelTensor)])

    @property
    def written_tensors(self) -> tuple[int, ...]:
        """The positions in ``model_tensors`` that new values of buffers are written to."""
        models = [i for i, s in enumerate(self.sources) if isinstance(s, ir.ModelTensor)]
        return tuple(models.index(target) for _, target in self.writes)


def _tensor_types(values: Sequence[ir.Value]) -> tuple[TensorType, ...]:
    assert all(isinstance(v.type, TensorType) for v in values)
    return tuple(v.type for v in values)  # type: ignore[misc]


def cut_program(program: ir.Program, colors: Colors, num_stages: int) -> list[Stage]:
    """Returns the stages of a captured program, given the stage of each call.

    Raises if a stage needs a value of a later stage, or a buffer changes on one stage and is used
    on another.
    """
    whole, flat = split_composites(program, colors)
    return _Cutter(whole, flat, num_stages).stages()


# ---- composites that span stages -------------------------------------------------------------


def split_composites(program: ir.Program, colors: Colors) -> tuple[ir.Program, tuple[int, ...]]:
    """Replaces calls of composites that span stages by calls of their parts.

    Returns the program, and the stage of each of its calls.
    """
    if all(isinstance(c, int) for c in colors):
        return program, colors  # type: ignore[return-value]
    parts: _Parts = {}
    calls, flat, same = _split_calls(program.calls, colors, parts)
    outputs = tuple(same.get(v, v) for v in program.outputs)
    return replace(program, calls=calls, outputs=outputs), flat


_Parts = dict[tuple[ir.Closure, Colors], tuple[dict[int, ir.Call], tuple[ir.Value, ...]]]


def _split_calls(
    calls: Sequence[ir.Call], colors: Colors, parts: _Parts
) -> tuple[tuple[ir.Call, ...], tuple[int, ...], dict[ir.Value, ir.Value]]:
    """Returns calls, those that span stages cut; their stages; a map of replaced values."""
    found: list[ir.Call] = []
    flat: list[int] = []
    same: dict[ir.Value, ir.Value] = {}
    for call, color in zip(calls, colors, strict=True):
        call = with_operands(call, same)
        if isinstance(color, int):
            found.append(call)
            flat.append(color)
            continue
        assert isinstance(call.closure, ir.Composite)
        first = min(stages_in(color))
        env = dict(zip(call.closure.program.inputs, call.args, strict=True))
        # Its stages are counted from the first one, so equal cuts on other stages share parts.
        pieces, outputs = _parts_of(call.closure, _relative(color, first), parts)
        for stage, part in pieces.items():
            results = tuple(ir.Value(v.type, v.hint) for v in part.results)
            path = ".".join(p for p in (call.path, part.path) if p)
            mark = part.recompute or call.recompute
            operands = tuple(env[v] for v in part.args)
            found.append(ir.Call(part.closure, operands, results, path, mark))
            flat.append(first + stage)
            env.update(zip(part.results, results, strict=True))
        same.update(zip(call.results, (env[v] for v in outputs), strict=True))
    return tuple(found), tuple(flat), same


def _parts_of(
    closure: ir.Composite, colors: Colors, known: _Parts
) -> tuple[dict[int, ir.Call], tuple[ir.Value, ...]]:
    """Cuts a composite; returns a call for each of its stages, and its outputs."""
    # Calls that are cut in the same way share their parts, which are compiled once.
    key = (closure, colors)
    if key not in known:
        body = closure.program
        calls, flat, same = _split_calls(body.calls, colors, known)
        outputs = tuple(same.get(v, v) for v in body.outputs)
        pieces = {s: _part(closure.name, calls, flat, s, set(outputs)) for s in sorted(set(flat))}
        known[key] = (pieces, outputs)
    return known[key]


def _part(
    name: str, calls: Sequence[ir.Call], flat: Sequence[int], stage: int, outputs: set[ir.Value]
) -> ir.Call:
    own = [c for c, color in zip(calls, flat, strict=True) if color == stage]
    if len(own) == 1:  # no composite around it: it keeps its path and its recompute mark
        return own[0]
    later = {v for c, color in zip(calls, flat, strict=True) if color != stage for v in c.args}
    return in_closure(f"{name}.part{stage}", own, later | outputs)


def stages_in(colors: Colors) -> set[int]:
    """Returns the stages of all calls."""
    parts = ({c} if isinstance(c, int) else stages_in(c) for c in colors)
    return set().union(*parts)


def _relative(colors: Colors, first: int) -> Colors:
    return tuple(c - first if isinstance(c, int) else _relative(c, first) for c in colors)


# ---- stages ----------------------------------------------------------------------------------


class _Cutter:
    """Finds the values that cross boundaries between stages, and builds the stages."""

    def __init__(self, program: ir.Program, colors: Sequence[int], num_stages: int) -> None:
        self._program = program
        self._colors = colors
        self._num_stages = num_stages
        self._num_results = len(program.outputs) - len(program.writes)
        self._made_on: dict[ir.Value, int] = {}
        self._last_use: dict[ir.Value, int] = {}
        for call, color in zip(program.calls, colors, strict=True):
            self._check_order(call, color)
            self._made_on.update(dict.fromkeys(call.results, color))
            for value in call.args:
                self._last_use[value] = max(color, self._last_use.get(value, 0))
        for value in program.outputs[: self._num_results]:
            self._last_use[value] = num_stages - 1
        self._sources = dict(zip(program.inputs, program.sources, strict=True))

    def _check_order(self, call: ir.Call, color: int) -> None:
        for value in call.args:
            made = self._made_on.get(value, 0)
            if made > color:
                place = call.path or f"@{call.closure.name}"
                raise PipelineError(
                    f"{place} is on stage {color} and needs {value.hint or 'a value'} that "
                    f"stage {made} makes. Stages must follow the order in which the model runs; "
                    "give this module a later stage, or that one an earlier."
                )

    def stages(self) -> list[Stage]:
        self._check_writes()
        return [self._stage(index) for index in range(self._num_stages)]

    def _crossing(self, boundary: int) -> list[ir.Value]:
        """Returns the values that stage ``boundary`` sends to the next one."""
        return [
            v for v, made in self._made_on.items() if made <= boundary < self._last_use.get(v, -1)
        ]

    def _stage(self, index: int) -> Stage:
        program = self._program
        calls = [c for c, color in zip(program.calls, self._colors, strict=True) if color == index]
        received = self._crossing(index - 1) if index else []
        is_last = index == self._num_stages - 1
        results = program.outputs[: self._num_results]
        sent = list(results) if is_last else self._crossing(index)
        writes = [
            (program.outputs[output], program.inputs[target])
            for output, target in program.writes
            if self._made_on.get(program.outputs[output]) == index
        ]
        used = dict.fromkeys(v for c in calls for v in c.args if v in self._sources)
        used.update(dict.fromkeys(v for v in sent if v in self._sources))
        used.update(dict.fromkeys(target for _, target in writes))
        own = [v for v in program.inputs if v in used]
        # A stage is a program of its own, so a received value is an input of it.
        copies = {v: ir.Value(v.type, v.hint) for v in received}
        body = ir.Program(
            (*copies.values(), *own),
            tuple(with_operands(c, copies) for c in calls),
            tuple(copies.get(v, v) for v in (*sent, *(state for state, _ in writes))),
        )
        pairs = tuple((len(sent) + i, own.index(target)) for i, (_, target) in enumerate(writes))
        return Stage(
            index,
            body,
            len(received),
            0 if is_last else len(sent),
            tuple(self._sources[v] for v in own),
            pairs,
            tuple(c.path for c in calls if c.path),
        )

    def _check_writes(self) -> None:
        used_on: dict[ir.Value, set[int]] = {}
        for call, color in zip(self._program.calls, self._colors, strict=True):
            for value in call.args:
                used_on.setdefault(value, set()).add(color)
        for output, target in self._program.writes:
            source = self._program.sources[target]
            if isinstance(source, ir.UserInput):
                raise PipelineError(
                    f"The model changes its input {source.name} in place, which a pipeline does "
                    "not carry back to the caller. Work on a copy."
                )
            made = self._made_on.get(self._program.outputs[output], 0)
            others = used_on.get(self._program.inputs[target], {made}) - {made}
            if others:
                raise PipelineError(
                    f"{source.name} is changed on stage {made} and also used on stage(s) "
                    f"{sorted(others)}. Put the modules that share it on one stage."
                )

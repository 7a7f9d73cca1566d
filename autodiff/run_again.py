"""Recompute of whole closures, without drawing random numbers a second time.

A closure is split into a *first* run, which returns its results and its random draws, and a run
*again*, which takes the draws and returns only what the backward needs. This works on leaves and on
whole programs, so a sub-program of any size is a unit of recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.fx

from ..reuse.ir import program as ir
from ..reuse.ir.operators import is_draw
from ..reuse.ir.rewrite import grouped, packed, unpacked
from ..reuse.ir.torch_symbols import is_certain
from ..reuse.ir.types import StructType, TensorType, Type
from ..reuse.once import once
from .flows import Draws
from .leaf_derivative import Derivative, cotangent_type
from .traces.torch_partition import ancestors, extract


@dataclass(frozen=True, eq=False)
class Rerun:
    """Holds the two runs of a closure."""

    first: ir.Closure  # takes the closure's inputs; returns its leading results, then the draws
    # Takes the draws, then ``used_inputs``; returns the outputs asked for. None if nothing has to
    # be recomputed.
    again: ir.Closure | None
    used_inputs: tuple[int, ...]  # positions of the closure's inputs that ``again`` takes

    @property
    def draws(self) -> StructType:
        """Returns the type of the draws of the first run."""
        drawn = self.first.output_types[-1]
        assert isinstance(drawn, StructType)
        return drawn


class Rerunner:
    """Makes reruns and caches them by closure."""

    def __init__(self) -> None:
        self._draws = Draws()

    @once
    def rerun(self, closure: ir.Closure, needed: tuple[int, ...]) -> Rerun:
        """Returns the two runs of a forward; the second one returns the ``needed`` outputs.

        A closure that also returns a saved struct returns it last; the first run leaves it out.
        """
        if isinstance(closure, ir.Leaf):
            return _rerun_leaf(closure, needed)
        assert isinstance(closure, ir.Composite)
        return _ProgramRerun(self, closure, needed).rerun()

    def draws(self, closure: ir.Closure) -> bool:
        """Returns whether running a closure advances a random generator."""
        return bool(self._draws.of_closure(closure))


def num_results(closure: ir.Closure) -> int:
    """Returns how many outputs are the primal's results: all but a saved struct."""
    return sum(isinstance(t, TensorType) for t in closure.output_types)


# ---- leaves ------------------------------------------------------------------------------


def _rerun_leaf(leaf: ir.Leaf, needed: tuple[int, ...]) -> Rerun:
    groups = list(grouped(ir.outputs_of(leaf.module), leaf.output_types))
    count = num_results(leaf)
    wanted = [n for i in needed for n in groups[i]]
    entries = leaf.entries
    drawn = _drawn_values([n for n in wanted if isinstance(n, torch.fx.Node)])
    results = [n for group in groups[:count] for n in group]
    # The first run keeps all draws, used or not, or the next layer would draw other numbers.
    moving = [n for n in leaf.nodes if is_draw(n)]
    first = extract(leaf.module, entries, [*results, *drawn], also=moving)
    struct = StructType(tuple(TensorType.of(n.meta["val"]) for n in drawn))
    types: tuple[Type, ...] = (*leaf.output_types[:count], struct)
    name = leaf.name.removesuffix(".forward")
    first_leaf = replace(leaf, name=f"{name}.first", module=first, output_types=types)
    if not needed:
        return Rerun(first_leaf, None, ())
    reached = ancestors([n for n in wanted if isinstance(n, torch.fx.Node)], drawn)
    used = tuple(i for i, n in enumerate(entries) if n in reached)
    again = extract(leaf.module, [*drawn, *(entries[i] for i in used)], wanted)
    again_leaf = replace(
        leaf,
        name=f"{name}.again",
        module=again,
        input_types=(struct, *(leaf.input_types[i] for i in used)),
        output_types=tuple(leaf.output_types[i] for i in needed),
        input_names=(),
    )
    return Rerun(first_leaf, again_leaf, used)


def _drawn_values(outputs: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """Returns the values to save for the draws: where smaller, what is computed from them alone.

    Of ``rand(...) > p`` the mask is saved, with one byte per element, not the random numbers.
    """
    reached = ancestors(outputs)
    found: dict[torch.fx.Node, None] = {}
    for node in outputs[0].graph.nodes if outputs else ():
        if node not in reached or not is_draw(node):
            continue
        parts = [node]
        if not isinstance(node.meta.get("val"), torch.Tensor):
            parts = [user for user in node.users if user in reached]
        found.update(dict.fromkeys(_smallest(part, reached) for part in parts))
    return list(found)


def _smallest(node: torch.fx.Node, reached: set[torch.fx.Node]) -> torch.fx.Node:
    while True:
        users = [u for u in node.users if u in reached]
        if len(users) != 1 or users[0].all_input_nodes != [node] or is_draw(users[0]):
            return node
        value = users[0].meta.get("val")
        if not isinstance(value, torch.Tensor):
            return node
        drawn = TensorType.of(node.meta["val"])
        if not is_certain(TensorType.of(value).num_bytes < drawn.num_bytes):
            return node
        node = users[0]


# ---- programs ----------------------------------------------------------------------------


class _ProgramRerun:
    """Reruns a program call by call, without the calls whose results are not needed again."""

    def __init__(self, rerunner: Rerunner, closure: ir.Composite, needed: tuple[int, ...]) -> None:
        self._rerunner = rerunner
        self._closure = closure
        self._program = closure.program
        self._needed = needed
        self._kept: list[ir.Value] = []  # values of the first run that the run again gets
        self._again: list[ir.Call] = []
        self._values_again: dict[ir.Value, ir.Value] = {}

    def rerun(self) -> Rerun:
        program = self._program
        wanted = {program.outputs[i] for i in self._needed}
        plans: list[Rerun | None] = []
        # From the last call to the first: the readers of a call's results say which are needed.
        for call in reversed(program.calls):
            plans.append(self._plan(call, wanted))
        plans.reverse()
        first_calls = [
            first
            for call, plan in zip(program.calls, plans, strict=True)
            if (first := self._run(call, plan, wanted)) is not None
        ]
        return self._assemble(first_calls, wanted)

    def _plan(self, call: ir.Call, wanted: set[ir.Value]) -> Rerun | None:
        """Returns the rerun of a call, or None to repeat it; adds what it needs to ``wanted``."""
        closure = call.closure
        positions = tuple(i for i, v in enumerate(call.results) if v in wanted)
        # A call that was not differentiated runs again as it is, unless it draws.
        is_struct = isinstance(closure, (ir.Pack, ir.Unpack))
        if is_struct or num_results(closure) == len(call.results):
            if positions and not self._rerunner.draws(closure):
                wanted.update(call.args)
            return None
        rerun = self._rerunner.rerun(closure, positions)
        wanted.update(call.args[i] for i in rerun.used_inputs)
        return rerun

    def _run(self, call: ir.Call, rerun: Rerun | None, wanted: set[ir.Value]) -> ir.Call | None:
        """Returns the call of the first run, and notes the call of the run again."""
        closure = call.closure
        needed = [v for v in call.results if v in wanted]
        if rerun is None:
            if needed and self._rerunner.draws(closure):
                self._kept.extend(needed)
                for value in needed:
                    self._value_again(value)
            elif needed:
                self._repeat(call)
            return None if isinstance(closure, (ir.Pack, ir.Unpack)) else call
        draws = ir.Value(rerun.draws, "draws")
        if rerun.again is not None:
            self._kept.append(draws)
            args = [self._value_again(draws)] + [
                self._value_again(call.args[i]) for i in rerun.used_inputs
            ]
            results = tuple(self._value_again(v) for v in needed)
            self._again.append(ir.Call(rerun.again, tuple(args), results, call.path))
        count = num_results(closure)
        return ir.Call(rerun.first, call.args, (*call.results[:count], draws), call.path)

    def _repeat(self, call: ir.Call) -> None:
        args = tuple(self._value_again(v) for v in call.args)
        results = tuple(self._value_again(v) for v in call.results)
        self._again.append(ir.Call(call.closure, args, results, call.path))

    def _value_again(self, value: ir.Value) -> ir.Value:
        if value not in self._values_again:
            self._values_again[value] = ir.Value(value.type, value.hint)
        return self._values_again[value]

    def _assemble(self, first_calls: list[ir.Call], wanted: set[ir.Value]) -> Rerun:
        program, name = self._program, self._closure.name.removesuffix(".forward")
        pack, results = packed(self._kept, "draws"), program.outputs[: num_results(self._closure)]
        first = ir.Program(program.inputs, (*first_calls, pack), (*results, *pack.results))
        entry = ir.Value(pack.results[0].type, "draws")
        unpack = unpacked(entry, (self._values_again[v] for v in self._kept))
        used = tuple(i for i, v in enumerate(program.inputs) if v in self._values_again)
        again = ir.Program(
            (entry, *(self._values_again[program.inputs[i]] for i in used)),
            (unpack, *self._again),
            tuple(self._values_again[program.outputs[i]] for i in self._needed),
        )
        return Rerun(
            ir.Composite(f"{name}.first", first, self._closure.input_names),
            ir.Composite(f"{name}.again", again) if self._needed else None,
            used,
        )


def run_again(closure: ir.Closure, plain: Derivative, rerunner: Rerunner) -> Derivative:
    """Returns a closure's derivative that saves only random draws, given its ``plain`` one."""
    last = len(plain.forward.output_types) - 1
    # The saving forward is the one that runs again: the plain backward takes its struct.
    rerun = rerunner.rerun(plain.forward, (*plain.kept_outputs, last))
    assert rerun.again is not None, "the saved struct was asked for"
    values = [ir.Value(t, "again") for t in rerun.again.output_types]
    kept_inputs = tuple(sorted({*rerun.used_inputs, *plain.kept_inputs}))
    kept = {i: ir.Value(closure.input_types[i]) for i in kept_inputs}
    seeds = tuple(
        ir.Value(cotangent_type(closure.output_types[i])) for i in plain.cotangent_outputs
    )
    draws = ir.Value(rerun.draws, "draws")
    gradients = tuple(ir.Value(t) for t in plain.backward.output_types)
    again = ir.Call(rerun.again, (draws, *(kept[i] for i in rerun.used_inputs)), tuple(values))
    operands = (values[-1], *(kept[i] for i in plain.kept_inputs), *values[:-1], *seeds)
    body = ir.Program(
        (draws, *kept.values(), *seeds),
        (again, ir.Call(plain.backward, operands, gradients)),
        gradients,
    )
    return Derivative(
        rerun.first,
        ir.Composite(f"{closure.name}.backward_again", body),
        kept_inputs,
        (),
        plain.cotangent_outputs,
        plain.gradient_inputs,
    )

"""Control-flow operators of the model: each body is traced once and becomes a closure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.fx

from ...autodiff.inner_gradients import DerivativeMark
from ...reuse import torch_pytree
from ...reuse.errors import CaptureError
from ...reuse.ir.control import Choose, Repeat, RepeatWhile, row_of, stacked_type
from ...reuse.ir.operators import is_draw, is_view
from ...reuse.ir.printer import tensor_type_text
from ...reuse.ir.program import Call, Closure, Composite, Control, Leaf, Program, Value
from ...reuse.ir.rewrite import map_leaves
from ...reuse.ir.types import TensorType
from ..tracing.frames import user_line
from .assemble import Assembler
from .recording import Recording
from .regions import Region


@dataclass(frozen=True, eq=False)
class _Body:
    """A body that was traced: its nodes, its results, and the nodes it uses from outside."""

    region: Region
    results: list[torch.Tensor]
    spec: torch_pytree.TreeSpec
    used: list[torch.fx.Node]

    @property
    def types(self) -> list[TensorType]:
        return [TensorType.of(x) for x in self.results]


class ControlFlow:
    """Records each call of ``cond``, ``scan``, ``map`` and ``while_loop`` as one node."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        with recording.tracer.untraced():
            self._requires_grad = torch.empty((), device="cpu", requires_grad=True)

    def run(self, name: str, args: tuple[Any, ...]) -> Any:
        """Records one call and returns its result."""
        if self._recording.sizes is not None:
            self._refuse(name, "is given sizes that vary, and is compiled for each size")
        runs: dict[str, Callable[..., Any]] = {
            "cond": self._cond,
            "scan": partial(self._repeated, "scan"),
            "map": lambda step, *rest: self._repeated("map", step, (), *rest),
            "while_loop": self._while_loop,
        }
        return runs[name](*args)

    def _cond(self, flag: Any, if_true: Any, if_false: Any, operands: Any) -> Any:
        number = _flag(self._recording.fake_of(flag))
        branches = {"if_true": if_true, "if_false": if_false}
        bodies = [self._traced("cond", n, branch, operands) for n, branch in branches.items()]
        if bodies[0].types != bodies[1].types:
            self._refuse("cond", f"returns {_text(bodies[0])} or {_text(bodies[1])}")
        used = _union(*(body.used for body in bodies))
        control = Choose(tuple(self._closure(body, used) for body in bodies))
        operand_nodes = [self._recording.tensors.node_of(number), *used]
        return self._made(control, operand_nodes, bodies, bodies[0].types)

    def _repeated(
        self, name: str, step: Any, init: Sequence[Any], xs: Sequence[Any], given: Any = ()
    ) -> Any:
        carried, slabs = self._contiguous(init), self._contiguous(xs)
        num_steps = len(slabs[0])
        if num_steps == 0:
            self._refuse(name, "is given no rows")
        rows = [self._placeholder(row_of(TensorType.of(slab)), (slab,)) for slab in slabs]
        body, entries = self._traced_carrying(name, step, carried, rows, given)
        self._refuse_other_types(name, carried, body)
        nodes = list(map(self._recording.tensors.node_of, (*entries, *rows)))
        same = [node for node in body.used if node not in nodes]
        control = Repeat(
            (self._closure(body, [*nodes, *same]),), num_steps, len(carried), len(slabs)
        )
        _mark_as_inside(nodes, body.region)
        stacked = [stacked_type(t, num_steps) for t in body.types[len(carried) :]]
        operands = [*map(self._recording.tensors.node_of, (*carried, *slabs)), *same]
        return self._made(control, operands, [body], [*body.types[: len(carried)], *stacked])

    def _while_loop(self, condition: Any, step: Any, init: Any, given: Any = ()) -> Any:
        name = "while_loop"
        carried = self._contiguous(init)
        body, entries = self._traced_carrying(name, step, carried, given)
        self._refuse_other_types(name, carried, body)
        asked = lambda *given: _flag(condition(*given))  # noqa: E731
        test = self._traced(name, "test", asked, (*entries, *given))
        nodes = list(map(self._recording.tensors.node_of, entries))
        same = [node for node in _union(test.used, body.used) if node not in nodes]
        bodies = tuple(self._closure(one, [*nodes, *same]) for one in (test, body))
        _mark_as_inside(nodes, body.region)
        operands = [*map(self._recording.tensors.node_of, carried), *same]
        return self._made(RepeatWhile(bodies, len(carried)), operands, [body], body.types)

    # ---- bodies --------------------------------------------------------------------------

    def _traced_carrying(
        self, name: str, step: Any, carried: Sequence[Any], *others: Sequence[Any]
    ) -> tuple[_Body, list[torch.Tensor]]:
        """Traces a body on carried values and others; returns it, and the fakes of the former."""
        # If a step's result requires grad, the carried value requires grad in the next step.
        wants = [x.requires_grad for x in carried]
        while True:
            entries = [
                self._placeholder(TensorType.of(x), (self._requires_grad,) if want else ())
                for x, want in zip(carried, wants, strict=True)
            ]
            body = self._traced(name, "step", step, (*entries, *chain(*others)))
            results = body.results[: len(carried)]
            now = [want or x.requires_grad for want, x in zip(wants, results, strict=False)]
            if now == wants[: len(now)]:
                return body, entries
            wants = now
            _forget(body.region)
            _mark_as_inside(list(map(self._recording.tensors.node_of, entries)), body.region)

    def _traced(
        self, name: str, role: str, function: Callable[..., Any], args: Sequence[Any]
    ) -> _Body:
        """Traces a body once, into a region of its own."""
        recording, tensors = self._recording, self._recording.tensors
        around = recording.current
        region = Region(recording.model, around.path, role, around, reads=around.reads)
        with recording.apart(region):
            results, spec = torch_pytree.flatten(function(*args))
            for index, result in enumerate(results):
                if not isinstance(result, torch.Tensor):
                    self._refuse(name, f"returns a {type(result).__name__}, which is no tensor")
                results[index] = self._own(name, region, recording.fake_of(result), results[:index])
        with recording.bookkeeping():
            tensors.resolve_all(region.nodes())
        # torch.tensor detaches its literal, which has no history: that node can be removed.
        cut, literals = torch.ops.aten.detach_.default, tensors.literals
        for node in region.nodes():
            if node.target is cut and node.args[0] in literals and node in region.items:
                region.items.remove(node)
        nodes = region.nodes()
        inside = set(nodes)
        for node in nodes:
            if is_draw(node):
                self._refuse(name, "draws random numbers, which eager draws in one body alone")
            if isinstance(node.target, DerivativeMark):
                self._refuse(name, "differentiates in a body")
        operands = [n for node in nodes for n in node.all_input_nodes]
        return _Body(region, results, spec, _union([n for n in operands if n not in inside]))

    def _own(
        self, name: str, region: Region, result: torch.Tensor, others: Sequence[Any]
    ) -> torch.Tensor:
        """Returns a body's result in storage of its own, contiguous if rows are stacked."""
        inside = set(region.nodes())
        roots = [_root(self._recording.tensors.node_of(x), inside) for x in (result, *others)]
        is_dense = TensorType.of(result).is_dense if name == "cond" else result.is_contiguous()
        if is_dense and roots[0] in inside and roots[0] not in roots[1:]:
            return result
        kept = torch.preserve_format if is_dense else torch.contiguous_format
        return result.clone(memory_format=kept)

    def _closure(self, body: _Body, inputs: Sequence[torch.fx.Node]) -> Composite:
        region, tensors = body.region, self._recording.tensors
        region.inputs, region.num_calls = list(inputs), 2
        region.input_names = [node.name for node in inputs]
        region.outputs = [tensors.node_of(x) for x in body.results]
        with self._recording.bookkeeping():
            built = Assembler({region: region.outputs}).body(region)
            closure = _as_composite(built.closure)
        if built.changed:
            self._refuse(region.name, "changes a tensor from outside in place")
        _forget(region)
        return closure

    def _made(
        self,
        control: Control,
        operands: Sequence[torch.fx.Node],
        bodies: Sequence[_Body],
        types: Sequence[TensorType],
    ) -> Any:
        """Adds the operator's node; returns its results in the structure of the body's results."""
        tracer = self._recording.tracer
        node = tracer.call(control, operands)  # type: ignore[arg-type]
        results = [
            tracer.track_new(type_, [b.results[i] for b in bodies], tracer.item(node, i))
            for i, type_ in enumerate(types)
        ]
        return torch_pytree.unflatten(results, bodies[0].spec)

    def _contiguous(self, init: Sequence[Any]) -> list[torch.Tensor]:
        for x in init:
            if not isinstance(x, torch.Tensor):
                self._refuse("while_loop", f"carries a {type(x).__name__}, which is no tensor")
        return [self._recording.fake_of(x).contiguous() for x in init]

    def _placeholder(self, type_: TensorType, history: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns a fake of a value that a body gets anew in each step."""
        tracer = self._recording.tracer
        return tracer.track_new(type_, history, tracer.given_node())  # type: ignore[no-any-return]

    def _refuse_other_types(self, name: str, carried: Sequence[Any], body: _Body) -> None:
        types = [TensorType.of(x) for x in carried]
        if body.types[: len(types)] != types:
            given = ", ".join(map(tensor_type_text, types))
            self._refuse(name, f"carries {given} into a step that returns {_text(body)}")

    def _refuse(self, name: str, why: str) -> None:
        raise CaptureError(f"The {name} at {user_line()} {why}, and cannot be compiled.")


def _flag(number: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of one element as a bool without dimensions."""
    return number.reshape(()).to(torch.bool)


def _root(node: torch.fx.Node, inside: Collection[torch.fx.Node]) -> torch.fx.Node:
    """Returns the base of a view; nodes outside the body are not followed."""
    while node in inside and (is_view(node) or node.target is operator.getitem):
        node = node.all_input_nodes[0]
    return node


def _union(*nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    return list(dict.fromkeys(node for some in nodes for node in some))


def _text(body: _Body) -> str:
    return f"({', '.join(map(tensor_type_text, body.types))})"


def _forget(region: Region) -> None:
    """Removes the nodes of a finished body from the users of other nodes."""
    for node in region.nodes():
        node.args, node.kwargs = (), {}
    _mark_as_inside(region.nodes(), region)


def _mark_as_inside(nodes: Sequence[torch.fx.Node], region: Region) -> None:
    """Marks nodes as inside a finished body: no node outside may use them."""
    for node in nodes:
        node.meta["body"] = region.name


def _as_composite(closure: Closure) -> Composite:
    """Returns a body as a composite closure whose leaves, even small ones, the backend compiles."""
    if isinstance(closure, Composite):
        program = closure.program
    else:
        assert isinstance(closure, Leaf)
        inputs = tuple(map(Value, closure.input_types, closure.input_names))
        results = tuple(map(Value, closure.output_types))
        program = Program(inputs, (Call(closure, inputs, results),), results)
    program = map_leaves(
        program, lambda leaf: leaf if leaf.bodies else replace(leaf, kernels="compiled")
    )
    return Composite(closure.name, program, tuple(v.hint for v in program.inputs))

"""Control flow in ONNX: ``If``, ``Scan`` and ``Loop``, whose graphs call the bodies' functions.

Such a graph sees the values around it, so an operand that is the same in each step is no input of
it. Each graph has its own names: a value inside may not be called as one outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from onnxscript import ir

from ...reuse.ir.control import Choose, Repeat, RepeatWhile
from ...reuse.ir.printer import UniqueNames
from ...reuse.ir.program import Closure, Control
from ...reuse.ir.types import Type

Make = Callable[[Type, str], ir.Value]
"""Makes a value of a type, with a name."""


class ControlNodes:
    """Writes one control-flow operator.

    Args:
        functions: of its bodies.
        make: makes the inputs of graphs and the results of nodes.
        names: taken in the graph around.
    """

    def __init__(
        self, functions: Mapping[Closure, ir.Function], make: Make, names: UniqueNames
    ) -> None:
        self._functions = functions
        self._make = make
        self._names = names

    def nodes(self, control: Control, operands: Sequence[ir.Value]) -> list[ir.Node]:
        """Returns the nodes of an operator; the last one gives its results."""
        if isinstance(control, Choose):
            return [self._if(control, operands)]
        if isinstance(control, Repeat):
            return [self._scan(control, operands)]
        assert isinstance(control, RepeatWhile)
        return self._loop(control, operands)

    def _if(self, control: Choose, operands: Sequence[ir.Value]) -> ir.Node:
        graphs = []
        for name, body in zip(("then_branch", "else_branch"), control.bodies, strict=True):
            call = self._call(body, operands[1:])
            graphs.append(ir.AttrGraph(name, self._graph(name, [], [call], call.outputs)))
        number = len(control.bodies[0].output_types)
        return ir.Node("", "If", [operands[0]], graphs, num_outputs=number)

    def _scan(self, control: Repeat, operands: Sequence[ir.Value]) -> ir.Node:
        (body,) = control.bodies
        carried, scanned, same = control.split(operands)
        entries = self._entries(body.input_types[: len(carried) + len(scanned)])
        call = self._call(body, [*entries, *same])
        graph = self._graph("step", entries, [call], call.outputs)
        number = len(body.output_types)
        attributes = [
            ir.AttrGraph("body", graph),
            ir.AttrInt64("num_scan_inputs", len(scanned)),
            ir.AttrInt64s("scan_input_directions", [control.is_reversed] * len(scanned)),
            ir.AttrInt64s(
                "scan_output_directions", [control.is_reversed] * (number - len(carried))
            ),
        ]
        return ir.Node("", "Scan", [*carried, *scanned], attributes, num_outputs=number)

    def _loop(self, control: RepeatWhile, operands: Sequence[ir.Value]) -> list[ir.Node]:
        test, body = control.bodies
        number = control.num_carried
        same = operands[number:]
        first = self._call(test, operands)
        step = ir.Value(
            name=self._names.take("step"), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(())
        )
        flag = self._make(test.output_types[0], self._names.take("goes_on"))
        entries = self._entries(body.input_types[:number])
        call = self._call(body, [*entries, *same])
        again = self._call(test, [*call.outputs, *same])
        graph = self._graph(
            "step", [step, flag, *entries], [call, again], [*again.outputs, *call.outputs]
        )
        inputs = [None, first.outputs[0], *operands[:number]]
        loop = ir.Node("", "Loop", inputs, [ir.AttrGraph("body", graph)], num_outputs=number)
        return [first, loop]

    def _entries(self, types: Sequence[Type]) -> list[ir.Value]:
        return [self._make(type_, self._names.take("given")) for type_ in types]

    def _call(self, body: Closure, args: Sequence[ir.Value]) -> ir.Node:
        function, types = self._functions[body], body.output_types
        outputs = [self._make(type_, self._names.take("made")) for type_ in types]
        return ir.Node(
            function.domain,
            function.name,
            args,
            outputs=outputs,
            name=self._names.take(function.name),
        )

    def _graph(
        self,
        name: str,
        inputs: Sequence[ir.Value],
        nodes: Sequence[ir.Node],
        outputs: Sequence[ir.Value],
    ) -> ir.Graph:
        return ir.Graph(inputs, outputs, nodes=nodes, name=self._names.take(name))

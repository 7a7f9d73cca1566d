"""A program as an ONNX model: each closure one local function, each call one node.

A leaf is traced for ONNX, translated by torch.onnx and optimized on its own, once. Struct values,
which carry what a call saves for its backward, do not exist in ONNX: they travel as the tensors
inside them. Control flow is ``If``, ``Scan`` and ``Loop``, whose graphs call the bodies' functions
and see the values around them: an operand that is the same in each step is no input of a graph.
A model is flattened if asked for, and its weights are in the file, or streamed into one next to it.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir.passes.common as passes
import torch
import torch.fx
from onnxscript import ir, optimizer, version_converter

from ...autodiff.traces.joint_trace import trace_forward_on
from ...autodiff.traces.torch_interpreters import origin_of
from ...autodiff.traces.torch_make_fx import fake_tensor, new_fake_mode, sizes_kept_open
from ...autodiff.traces.torch_user_rules import rules_in
from ...reuse.errors import ExportError
from ...reuse.ir.control import Choose, Repeat, RepeatWhile
from ...reuse.ir.leaf import flat_types, stamp_of
from ...reuse.ir.operators import mutated_args
from ...reuse.ir.printer import UniqueNames, closure_names, closure_to_compare
from ...reuse.ir.program import (
    Call,
    Closure,
    Composite,
    Control,
    Leaf,
    ModelTensor,
    Pack,
    Program,
    Unpack,
    Value,
    count_calls,
)
from ...reuse.ir.rewrite import grouped
from ...reuse.ir.types import TensorType, Type
from . import torch_onnx

DOMAIN = "lazyinline"
IR_VERSION = 10  # the first version of the format in which functions carry types and metadata

Bundle = tuple[ir.Value, ...]  # the tensors of one program value: one, or those inside a struct


@dataclass(frozen=True)
class Naming:
    """Names that the outside sees."""

    inputs: Sequence[str]  # name of each program input
    outputs: Sequence[str | None]  # name of each program output; None leaves the output out
    # Names of symbolic sizes, such as ``{"s0": "batch"}``.
    sizes: Mapping[str, str] = field(default_factory=dict)
    graph: str = "main"  # name of the main graph


def build_model(program: Program, opset: int, naming: Naming) -> ir.Model:
    """Translates an entry program; raises ExportError if an operator cannot be written in ONNX."""
    return _Builder(program, opset, naming).build()


class _Body:
    """The nodes of one graph or function, while they are put together."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.values = UniqueNames()
        self._node_names = UniqueNames()

    def add(self, node: ir.Node, wish: str) -> ir.Node:
        node.name = self._node_names.take(wish)
        self.nodes.append(node)
        return node

    def graph(
        self,
        name: str,
        inputs: Sequence[ir.Value],
        nodes: Sequence[ir.Node],
        outputs: Sequence[ir.Value],
    ) -> ir.Graph:
        """Returns a graph inside a node, which sees the values of this body."""
        return ir.Graph(inputs, outputs, nodes=nodes, name=self.values.take(name))

    def outputs(self, values: Iterable[ir.Value], owned: Iterable[ir.Value]) -> list[ir.Value]:
        """Returns results that are each the result of a node of this body, and each only once."""
        taken = set(owned)
        results = []
        for value in values:
            if value in taken:
                node = self.add(ir.Node("", "Identity", [value]), "identity")
                copy = node.outputs[0]
                copy.name = self.values.take(f"{value.name}_out")
                copy.type, copy.shape = value.type, value.shape
                value = copy
            taken.add(value)
            results.append(value)
        return results


class _Builder:
    """Builds the functions of a program, callees first, and the main graph."""

    def __init__(self, program: Program, opset: int, naming: Naming) -> None:
        self._program = program
        self._opset = opset
        self._naming = naming
        self._names = closure_names(program)
        self._counts = count_calls(program)
        self._functions: dict[Closure, ir.Function] = {}
        self._paths = _call_paths(program)

    def build(self) -> ir.Model:
        # Callees come first, so that a function's calls find theirs.
        for closure in self._program.closures:
            if not isinstance(closure, (Pack, Unpack)):
                self._functions[closure] = self._function(closure)
        graph = self._main()
        functions = self._functions.values()
        model = ir.Model(graph, ir_version=IR_VERSION, functions=functions)
        torch_onnx.add_opset_imports(model)
        graph.opset_imports.update({"": self._opset, DOMAIN: 1})
        return model

    # ---- functions -----------------------------------------------------------------------

    def _function(self, closure: Closure) -> ir.Function:
        if isinstance(closure, Leaf) and closure.control is not None:
            graph = self._control_graph(closure, closure.control)
        elif isinstance(closure, Leaf):
            graph = leaf_graph(closure, self._opset, self._input_names(closure))
        else:
            assert isinstance(closure, Composite)
            graph = self._composite_graph(closure)
        graph.opset_imports.setdefault("", self._opset)
        _rename_sizes(graph, self._naming.sizes)
        graph.opset_imports[""] = self._opset
        name = re.sub(r"\W", "_", self._names[closure])
        function = ir.Function(DOMAIN, name, graph=graph, attributes=())
        function.doc_string = self._about(closure)
        # The same in every process: a digest of what the closure computes.
        text = closure_to_compare(closure).encode()
        function.metadata_props["lazyinline.key"] = hashlib.sha256(text).hexdigest()[:32]
        return function

    def _composite_graph(self, closure: Composite) -> ir.Graph:
        body = _Body()
        names = self._input_names(closure)
        env = {
            value: self._bundle(value.type, name, body)
            for value, name in zip(closure.program.inputs, names, strict=True)
        }
        inputs = [v for bundle in env.values() for v in bundle]
        self._calls(closure.program, env, body)
        results = [v for value in closure.program.outputs for v in env[value]]
        outputs = body.outputs(results, inputs)
        imports = {"": self._opset, DOMAIN: 1}
        return ir.Graph(inputs, outputs, nodes=body.nodes, opset_imports=imports)

    def _control_graph(self, leaf: Leaf, control: Control) -> ir.Graph:
        body = _Body()
        names = self._input_names(leaf)
        inputs = [self._bundle(t, n, body)[0] for t, n in zip(leaf.input_types, names, strict=True)]

        for node in self._control_nodes(control, inputs, body):
            body.add(node, node.op_type.lower())
        for value, type_ in zip(node.outputs, flat_types(leaf.output_types), strict=True):
            self._describe(value, type_)
            value.name = body.values.take(control.word)
        imports = {"": self._opset, DOMAIN: 1}
        return ir.Graph(inputs, node.outputs, nodes=body.nodes, opset_imports=imports)

    def _input_names(self, closure: Closure) -> list[str]:
        """Names a closure's inputs after its parameters, or after what its only caller passes."""
        assert isinstance(closure, (Leaf, Composite))
        hints = list(closure.input_names)
        if len(hints) != len(closure.input_types):
            hints = [""] * len(closure.input_types)
        calls = self._paths.get(closure, ())  # none of a body of control flow
        # Of several calls none can give its own names to what they share.
        if calls and (self._counts[closure] == 1 or not any(hints)):
            call = calls[0]
            hints = [v.hint or hint for v, hint in zip(call.args, hints, strict=True)]
        names = UniqueNames()
        return [names.take(hint or f"input_{i}") for i, hint in enumerate(hints)]

    def _about(self, closure: Closure) -> str:
        paths = [c.path for c in self._paths.get(closure, ()) if c.path]
        ends = dict.fromkeys((paths[0], paths[-1])) if paths else {}
        where = f": {' ... '.join(ends)}" if ends else ""
        count = self._counts[closure]
        return f"{self._names[closure]}, {count} call{'s' if count > 1 else ''}{where}"

    # ---- bodies --------------------------------------------------------------------------

    def _calls(self, program: Program, env: dict[Value, Bundle], body: _Body) -> None:
        for call in program.calls:
            args = [v for value in call.args for v in env[value]]
            is_struct = isinstance(call.closure, (Pack, Unpack))
            outputs = args if is_struct else self._node(call, args, body)
            bundles = grouped(outputs, [value.type for value in call.results])
            env.update(zip(call.results, map(tuple, bundles), strict=True))

    def _node(self, call: Call, args: Sequence[ir.Value], body: _Body) -> Sequence[ir.Value]:
        function = self._functions[call.closure]
        types = flat_types(call.closure.output_types)
        node = ir.Node(function.domain, function.name, args, num_outputs=len(types))
        body.add(node, _node_name(call, self._names[call.closure]))
        for value, type_ in zip(node.outputs, types, strict=True):
            self._describe(value, type_)
        hints = [v.hint for v in call.results for _ in flat_types([v.type])]
        for index, (value, hint) in enumerate(zip(node.outputs, hints, strict=True)):
            wish = hint if not call.path else str(node.name)
            many = call.path and len(types) > 1
            value.name = body.values.take(
                f"{wish}.{index}" if many else wish or f"{node.name}.{index}"
            )
        return node.outputs

    def _bundle(self, type_: Type, name: str, body: _Body) -> Bundle:
        wishes = zip(_flat_names([type_], [name]), flat_types([type_]), strict=True)
        return tuple(self._made(inner, wish, body) for wish, inner in wishes)

    def _made(self, type_: Type, wish: str, body: _Body) -> ir.Value:
        """Returns a new value of a tensor type, which no node gives yet."""
        value = ir.Value(name=body.values.take(wish))
        (inner,) = flat_types([type_])
        self._describe(value, inner)
        return value

    def _describe(self, value: ir.Value, type_: TensorType) -> None:
        value.dtype = torch_onnx.onnx_dtype(type_.dtype)
        sizes = self._naming.sizes
        value.shape = ir.Shape(
            [d if isinstance(d, int) else _size_name(str(d), sizes) for d in type_.shape]
        )

    # ---- control flow --------------------------------------------------------------------

    def _control_nodes(
        self, control: Control, operands: Sequence[ir.Value], body: _Body
    ) -> list[ir.Node]:
        """Returns the nodes of an operator; the last one gives its results."""
        if isinstance(control, Choose):
            return [self._if(control, operands, body)]
        if isinstance(control, Repeat):
            return [self._scan(control, operands, body)]
        assert isinstance(control, RepeatWhile)
        return self._loop(control, operands, body)

    def _if(self, control: Choose, operands: Sequence[ir.Value], body: _Body) -> ir.Node:
        graphs = []
        for name, branch in zip(("then_branch", "else_branch"), control.bodies, strict=True):
            call = self._inner_call(branch, operands[1:], body)
            graphs.append(ir.AttrGraph(name, body.graph(name, [], [call], call.outputs)))
        number = len(control.bodies[0].output_types)
        return ir.Node("", "If", [operands[0]], graphs, num_outputs=number)

    def _scan(self, control: Repeat, operands: Sequence[ir.Value], body: _Body) -> ir.Node:
        (step,) = control.bodies
        carried, scanned, same = control.split(operands)
        number, turned = len(step.output_types), control.is_reversed
        types = step.input_types[: len(carried) + len(scanned)]
        entries = [self._made(type_, "given", body) for type_ in types]
        call = self._inner_call(step, [*entries, *same], body)
        graph = body.graph("step", entries, [call], call.outputs)
        attributes = [
            ir.AttrGraph("body", graph),
            ir.AttrInt64("num_scan_inputs", len(scanned)),
            ir.AttrInt64s("scan_input_directions", [turned] * len(scanned)),
            ir.AttrInt64s("scan_output_directions", [turned] * (number - len(carried))),
        ]
        return ir.Node("", "Scan", [*carried, *scanned], attributes, num_outputs=number)

    def _loop(
        self, control: RepeatWhile, operands: Sequence[ir.Value], body: _Body
    ) -> list[ir.Node]:
        (test, step), number = control.bodies, control.num_carried
        same = operands[number:]
        first = self._inner_call(test, operands, body)
        whole = ir.TensorType(ir.DataType.INT64)
        place = ir.Value(name=body.values.take("step"), type=whole, shape=ir.Shape(()))
        flag = self._made(test.output_types[0], "goes_on", body)
        entries = [self._made(type_, "given", body) for type_ in step.input_types[:number]]
        call = self._inner_call(step, [*entries, *same], body)
        again = self._inner_call(test, [*call.outputs, *same], body)
        given, made = [place, flag, *entries], [*again.outputs, *call.outputs]
        graph = body.graph("step", given, [call, again], made)
        inputs = [None, first.outputs[0], *operands[:number]]
        loop = ir.Node("", "Loop", inputs, [ir.AttrGraph("body", graph)], num_outputs=number)
        return [first, loop]

    def _inner_call(self, closure: Closure, args: Sequence[ir.Value], body: _Body) -> ir.Node:
        function = self._functions[closure]
        outputs = [self._made(type_, "made", body) for type_ in closure.output_types]
        name = body.values.take(function.name)
        return ir.Node(function.domain, function.name, args, outputs=outputs, name=name)

    # ---- the main graph ------------------------------------------------------------------

    def _main(self) -> ir.Graph:
        program, body = self._program, _Body()
        # The user's names are taken first: no value inside may have one.
        for name in self._naming.outputs:
            if name is not None:
                body.values.take(name)
        env: dict[Value, Bundle] = {}
        inputs, initializers = [], []
        for value, source, name in zip(
            program.inputs, program.sources, self._naming.inputs, strict=True
        ):
            (made,) = env[value] = self._bundle(value.type, name, body)
            if isinstance(source, ModelTensor):
                made.const_value = torch_onnx.tensor_data(source.tensor, str(made.name))
                initializers.append(made)
            else:
                inputs.append(made)
        self._calls(program, env, body)
        named = [
            (env[value][0], name)
            for value, name in zip(program.outputs, self._naming.outputs, strict=True)
            if name is not None
        ]
        outputs = body.outputs([v for v, _ in named], [*inputs, *initializers])
        for value, (_, name) in zip(outputs, named, strict=True):
            value.name = name
        return ir.Graph(
            inputs, outputs, nodes=body.nodes, initializers=initializers, name=self._naming.graph
        )


def _call_paths(program: Program) -> dict[Closure, list[Call]]:
    paths: dict[Closure, list[Call]] = {}
    bodies = [program, *(c.program for c in program.closures if isinstance(c, Composite))]
    for body in bodies:
        for call in body.calls:
            paths.setdefault(call.closure, []).append(call)
    return paths


def _node_name(call: Call, closure_name: str) -> str:
    """Returns the module path, with a word for the backward of a block."""
    if not call.path:
        return closure_name
    return f"{call.path}.backward" if closure_name.endswith(".backward") else call.path


def _size_name(text: str, names: Mapping[str, str]) -> str:
    """Writes a symbolic size with the user's names."""
    return re.sub(r"\w+", lambda m: names.get(m[0], m[0]), text)


def _rename_sizes(graph: ir.Graph, names: Mapping[str, str]) -> None:
    for value in (*graph.inputs, *(made for node in graph for made in node.outputs)):
        if value.shape is not None and not value.shape.is_static():
            value.shape = ir.Shape(
                [d if isinstance(d, int) else _size_name(str(d.value), names) for d in value.shape]
            )


def leaf_graph(leaf: Leaf, opset: int, input_names: Sequence[str]) -> ir.Graph:
    """Translates a leaf into a function's body; ExportError, with lines, for what ONNX lacks."""
    module = _traced(leaf, opset)
    torch_onnx.prepare(module)
    _refuse_untranslatable(leaf, module, opset)
    model = _translated(leaf, module, opset)
    for node in model.graph:
        _set_source(node)
    # torch.onnx translates for one operator set; the converter takes the graph to the one asked.
    version_converter.convert_version(model, opset)
    optimizer.optimize_ir(model)
    _constants_inside(model.graph)
    names = _flat_names(leaf.input_types, input_names)
    for value, name in zip(model.graph.inputs, names, strict=True):
        value.name = name
    passes.NameFixPass()(model)  # a value inside that has such a name gets another one
    return model.graph


def _flat_names(types: Sequence[Type], names: Sequence[str]) -> list[str]:
    """Names the tensors of some values: those of a struct are numbered."""
    found = []
    for type_, name in zip(types, names, strict=True):
        inner = flat_types([type_])
        found += [name] if len(inner) == 1 else [f"{name}.{i}" for i in range(len(inner))]
    return found


def _traced(leaf: Leaf, opset: int) -> torch.fx.GraphModule:
    """Returns the body with operators that ONNX has; composite ones whole where it can be."""
    if leaf.level == "aten" and torch_onnx.is_traced(leaf.module):
        return leaf.module
    for node in leaf.nodes:
        node.meta["stack_trace"] = stamp_of(node).source
    inputs, mode = _fake_inputs(leaf)
    # ONNX has no changes in place and no autocast: a trace before it writes both out.
    changing = any(mutated_args(n) or stamp_of(n).autocast for n in leaf.nodes)
    if not changing and not rules_in(leaf.nodes):  # what a rule does inside is not known
        table = torch_onnx.keeping_decompositions(opset)
        kept = torch_onnx.trace(leaf.module, inputs, mode, table)
        if not any(map(mutated_args, kept.graph.nodes)):  # as in what cosine_similarity is made of
            return kept
    with torch_onnx.exact_attention(), sizes_kept_open(mode):
        module = trace_forward_on(leaf.module, inputs, mode, torch_onnx.batch_norm())
    return torch_onnx.trace(module, inputs, mode, torch_onnx.exact_decompositions(opset))


def _fake_inputs(leaf: Leaf) -> tuple[list[Any], Any]:
    """Returns fake inputs and their mode; symbolic ones as they were captured."""
    types = flat_types(leaf.input_types)
    traced = [n.meta["val"] for n, t in zip(leaf.entries, types, strict=True) if t.is_symbolic]
    mode = traced[0].fake_mode if traced else new_fake_mode()
    captured = iter(traced)
    return [next(captured) if t.is_symbolic else fake_tensor(mode, t) for t in types], mode


def _refuse_untranslatable(leaf: Leaf, module: torch.fx.GraphModule, opset: int) -> None:
    found = torch_onnx.untranslatable(module, opset)
    if not found:
        return
    lines = dict.fromkeys(_place(leaf, node) for node in found)
    raise ExportError(
        f"ONNX (opset {opset}) has no operator for " + "; ".join(lines) + ". Write that part with "
        "other operators, or try a newer opset (up to 24)."
    )


def _translated(leaf: Leaf, module: torch.fx.GraphModule, opset: int) -> ir.Model:
    try:
        return torch_onnx.translate(module, opset)
    except torch_onnx.UntranslatedError as error:
        place = leaf.name if error.node is None else _place(leaf, error.node)
        raise ExportError(
            f"torch.onnx cannot write {place} the way it is called: {error.reason} "
            "Write that part with other operators."
        ) from error


def _place(leaf: Leaf, node: torch.fx.Node) -> str:
    """Returns what the user called, in which block, and on which line."""
    origin = origin_of(node)
    source = str(node.meta.get("stack_trace") or "").strip().splitlines()
    operator: object = node.meta.get("original_aten", node.target)
    if origin is not None:  # a joint graph knows what the user called
        operator, source = origin, origin.source.splitlines()
    return f"{operator} in {leaf.name}" + (f" at {source[-1].strip()}" if source else "")


def _set_source(node: ir.Node) -> None:
    """Leaves the user's line on a node, and nothing else."""
    source = node.metadata_props.get("pkg.torch.onnx.stack_trace", "")
    # torch.onnx leaves whole stack traces and module names of this machine on each node.
    node.metadata_props.clear()
    node.meta.clear()
    if source:
        node.metadata_props["source"] = source


def _constants_inside(graph: ir.Graph) -> None:
    """Turns initializers into Constant nodes: a function has no initializers."""
    first = next(iter(graph), None)
    for name, value in list(graph.initializers.items()):
        node = ir.node(
            "Constant", [], attributes={"value": value.const_value}, name=f"const_{name}"
        )
        made = node.outputs[0]
        made.type, made.shape = value.type, value.shape
        ir.convenience.replace_all_uses_with(value, made, replace_graph_outputs=True)
        del graph.initializers[name]
        made.name = name
        if first is None:
            graph.append(node)
        else:
            graph.insert_before(first, [node])


_INLINE_LIMIT_BYTES = 2**31 - 2**27
"""A protobuf holds less than 2 GiB; an eighth of a GiB is left for the graph."""


def save_model(model: ir.Model, path: pathlib.Path, *, external_data: bool | None) -> None:
    """Writes a model into an ``.onnx`` file; weights may go to ``<name>.data`` next to it.

    Those are written one by one, straight from the tensors; ``external_data=None`` decides by their
    size. Raises ExportError if the file cannot be written, or weights do not fit into one file.
    """
    num_bytes = weight_bytes(model)
    if external_data is None:
        external_data = num_bytes > _INLINE_LIMIT_BYTES
    if not external_data and num_bytes > _INLINE_LIMIT_BYTES:
        raise ExportError(
            f"The weights are {num_bytes / 2**30:.1f} GiB, and an ONNX file holds less than 2. "
            "Leave external_data=None, or make it True."
        )
    try:
        if external_data:
            ir.save(model, path, external_data=f"{path.name}.data", size_threshold_bytes=256)
        else:
            ir.save(model, path)
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror or error}.") from error


def weight_bytes(model: ir.Model) -> int:
    """Returns the bytes of a model's initializers."""
    values = (v.const_value for v in model.graph.initializers.values())
    return sum(v.nbytes for v in values if v is not None)


def inline_functions(model: ir.Model) -> None:
    """Inlines every function, in place; nodes and values are named by module path."""
    paths = list(_paths(model, model.graph, ""))
    passes.InlinePass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    kept = {v for v in model.graph.outputs}  # the user chose their names
    for node, (path, operator) in zip(model.graph, paths, strict=True):
        assert node.op_type == operator, (node.op_type, operator)
        if path:
            node.name = f"{path}/{node.name}"
            for value in node.outputs:
                if value not in kept:
                    value.name = f"{path}/{value.name}"


def _paths(model: ir.Model, nodes: Iterable[ir.Node], path: str) -> Iterator[tuple[str, str]]:
    """Yields the module path and operator of each node after inlining."""
    for node in nodes:
        function = model.functions.get(node.op_identifier())
        if function is None:
            yield path, node.op_type
        else:
            # Operators outside of any block have no module to be named after.
            name = node.name or ""
            is_glue = "." not in name and name.startswith("glue")
            below = "/".join(p for p in (path, name) if p) if not is_glue else path
            yield from _paths(model, function, below)

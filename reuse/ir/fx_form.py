"""A program as a ``torch.fx.GraphModule`` that runs by itself, and other forms of it.

Each closure is a submodule, called once per instance. A call gives the tuple of its results; a
struct is a tuple. A program whose sizes vary reads them from its inputs, and passes them to each
closure after its operands. What PyTorch exports of that module is flat; the program's text is saved
beside that graph, and is used only while the graph is the one it was written for.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
import torch.fx
from torch import nn
from torch.export import Dim, ExportedProgram

from ..errors import ExportError, ParseError
from ..once import once
from ..torch_pytree import Nested
from . import program as ir
from . import torch_symbols
from .leaf import as_values, enter_modes, flatten_value, stamp_of, without_autocast
from .parser import parse_program
from .printer import UniqueNames, closure_names, operand_text, text_to_compare
from .torch_fake_rules import kernels_own_rules
from .types import StructType, TensorType, reach

if TYPE_CHECKING:
    import networkx

Node = torch.fx.Node

_PROGRAM, _LEAF, _MODES = "lazyinline_program", "lazyinline_leaf", "lazyinline_modes"
_USUAL: tuple[bool, Any] = (True, ())  # gradients, and no autocast


class Block(nn.Module):
    """Stands for one call of a graph; blocks that compute the same share it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Any) -> Any:
        """Runs the graph."""
        return self.body(*inputs)


class Places:
    """Puts blocks into a tree, at the paths of the user's modules, with tensors that are there."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._kinds: dict[str, type[Block]] = {}

    def put(self, path: str, kind: str, body: nn.Module) -> str:
        """Puts a block of a class that is named as the user's is; returns its path."""
        if kind not in self._kinds:
            self._kinds[kind] = type(kind, (Block,), {})
        block, (holder, above, last) = self._kinds[kind](body), holder_of(self._root, path)
        # If the path holds only the block's tensors, it takes them: their names stay the model's.
        tensors = holder._modules.get(last)  # of the block
        if type(tensors) is nn.Module and "body" not in tensors._modules:
            for table in ("_modules", "_parameters", "_buffers"):
                getattr(block, table).update(getattr(tensors, table))
            del holder._modules[last]
        last = free_name(holder, last)
        holder.add_module(last, block)
        return f"{above}{last}"


def holder_of(root: nn.Module, path: str) -> tuple[nn.Module, str, str]:
    """Returns the module that holds a path's last name (new if missing), its path, and the name."""
    *names, last = path.split(".")
    above = ""
    for name in names:
        if name not in root._modules:
            name = free_name(root, name)
            root.add_module(name, nn.Module())
        root, above = root.get_submodule(name), f"{above}{name}."
    return root, above, last


def hold(holder: nn.Module, name: str, value: Any) -> None:
    """Gives a module something to hold; a tensor that is no parameter is a buffer."""
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        holder.register_buffer(name, value)
    else:
        setattr(holder, name, value)


def free_name(holder: nn.Module, name: str) -> str:
    """Returns a name that nothing in a module has, nor in the graph module that it becomes."""
    while hasattr(holder, name) or hasattr(torch.fx.GraphModule, name) or name == "meta":
        name += "_"
    return name


# ---- what graphs call, besides operators ---------------------------------------------------------


class LeafModule(torch.fx.GraphModule):
    """A leaf's graph; modes that change within it are its last input."""

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        """Runs the graph on values, and behind them sizes."""
        flat = [x for value in operands for x in flatten_value(value)]
        # ATen operators do not record the modes they ran in, and the caller's are not theirs.
        with without_autocast(), ExitStack() as held:
            if len(self.meta[_MODES]) > 1:
                flat.append(held)
            else:
                enter_modes(held, *(self.meta[_MODES] or [_USUAL])[0])
            return tuple(as_values(self.meta[_LEAF].output_types, super().__call__(*flat)))


def require(condition: bool, text: str) -> None:
    """Raises AssertionError unless a condition holds, as ``ExportedProgram.module()`` does."""
    if not condition:
        raise AssertionError(f"This program is for inputs of which {text}.")


def is_typed(tensor: torch.Tensor, dtype: torch.dtype, *shape: Any) -> bool:
    """Whether an input is of the program's type."""
    return tensor.dtype is dtype and tuple(tensor.shape) == shape


def pack(*fields: Any) -> tuple[Any, ...]:
    """Makes one struct, the one result, of several values."""
    return (fields,)


def unpack(struct: tuple[Any, ...]) -> tuple[Any, ...]:
    """Takes a struct apart."""
    return struct


class Result:
    """Makes the model's result from a program's outputs."""

    __name__ = "result"

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def __call__(self, *outputs: Any) -> Any:
        """Returns it."""
        leaves = [outputs[x] if kind == "output" else x for kind, x in self.tree.leaves]
        return self.tree.built(leaves)


# ---- to fx ---------------------------------------------------------------------------------------


def to_fx(program: ir.Program) -> torch.fx.GraphModule:
    """Returns the module; see :meth:`Program.to_fx`."""
    module = _ToFx(program).module(program)
    module.meta[_PROGRAM] = program, digest_of(module)
    return module


def from_fx(module: torch.fx.GraphModule) -> ir.Program:
    """Returns the program; see :meth:`Program.from_fx`."""
    program, digest = module.meta.get(_PROGRAM, (None, ""))
    if program is None or digest != digest_of(module):
        raise ExportError(
            f"{type(module).__name__} is not, or no longer, what to_fx made. Its program is "
            "lazyinline.capture(module, inputs)."
        )
    names = tensor_names(module)
    return with_tensors(program, [operator.attrgetter(name)(module) for name in names])


def tensor_names(module: torch.fx.GraphModule) -> list[str]:
    """Returns where a module holds the model's tensors, in the program's order."""
    return [str(node.target) for node in module.graph.find_nodes(op="get_attr")]


def with_tensors(program: ir.Program, tensors: Iterable[torch.Tensor]) -> ir.Program:
    """Returns a program that is bound to other tensors of its types."""
    left = iter(tensors)
    sources = [
        replace(s, tensor=next(left)) if isinstance(s, ir.ModelTensor) else s
        for s in program.sources
    ]
    return replace(program, sources=tuple(sources))


def digest_of(root: nn.Module) -> str:
    """Returns a digest of all graphs; names of nodes, which loading may change, do not count."""
    lines: list[str] = []
    for module in root.modules():
        graph = module.graph if isinstance(module, torch.fx.GraphModule) else torch.fx.Graph()
        # By names of tensors, since their data changes in training.
        values = {node: str(node.target) for node in graph.find_nodes(op="get_attr")}
        for node in graph.nodes:
            if node not in values:
                operands = operand_text((node.args, *node.kwargs.items()), values)
                lines.append(f"{node.op} {node.target if '_' in node.op else ''} {operands}")
                values[node] = f"%{len(lines)}"
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _ToFx:
    """Makes the module of each closure once."""

    def __init__(self, program: ir.Program) -> None:
        self._names = closure_names(program)
        self._modules: dict[ir.Closure, nn.Module] = {}
        self._sizes: dict[ir.Closure, list[Any]] = {}  # the symbols that each takes
        self._conditions: dict[Any, None] = {}
        for closure in program.closures:
            self._sizes[closure] = self._sizes_of(closure)

    def _sizes_of(self, closure: ir.Closure) -> list[Any]:
        found: set[Any] = set()
        if isinstance(closure, ir.Composite):
            found = {s for call in closure.program.calls for s in self._sizes[call.closure]}
        elif isinstance(closure, ir.Leaf):
            found = set(torch_symbols.symbols_of(closure.module))
            if any(self._sizes[body] for body in closure.bodies):
                raise ExportError(f"@{closure.name} runs closures whose sizes vary.")
        if found and isinstance(closure, ir.Leaf):
            guards = torch_symbols.environment_of(closure.module).guards
            # PyTorch specializes sizes 0 and 1, so a symbol is neither.
            self._conditions.update(dict.fromkeys(sympy.Ge(symbol, 2) for symbol in found))
            self._conditions.update(dict.fromkeys(guard.expr for guard in guards))
        return sorted(found, key=str)

    def module(
        self, program: ir.Program, sizes: Sequence[Any] | None = None
    ) -> torch.fx.GraphModule:
        """Returns the module of a program; a closure's takes sizes."""
        graph, root = torch.fx.Graph(), nn.Module()
        body = _Body(program, graph, root)
        if sizes is None:
            body.check(self._conditions)
        else:
            body.sizes.update({s: graph.placeholder(str(s)) for s in sizes})
        for call in program.calls:
            args = [body.values[v] for v in call.args]
            if isinstance(call.closure, (ir.Pack, ir.Unpack)):
                function = pack if isinstance(call.closure, ir.Pack) else unpack
                made = graph.call_function(function, tuple(args))
            else:
                args += [body.size(symbol) for symbol in self._sizes[call.closure]]
                place = body.place(call, self._names[call.closure], self._closure(call.closure))
                made = graph.call_module(place, tuple(args))
            for index, value in enumerate(call.results):
                body.values[value] = graph.call_function(operator.getitem, (made, index))
        body.output()
        return torch.fx.GraphModule(root, graph)

    @once
    def _closure(self, closure: ir.Closure) -> nn.Module:
        sizes = self._sizes[closure]
        if isinstance(closure, ir.Composite):
            return self.module(closure.program, sizes)
        return _leaf_module(closure, sizes)  # type: ignore[arg-type]


def _leaf_module(leaf: ir.Leaf, sizes: Sequence[Any]) -> LeafModule:
    is_sized = torch_symbols.has_sizes(leaf.module)
    module = torch_symbols.with_size_inputs(leaf.module, sizes, "last") if is_sized else leaf.module
    graph, held = torch.fx.Graph(), None
    graph.output(graph.graph_copy(module.graph, {}))
    operators = [n for n in graph.nodes if n.op == "call_function" and not torch_symbols.is_size(n)]
    stamps = [(stamp_of(node).grad_enabled, stamp_of(node).autocast) for node in operators]
    if len(set(stamps)) > 1:
        with graph.inserting_before(operators[0]):
            held = graph.placeholder("modes")
        for node, before, modes in zip(operators, [_USUAL, *stamps], stamps, strict=False):
            if modes != before:
                with graph.inserting_before(node):
                    graph.call_function(enter_modes, (held, *modes))
    made = LeafModule(module, graph)
    made.meta.update({_LEAF: leaf, _MODES: list(dict.fromkeys(stamps))})
    return made


class _Body:
    """The graph of one program while it is made, with the node of each value and symbol."""

    def __init__(self, program: ir.Program, graph: torch.fx.Graph, root: nn.Module) -> None:
        self._program, self._graph, self._root = program, graph, root
        self._places, self._placed = Places(root), dict[Any, str]()
        self.sizes: dict[Any, Node] = {}
        self.values: dict[ir.Value, Node] = {}
        names = UniqueNames()
        for index, value in enumerate(program.inputs):
            source = program.sources[index] if program.sources else None
            if isinstance(source, ir.ModelTensor):
                self.values[value] = graph.get_attr(self._hold(source))
            else:
                name = _identifier(value.hint if source is None else source.name)
                self.values[value] = graph.placeholder(names.take(name))

    def _hold(self, source: ir.ModelTensor) -> str:
        holder, above, last = holder_of(self._root, _path(source.name))
        last = free_name(holder, last)
        hold(holder, last, source.tensor)
        return f"{above}{last}"

    def size(self, symbol: Any) -> Node:
        """Returns the node of a symbol; the first time, reads it from an input."""
        if symbol in self.sizes:
            return self.sizes[symbol]
        for value in self._program.inputs:
            shape = () if isinstance(value.type, StructType) else value.type.shape
            if symbol in shape:
                asked = (self.values[value], shape.index(symbol))
                self.sizes[symbol] = self._graph.call_function(torch.ops.aten.sym_size.int, asked)
                return self.sizes[symbol]
        raise ExportError(f"The size {symbol} is no size of an input by itself.")

    def check(self, conditions: Mapping[Any, None]) -> None:
        """Adds checks of the user's inputs, and of the conditions on sizes."""
        for value in self._program.inputs:
            node, type_ = self.values[value], value.type
            if node.op == "placeholder" and isinstance(type_, TensorType):
                wanted = (node, type_.dtype, *map(self._computed, type_.shape))
                text = f"{node} is a {type_}"
                self._graph.call_function(
                    require, (self._graph.call_function(is_typed, wanted), text)
                )
        for condition in conditions:
            self._graph.call_function(require, (self._computed(condition), f"{condition} holds"))

    def _computed(self, expression: Any) -> Any:
        """Returns a number, or the node of an expression of symbols."""
        symbols = () if isinstance(expression, int) else expression.free_symbols
        nodes = {symbol: self.size(symbol) for symbol in symbols}
        return torch_symbols.computing_node(expression, nodes, self._graph)

    def place(self, call: ir.Call, name: str, module: nn.Module) -> str:
        """Returns where a block of a closure stands: where the user's module does."""
        # A module that is called twice is one module there, too.
        key = call.path, call.closure
        if key not in self._placed:
            self._placed[key] = self._places.put(_path(call.path or name), name, module)
        return self._placed[key]

    def output(self) -> None:
        """Writes what the program writes, and returns what it returns."""
        nodes, tree = [self.values[v] for v in self._program.outputs], self._program.output_tree
        for output, target in self._program.writes:
            written = (self.values[self._program.inputs[target]], nodes[output])
            self._graph.call_function(torch.ops.aten.copy_.default, written)
        is_flat = tree is None or tree.updates
        result = nodes if is_flat else self._graph.call_function(Result(tree), tuple(nodes))
        self._graph.output(tuple(nodes) if is_flat else result)


def _path(path: str) -> str:
    return ".".join(map(_identifier, path.split(".")))


def _identifier(name: str) -> str:
    """Returns a name that Python takes for an argument or an attribute."""
    plain = re.sub(r"\W", "_", name)
    return plain if plain.isidentifier() or plain.isdigit() else f"_{plain}"


# ---- As graphs of networkx -----------------------------------------------------------------------


_BODY = re.compile(r"^(.*@([\w.]+)\((.*)\) -> \((.*)\) \{.*)\n((?:  .*\n)*)\}", re.MULTILINE)
_TYPED = re.compile(r"(%[\w.]+): (\S+?)(?=, | =|$)")
_NAMES = re.compile(r"%[\w.]+(?=[^']*(?:'[^']*'[^']*)*$)")  # none in quotes


def to_networkx(program: ir.Program) -> networkx.MultiDiGraph[Any]:
    """Returns the graph of a program; see :meth:`Program.to_networkx`."""
    import networkx as nx

    # The printer has named all values already, so that edges need no second naming.
    text = text_to_compare(program)
    bodies: dict[str, Any] = {}
    for found in _BODY.finditer(text):
        head, name, inputs, results, lines = found.groups()
        graph = nx.MultiDiGraph(name=name, head=head, results=results.split(", "))
        for value, type_ in _TYPED.findall(inputs):
            graph.add_node(value, kind="input", type=type_, text="")
        made = {value: (value, type_) for value, type_ in _TYPED.findall(inputs)}
        for number, line in enumerate(lines.splitlines()):
            _add_line(graph, number, line, made, bodies)
        bodies[name] = graph
    main = bodies.pop("main")
    main.graph.update(structs=text[: text.find("\n\n")] if text[0] == "$" else "", closures=bodies)
    for source, (_, node) in zip(program.sources, main.nodes(data=True), strict=False):
        node["source"] = source
    return main


def _add_line(
    graph: Any, number: int, line: str, made: dict[str, tuple[Any, str]], bodies: dict[str, Any]
) -> None:
    """Adds a node for an operator, a call or what is returned, and an edge for each operand."""
    targets, _, applied = (
        line.strip().rpartition(" = ") if " = " in line else ("", "", line.strip())
    )
    word, *called = re.split(r"[ (@]+", applied)[:2]
    is_call = word == "call"
    graph.add_node(number, kind="call" if is_call else "operator", operator=word, text=line)
    if is_call:
        path = re.search(r"at='((?:[^'\\]|\\.)*)'", applied)
        graph.nodes[number].update(closure=called[0], path=path[1] if path else "")
    for position, name in enumerate(_NAMES.findall(applied)):
        source, type_ = made[name] if name in made else made[name.rpartition(".")[0]]
        graph.add_edge(source, number, value=name, type=type_, position=position)
    types = bodies[called[0]].graph["results"] if is_call else []
    for index, name in enumerate(re.findall(r"%[\w.]+", targets)):
        known = dict(_TYPED.findall(targets)).get(name) or (types[index] if types else "")
        made[name] = number, known


def from_networkx(graph: networkx.MultiDiGraph[Any]) -> ir.Program:
    """Returns the program; see :meth:`Program.from_networkx`."""
    parts = [graph.graph["structs"]]
    for body in (*graph.graph["closures"].values(), graph):
        lines = [text for _, text in body.nodes(data="text") if text]
        parts.append("\n".join([body.graph["head"], *lines, "}\n"]))
    # Only the texts are read, so that changed edges have no effect.
    program = parse_program("\n".join(parts))
    sources = [source for _, source in graph.nodes(data="source") if source is not None]
    return replace(program, sources=tuple(sources))


# ---- As torch.export has it ----------------------------------------------------------------------


_RECORD = "lazyinline"  # key in what PyTorch saves of a graph for others


def to_exported(program: ir.Program) -> ExportedProgram:
    """Returns what ``torch.export`` makes of a program; see :meth:`Program.to_exported`."""
    tree, count = program.output_tree, len(program.outputs)
    if tree is not None and isinstance(tree.spec, Nested):
        tree, program = None, replace(program, output_tree=None)
    leaves = [closure for closure in program.closures if isinstance(closure, ir.Leaf)]
    controls = [f"@{leaf.name} is control flow" for leaf in leaves if leaf.control is not None]
    for reason in [*controls, *["it was not captured"] * (not program.sources)]:
        raise ExportError(f"to_exported has no form for this program: {reason}.")
    sources = zip(program.inputs, program.sources, strict=True)
    types = [ir.tensor_type(value) for value, s in sources if isinstance(s, ir.UserInput)]
    values = _example(leaves)
    varying = [{i: Dim.DYNAMIC for i, n in enumerate(t.shape) if type(n) is not int} for t in types]
    module = to_fx(program)
    # Where all of it ran without gradients, so does the export: no operator has to say it then.
    stamps = [stamp_of(node) for leaf in leaves for node in leaf.nodes]
    with kernels_own_rules(), torch.set_grad_enabled(any(s.grad_enabled for s in stamps)):
        made = tuple(_zeros(torch_symbols.tensor_type_at(type_, values)) for type_ in types)
        try:
            exported = torch.export.export(module, made, dynamic_shapes=tuple(varying))
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise ExportError(f"torch.export cannot take this program: {reason}") from error
    if not values:  # a text does not hold the guards on sizes
        exported.graph_module.meta.setdefault("custom", {})[_RECORD] = {
            "text": text_to_compare(program),
            "graph": digest_of(exported.graph_module),
            "tensors": tensor_names(module),
            "leaves": tree.leaves if tree else [("output", i) for i in range(count)],
        }
    return exported


def _example(leaves: list[ir.Leaf]) -> torch_symbols.Values:
    """Returns a number for each symbol, such that all guards hold."""
    sized = [leaf.module for leaf in leaves if torch_symbols.symbols_of(leaf.module)]
    symbols = sorted({s for module in sized for s in torch_symbols.symbols_of(module)}, key=str)
    guards = [
        guard.expr for module in sized[:1] for guard in torch_symbols.environment_of(module).guards
    ]
    for least in (12, 16, 60, 2, 5040):
        values = torch_symbols.Values({symbol: least * (i + 1) for i, symbol in enumerate(symbols)})
        if all(torch_symbols.value_of(guard, values) for guard in guards):
            return values
    raise ExportError("to_exported found no example for the sizes that vary.")


def _zeros(type_: TensorType) -> torch.Tensor:
    size = max(reach(type_.shape, type_.stride), 0)
    flat = torch.zeros(size, dtype=type_.dtype, device=type_.device)
    return flat.as_strided(type_.shape, type_.stride)


def program_in(exported: ExportedProgram) -> tuple[ir.Program, Any] | None:
    """Returns the program that was exported, and the leaves of its result; None if unknown."""
    record = exported.graph_module.meta.get("custom", {}).get(_RECORD)
    if record is None or record["graph"] != digest_of(exported.graph_module):
        return None
    held = {**exported.constants, **exported.state_dict}
    try:
        read = parse_program(record["text"])
    except ParseError:  # of an operator that is a Python function of the user's
        return None
    program = with_tensors(read, [held[name] for name in record["tensors"]])
    for source, value in zip(program.sources, program.inputs, strict=True):
        if isinstance(source, ir.ModelTensor) and TensorType.of(source.tensor) != value.type:
            return None
    return program, tuple(map(tuple, record["leaves"]))

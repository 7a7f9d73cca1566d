"""Adapter: sizes that are expressions of symbols, in types and in graphs. Private names live here.

In a leaf captured with symbolic sizes each size is a :class:`SizeLiteral` in the operators'
arguments: no node computes a size, so a graph can be cut anywhere, and only tensors cross the cut.
To run a graph, sizes become numbers (:func:`module_at`), or are computed from inputs for the
symbols (:func:`with_size_inputs`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal

import sympy
import torch
import torch.fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import Source
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import map_aggregate, map_arg
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy import functions
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT, make_symbol

from ..errors import CaptureError
from ..torch_names import module_of
from .torch_fake_rules import errors_unlogged, kernels_own_rules
from .types import TensorType, Type, map_type


def computing_node(
    expression: Any, nodes: Mapping[Any, torch.fx.Node], graph: torch.fx.Graph
) -> Any:
    """Returns an expression's number, or its node, added to a graph; ``nodes`` are by symbol."""
    if isinstance(expression, int) or expression.is_number:
        return value_of(expression, Values())
    tracer = GraphAppendingTracer(graph)
    proxies = {symbol: torch.fx.Proxy(node, tracer) for symbol, node in nodes.items()}
    return sympy_interp(_AsPython, proxies, expression).node


def _rounding(function: Callable[..., Any]) -> Any:
    def rounded(x: Any, dtype: Any) -> Any:
        if not isinstance(x, torch.fx.Proxy):
            return function(x)
        return x.tracer.create_proxy("call_function", function, (x,), {})

    return staticmethod(rounded)


class _AsPython(PythonReferenceAnalysis):
    """Adds what PyTorch's analysis leaves to sympy: quotients of integers, rounding."""

    int_truediv = staticmethod(operator.truediv)
    floor_to_int, ceil_to_int = _rounding(math.floor), _rounding(math.ceil)
    trunc_to_int, round_to_int = _rounding(math.trunc), _rounding(round)


SIZE_TYPES: tuple[type, ...] = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Values(dict[Any, int]):
    """The number of each symbol; caches the values of expressions."""

    def __init__(self, numbers: Mapping[Any, int] | None = None) -> None:
        super().__init__(numbers or {})
        self.known: dict[Any, Any] = {}


class SizeLiteral:
    """A size in a graph, of the shape environment that the graph was captured with."""

    __slots__ = ("size",)

    def __init__(self, size: Any) -> None:
        self.size = size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SizeLiteral) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"size({str(self.size)!r})"

    @property
    def _key(self) -> Any:
        return type(self.size), expression_of(self.size)


class SizedInterpreter(torch.fx.Interpreter):
    """Runs a graph whose sizes are literals; by ``values`` if its tensors have other symbols."""

    values: Values | None = None

    def fetch_args_kwargs_from_env(
        self, n: torch.fx.Node
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a node's operands."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return map_aggregate(args, self._size), map_aggregate(kwargs, self._size)  # type: ignore[return-value]

    def _size(self, value: Any) -> Any:
        if self.values is None or not isinstance(value, SizeLiteral):
            return _size_of(value)
        return value_of(expression_of(value.size), self.values)


def _size_of(value: Any) -> Any:
    return value.size if isinstance(value, SizeLiteral) else value


def expression_of(size: Any) -> Any:
    """Returns a size as an expression of symbols, or as the number it is."""
    if not isinstance(size, SIZE_TYPES):
        return size
    return size.node.expr  # type: ignore[attr-defined]


def is_certain(relation: Any) -> bool:
    """Returns whether a comparison is known to hold for all sizes."""
    return bool(relation == True)  # noqa: E712  (one that is left open has no truth value)


def is_size(node: torch.fx.Node) -> bool:
    """Whether a node is a size, not a tensor."""
    return isinstance(node.meta.get("val"), SIZE_TYPES)


def value_of(expression: Any, values: Values) -> Any:
    """Returns the value of an expression, computed as Python would compute it on numbers."""
    if isinstance(expression, (bool, int, float)):
        return expression
    if expression not in values.known:
        values.known[expression] = _computed(expression, values)
    return values.known[expression]


def _computed(expression: Any, values: Values) -> Any:
    value = sympy_interp(_AsPython, values, expression)
    if isinstance(value, (bool, int, float, *SIZE_TYPES)):
        return value
    if value.is_Boolean:
        return bool(value)
    return int(value) if value.is_Integer else float(value)


def size_in(environment: Any, expression: Any) -> Any:
    """Returns an expression as a size that PyTorch computes with."""
    if isinstance(expression, int):
        return expression
    return environment.create_symintnode(expression, hint=None)


def environment_of(module: torch.fx.GraphModule) -> Any:
    """Returns the shape environment that a graph's sizes belong to; None if all are numbers."""
    for size in _occurring(module):
        return size.node.shape_env
    return None


def environment_of_tensor(tensor: torch.Tensor) -> Any:
    """Returns the shape environment of a tensor's sizes; None if all are numbers."""
    sizes: list[Any] = [n for n in tensor.shape if isinstance(n, SIZE_TYPES)]
    return sizes[0].node.shape_env if sizes else None


def symbols_of(module: torch.fx.GraphModule) -> list[Any]:
    """Returns the symbols in a graph's input shapes and size literals, in a fixed order."""
    found: set[Any] = set()
    for size in _occurring(module):
        found |= size.node.expr.free_symbols
    return sorted(found, key=str)


def has_sizes(module: torch.fx.GraphModule) -> bool:
    """Whether a graph's sizes belong to a shape environment, even if all are numbers by now."""
    return bool(_occurring(module))


def symbol_sizes(module: torch.fx.GraphModule) -> tuple[Any, ...]:
    """Returns the symbols of a graph as sizes, whose expressions follow what a trace settles."""
    environment = environment_of(module)
    return tuple(size_in(environment, symbol) for symbol in symbols_of(module))


def sizes_in(module: torch.fx.GraphModule) -> list[Any]:
    """Returns what a trace of the graph may ask for: each symbol, and each literal once."""
    found = _occurring(module)
    return [*symbol_sizes(module), *{id(size.node): size for size in found}.values()]


def _occurring(module: torch.fx.GraphModule) -> list[Any]:
    """Returns the symbolic sizes in a graph's input shapes, strides and arguments."""
    found: list[Any] = []

    def note(value: Any) -> Any:
        if isinstance(value, (SizeLiteral, *SIZE_TYPES)):
            found.append(_size_of(value))
        return value

    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            map_aggregate((*value.shape, *value.stride()), note)
        elif node.op == "call_function":
            map_aggregate((node.args, node.kwargs), note)
    return found


def sizes_as_literals(graph: torch.fx.Graph) -> None:
    """Replaces what computes sizes, inputs included, by literals in the arguments of its users."""
    # Backwards, so that a size has no user left when it is erased.
    for node in reversed(list(graph.nodes)):
        if is_size(node):
            for user in list(node.users):
                replace_operand(user, node, as_literal(node.meta["val"]))
            graph.erase_node(node)


def as_literal(size: Any) -> Any:
    """Returns a size as it stands in the operators' arguments: a literal, or a number."""
    if not isinstance(size, SIZE_TYPES):
        return size
    expression = expression_of(size)
    return value_of(expression, Values()) if expression.is_number else SizeLiteral(size)


def replace_operand(user: torch.fx.Node, old: torch.fx.Node, new: Any) -> None:
    """Replaces one node among a node's operands."""

    def swap(operand: torch.fx.Node) -> Any:
        return new if operand is old else operand

    user.args, user.kwargs = map_arg(user.args, swap), map_arg(user.kwargs, swap)


def module_at(module: torch.fx.GraphModule, values: Values) -> torch.fx.GraphModule:
    """Returns a graph with a number in place of each size."""
    return _with_sizes(module, lambda graph, size: value_of(expression_of(size), values))


def with_size_inputs(
    module: torch.fx.GraphModule, symbols: Sequence[Any], place: Literal["first", "last"]
) -> torch.fx.GraphModule:
    """Returns a graph that takes symbols as inputs, first or last, and computes its sizes."""
    environment = environment_of(module)
    inputs: dict[Any, torch.fx.Node] = {}
    made: dict[Any, Any] = {}

    def compute(graph: torch.fx.Graph, size: Any) -> Any:
        expression = expression_of(size)
        if expression not in made:
            made[expression] = _nodes_for(graph, expression, inputs)
        return made[expression]

    def entries(graph: torch.fx.Graph) -> None:
        for symbol in symbols:
            inputs[symbol] = graph.placeholder(f"size_{symbol}")
            inputs[symbol].meta["val"] = size_in(environment, symbol)

    return _with_sizes(module, compute, entries, place)


def _nodes_for(graph: torch.fx.Graph, expression: Any, inputs: Mapping[Any, torch.fx.Node]) -> Any:
    first = len(graph.nodes)
    result = computing_node(expression, inputs, graph)

    def value(operand: torch.fx.Node) -> Any:
        return operand.meta["val"]

    for node in list(graph.nodes)[first:]:
        args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    return result


def _with_sizes(
    module: torch.fx.GraphModule,
    number: Callable[[torch.fx.Graph, Any], Any],
    entries: Callable[[torch.fx.Graph], None] | None = None,
    place: Literal["first", "last"] = "first",
) -> torch.fx.GraphModule:
    """Copies a graph, each size replaced; ``entries`` adds inputs before or after the others."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    if entries is not None and place == "first":
        entries(graph)

    def swap(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return copies[value]
        return number(graph, value.size) if isinstance(value, SizeLiteral) else value

    waiting = entries if place == "last" else None
    for node in module.graph.nodes:
        if waiting is not None and node.op != "placeholder":
            waiting(graph)
            waiting = None
        if node.op == "call_function":
            args = tuple(map_aggregate(node.args, swap))
            kwargs = dict(map_aggregate(node.kwargs, swap))
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
            copies[node].meta.update(node.meta)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return module_of(graph, module)


def tensor_type_at(type_: TensorType, values: Values) -> TensorType:
    """Returns a tensor type with a number in place of each size."""
    if not type_.is_symbolic:
        return type_
    shape = tuple(value_of(n, values) for n in type_.shape)
    stride = tuple(value_of(n, values) for n in type_.stride)
    return TensorType(type_.dtype, shape, stride, type_.device)


def type_at(type_: Type, values: Values) -> Type:
    """Returns a type with a number in place of each size."""
    return map_type(type_, lambda one: tensor_type_at(one, values))


def refuse_inexact(module: torch.fx.GraphModule) -> None:
    """Raises CaptureError for a float size that symbols may compute in another order."""
    for size in _occurring(module):
        for part in sympy.preorder_traversal(size.node.expr):
            # Sums and products are reordered in expressions, which moves the last bit of floats.
            reordered = isinstance(part, (sympy.Add, sympy.Mul, sympy.Pow))
            if reordered and not all(a.is_integer for a in part.args):
                raise CaptureError(f"it computes {size.node.expr}, a float, from sizes")


class _Named(Source):
    """Names a symbol; PyTorch's own class for that imports Dynamo."""

    def __init__(self, name: str) -> None:
        self._named = name

    @property
    def _name_template(self) -> str:
        return self._named

    @property
    def name(self) -> Any:
        """The name."""
        return self._named


class SymbolTrace:
    """Symbols in a shape environment of its own, for operators that run for all shapes.

    ``values`` has a size that PyTorch computes with for each; the environment keeps the guards.
    """

    def __init__(self, examples: Values) -> None:
        self.environment = ShapeEnv()
        self.values, self._symbols = Values(), Values()
        for symbol, number in examples.items():
            source = _Named(f"size{len(self.values)}")
            own = self.environment.create_symbol(
                int(number), source, dynamic_dim=DimDynamic.DYNAMIC
            )
            self.values[symbol] = size_in(self.environment, own)
            self._symbols[own] = symbol

    def number(self, size: Any) -> Any:
        """Returns a size as an expression of the symbols that this was made for."""
        if not isinstance(size, SIZE_TYPES):
            return size
        # Expanded, so that it is the same after it is printed and parsed.
        found = sympy.expand(expression_of(size).xreplace(self._symbols))
        return value_of(found, Values()) if found.is_number else found

    def conditions(self) -> list[Any]:
        """Returns the guards, in the symbols that this was made for."""
        return [guard.expr.xreplace(self._symbols) for guard in self.environment.guards]


# ---- sizes read from text ------------------------------------------------------------------------


_TOO_LARGE = ("PowByNatural", "FloatPow", "LShift")  # a short text gives any number of digits
SIZE_FUNCTIONS = {
    name: function
    for name, function in vars(functions).items()
    if getattr(function, "is_Function", False) and name not in _TOO_LARGE
}
SIZE_FUNCTIONS |= {"Eq": sympy.Eq, "Ne": sympy.Ne}
"""Functions by which PyTorch computes and compares sizes, besides the operators of Python."""


def degree(size: Any) -> int:
    """Returns how many factors a power or a product has at most: its digits grow with them."""
    inner = list(map(degree, getattr(size, "args", ())))
    if isinstance(size, sympy.Pow):
        return inner[0] * abs(int(size.exp))
    return sum(inner) if isinstance(size, sympy.Mul) else max(inner, default=1)


class _NamedSymbols(ShapeEnv):
    """Gives a symbol the number that is in its name; PyTorch would use a hash of the name."""

    def _generate_unique_id(self, source_name: str) -> int:
        return int(source_name.removeprefix("s"))


class ReadSizes:
    """The sizes of programs that are read from text: each symbol is a size of at least two.

    Guards are evaluated with the examples, one for each symbol that is allowed. Without any, each
    symbol is allowed, with an example of its own. ``required`` are conditions that are assumed to
    hold.
    """

    def __init__(self, examples: Mapping[str, int] | None = None) -> None:
        self._examples = examples
        self._symbols: dict[str, Any] = {}
        self.required: list[Any] = []

    @property
    def examples(self) -> Mapping[str, int]:
        """The examples that it was made with."""
        return self._examples or {}

    @property
    def has_environment(self) -> bool:
        """Whether there is an environment, so that operators may have added guards."""
        return "environment" in vars(self)

    @cached_property
    def environment(self) -> Any:
        """Keeps the symbols, and operators' guards on them; the first one imports Dynamo."""
        made = _NamedSymbols(allow_dynamic_output_shape_ops=False, allow_scalar_outputs=False)
        for number, (name, symbol) in enumerate(self._symbols.items()):
            self._enter(made, number, name, symbol)
        for condition in self.required:
            made.evaluate_expr(condition)
        return made

    def _enter(self, environment: Any, number: int, name: str, symbol: Any) -> None:
        # An example that a view may divide, and that equals no other symbol's small multiple.
        example = 5040 * (101 + 2 * number) if self._examples is None else self._examples[name]
        dynamic = DimDynamic.DYNAMIC
        made = environment.create_symbol(example, _Named(name), dynamic_dim=dynamic)
        assert made == symbol, (made, symbol)

    @cached_property
    def _mode(self) -> FakeTensorMode:  # the first of a process imports Dynamo
        if not self._symbols:
            return FakeTensorMode()
        mode = FakeTensorMode(shape_env=self.environment, static_shapes=True)
        mode.cache_enabled = False  # it is hardly ever hit where sizes are symbols
        return mode

    def symbol(self, name: str) -> Any:
        """Returns the symbol of a name, such as ``s0``; raises KeyError if there is none."""
        if name not in self._symbols:
            if self._examples is not None and name not in self._examples:
                raise KeyError(name)
            if not self._symbols:
                vars(self).pop("_mode", None)  # so far all sizes were numbers
            made = make_symbol(SymT.SIZE, int(name[1:]), positive=True, integer=True)
            if self.has_environment:
                self._enter(self.environment, len(self._symbols), name, made)
            self._symbols[name] = made
        return self._symbols[name]

    def require(self, condition: Any) -> None:
        """Assumes from here on that a condition holds; ValueError if the examples break it."""
        examples = Values({self.symbol(name): number for name, number in self.examples.items()})
        if not value_of(condition, examples):
            raise ValueError(f"{condition} does not hold for the example sizes")
        self.required.append(condition)

    def are_equal(self, one: Any, other: Any) -> bool:
        """Whether two sizes are equal; with symbols the answer becomes a guard."""
        if isinstance(one, int) and isinstance(other, int):
            return one == other
        return bool(self.environment.evaluate_expr(sympy.Eq(one, other)))

    def literal(self, expression: Any) -> Any:
        """Returns a size in the form that an operator's operands have."""
        if isinstance(expression, int):
            return expression
        if expression.is_integer:
            return as_literal(size_in(self.environment, expression))
        return as_literal(self.environment.create_symfloatnode(expression, hint=None))

    def fake(self, type_: TensorType) -> torch.Tensor:
        """Returns a fake tensor of a type."""
        shape, stride = type_.shape, type_.stride
        if type_.is_symbolic:
            shape, stride = (
                tuple(size_in(self.environment, n) for n in part) for part in (shape, stride)
            )
        with self._mode:
            return torch.empty_strided(shape, stride, dtype=type_.dtype, device=type_.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs operators inside the context on fake tensors, whose sizes keep the symbols."""
        # Some operators read sizes as numbers in C++; PyTorch has these in Python, too.
        python = enable_python_dispatcher() if self._symbols else nullcontext()
        with self._mode, python, kernels_own_rules(), errors_unlogged():
            yield

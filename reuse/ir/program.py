"""The program: closures, calls on them, and the values that flow between.

Everything here is immutable and compared by identity; names are hints for the printer. A derived
form (a derivative, a kernel, a plan) is made once per closure and cached under the closure.

    Value       one result of a call, or one input
    Closure     a pure graph with explicit inputs and outputs; one of
      Leaf        an ATen graph (torch.fx)
      Composite   a program
      Pack/Unpack many values into one struct value, and back
    Call        applies a closure to values
    Program     inputs, calls in order, outputs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, Union

import torch
import torch.fx

from .types import StructType, TensorType, Type

if TYPE_CHECKING:
    import networkx


def input_nodes(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Returns the nodes of a graph's inputs, in order."""
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def outputs_of(module: torch.fx.GraphModule) -> list[Any]:
    """Returns a graph's outputs, flat."""
    outputs = module.graph.output_node().args[0]
    assert isinstance(outputs, (tuple, list))
    return list(outputs)


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """One value. ``hint`` is its preferred printed name."""

    type: Type
    hint: str = ""


Level: TypeAlias = Literal["composite", "aten"]
TensorKind: TypeAlias = Literal["parameter", "buffer", "attribute", "constant"]
RecomputeMark: TypeAlias = Literal["", "save", "full", "selective"]
Kernels: TypeAlias = Literal["backend", "compiled", "eager"]
"""Which kernels a leaf gets: those that the backend chooses, which may run a small leaf eagerly;
compiled ones, however small it is; or PyTorch's own."""


Run: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""A function that runs a closure on its operands."""


@dataclass(frozen=True, eq=False)
class Control:
    """A control-flow operator: chooses between closures, its bodies, or repeats one."""

    bodies: tuple[Composite, ...]
    word: ClassVar[str]  # its printed name

    @property
    def numbers(self) -> dict[str, int]:
        """The operator's integer settings, such as the number of steps, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "bodies"}

    def run(self, bodies: Sequence[Run], operands: Sequence[Any]) -> Sequence[Any]:
        """Runs the operator; ``bodies`` are functions that run its bodies."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Leaf:
    """A closure whose body is one ATen graph.

    The graph's placeholders are the inputs, flattened (a struct input gives one placeholder per
    tensor inside it); its output is a flat tuple, grouped by ``output_types`` in the same way.
    ``level`` is ``"composite"`` as captured (composite operators are whole, each node's stamp has
    its modes) and ``"aten"`` once differentiated or decomposed (plain ATen, ready for a backend).
    """

    name: str
    module: torch.fx.GraphModule
    input_types: tuple[Type, ...]
    output_types: tuple[Type, ...]
    input_names: tuple[str, ...] = ()
    level: Level = "composite"
    kernels: Kernels = "backend"

    @property
    def entries(self) -> list[torch.fx.Node]:
        """The graph's inputs, flat."""
        return input_nodes(self.module)

    @property
    def nodes(self) -> list[torch.fx.Node]:
        """The operator nodes (inputs and output left out)."""
        return [n for n in self.module.graph.nodes if n.op not in ("placeholder", "output")]

    @cached_property
    def num_nodes(self) -> int:
        """Operators in the body."""
        return len(self.nodes)

    @cached_property
    def first_target(self) -> Any:
        """The operator of the first node; None without one."""
        return next((n.target for n in self.module.graph.nodes if n.op == "call_function"), None)

    @cached_property
    def is_sum(self) -> bool:
        """Whether the leaf only adds its two inputs."""
        if self.num_nodes != 1 or self.first_target is not torch.ops.aten.add.Tensor:
            return False
        (node,) = self.nodes
        return [*node.args] == self.entries and not node.kwargs

    @property
    def control(self) -> Control | None:
        """The leaf's control-flow operator; None if it has none."""
        return self.first_target if isinstance(self.first_target, Control) else None

    @property
    def bodies(self) -> tuple[Composite, ...]:
        """The closures that its control-flow operator runs, if it has one."""
        return () if self.control is None else self.control.bodies

    def retyped(self, inputs: tuple[Type, ...], outputs: tuple[Type, ...]) -> Leaf:
        """Returns the same leaf for other types."""
        return replace(self, input_types=inputs, output_types=outputs)


@dataclass(frozen=True, eq=False)
class Composite:
    """A closure whose body is a program."""

    name: str
    program: Program
    input_names: tuple[str, ...] = ()

    @property
    def input_types(self) -> tuple[Type, ...]:
        """Types of the program's inputs."""
        return tuple(v.type for v in self.program.inputs)

    @property
    def output_types(self) -> tuple[Type, ...]:
        """Types of the program's outputs."""
        return tuple(v.type for v in self.program.outputs)

    @property
    def num_nodes(self) -> int:
        """Calls in the body."""
        return len(self.program.calls)


@dataclass(frozen=True, eq=False)
class Pack:
    """Makes one struct value of several values. Costs nothing at run time."""

    type: StructType
    name: str = "pack"
    num_nodes: int = 0

    @property
    def input_types(self) -> tuple[Type, ...]:
        """Types of the fields."""
        return self.type.fields

    @property
    def output_types(self) -> tuple[Type, ...]:
        """The struct type."""
        return (self.type,)


@dataclass(frozen=True, eq=False)
class Unpack:
    """Takes a struct value apart. Costs nothing at run time."""

    type: StructType
    name: str = "unpack"
    num_nodes: int = 0

    @property
    def input_types(self) -> tuple[Type, ...]:
        """The struct type."""
        return (self.type,)

    @property
    def output_types(self) -> tuple[Type, ...]:
        """Types of the fields."""
        return self.type.fields


Closure = Union[Leaf, Composite, Pack, Unpack]  # noqa: UP007


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """Applies ``closure`` to ``args``. ``path`` is the module path of the instance.

    ``recompute`` is what the user marked the instance with: ``"full"``, ``"selective"``,
    ``"save"``, or nothing.
    """

    closure: Closure
    args: tuple[Value, ...]
    results: tuple[Value, ...]
    path: str = ""
    recompute: RecomputeMark = ""


@dataclass(frozen=True, slots=True)
class UserInput:
    """A program input that the caller passes: a leaf of the flattened arguments.

    ``is_switched``: the forward itself sets ``requires_grad`` of this input.
    ``is_switched_back``: the forward also resets it before it returns.
    """

    index: int
    name: str
    requires_grad: bool = False
    is_switched: bool = False
    is_switched_back: bool = False


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A program input that is bound to a tensor of the model, by reference.

    ``name`` is its qualified name in ``state_dict`` where it has one.
    """

    name: str
    tensor: torch.Tensor = field(repr=False, compare=False)
    kind: TensorKind = "constant"

    def forgotten(self) -> ModelTensor:
        """Returns a copy that keeps nothing of the tensor but ``requires_grad``."""
        # A meta tensor has no memory: who keeps the copy does not keep the model's memory alive.
        stand_in = torch.empty(0, device="meta", requires_grad=self.tensor.requires_grad)
        return ModelTensor(self.name, stand_in, self.kind)


Source = Union[UserInput, ModelTensor]  # noqa: UP007


def wants_gradient(source: Source) -> bool:
    """Whether an input requires a gradient."""
    return source.tensor.requires_grad if isinstance(source, ModelTensor) else source.requires_grad


@dataclass(frozen=True, eq=False)
class Program:
    """Calls in execution order, between inputs and outputs.

    ``sources`` says where each input of a captured model's entry program comes from. ``writes``
    pairs an output with the input whose tensor it is copied into after a run (a buffer that the
    model's forward changes in place).
    """

    inputs: tuple[Value, ...]
    calls: tuple[Call, ...]
    outputs: tuple[Value, ...]
    sources: tuple[Source, ...] = ()
    writes: tuple[tuple[int, int], ...] = ()
    output_tree: Any = None

    @property
    def closures(self) -> tuple[Closure, ...]:
        """Every different closure reached, callees first, each once."""
        return tuple(count_calls(self))

    def num_nodes(self) -> int:
        """Counts graph nodes, each closure's body once."""
        return len(self.calls) + sum(c.num_nodes for c in self.closures)

    def num_nodes_if_inlined(self) -> int:
        """Counts graph nodes as if every call were inlined."""
        sizes = inlined_sizes(self)
        return sum(sizes[call.closure] for call in self.calls)

    def __str__(self) -> str:
        from .printer import format_program

        return format_program(self)

    def to_fx(self) -> torch.fx.GraphModule:
        """Returns the program as a module that runs by itself.

        Each closure is a submodule, called once per instance; the module owns the model's tensors.
        It takes the tensors among the model's arguments, and returns what the model returns.

        Raises:
            ExportError: if a symbolic size is not the size of an input.
        """
        from .fx_form import to_fx

        return to_fx(self)

    @staticmethod
    def from_fx(module: torch.fx.GraphModule) -> Program:
        """Returns the program of a module from :meth:`to_fx`, bound to the module's tensors.

        Raises:
            ExportError: if the module is another, or its graphs have changed: capture it then.
        """
        from .fx_form import from_fx

        return from_fx(module)

    def to_networkx(self) -> networkx.MultiDiGraph[Any]:
        """Returns the program's calls as a graph; ``graph.graph["closures"]`` has each closure's.

        A node is an input, a call (``closure``, ``path``) or an operator, each with its printed
        ``text``. An edge is an operand (``value``, ``type``, ``position``).
        """
        from .fx_form import to_networkx

        return to_networkx(self)

    @staticmethod
    def from_networkx(graph: networkx.MultiDiGraph[Any]) -> Program:
        """Returns the program of a graph from :meth:`to_networkx`, parsed from its texts.

        Raises:
            ParseError: names the line that is wrong.
        """
        from .fx_form import from_networkx

        return from_networkx(graph)

    def to_exported(self) -> torch.export.ExportedProgram:
        """Returns a captured program as a flat ``ExportedProgram``, which can be saved.

        It takes the tensors among the model's arguments; its state is the model's own tensors.
        ``lazyinline.from_exported`` gives the program back as it was.

        Raises:
            ExportError: if it holds control flow, or was not captured.
        """
        from .fx_form import to_exported

        return to_exported(self)


def walk_closures(program: Program) -> Iterator[Closure]:
    """Yields every different closure reached from a program, callees first, each once."""
    seen: set[Closure] = set()

    def visit(inner: Program) -> Iterator[Closure]:
        for call in inner.calls:
            if call.closure in seen:
                continue
            seen.add(call.closure)
            if isinstance(call.closure, Composite):
                yield from visit(call.closure.program)
            elif isinstance(call.closure, Leaf):
                for body in call.closure.bodies:
                    if body not in seen:
                        seen.add(body)
                        yield from visit(body.program)
                        yield body
            yield call.closure

    yield from visit(program)


def leaf_nodes(program: Program) -> Iterator[tuple[Leaf, torch.fx.Node]]:
    """Yields the operators of every different leaf of a program, each with its leaf."""
    for closure in walk_closures(program):
        if isinstance(closure, Leaf):
            yield from ((closure, node) for node in closure.nodes)


def count_calls(program: Program) -> Counter[Closure]:
    """Counts the call sites of each closure over all closure bodies, callees first."""
    # Zeros first, to keep the order of the walk: callees before callers.
    counts: Counter[Closure] = Counter(dict.fromkeys(walk_closures(program), 0))
    bodies = [program] + [c.program for c in counts if isinstance(c, Composite)]
    for body in bodies:
        for call in body.calls:
            counts[call.closure] += 1
    for leaf in counts:
        counts.update(leaf.bodies if isinstance(leaf, Leaf) else ())
    return counts


def inlined_sizes(program: Program) -> dict[Closure, int]:
    """Counts the operators of each closure, with every call in it inlined."""
    # Callees come first, so that each body is counted once, however often it is called.
    sizes: dict[Closure, int] = {}
    for closure in walk_closures(program):
        if isinstance(closure, Composite):
            sizes[closure] = sum(sizes[call.closure] for call in closure.program.calls)
        elif isinstance(closure, Leaf) and closure.bodies:
            sizes[closure] = sum(sizes[body] for body in closure.bodies)
        else:
            sizes[closure] = closure.num_nodes
    return sizes


def tensor_type(value: Value) -> TensorType:
    """Returns the type of a value that must be a tensor."""
    assert isinstance(value.type, TensorType)
    return value.type

"""The vocabulary of capture: keys of blocks and of calls, regions of the outer graph, decisions.

The key of a block is its class and the arguments of its constructor, as an instance shows them. An
argument shows where the instance, or a module inside it, holds something under the name of the
parameter (``self.heads = heads``). Nothing is recorded while a model is built, so instances made
before the mark have a key as well, and a value that was changed since counts as it is now. The key
only proposes which instances are alike: evidence decides. The signature of a call is what about its
arguments decides whether a closure fits.

A program has no values, but what Python computes from whole numbers among the inputs alone, such as
``int(batch.max())``, can be computed before it runs. The number stands in the program; the guard
asks again and compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
import torch.fx
from torch import nn

from ...reuse import torch_pytree
from ...reuse.errors import CaptureError
from ...reuse.evidence.evidence import Evidence
from ...reuse.evidence.module_state import module_state, walk_modules
from ...reuse.evidence.reads import Reads
from ...reuse.evidence.root_evidence import RootEvidence
from ...reuse.evidence.slots import SlotEvidence
from ...reuse.freeze import Freezer, Identity, describe
from ...reuse.ir.leaf import memory_of
from ...reuse.ir.operators import is_mutable, may_draw
from ...reuse.ir.program import Control, ModelTensor, Program, RecomputeMark, Source, UserInput
from ...reuse.ir.types import TensorType
from ...reuse.torch_names import memory_id, module_of
from ..tracing.torch_settings import Reading
from ..tracing.torch_tracing import made_of, untraced_numbers, written_by


@dataclass(frozen=True, eq=False)
class Question:
    """Holds a question that the forward asks of the inputs of a call.

    Attributes:
        source: the user's line.
        text: what is computed; equal for questions that are the same.
        answer: what it was when the forward was captured.
    """

    source: str
    text: str
    answer: int | bool
    _module: torch.fx.GraphModule
    _places: tuple[int, ...]

    @classmethod
    def of(
        cls,
        node: torch.fx.Node,
        sources: Mapping[torch.fx.Node, Source],
        tensors: Sequence[torch.Tensor],
        source: str,
    ) -> Question | None:
        """Returns the question for the value of a node; None if more than inputs decides it."""
        found = made_of(node)
        if not all(_is_asked(n, sources, found) for n in found):
            return None
        if _writes_inputs(node, sources, tensors):
            return None
        # Only what leads to the number: the rest of the trace needs the model, and takes longer.
        graph = torch.fx.Graph()
        places, copies = [], dict[torch.fx.Node, torch.fx.Node]()
        for n in (n for n in node.graph.nodes if n in found):
            given = sources.get(n)
            if isinstance(given, UserInput):
                copies[n] = graph.placeholder(f"input_{given.index}")
                places.append(given.index)
            else:
                copies[n] = graph.node_copy(n, copies.__getitem__)
        graph.output(copies[node])
        asked = tensors[places[0]]
        if any(tensors[i].is_meta or tensors[i].device != asked.device for i in places):
            return None
        question = cls(source, str(graph), 0, module_of(graph), tuple(places))
        with untraced_numbers():
            answer = question.ask(tensors)
        return cls(source, question.text, answer, question._module, question._places)

    def ask(self, tensors: Sequence[torch.Tensor]) -> int | bool:
        """Returns the answer for the tensors among the inputs of a call."""
        with torch.no_grad():
            answer: int | bool = self._module(*[tensors[i] for i in self._places]).item()
        return answer


def _is_asked(
    node: torch.fx.Node, sources: Mapping[torch.fx.Node, Source], found: Collection[torch.fx.Node]
) -> bool:
    """Whether a node is whole numbers of the inputs, or computed from such by PyTorch alone."""
    value = node.meta.get("val")
    is_whole = isinstance(value, torch.Tensor) and not (
        value.dtype.is_floating_point or value.dtype.is_complex
    )
    if not is_whole or node in sources:
        return is_whole and isinstance(sources[node], UserInput)
    is_own = getattr(node.target, "namespace", "") == "aten"
    is_plain = is_own and not is_mutable(node.target) and not may_draw(node.target)
    return is_plain and bool(node.all_input_nodes) and all(n in found for n in node.all_input_nodes)


def _writes_inputs(
    node: torch.fx.Node, sources: Mapping[torch.fx.Node, Source], tensors: Sequence[torch.Tensor]
) -> bool:
    """Whether the forward has changed one of its inputs so far, or a buffer that is one."""
    held = set(map(memory_id, tensors))
    inputs = {
        memory_of(n)
        for n, source in sources.items()
        if isinstance(source, UserInput) or memory_id(source.tensor) in held
    }
    written = (n for other in node.graph.nodes for n in written_by(other))
    return any(memory_of(n) in inputs for n in written)


# ---- Keys, regions, decisions --------------------------------------------------------------------


_MAX_DEPTH = 4
_MAX_TEXT = 40
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_UNKNOWN: Any = object()


@dataclass(frozen=True)
class InitArgument:
    """Holds one argument of a constructor.

    Attributes:
        name: of the parameter.
        text: the value as a person reads it.
        identity: what two equal arguments have in common: the text of a plain value, the identity
            of an object.
        is_default: whether it is what the constructor assumes.
    """

    name: str
    text: str
    identity: str | int
    is_default: bool = False

    def __str__(self) -> str:
        return f"{self.name}={self.text}"


@dataclass(frozen=True)
class InitKey:
    """A class and its constructor's arguments, as far as an instance shows them."""

    class_name: str
    arguments: tuple[InitArgument, ...] = ()

    def __str__(self) -> str:
        shown = [str(a) for a in self.arguments if not a.is_default]
        return f"{self.class_name}({', '.join(shown)})"

    def differing(self, other: InitKey) -> list[str]:
        """Returns the names of the arguments that another key of the class has otherwise."""
        mine, others = ({a.name: a.identity for a in k.arguments} for k in (self, other))
        return [n for n in {**mine, **others} if mine.get(n, n) != others.get(n, n)]

    def argument(self, name: str) -> InitArgument | None:
        """Returns the argument of a name, if the instance shows it."""
        return next((a for a in self.arguments if a.name == name), None)


NO_KEY = InitKey("")


def text_of_keys(keys: Sequence[InitKey]) -> str:
    """Writes keys of one class as one; an argument that varies shows its first and last value."""
    first, last = keys[0], keys[-1]
    varying = {name for key in keys for name in first.differing(key)}
    arguments = []
    for argument in first.arguments:
        end = last.argument(argument.name)
        if argument.name in varying and end is not None:
            arguments.append(f"{argument.name}={argument.text}..{end.text}")
        elif not argument.is_default:
            arguments.append(str(argument))
    return f"{first.class_name}({', '.join(arguments)})"


class InitKeys:
    """Reads the keys of instances; each class's constructor is looked at once."""

    def __init__(self) -> None:
        self._parameters: dict[type, Mapping[str, Any]] = {}

    def key(self, module: nn.Module) -> InitKey:
        """Returns the key of an instance."""
        cls = type(module)
        if cls not in self._parameters:
            self._parameters[cls] = _parameters(cls)
        found = []
        places = _near(module)
        for name, default in self._parameters[cls].items():
            # A parameter or a module is seldom what the argument of its name was (``bias=True``).
            held = (module_state(place).get(name, _UNKNOWN) for place in places)
            # Constructors hand arguments on: what the module does not hold, the nearest part may.
            value = next((v for v in held if v is not _UNKNOWN), _UNKNOWN)
            if value is not _UNKNOWN:
                described = _described(value)
                is_alike = type(value) is type(default) and described == _described(default)
                found.append(InitArgument(name, *described, value is default or is_alike))
        return InitKey(cls.__name__, tuple(found))


def _parameters(cls: type) -> Mapping[str, Any]:
    """Returns the parameters of a module class's constructor, with their defaults."""
    owner = next((base for base in cls.__mro__ if "__init__" in vars(base)), object)
    init = vars(owner).get("__init__")
    if owner in (nn.Module, object) or not inspect.isfunction(init):
        return {}
    try:
        parameters = list(inspect.signature(init).parameters.values())[1:]
    except (TypeError, ValueError):
        return {}
    return {
        p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }


def _near(module: nn.Module) -> list[nn.Module]:
    """Returns a module and those inside it, the nearest first."""
    places = ((path.count(".") + bool(path), one) for path, one in walk_modules(module))
    near = (place for place in places if place[0] <= _MAX_DEPTH)
    return [one for _, one in sorted(near, key=lambda place: place[0])]


def _described(value: Any) -> tuple[str, str | int]:
    """Returns how a value is shown, and what it has in common with an equal one."""
    if isinstance(value, (*_PLAIN, tuple, list)):
        text = repr(value)
        return (text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."), text
    # Two objects that look equal may not behave so: they have nothing in common.
    return getattr(value, "__name__", type(value).__name__), id(value)


class CrossingError(CaptureError):
    """A tensor crosses the boundary of a block in a way that a closure cannot express."""


@dataclass(eq=False)
class Region:
    """Holds a traced instance of a block, a part marked for recompute, or the model (the root).

    ``recompute`` is how the user wants it recomputed, if at all; ``init_key`` is the block's;
    ``alone`` says why no other instance can call its closure, from what it did as it ran.
    """

    module: nn.Module
    path: str
    name: str
    parent: Region | None = None
    items: list[torch.fx.Node | Region] = field(default_factory=list)
    reads: Reads = field(default_factory=Reads)
    inputs: list[torch.fx.Node] = field(default_factory=list)
    input_names: list[str] = field(default_factory=list)
    outputs: list[torch.fx.Node] = field(default_factory=list)
    num_calls: int = 1
    recompute: RecomputeMark = ""
    init_key: InitKey = NO_KEY
    alone: str = ""

    def nodes(self) -> list[torch.fx.Node]:
        """Returns all nodes of the region and of the regions inside it, in order."""
        found: list[torch.fx.Node] = []
        for item in self.items:
            found.extend(item.nodes() if isinstance(item, Region) else [item])
        return found

    def num_operators(self) -> int:
        """Counts the nodes, and in place of control flow the operators of its bodies."""
        nodes = self.nodes()
        targets: list[Any] = [node.target for node in nodes]
        bodies = [body for t in targets if isinstance(t, Control) for body in t.bodies]
        return len(nodes) + sum(body.program.num_nodes_if_inlined() for body in bodies)


class Sizes(Protocol):
    """The dynamic dimensions of one capture."""

    mode: Any

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a fake of an input."""

    def given(self, index: int, leaf: Any) -> Any:
        """Returns what the model is given in place of one of its flat inputs that is no tensor."""

    def settle(self, root: Region, sources: Any) -> None:
        """Rewrites a recorded run so that no size crosses from one region to another."""


def regions_inside(root: Region) -> Iterator[Region]:
    """Yields every region inside one, outer before inner."""
    for item in root.items:
        if isinstance(item, Region):
            yield item
            yield from regions_inside(item)


@dataclass(frozen=True)
class OutputLeaf:
    """Describes a leaf of a block's result: a new tensor, an input passed through, a constant."""

    kind: Literal["new", "input", "constant"]
    index: int = -1
    constant: Any = None
    type: TensorType | None = None
    requires_grad: bool = False
    alias_of: int = -1  # input whose storage a new tensor shares
    storage_offset: int = 0
    prototype: torch.Tensor | None = None


@dataclass(frozen=True)
class Template:
    """Holds what it takes to replace another instance by a call on a region's closure.

    Attributes:
        written: the operands of the call, by position, that it changes in place.
        grown: those of them that are then functions of what requires grad.
    """

    region: Region
    evidence: Evidence
    bindings: tuple[tuple[str, Any], ...]
    output_leaves: tuple[OutputLeaf, ...]
    output_spec: torch_pytree.TreeSpec
    written: tuple[int, ...] = ()
    grown: tuple[int, ...] = ()
    slots: SlotEvidence | None = None


@dataclass(frozen=True)
class CallSite:
    """A call node's meaning: the region whose closure it calls, the instance's path and mark."""

    region: Region
    path: str
    recompute: RecomputeMark = ""


@dataclass(frozen=True)
class SharingDecision:
    """Whether the Python of one instance ran, for the report.

    Attributes:
        path: where the instance sits in the model.
        class_name: of the block.
        shared: whether it became a call without its Python being run.
        reason: why it was traced although an earlier instance was known.
        compared_with: path of that instance, or of the one whose closure it calls.
        key: its class and the arguments of its constructor.
        shares: how it shares a closure all the same, its graph being equal up to constants.
    """

    path: str
    class_name: str
    shared: bool
    reason: str = ""
    compared_with: str = ""
    shares: str = ""
    key: InitKey = NO_KEY


@dataclass(frozen=True)
class ModeChoice:
    """Names the mode in which a derivative that the forward takes is computed, for the report.

    Attributes:
        what: the derivative, in words.
        source: the user's line.
        mode: ``"taylor"``, ``"forward"`` or ``"reverse"``.
        why: that mode.
    """

    what: str
    source: str
    mode: str
    why: str

    def __str__(self) -> str:
        return f"{self.what} at {self.source}: {self.mode} mode, {self.why}"


@dataclass
class CapturedModel:
    """A captured program and what was decided on the way."""

    program: Program
    decisions: list[SharingDecision]
    evidence: RootEvidence
    """The reads of the model's Python, which the guard compares."""
    modules: list[nn.Module]
    """The modules outside the model's tree that it read."""
    readings: Mapping[Reading, Any]
    """Settings and registries that it asked for, and the answers: the guard asks again."""
    sizes: Any = None
    """The dynamic sizes it was captured with, if any."""
    modes: Sequence[ModeChoice] = ()
    """The modes of derivatives in the forward, where the user left them open."""
    questions: Sequence[Question] = ()
    """The numbers that the forward asked of its inputs: the guard asks again."""
    left_out: Sequence[str] = ()
    """Where the forward left what no run leaves there."""

    def without_tensors(self) -> CapturedModel:
        """Returns the same without the model's tensors, which a guard holds as long as they fit."""
        sources = tuple(
            s.forgotten() if isinstance(s, ModelTensor) else s for s in self.program.sources
        )
        return replace(self, program=replace(self.program, sources=sources))


DIFFERENTIATED = "differentiated"
"""Key in ``meta`` of a node that a gradient is taken with respect to in the forward."""


def shared_call(*operands: Any) -> Any:
    """Target of call nodes in the outer graph. Never run."""
    raise AssertionError("a call node of the outer graph was executed")


# ---- calls: arguments by name, and what is compared of them ------------------------------------


CallKey = tuple[type, torch_pytree.TreeSpec, "CallSignature", Any, tuple[tuple[str, str], ...]]
"""Equal for two calls that may share: class, nesting, signature, modes, marks inside."""

_PLAIN_TYPES = (bool, int, str, type(None))


class CallSignature:
    """Compares the arguments of calls in full: layouts, shared memory, and all other values.

    Args:
        module: the block called.
        leaves: its flattened arguments; tensors are fake.
        own_fakes: ``id(fake) -> id(real tensor)`` of the model's tensors, to notice an argument
            that is one of the block's own tensors.
    """

    __slots__ = ("_rows",)

    def __init__(
        self, module: nn.Module, leaves: Sequence[Any], own_fakes: Mapping[int, int]
    ) -> None:
        places: list[tuple[str, nn.Module]] = []
        freezer: Freezer | None = None
        rows: list[Any] = []
        if any(id(leaf) in own_fakes for leaf in leaves):
            places = walk_modules(module)
            # A tensor of the block's own among its arguments has two ways into it.
            rows = _own_tensors(places, leaves, own_fakes)
        seen: dict[int, int] = {}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                # What a write in the block reaches depends on which arguments share memory.
                memory = seen.setdefault(memory_id(leaf), len(seen))
                same = seen.setdefault(id(leaf), len(seen))
                offset = leaf.storage_offset()
                rows.append((TensorType.of(leaf), leaf.requires_grad, memory, same, offset))
            elif type(leaf) in _PLAIN_TYPES:
                rows.append((type(leaf), leaf))
            elif torch_pytree.is_container(leaf):  # what is read in it is compared apart
                rows.append((type(leaf), seen.setdefault(id(leaf), len(seen))))
            else:
                places = places or walk_modules(module)
                freezer = freezer or Freezer({id(m): p for p, m in places})
                rows.append(freezer.freeze(leaf))
        self._rows = rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallSignature) and self._rows == other._rows

    def __hash__(self) -> int:
        # Rows may hold what has no hash, and few calls are kept of a block.
        return len(self._rows)

    def difference(self, other: CallSignature, names: Sequence[str]) -> str:
        """Says which argument another call passes in another way; ``names`` are of the leaves."""
        rows, others = (x._rows[len(x._rows) - len(names) :] for x in (self, other))
        if len(rows) != len(others):
            return ""
        for name, row, earlier in zip(names, rows, others, strict=True):
            if row != earlier:
                return (
                    f"argument {name} is {_row_text(row, earlier)}, not {_row_text(earlier, row)}"
                )
        return ""


def _row_text(row: Any, other: Any) -> str:
    """Describes one argument, as far as is needed to tell it from the other."""
    if not (isinstance(row, tuple) and row and isinstance(row[0], TensorType)):
        return describe(row)
    facts = [str(row[0])]
    if isinstance(other, tuple) and len(other) == len(row) and row[0] == other[0]:
        if row[1] != other[1]:
            facts.append("that requires grad" if row[1] else "without grad")
        if row[2:] != other[2:]:
            facts.append("in memory shared in another way")
    return " ".join(facts)


def _own_tensors(
    places: Sequence[tuple[str, nn.Module]], leaves: Sequence[Any], own_fakes: Mapping[int, int]
) -> list[Any]:
    positions = {own_fakes.get(id(leaf)): i for i, leaf in enumerate(leaves)}
    rows: list[Any] = []
    for path, inner in places:
        state = module_state(inner)
        for name, tensor in (*state["_parameters"].items(), *state["_buffers"].items()):
            position = positions.get(id(tensor))
            if position is not None:
                rows.append(("own tensor", path, name, position))
    return rows


def freeze_arguments(leaves: Sequence[Any], tree: torch_pytree.TreeSpec) -> Any:
    """Freezes a call's flat arguments, to notice that the call changed one of them."""

    def frozen(leaf: Any) -> Any:
        apart = isinstance(leaf, torch.Tensor) or torch_pytree.is_container(leaf)
        return Identity(leaf) if apart else Freezer().freeze(leaf)

    return list(map(frozen, leaves)), tree


def argument_names(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Names the flat arguments of a call after forward's parameters, in the order of these."""
    arguments = bind_arguments(forward_signature(model), args, kwargs)
    named: dict[int, list[str]] = {}
    for name, leaf in torch_pytree.flatten_with_names(arguments):
        named.setdefault(id(leaf), []).append(name)
    leaves = torch_pytree.flatten((tuple(args), dict(kwargs)))[0]
    # One object may be given under several names: each place takes the next.
    return [named[id(leaf)].pop(0) if named.get(id(leaf)) else "" for leaf in leaves]


def bind_arguments(
    signature: inspect.Signature | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a call's arguments by name, defaults applied."""
    try:
        bound = None if signature is None else signature.bind(*args, **kwargs)
    except TypeError:
        bound = None
    if bound is None:
        return {"args": list(args), "kwargs": dict(kwargs)}
    bound.apply_defaults()
    return dict(bound.arguments)


def forward_signature(module: nn.Module) -> inspect.Signature | None:
    """Returns the signature of a module's forward, or None if it has none that can be read."""
    own = module_state(module).get("forward")
    forward = own if own is not None else type(module).forward.__get__(module)
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def shapes_of(leaves: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of flat inputs; of a whole number itself, of others nothing."""
    return tuple(
        tuple(x.shape) if isinstance(x, torch.Tensor) else (x,) if type(x) is int else ()
        for x in leaves
    )

"""Data types of capture: questions to inputs, keys of blocks and calls, regions, decisions.

The key of a block is its class and its constructor's arguments. Nothing is recorded while a model
is built: an argument is read back from an attribute of the same name (``self.heads = heads``) of
the instance or a module inside it, as it is now. The key only proposes which instances are alike;
evidence decides. The signature of a call has all properties of its arguments that decide whether a
closure fits.

A trace has no values, but a number that Python reads from integer inputs alone, such as
``int(batch.max())``, can be computed before the program runs. The program contains the number, and
the guard computes it again at each call and compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.fx
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

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
from ...reuse.once import once
from ...reuse.torch_names import memory_id, module_of
from ..tracing.torch_state import Reading, why_no_memory
from ..tracing.torch_tracing import made_of, untraced_numbers, written_by
from .outside_tensors import OutsideTensors


@dataclass(frozen=True, eq=False)
class Question:
    """A number that the forward reads from its inputs at a line of the user's, ``source``.

    Equal questions have equal texts, the computation; ``answer`` is the number at capture.
    """

    source: str
    text: str
    answer: int | bool
    _module: GraphModule
    _places: tuple[int, ...]

    @classmethod
    def of(
        cls,
        node: Node,
        sources: Mapping[Node, Source],
        tensors: Sequence[Tensor],
        source: str,
    ) -> Question | None:
        """Returns the question for a node's value; None if it depends on more than the inputs."""
        found = made_of(node)
        if not all(_is_asked(n, sources, found) for n in found):
            return None
        if _writes_inputs(node, sources, tensors):
            return None
        # Only the nodes that lead to the number: others need the model, and take longer.
        graph = Graph()
        places, copies = [], dict[Node, Node]()
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
            return replace(question, answer=question.ask(tensors))

    def ask(self, tensors: Sequence[Tensor]) -> int | bool:
        """Returns the answer for the tensor inputs of a call."""
        with torch.no_grad():
            answer: int | bool = self._module(*[tensors[i] for i in self._places]).item()
        return answer


def _is_asked(node: Node, sources: Mapping[Node, Source], found: Collection[Node]) -> bool:
    """Whether a node is an integer input, or computed from such by ATen operators alone."""
    value = node.meta.get("val")
    is_whole = isinstance(value, Tensor) and not (
        value.dtype.is_floating_point or value.dtype.is_complex
    )
    if not is_whole or node in sources:
        return is_whole and isinstance(sources[node], UserInput)
    is_own = getattr(node.target, "namespace", "") == "aten"
    is_plain = is_own and not is_mutable(node.target) and not may_draw(node.target)
    return is_plain and bool(node.all_input_nodes) and all(n in found for n in node.all_input_nodes)


def _writes_inputs(node: Node, sources: Mapping[Node, Source], tensors: Sequence[Tensor]) -> bool:
    """Whether the forward has changed an input so far, or a buffer that shares memory with one."""
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


class InitArgument(NamedTuple):
    """One argument of a constructor."""

    text: str  # for people
    identity: str | int  # equal for equal arguments: the text of plain values, ``id`` of objects
    is_default: bool


@dataclass(frozen=True)
class InitKey:
    """A class and its constructor's arguments by name, as far as an instance has them."""

    class_name: str
    arguments: Mapping[str, InitArgument] = field(default_factory=dict)

    def __str__(self) -> str:
        return text_of_keys([self])

    def differing(self, other: InitKey) -> list[str]:
        """Returns the names of the arguments that differ in another key of the class."""
        mine, others = ({n: a.identity for n, a in k.arguments.items()} for k in (self, other))
        return [n for n in {**mine, **others} if mine.get(n, n) != others.get(n, n)]


NO_KEY = InitKey("")


def text_of_keys(keys: Sequence[InitKey]) -> str:
    """Formats keys of one class as one; an argument that varies shows its first and last value."""
    first, ends = keys[0], keys[-1].arguments
    varying = {name for key in keys for name in first.differing(key)} & ends.keys()
    shown = [
        f"{name}={one.text}..{ends[name].text}" if name in varying else f"{name}={one.text}"
        for name, one in first.arguments.items()
        if name in varying or not one.is_default
    ]
    return f"{first.class_name}({', '.join(shown)})"


class InitKeys:
    """Reads the keys of instances; inspects each class's constructor once."""

    def key(self, module: nn.Module) -> InitKey:
        """Returns the key of an instance."""
        found, places = dict[str, InitArgument](), _near(module)
        for name, default in self._parameters(type(module)).items():
            # Only plain attributes: a parameter ``bias`` is not the argument ``bias=True``.
            held = (module_state(place).get(name, _UNKNOWN) for place in places)
            # Constructors pass arguments on, so an attribute of the nearest sub-module counts too.
            value = next((v for v in held if v is not _UNKNOWN), _UNKNOWN)
            if value is not _UNKNOWN:
                described = _described(value)
                is_alike = type(value) is type(default) and described == _described(default)
                found[name] = InitArgument(*described, value is default or is_alike)
        return InitKey(type(module).__name__, found)

    @once
    def _parameters(self, cls: type) -> Mapping[str, Any]:
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
    """Returns a module and its sub-modules, the nearest first."""
    places = ((path.count(".") + bool(path), one) for path, one in walk_modules(module))
    near = (place for place in places if place[0] <= _MAX_DEPTH)
    return [one for _, one in sorted(near, key=lambda place: place[0])]


def _described(value: Any) -> tuple[str, str | int]:
    """Returns the text and the identity of a value (see ``InitArgument``)."""
    if isinstance(value, (*_PLAIN, tuple, list)):
        text = repr(value)
        return (text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."), text
    # Objects that look equal may behave differently, so each equals only itself.
    return getattr(value, "__name__", type(value).__name__), id(value)


class CrossingError(CaptureError):
    """A tensor crosses the boundary of a block in a way that a closure cannot express."""


@dataclass(eq=False)
class Region:
    """The nodes of a traced block, of a part marked for recompute, or of the model (the root).

    ``recompute`` is the user's recompute mark; ``init_key`` is the block's key; ``alone`` is the
    reason, found while it ran, why no other instance can call its closure.
    """

    module: nn.Module
    path: str
    name: str
    parent: Region | None = None
    items: list[Node | Region] = field(default_factory=list)
    reads: Reads = field(default_factory=Reads)
    inputs: list[Node] = field(default_factory=list)
    input_names: list[str] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    num_calls: int = 1
    recompute: RecomputeMark = ""
    init_key: InitKey = NO_KEY
    alone: str = ""

    def nodes(self) -> list[Node]:
        """Returns all nodes of the region and of the regions inside it, in order."""
        found: list[Node] = []
        for item in self.items:
            found.extend(item.nodes() if isinstance(item, Region) else [item])
        return found

    def num_operators(self) -> int:
        """Counts the nodes, including those in bodies of control flow."""
        nodes = self.nodes()
        targets: list[Any] = [node.target for node in nodes]
        bodies = [body for t in targets if isinstance(t, Control) for body in t.bodies]
        return len(nodes) + sum(body.program.num_nodes_if_inlined() for body in bodies)


Sizes: TypeAlias = Any
"""The dynamic dimensions of one capture: a :class:`..sizes.torch_input_sizes.TracedSizes`."""


def regions_inside(root: Region) -> Iterator[Region]:
    """Yields every region inside one, outer before inner."""
    for item in root.items:
        if isinstance(item, Region):
            yield item
            yield from regions_inside(item)


@dataclass(frozen=True)
class OutputLeaf:
    """A leaf of a block's result: a new tensor, an input passed through, or a constant."""

    kind: Literal["new", "input", "constant"]
    index: int = -1
    constant: Any = None
    type: TensorType | None = None
    requires_grad: bool = False


@dataclass(frozen=True)
class Template:
    """Replaces another instance by a call of a region's closure."""

    region: Region
    evidence: Evidence  # what another instance must agree with
    bindings: tuple[tuple[str, Any], ...]  # for each operand, where an instance finds it
    output_leaves: tuple[OutputLeaf, ...]
    output_spec: torch_pytree.TreeSpec
    written: tuple[int, ...] = ()  # the positions of operands that the block changes in-place
    grown: tuple[int, ...] = ()  # those of them that require grad after the call
    slots: SlotEvidence | None = None  # what the block reads and writes in objects that it is given


@dataclass(frozen=True)
class CallSite:
    """The target of a call node: a region's closure, for the instance at a path, with its mark."""

    region: Region
    path: str
    recompute: RecomputeMark = ""


@dataclass(frozen=True)
class SharingDecision:
    """Whether one instance shared a closure, for the report."""

    path: str  # the path of the instance in the model
    class_name: str  # the class of the block
    shared: bool  # whether it became a call without running its Python
    reason: str = ""  # why it was traced although an earlier instance was known
    compared_with: str = ""  # the path of that instance, or of the one whose closure it calls
    shares: str = ""  # how a traced instance shares a closure after all, with constants as inputs
    key: InitKey = NO_KEY  # its class and its constructor's arguments


@dataclass(frozen=True)
class ModeChoice:
    """The mode (``"taylor"``, ``"forward"``, ``"reverse"``) of a derivative in the forward."""

    what: str
    source: str
    mode: str
    why: str

    def __str__(self) -> str:
        return f"{self.what} at {self.source}: {self.mode} mode, {self.why}"


@dataclass
class CapturedModel:
    """A captured program, with what guards and reports need to know of its capture."""

    program: Program
    decisions: list[SharingDecision]
    evidence: RootEvidence  # the reads of the model's Python; the guard compares them at each call
    modules: list[nn.Module]  # the modules outside the model's tree that it read
    readings: Mapping[Reading, Any]
    """The settings that it read, with their values; the guard reads them again."""
    sizes: Any = None  # the dynamic sizes it was captured with, if any
    modes: Sequence[ModeChoice] = ()
    """The chosen modes of derivatives in the forward, where the user left the mode open."""
    questions: Sequence[Question] = ()
    """The numbers that the forward read from its inputs; the guard computes them again."""
    left_out: Sequence[str] = ()
    """Places that the forward writes to, and a run of the program does not."""

    def without_tensors(self) -> CapturedModel:
        """Returns the captured model without references to its tensors, which the guard holds."""
        sources = tuple(
            s.forgotten() if isinstance(s, ModelTensor) else s for s in self.program.sources
        )
        return replace(self, program=replace(self.program, sources=sources))


DIFFERENTIATED = "differentiated"
"""Key in the ``meta`` of a node by which the forward differentiates."""


def shared_call(*operands: Any) -> Any:
    """Target of call nodes in the outer graph. Never run."""
    raise AssertionError("a call node of the outer graph was executed")


# ---- calls: arguments by name, and how they are compared ---------------------------------------


CallKey = tuple[type, torch_pytree.TreeSpec, "CallSignature", Any, tuple[tuple[str, str], ...]]
"""Equal for calls that may share: class, tree structure, signature, modes, recompute marks."""

_PLAIN_TYPES = (bool, int, str, type(None))


class CallSignature:
    """Compares the arguments of calls in full: layouts, shared memory, and all other values.

    With ``outside``, the model's tensors and their fakes, it notices an argument that is one of the
    block's own tensors or shares memory with one.
    """

    __slots__ = ("_rows",)

    def __init__(self, module: nn.Module, leaves: Sequence[Any], outside: OutsideTensors) -> None:
        places: list[tuple[str, nn.Module]] = []
        freezer: Freezer | None = None
        rows: list[Any] = []
        memories = [memory_id(x) if isinstance(x, Tensor) else None for x in leaves]
        if not outside.memories.keys().isdisjoint(memories):
            places = walk_modules(module)
            # An argument that is also the block's own tensor reaches the block in two ways.
            rows = _own_tensors(places, leaves, memories, outside)
        seen: dict[int, int] = {}
        begins: dict[int | None, int] = {}  # where the first argument of a memory begins
        for leaf, memory in zip(leaves, memories, strict=True):
            if memory is not None:
                # Which arguments share memory decides what an in-place write changes. Where in that
                # memory they lie does not: a forward that asks for it is refused.
                same = seen.setdefault(id(leaf), len(seen))
                offset = leaf.storage_offset()
                apart = offset - begins.setdefault(memory, offset)
                number = seen.setdefault(memory, len(seen))
                rows.append((TensorType.of(leaf), leaf.requires_grad, number, same, apart))
            elif type(leaf) in _PLAIN_TYPES:
                rows.append((type(leaf), leaf))
            elif torch_pytree.is_container(leaf):  # its contents are compared by ``slots``
                rows.append((type(leaf), seen.setdefault(id(leaf), len(seen))))
            else:
                places = places or walk_modules(module)
                freezer = freezer or Freezer({id(m): p for p, m in places})
                rows.append(freezer.freeze(leaf))
        self._rows = rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallSignature) and self._rows == other._rows

    def __hash__(self) -> int:
        # Rows may contain unhashable values, and a block has few different calls.
        return len(self._rows)

    def difference(self, other: CallSignature, names: Sequence[str]) -> str:
        """Says which argument differs in another call; ``names`` are the names of the leaves."""
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
    """Describes one argument, with the properties in which it differs from the other."""
    if not (isinstance(row, tuple) and row and isinstance(row[0], TensorType)):
        return describe(row)
    facts = [str(row[0])]
    if isinstance(other, tuple) and len(other) == len(row) and facts[0] == str(other[0]):
        if row[0] != other[0]:
            facts.append(f"of strides {row[0].stride} on {row[0].device}")
        if row[1] != other[1]:
            facts.append("that requires grad" if row[1] else "without grad")
        if row[2:] != other[2:]:
            facts.append("in memory shared in another way")
    return " ".join(facts)


def _own_tensors(
    places: Sequence[tuple[str, nn.Module]],
    leaves: Sequence[Any],
    memories: Sequence[int | None],
    outside: OutsideTensors,
) -> list[Any]:
    """Returns the block's tensors that share memory with an argument, and how."""
    held: dict[int, list[int]] = {}
    for position, memory in enumerate(memories):
        if memory in outside.memories:
            held.setdefault(outside.memories[memory], []).append(position)
    rows: list[Any] = []
    for path, inner in places:
        state = module_state(inner)
        for name, tensor in (*state["_parameters"].items(), *state["_buffers"].items()):
            if tensor is None or why_no_memory(tensor):
                continue
            for position in held.get(memory_id(tensor), ()):
                leaf = leaves[position]
                is_same = outside.real_ids.get(id(leaf)) == id(tensor)
                apart = tensor.storage_offset() - leaf.storage_offset()
                rows.append((path, name, position, is_same, apart))
    return rows


def freeze_arguments(leaves: Sequence[Any], tree: torch_pytree.TreeSpec) -> Any:
    """Freezes a call's flat arguments, to find out whether the call changed one of them."""

    def frozen(leaf: Any) -> Any:
        apart = isinstance(leaf, Tensor) or torch_pytree.is_container(leaf)
        return Identity(leaf) if apart else Freezer().freeze(leaf)

    return list(map(frozen, leaves)), tree


def argument_names(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Names the flat arguments of a call after the parameters of ``forward``."""
    arguments = bind_arguments(forward_signature(model), args, kwargs)
    named: dict[int, list[str]] = {}
    for name, leaf in torch_pytree.flatten_with_names(arguments):
        named.setdefault(id(leaf), []).append(name)
    leaves = torch_pytree.flatten((tuple(args), dict(kwargs)))[0]
    # One object may be passed under several names: each place takes the next name.
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
    """Returns the shape of each tensor input, ``(n,)`` for an int, ``()`` for anything else."""
    return tuple(
        tuple(x.shape) if isinstance(x, Tensor) else (x,) if type(x) is int else () for x in leaves
    )

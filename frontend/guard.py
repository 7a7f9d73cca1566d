"""The guard of a compiled program, and the programs of a module that are kept.

At each call, a guard compares the inputs and everything that the model's Python read during
capture: train/eval modes, attributes, sub-modules, and the tensors themselves. It first compares
identities in one flat table, which takes one to three microseconds per block if the model has not
changed. If that fails, it compares by value.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import nn

from ..reuse import torch_pytree
from ..reuse.evidence.module_state import module_state, walk_modules
from ..reuse.evidence.root_evidence import Check, CompareFacts, IdentityChecks
from ..reuse.freeze import same_value
from ..reuse.ir.program import ModelTensor
from ..reuse.ir.types import contiguous_stride
from ..reuse.kinds import is_library
from ..reuse.process import ProcessLock
from ..reuse.torch_names import global_hook_tables, is_lazy, memory_id
from .capture.regions import CapturedModel, argument_names, shapes_of
from .compile_record import alike
from .tracing.frames import warn_user
from .tracing.torch_state import Modes, TensorLayouts, have_own_memory

_HOOK_TABLES = tuple(
    name
    for name in nn.Module().__dict__
    if name.startswith(("_forward", "_backward")) and name.endswith("hooks")
)
_TABLES = frozenset({"_parameters", "_buffers", "_modules", *_HOOK_TABLES})
_MAX_TEXT = 40
_training_of = operator.itemgetter("training")


class Guard:
    """Decides whether a program fits a call, and holds the model's present tensors."""

    def __init__(
        self,
        model: nn.Module,
        captured: CapturedModel,
        leaves: Sequence[Any],
        tree: torch_pytree.TreeSpec,
        native: CompareFacts | None = None,
    ) -> None:
        self.tree = tree
        self._native = native
        self._set_inputs(leaves, list(map(_layout, leaves)))
        self._questions = captured.questions
        self.modes = Modes(captured.readings)
        self._modules = [*model.modules(), *captured.modules]
        self._states = [module_state(m) for m in self._modules]
        self._training = list(map(_training_of, self._states))
        self._evidence = captured.evidence
        for leaf in leaves:  # the contents of an argument object may change between calls
            self._evidence.contents.look_into(leaf)
        self._structure = self._structure_checks()
        self._same_structure = self._structure.function(native)
        places = _places(self._modules, captured.program.sources)
        self._place_tables = [table for found in places for table, _ in found]
        self._place_names = [name for found in places for _, name in found]
        self._owners = [i for i, found in enumerate(places) for _ in found]
        self._placed = self._present()
        # The model's tensors, in the order of the program's sources.
        self.tensors: list[torch.Tensor] = [table[name] for (table, name), *_ in places]
        # If a list or global also holds a tensor, it keeps the old one when the module's changes.
        held = enumerate(self.tensors)
        self._held_elsewhere = [(i, t) for i, t in held if self._evidence.contents.has_met(t)]
        self._layouts_of_tensors = TensorLayouts(self.tensors)
        # Tensors that code only read properties of, such as the shape.
        self._asked = [t for t in self._evidence.tensors if have_own_memory([t])]
        self._layouts_of_asked = TensorLayouts(self._asked)
        program = captured.program
        own = [i for i, source in enumerate(program.sources) if isinstance(source, ModelTensor)]
        # Which of the model's tensors the program writes, by position; -1 for a user input.
        self._written = [own.index(i) if i in own else -1 for _, i in program.writes]
        self._sharing = self._memories(leaves)
        self._memory: list[int] | None = None
        self.token = object()  # a new object whenever one of them was replaced or its memory moved
        self._lock = ProcessLock()
        self._unchanged = self._identity_checks()
        self._note_addresses()
        self._num_changes = 0

    def accepts(self, leaves: Sequence[Any], tree: torch_pytree.TreeSpec) -> bool:
        """Whether the program was compiled for these inputs and the model's present state."""
        fits = (
            self._match(leaves)
            and (tree is self.tree or tree == self.tree)
            and self._is_answered(leaves)
            and self.modes.hold()
            and (self._unchanged() or self._same_by_value())
            and self._evidence.contents.same()
            # A program with in-place writes is right only if the same tensors share memory.
            and self._memories(leaves) == self._sharing
        )
        if fits:
            self._note_addresses()
        return fits

    def _is_answered(self, leaves: Sequence[Any]) -> bool:
        """Whether the numbers that the forward read from its inputs are the same as at capture."""
        if not self._questions:
            return True
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        return all(question.ask(tensors) == question.answer for question in self._questions)

    def has_met(self, value: Any) -> bool:
        """Whether the model's Python read an object, or something that holds it."""
        return self._evidence.contents.has_met(value)

    @property
    def answers(self) -> tuple[int | bool, ...]:
        """The numbers read from inputs, which are constants of the program."""
        return tuple(question.answer for question in self._questions)

    def _note_addresses(self) -> None:
        """Notes the addresses of the model's tensors; makes a new token if they changed."""
        # ``.data = ...`` changes the address of the same object; programs are bound to addresses.
        memory = self._layouts_of_tensors.addresses(self.tensors)
        if memory != self._memory:
            self._memory, self.token = memory, object()

    def _structure_checks(self) -> IdentityChecks:
        """Makes checks of the modules: their classes, dicts, train modes, children and hooks."""
        checks = IdentityChecks()
        for module, state in zip(self._modules, self._states, strict=True):
            checks.held_in(module, type(module), state)
            for name in state.keys() & _TABLES:
                checks.entry(state, name, state[name])
            checks.entry(state, "training", state["training"])
            if "forward" in state:
                checks.entry(state, "forward", state["forward"])
            else:
                checks.absent(state, "forward")
            checks.values(state["_modules"])
        for kind in dict.fromkeys(map(type, self._modules)):
            for name in ("forward", "__call__"):
                checks.attribute(kind, name, getattr(kind, name))
            checks.bases(kind)
            # Users replace methods of PyTorch's layers. Reads of user classes are in the evidence.
            for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
                if is_library(base.__module__):
                    for name, method in vars(base).items():
                        if isinstance(method, FunctionType):
                            checks.entry(vars(base), name, method)
        tables = [state[name] for state in self._states for name in _HOOK_TABLES]
        for table in tables + global_hook_tables("forward") + global_hook_tables("backward"):
            checks.values(table)
        return checks

    def _identity_checks(self) -> Check:
        """Makes the check by identity: every object read is still the one that it is now."""
        checks = self._structure.copy()
        self._evidence.add_identity_checks(checks)
        for table, name in zip(self._place_tables, self._place_names, strict=True):
            checks.entry(table, name, table[name])
        tensors, layouts = self.tensors, self._layouts_of_tensors
        checks.holds(lambda: layouts.same(tensors))
        asked, layouts_of_asked = self._asked, self._layouts_of_asked
        if asked:
            checks.holds(lambda: layouts_of_asked.same(asked))
        return checks.function(self._native)

    def training_of(self, model: nn.Module) -> tuple[bool, list[str]]:
        """Returns whether the model was in train mode, and the paths of modules that differed."""
        names = [name for name, _ in model.named_modules()]
        first = next(i for i, one in enumerate(self._modules) if one is model)
        whole, *_ = modes = self._training[first:]  # a module that computes the loss may come first
        others = [n for n, mode in zip(names, modes, strict=False) if mode is not whole]
        return whole, others

    def is_bound_to_present(self) -> bool:
        """Whether the tensors that it holds are the model's present ones, at the same addresses."""
        if self._memory is None or not all(map(operator.is_, self._present(), self._placed)):
            return False
        return self._layouts_of_tensors.addresses(self.tensors) == self._memory

    def release(self) -> None:
        """Drops tensors that the model no longer has; the next call looks them up again."""
        with self._lock:
            self._unchanged, self._memory, self._num_changes = _not_checked, None, 0
            self._evidence.release()
            held = set(map(id, self._evidence.tensors))
            self._asked = [t for t in self._asked if id(t) in held]
            if not all(map(operator.is_, self._present(), self._placed)):
                self._placed, self.tensors = [None] * len(self._placed), []

    def _present(self) -> list[Any]:
        return list(map(dict.get, self._place_tables, self._place_names))

    def _same_by_value(self) -> bool:
        """Compares by value; if equal, adopts replaced tensors and learns the new identities."""
        # Locked: no other thread may use the identity checks while tensors are exchanged, and the
        # second comparison below finds values that another thread changed meanwhile.
        with self._lock:
            before, self._unchanged = self._unchanged, _not_checked
            if not self._same_values():
                self._unchanged = before
                return False
            self._num_changes += 1
            if self._num_changes.bit_count() == 1:  # less and less often, if every call differs
                learnt = self._identity_checks()
                if self._same_values() and learnt():
                    self._unchanged = learnt
            return True

    def _same_values(self) -> bool:
        return (
            self._same_structure()
            and self._evidence.still_holds()
            and have_own_memory(self._asked)
            and self._layouts_of_asked.same(self._asked)
            and self.rebind()
        )

    def differences(self, leaves: Sequence[Any], names: Sequence[str]) -> list[Difference]:
        """Says, for people, how a call and the present model differ from what the guard accepts."""
        found = [
            Difference(f"the argument {name}", _text(layout), _text(leaf))
            for name, leaf, layout in zip(names, leaves, self.layouts, strict=False)
            if not _matches(leaf, layout)
        ]
        if not found and not self._is_answered(leaves):
            lines = ", ".join(dict.fromkeys(q.source for q in self._questions))
            found.append(Difference(f"the numbers that are read from inputs at {lines}"))
        if not found and not self.modes.hold():
            found.append(Difference("grad mode, autocast or another mode"))
        if not found and list(map(_training_of, self._states)) != self._training:
            found.append(Difference("train and eval mode"))
        owners = {id(m.__dict__): path for path, m in walk_modules(self._modules[0])}
        for table, name, before, now in self._evidence.changed():
            if not found and id(table) in owners:
                path = owners[id(table)]
                what = f"the attribute {path}{'.' if path else ''}{name}"
                found.append(Difference(what, _shown(before), _shown(now)))
        if not found and not self._layouts_of_tensors.same(self.tensors):
            found.append(Difference("types, layouts or requires_grad of the model's tensors"))
        return found or [Difference("what the forward reads outside its arguments")]

    def resized(self, leaves: Sequence[Any]) -> Guard | None:
        """Returns the guard of a program for inputs that differ in sizes only, None for others."""
        if len(leaves) != len(self.layouts) or _repeated(leaves) != self.repeated:
            return None
        counting = torch_pytree.counting_leaves(self.tree)
        layouts = list(map(_layout, leaves))
        for index, (layout, own) in enumerate(zip(layouts, self.layouts, strict=True)):
            # An int by which a cache counts its entries is a size too.
            is_count = index in counting and _is_int(layout) and _is_int(own)
            if not (is_count or _alike(layout, own)):
                return None
        guard = copy.copy(self)
        guard._set_inputs(leaves, layouts)
        return guard

    def _set_inputs(self, leaves: Sequence[Any], layouts: list[Any]) -> None:
        # For each flat input, the properties of a tensor, or the value of anything else.
        self.layouts = layouts
        self.shapes = shapes_of(leaves)
        plain = [i for i, x in enumerate(leaves) if type(x) is torch.Tensor]
        self._plain_at = plain
        self.repeated = _repeated(leaves)  # which inputs are the same tensor; empty if all differ
        self._others_at = [i for i in range(len(leaves)) if i not in plain]
        self._plain_inputs = TensorLayouts([leaves[i] for i in plain])

    def _match(self, leaves: Sequence[Any]) -> bool:
        """Whether arguments have the layouts or values that the program was compiled for."""
        if len(leaves) != len(self.layouts) or _repeated(leaves) != self.repeated:
            return False
        layouts = self.layouts
        if self._plain_inputs.fast_same([leaves[i] for i in self._plain_at]):
            return all([_matches(leaves[i], layouts[i]) for i in self._others_at])
        return all(map(_matches, leaves, layouts))

    def _memories(self, leaves: Sequence[Any]) -> list[int]:
        """Returns which inputs share memory, if the program writes to any."""
        if not self._written:
            return []
        numbers: dict[int, int] = {}
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        tensors += [self.tensors[i] for i in self._written if i >= 0]
        return [numbers.setdefault(memory_id(t), len(numbers)) for t in tensors]

    def rebind(self) -> bool:
        """Adopts tensors that were replaced in the model; False if they do not fit."""
        placed, tensors = self._present(), self.tensors
        if not all(map(operator.is_, placed, self._placed)):
            by_owner = dict(zip(self._owners, placed, strict=True))
            tensors = cast(list[torch.Tensor], list(by_owner.values()))
            if any(by_owner[i] is not t for i, t in zip(self._owners, placed, strict=True)):
                return False  # a shared tensor is now two
            if len(set(map(id, tensors))) < len(tensors):
                return False  # two tensors are now one
            if any(tensors[i] is not t for i, t in self._held_elsewhere):
                return False  # the forward may have read the tensor that the other place holds
            if not all(isinstance(t, torch.Tensor) for t in tensors):
                return False
            if not have_own_memory(tensors):
                return False  # it may have no strides to compare
        if not self._layouts_of_tensors.same(tensors):
            return False
        if tensors is not self.tensors:
            self._memory = None
        self._placed, self.tensors = placed, tensors
        return True


def _not_checked() -> bool:
    """In place of the identity checks until they are made: always compare by value."""
    return False


def _repeated(leaves: Sequence[Any]) -> list[int]:
    """Returns which inputs are the same tensor; empty if all differ, as in most calls."""
    ids = [id(x) for x in leaves if isinstance(x, torch.Tensor)]
    return [ids.index(one) for one in ids] if len(set(ids)) < len(ids) else []


def _layout(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        layout = (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
        return (*layout, type(leaf), is_lazy(leaf))
    return Constant(leaf)


def _alike(layout: Any, other: Any) -> bool:
    """Whether two layouts are equal except for sizes and strides."""
    if isinstance(layout, Constant) or isinstance(other, Constant):
        both = isinstance(layout, Constant) and isinstance(other, Constant)
        return both and same_value(layout.value, other.value)
    return len(layout[0]) == len(other[0]) and layout[2:] == other[2:]


def _is_int(layout: Any) -> bool:
    return isinstance(layout, Constant) and type(layout.value) is int


@dataclass(frozen=True)
class Difference:
    """The difference between a call and a program, with both values if they can be shown."""

    what: str
    before: str = ""
    now: str = ""


def shown(leaves: Sequence[Any]) -> str:
    """Describes flat arguments, or their layouts."""
    return f"({', '.join(map(_text, leaves))})"


def _text(leaf: Any) -> str:
    """Describes an argument or its layout."""
    if isinstance(leaf, torch.Tensor):
        leaf = _layout(leaf)
    if isinstance(leaf, tuple) and leaf and isinstance(leaf[0], torch.Size):
        shape, stride, dtype, *_ = leaf
        strides = "" if stride == contiguous_stride(shape) else f" of strides {stride}"
        return f"{str(dtype).removeprefix('torch.')}{list(shape)}{strides}"
    return _shown(leaf.value if isinstance(leaf, Constant) else leaf)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


class Constant:
    """A non-tensor argument that the program was compiled for."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _matches(leaf: Any, layout: Any) -> bool:
    if isinstance(layout, Constant):
        return same_value(leaf, layout.value)
    return isinstance(leaf, torch.Tensor) and bool(_layout(leaf) == layout)


def _places(
    modules: Sequence[nn.Module], sources: Sequence[Any]
) -> list[list[tuple[dict[str, Any], str]]]:
    """Returns, for each tensor of the model, every dict entry that holds it."""
    tables: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in modules:
        for table in (module._parameters, module._buffers, module.__dict__):
            for name, tensor in table.items():
                if isinstance(tensor, torch.Tensor):
                    tables.setdefault(id(tensor), []).append((table, name))
    found = []
    for source in sources:
        if isinstance(source, ModelTensor):
            fixed: tuple[dict[str, Any], str] = ({"tensor": source.tensor}, "tensor")
            found.append(tables.get(id(source.tensor), [fixed]))
    return found


# ---- the programs that are kept ------------------------------------------------------------------


MAX_PROGRAMS = 32
"""The most programs of one module that are kept; others are compiled again when needed."""
MAX_LINKED = 256
"""The most linked shapes of symbolic programs that are kept; others are only linked again."""
MAX_WITH_ARENAS = 8  # how many of all these keep their arena while idle; others allocate one again
SMALL_ARENA = 256 * 1024
"""The most bytes of an arena that every program may keep, for many small shapes (text lengths)."""
MANY_COMPILES = 8
"""The number of compiles of one module at which a warning says what keeps changing."""

_MAX_NAMED = 3


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call, nested and flat; of a training step, its first micro-batch's.

    ``given`` are the arguments as passed, flat; they differ from ``leaves`` for a step only.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    leaves: list[Any]
    tree: torch_pytree.TreeSpec
    given: list[Any]

    @classmethod
    def of(
        cls, leaves: list[Any], tree: torch_pytree.TreeSpec, given: list[Any] | None = None
    ) -> Inputs:
        """Returns the inputs with these flat arguments; ``given`` are those of a whole batch."""
        args, kwargs = torch_pytree.unflatten(leaves, tree)
        return cls(args, kwargs, leaves, tree, leaves if given is None else given)


class CompiledRepeatedlyWarning(UserWarning):
    """A module was compiled many times because its calls keep differing."""


class Entry(Protocol):
    """One program and its guard."""

    guard: Guard
    can_be_linked_again: bool

    @property
    def is_small(self) -> bool:
        """Whether it holds little memory while idle."""

    def rest(self) -> None:
        """Frees the memory that it holds while idle."""


AnyEntry = TypeVar("AnyEntry", bound=Entry)


class KeptPrograms(Generic[AnyEntry]):
    """The programs of one module, the last used first."""

    def __init__(self) -> None:
        self._entries: tuple[AnyEntry, ...] = ()
        self._by_shapes: Mapping[Any, tuple[AnyEntry, ...]] = {}
        self._token: object = None
        self._num_compiles = self._num_dropped = 0
        self._differences: list[Difference] = []

    def __iter__(self) -> Iterator[AnyEntry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first(self) -> AnyEntry | None:
        """The program used last, if there is one."""
        return self._entries[0] if self._entries else None

    def fitting(self, leaves: Sequence[Any], tree: torch_pytree.TreeSpec) -> AnyEntry | None:
        """Returns the program that fits a call, and puts it first."""
        entries = self._entries
        if not have_own_memory(leaves):
            return None
        if len(entries) > 1:  # only those for these shapes can fit
            entries = self._by_shapes.get(shapes_of(leaves), ())
        for entry in entries:
            if entry.guard.accepts(leaves, tree):
                if entry is not self.first or entry.guard.token is not self._token:
                    self._put_first(entry)
                return entry
        return None

    def add(self, entry: AnyEntry) -> bool:
        """Puts a new program first; drops those that were not used for longest.

        Returns whether as many were dropped as are kept: then most of the compiler's results per
        closure are unused.
        """
        self._put_first(entry)
        linked = [e for e in self._entries if e.can_be_linked_again]
        others = [e for e in self._entries if not e.can_be_linked_again]
        surplus = {*map(id, linked[MAX_LINKED:]), *map(id, others[MAX_PROGRAMS:])}
        if surplus:
            self._entries = tuple(e for e in self._entries if id(e) not in surplus)
            groups = alike(self._entries, lambda entry: entry.guard.shapes)
            self._by_shapes = {group[0].guard.shapes: tuple(group) for group in groups}
        self._num_dropped += len(surplus)
        if self._num_dropped < MAX_PROGRAMS:
            return False
        self._num_dropped = 0
        return True

    def warn_if_many(self, model: nn.Module, inputs: Inputs) -> None:
        """Counts a compile; warns once, after many, what keeps changing from call to call."""
        self._num_compiles += 1
        if self._num_compiles > MANY_COMPILES:
            return
        if self._entries:
            names = argument_names(model, inputs.args, inputs.kwargs)
            self._differences += self._entries[0].guard.differences(inputs.leaves, names)
        if self._num_compiles == MANY_COMPILES:
            warn_user(
                f"{type(model).__name__} was compiled {MANY_COMPILES} times, since its calls "
                f"differ: {_summary(self._differences)}. The {MAX_PROGRAMS} programs used last "
                "are kept. Pass a number that keeps changing as a 0-d tensor, keep anything else "
                "the same, or pad sizes to a few.",
                CompiledRepeatedlyWarning,
            )

    def _put_first(self, entry: AnyEntry) -> None:
        rest = [other for other in self._entries if other is not entry]
        shapes = entry.guard.shapes
        alike = (other for other in self._by_shapes.get(shapes, ()) if other is not entry)
        # A new mapping, because other threads may be reading the old one.
        self._by_shapes = {**self._by_shapes, shapes: (entry, *alike)}
        self._entries, self._token = (entry, *rest), entry.guard.token
        for other in rest[MAX_WITH_ARENAS - 1 : MAX_WITH_ARENAS]:
            if not other.is_small:
                other.rest()
        for other in rest:
            guard = other.guard  # if tokens are equal, so are the tensors
            if guard.token is entry.guard.token or guard.is_bound_to_present():
                break  # older entries were checked when this one was used
            other.guard.release()
            other.rest()


def _summary(differences: Sequence[Difference]) -> str:
    """Lists what differed, most frequent first, with its values."""
    values: dict[str, dict[str, None]] = {}
    for difference in differences:
        shown = values.setdefault(difference.what, {})
        shown.update(dict.fromkeys(filter(None, (difference.before, difference.now))))
    counts = Counter(difference.what for difference in differences)
    texts = []
    for what, _ in counts.most_common(_MAX_NAMED):
        shown_values = ", ".join(values[what])
        texts.append(f"{what} ({shown_values})" if shown_values else what)
    return "; ".join(texts)

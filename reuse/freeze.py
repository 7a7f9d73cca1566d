"""Records what Python code read, to compare it later: frozen values, and snapshots of objects.

Sharing is decided by comparing frozen values, so two frozen values may be equal only if code that
reads the originals would behave the same. ``1``, ``True`` and ``1.0`` are different; arrays are
compared by content; an object of a Python-defined class by class and attributes; an iterator or a
random number generator is equal to nothing; anything else by identity. Never by ``str()`` or
``repr()``.

A snapshot tells whether the same objects still hold the same. Code also reads through objects, as
in ``self.config.scale`` or ``self.tables[0]``: what the objects in between hold is recorded when
they are first read, and compared item by item, by identity.
"""

from __future__ import annotations

import builtins
import enum
import operator
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import nn

from .errors import CaptureError, FinalCaptureError
from .kinds import (
    ABSENT,
    BUILTINS,
    FUNCTION,
    NO_WAY,
    WHOLE_FUNCTION,
    Kind,
    Way,
    attribute_parts,
    function_parts,
    has_plain_class,
    is_library,
    is_library_scope,
    is_looked_into,
    is_opaque,
    is_unrepeatable,
    is_whole,
    kinds_of,
    parts_of,
)
from .torch_names import OPERATOR_TYPES
from .torch_pytree import is_set_of_outputs

_MAX_DEPTH = 8
_MAX_ITEMS = 4096
_SCALARS = (bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size)
IMMUTABLE = (*_SCALARS, float, complex)
BY_IDENTITY = (
    type,
    types.ModuleType,
    types.CodeType,
    *OPERATOR_TYPES,
    torch.memory_format,
    torch.layout,
)


class Identity:
    """Compares equal only to the same object, which it keeps alive so that no address repeats."""

    __slots__ = ("target",)

    def __init__(self, target: object) -> None:
        self.target = target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.target is self.target

    def __hash__(self) -> int:
        return id(self.target)

    def __repr__(self) -> str:
        return f"<{type(self.target).__qualname__} object>"


class Unrepeatable:
    """An object that gives something else at each use, as an iterator; not even equal to itself."""

    __slots__ = ("target",)
    __hash__ = object.__hash__

    def __init__(self, target: object) -> None:
        self.target = target

    def __eq__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{type(self.target).__qualname__} object>"


class Freezer:
    """Freezes values as seen from one module tree.

    Args:
        module_paths: ``id(module) -> path`` of the tree; its modules freeze to their path, so
            that the same reference inside another tree compares equal.
        on_tensor: called with each tensor met and the keys that lead to it; returns its frozen
            form. Default: identity.
        by_identity: further classes whose objects freeze by identity, whatever they hold.
        max_items: how many objects freeze by content; further ones freeze by identity.
    """

    def __init__(
        self,
        module_paths: Mapping[int, str] | None = None,
        on_tensor: Callable[[torch.Tensor, tuple[Any, ...]], Any] | None = None,
        by_identity: tuple[type, ...] = (),
        max_items: int = _MAX_ITEMS,
    ) -> None:
        self._max_items = max_items
        self._by_identity = (enum.Enum, *BY_IDENTITY, *by_identity)
        self._module_paths = module_paths or {}
        self._on_tensor = on_tensor
        self._items = 0

    def freeze(self, value: Any, keys: tuple[Any, ...] = ()) -> Any:
        """Returns the frozen form of one value. ``keys`` says how the value was reached."""
        self._items = 0
        return self._freeze(value, keys, (), 0)

    def _freeze(self, value: Any, keys: tuple[Any, ...], above: tuple[int, ...], depth: int) -> Any:
        kind = type(value)
        # A metaclass may call different classes equal: then only the object itself compares.
        if not has_plain_class(value):
            return Identity(value)
        if kind in _SCALARS:
            return (kind, value)
        # ``hex`` tells 0.0 from -0.0, which ``==`` does not, and finds nan equal to nan.
        if kind is float:
            return (kind, value.hex())
        if kind is complex:
            return (kind, value.real.hex(), value.imag.hex())
        if kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
            return (kind, str(value.node.expr))
        if isinstance(value, torch.Tensor):
            return self._on_tensor(value, keys) if self._on_tensor else Identity(value)
        if isinstance(value, nn.Module):
            path = self._module_paths.get(id(value))
            return Identity(value) if path is None else ("module", path)
        is_known = isinstance(value, self._by_identity) or is_plain_builtin(value)
        if is_known or is_library_scope(value):
            return Identity(value)
        if kind is types.FunctionType and not _function_state(value):
            return (kind, Identity(value.__code__), Identity(value.__globals__), *_texts_of(value))
        self._items += 1
        # Beyond the limits by identity, which is never wrong: it only shares less.
        if depth >= _MAX_DEPTH or self._items > self._max_items:
            return Identity(value)
        if id(value) in above:
            # By distance, so that the same cycle in another instance is equal.
            return ("cycle", len(above) - above.index(id(value)))
        return self._freeze_object(value, keys, (*above, id(value)), depth + 1)

    def _freeze_object(
        self, value: Any, keys: tuple[Any, ...], above: tuple[int, ...], depth: int
    ) -> Any:
        def item(inner: Any, way: Way = NO_WAY) -> Any:
            return self._freeze(inner, (*keys, way), above, depth)

        kind = type(value)
        if kind is types.FunctionType:
            own = (Identity(value.__code__), Identity(value.__globals__), *_texts_of(value))
            parts = tuple(map(item, function_parts(value)))
            return (kind, (*own, parts, item(annotations_of(value))), ())
        kinds, whole = kinds_of(value), is_whole(kind)
        if kind is object or not (kinds or whole):  # object(): only its identity matters
            return Unrepeatable(value) if is_unrepeatable(value) else Identity(value)
        # An object with more state, in C, equals only itself, and only while these parts are equal.
        held_parts = [] if whole else [Identity(value)]
        for row in kinds:
            held = row.read(value)
            ways = row.ways(value) if row.ways else repeat(NO_WAY)
            held_parts += [item(part, way) for part, way in zip(held, ways, strict=False)]
        attributes = [(name, item(held, way)) for name, way, held in attribute_parts(value)]
        return (kind, tuple(held_parts), tuple(attributes))


def is_plain_builtin(value: Any) -> bool:
    """Whether a value is a function written in C that is not bound to an object."""
    if not isinstance(value, types.BuiltinFunctionType):
        return False
    owner: Any = value.__self__
    return owner is None or isinstance(owner, (type, types.ModuleType))


def _function_state(function: types.FunctionType) -> Any:
    """Returns what a function holds besides its code and globals, if anything."""
    defaults = function.__defaults__ or function.__kwdefaults__
    return function.__closure__ or defaults or function.__dict__ or annotations_of(function)


def _texts_of(function: types.FunctionType) -> tuple[Any, ...]:
    return function.__module__, function.__name__, function.__qualname__, function.__doc__


def annotations_of(function: types.FunctionType) -> Any:
    """Returns a function's annotations, or Unrepeatable if reading them fails."""
    try:
        return function.__annotations__
    except Exception:  # since Python 3.14 they are computed now, from names that may be missing
        return Unrepeatable(function)


def describe(frozen: Any) -> str:
    """Returns a short text of a frozen value, for reports."""
    if isinstance(frozen, tuple) and len(frozen) == 2 and frozen[0] in _SCALARS:
        return repr(frozen[1])
    if isinstance(frozen, tuple) and len(frozen) == 2 and frozen[0] is float:
        return repr(float.fromhex(frozen[1]))
    if isinstance(frozen, Identity):
        return "<missing>" if frozen.target is ABSENT else repr(frozen)
    if isinstance(frozen, tuple) and frozen and isinstance(frozen[0], type):
        return f"<{frozen[0].__qualname__}>"
    return "<missing>" if frozen is None else str(frozen)[:60]


def narrow(found: Any, expected: Any) -> tuple[str, Any, Any]:
    """Returns the way to the part in which two frozen values differ (``[2].size``), and both."""
    for name, a, b in _pairs(found, expected):
        if a != b:
            where, a, b = narrow(a, b)
            return name + where, a, b
    return "", found, expected


def _pairs(found: Any, expected: Any) -> list[tuple[str, Any, Any]]:
    """Pairs up the parts of two frozen objects of one class that have the same parts."""
    both = (found, expected)
    if any(type(x) is not tuple or len(x) != 3 or not isinstance(x[0], type) for x in both):
        return []
    kind, parts, attributes = found
    if kind is not expected[0] or any(type(x[1]) is not tuple for x in both):
        return []
    names = [tuple(name for name, _ in x[2]) for x in both if type(x[2]) is tuple]
    if len(names) < 2 or names[0] != names[1] or len(parts) != len(expected[1]):
        return []
    pairs, half = [], len(parts) // 2
    if issubclass(kind, (list, tuple, deque)):  # of a deque, its length is the last
        labels = [f"[{i}]" for i in range(len(parts))]
        labels[-1:] = [".maxlen"] if issubclass(kind, deque) else labels[-1:]
        pairs = list(zip(labels, parts, expected[1], strict=True))
    elif kind is dict and parts[:half] == expected[1][:half]:
        entries = zip(parts[:half], parts[half:], expected[1][half:], strict=True)
        pairs = [(f"[{describe(key)}]", a, b) for key, a, b in entries]
    elif parts != expected[1]:
        return []
    rows = zip(attributes, expected[2], strict=True)
    return pairs + [(f".{name}", a, b) for (name, a), (_, b) in rows]


# ---- snapshots -----------------------------------------------------------------------------------


_ATOMS = frozenset(IMMUTABLE)
_BY_VALUE = (bool, int, str, bytes, range, torch.device, torch.Size)
_C_FUNCTION = types.BuiltinFunctionType
_MAX_OBJECTS = 2**20
_MAX_COVERED = 4096
_attributes_of = operator.attrgetter("__dict__")
_END = object()  # marks where the contents of one object end
TELLS_APART = "tells objects apart"
"""Part of a reason. A forward with it runs eagerly, without what a dispatcher puts on modules."""


class Snapshot:
    """Records what objects hold, to notice later changes.

    Args:
        functions: how functions are read: ``FUNCTION`` (their attributes) or ``WHOLE_FUNCTION``.
        on_holder: called with each class and module when it is met.
    """

    def __init__(
        self, functions: Kind = FUNCTION, on_holder: Callable[[Any], None] | None = None
    ) -> None:
        # The classes and modules met, and the classes of the objects met: what they hold is read by
        # name.
        self.holders: dict[int, Any] = {}
        # The classes of the objects met, whose operators may be used.
        self.classes: dict[int, type] = {}
        self.functions: dict[int, types.FunctionType] = {}  # the functions met
        # Reads that no snapshot can compare: an iterator, raw memory, ``id()``.
        self.unreadable: list[str] = []
        self.lasting = ""  # what was changed and could not be put back, or an empty text
        self._function = functions
        self._on_holder = on_holder
        self._seen: dict[int, Any] = {}
        self._bare: list[types.FunctionType] = []  # those without attributes: most of them
        self._noted: list[tuple[Any, Kind, Sequence[Any]]] = []
        self._held: list[Any] = []  # by all that was noted, one after another

    def look_into(self, value: Any) -> None:
        """Records what a value and the objects in it hold; CaptureError for over a million."""
        todo = [value]
        while todo:
            value = todo.pop()
            if id(value) in self._seen or is_constant(value):
                continue
            self._seen[id(value)] = value
            if len(self._seen) > _MAX_OBJECTS:
                raise CaptureError(
                    f"An attribute or global that the model's forward reads holds more than "
                    f"{_MAX_OBJECTS} objects, and a change in any of them would have to be "
                    "noticed at every call. Keep what the forward needs in attributes of their "
                    "own, numbers in a tensor."
                )
            todo += self._note(value)

    def refuse_use(self, what: str) -> None:
        """Records a use by code that tells equal objects apart; an empty text is ignored."""
        if what:
            self.unreadable.append(f"{TELLS_APART} by {what}")

    def look_into_library(self, value: Any) -> None:
        """Does the same for what a library keeps: threads and streams, which no model reads."""
        num_unreadable = len(self.unreadable)
        self.look_into(value)
        del self.unreadable[num_unreadable:]

    def has_met(self, value: Any) -> bool:
        """Whether an object was looked into, or is held by one that was."""
        return id(value) in self._seen

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors among what was looked into."""
        return [value for value in self._seen.values() if isinstance(value, torch.Tensor)]

    def _note(self, value: Any) -> list[Any]:
        """Records what a value itself holds; returns the objects to look into next."""
        found: list[Any] = []
        kinds = self._kinds_of(value)
        for kind in kinds:
            held = list(kind.read(value))
            if kind is FUNCTION and not held:
                self._bare.append(value)
            elif not kind.is_fixed:
                self._noted.append((value, kind, held))
                self._held += (*held, _END)
            # transformers keeps all its output classes there, two fifths of a guard's facts, and no
            # model reads them.
            found += [] if is_set_of_outputs(value) else held
        # Not part of what code reads: the builtins that exec adds, and the module of a C function.
        if (type(value) is dict and BUILTINS in value) or type(value) is _C_FUNCTION:
            found = [part for part in found if part is not builtins and not is_library_scope(part)]
        if isinstance(value, types.FunctionType):
            self.functions[id(value)] = value
            found += [value.__defaults__, value.__kwdefaults__]
        elif isinstance(value, (type, types.ModuleType)):
            self._meets(value)
            if value is type or value is builtins:
                self.refuse_use("type(), which it finds under another name or in builtins")
        elif is_library_scope(value):
            of = "sys" if value is sys.modules else value["__name__"]
            self.unreadable.append(f"reads the modules, or all names, that {of} holds")
        elif is_opaque(value):
            self.unreadable.append(f"reads a {type(value).__qualname__}")
            del self._seen[id(value)]  # a library may hold one; if a model reads it, note it again
        elif kinds and is_looked_into(type(value)):
            self._meets(type(value))
            self.classes[id(type(value))] = type(value)
        return found

    def _meets(self, holder: Any) -> None:
        if id(holder) not in self.holders:
            self.holders[id(holder)] = holder
            if self._on_holder is not None:
                self._on_holder(holder)

    def _kinds_of(self, value: Any) -> Sequence[Kind]:
        if not isinstance(value, types.FunctionType):
            return () if is_library_scope(value) else parts_of(value)
        if self._function is WHOLE_FUNCTION:
            return (WHOLE_FUNCTION,)
        return () if is_library(value.__module__) else (FUNCTION,)

    def same(self) -> bool:
        """Whether all of them still hold the same objects (or equal numbers and strings)."""
        # One list of all contents, so that one loop in C compares them.
        held: list[Any] = []
        for value, kind, _ in self._noted:
            held += kind.read(value)
            held.append(_END)
        is_same = len(held) == len(self._held) and all(map(operator.is_, held, self._held))
        if is_same and not any(map(_attributes_of, self._bare)):
            return True
        return all(_same(kind.read(value), before) for value, kind, before in self._rows())

    def _rows(self) -> Iterator[tuple[Any, Kind, Sequence[Any]]]:
        yield from self._noted
        yield from ((function, FUNCTION, ()) for function in self._bare)

    def covers(self, value: Any) -> bool:
        """Looks into a value; says whether :meth:`same` notices all that freezing it would.

        Only a snapshot of whole functions can say so.
        """
        todo, seen = [value], dict[int, Any]()
        while todo:
            value = todo.pop()
            if id(value) in seen or is_constant(value):
                continue
            if len(seen) > _MAX_COVERED or not _shows_all(value):
                return False
            seen[id(value)] = value
            if not isinstance(value, BY_IDENTITY):
                todo += [item for kind in self._kinds_of(value) for item in kind.read(value)]
        for value in seen.values():
            self.look_into(value)
        return True

    def _changed(self) -> list[tuple[Any, Kind, Sequence[Any], list[Any]]]:
        rows = [(v, kind, before, list(kind.read(v))) for v, kind, before in self._rows()]
        return [row for row in rows if not _same(row[3], row[2])]

    def what_changed(self) -> tuple[str, list[Any]]:
        """Returns what was changed, or an empty text, and every value that is new there."""
        changed = self._changed()
        new: list[Any] = []
        for _, _, before, now in changed:
            known = set(map(id, before))
            new += [x for x in now if id(x) not in known]
        return (_name_of(changed[-1][0]) if changed else ""), new

    def undo(self) -> None:
        """Puts back what the objects held."""
        changed = self._changed()
        for value, kind, before, _ in changed:
            _put(value, kind, before)
        for value, kind, before, _ in changed:
            # A weak reference whose target died cannot be put back, and need not be.
            if not (isinstance(value, weakref.ReferenceType) or _same(kind.read(value), before)):
                self.lasting = _name_of(value)

    def refuse_lasting(self) -> None:
        """Raises CaptureError if a run changed something that could not be put back."""
        # Another run, of a capture or an eager one, would make the change once more.
        if self.lasting:
            raise FinalCaptureError(
                f"The model's forward changes {self.lasting}, and what it held before cannot be "
                "restored after the run that captures the model, so the change would be made "
                "twice. Keep what changes in a list, a dictionary, an attribute or a buffer."
            )


def _put(value: Any, kind: Kind, items: Sequence[Any]) -> None:
    if kind.put is not None and not _same(kind.read(value), items):
        kind.put(value, items)


def _name_of(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return f"an attribute of the function {value.__qualname__}"
    # A dictionary may be an object's ``__dict__``.
    return "a dictionary or object" if type(value) is dict else f"a {type(value).__name__}"


def _shows_all(value: Any) -> bool:
    """Whether an object freezes to the same while it holds the same."""
    if isinstance(value, (torch.Tensor, nn.Module)):
        return False  # what they freeze to depends on where they sit, or can change in place
    if isinstance(value, (*BY_IDENTITY, types.FunctionType)):
        return True
    kind, kinds = type(value), kinds_of(value)
    return bool(kinds) or is_whole(kind) or not is_unrepeatable(value)


def same_value(now: Any, before: Any) -> bool:
    """Whether two values are one object, or of one plain type and hold equal values."""
    # Two equal objects may differ later, so the answer holds for now only.
    return now is before or _same_plain(now, before, set())


def is_constant(value: Any) -> bool:
    """Whether a value can never hold anything else."""
    return has_plain_class(value) and type(value) in _ATOMS


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    if len(now) != len(before):
        return False
    return all(map(operator.is_, now, before)) or all(map(same_value, now, before))


def _same_plain(now: Any, before: Any, compared: set[tuple[int, int]]) -> bool:
    kind = type(now)
    if now is before or kind is not type(before):
        return now is before
    if kind is float or kind is complex:
        return repr(now) == repr(before)  # 0.0 is not -0.0, but nan is nan
    if kind in _BY_VALUE:
        return bool(now == before)
    pair = (id(now), id(before))
    # Met again in a cycle: equal, unless another part differs.
    if pair in compared:
        return True
    compared.add(pair)
    items, others = _items_of(now), _items_of(before)
    return (
        items is not None
        and others is not None
        and len(items) == len(others)
        and all(map(_same_plain, items, others, repeat(compared)))
    )


def _items_of(value: Any) -> list[Any] | None:
    """Returns the parts of a value that compares by content, in order; None for another."""
    kind, kinds = type(value), kinds_of(value)
    is_named = isinstance(value, tuple) and hasattr(kind, "_fields")
    if not (is_named or any(row.is_whole and kind in row.classes for row in kinds)):
        usual: Any = object.__eq__  # equal to itself alone
        if not all(row.is_fixed for row in kinds) or kind.__eq__ is usual or not is_whole(kind):
            return None
    items = [item for row in kinds for item in row.read(value)]
    return items + [part for name, _, held in attribute_parts(value) for part in (name, held)]

"""Records what objects hold, all the way down, to see later whether they hold it still.

A model's Python reads more than attributes: ``self.config.scale``, ``self.tables[0]``. The objects
in between are looked into when they are first read, and compared by identity, item by item.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError, FinalCaptureError
from ..freeze import BY_IDENTITY, IMMUTABLE
from ..kinds import (
    FUNCTION,
    WHOLE_FUNCTION,
    Kind,
    attribute_parts,
    has_plain_class,
    is_library,
    is_looked_into,
    is_opaque,
    is_unrepeatable,
    is_whole,
    kinds_of,
    parts_of,
)
from ..torch_pytree import is_set_of_outputs

_ATOMS = frozenset(IMMUTABLE)
_SCALARS = (bool, int, str, bytes, range, torch.device, torch.Size)
_MAX_OBJECTS = 2**20
_MAX_VOUCHED = 4096
_attributes_of = operator.attrgetter("__dict__")
_END = object()  # of what one object holds
TELLS_APART = "tells objects apart"
"""In the reason why a forward runs eagerly that is not to see what a dispatcher puts on modules."""


class Snapshot:
    """Keeps what the objects looked into held then.

    Args:
        functions: the row of functions: what was put on them, or all that they are made of.
        on_holder: called with each class and module when it is met.

    Attributes:
        holders: the classes and modules met, and the classes of the objects met: what they hold
            is read by name.
        classes: the classes of the objects met, whose operators may be used.
        functions: the functions met.
        unreadable: what code does that nothing shows: reads an iterator, a memory, uses ``id()``.
        lasting: what was changed and could not be put back, or an empty text.
    """

    def __init__(
        self, functions: Kind = FUNCTION, on_holder: Callable[[Any], None] | None = None
    ) -> None:
        self.holders: dict[int, Any] = {}
        self.classes: dict[int, type] = {}
        self.functions: dict[int, types.FunctionType] = {}
        self.unreadable: list[str] = []
        self.lasting = ""
        self._function = functions
        self._on_holder = on_holder
        self._seen: dict[int, Any] = {}
        self._bare: list[types.FunctionType] = []  # those without attributes: most of them
        self._noted: list[tuple[Any, Kind, Sequence[Any]]] = []
        self._held: list[Any] = []  # by all that was noted, one after another

    def look_into(self, value: Any) -> None:
        """Notes what a value holds, unless that was done before.

        Raises:
            CaptureError: if that is a million objects.
        """
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
        """Notes what code uses that tells equal objects apart; an empty text for nothing."""
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
        """Keeps what a value holds itself; returns what it leads to."""
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
        if isinstance(value, types.FunctionType):
            self.functions[id(value)] = value
            found += [value.__defaults__, value.__kwdefaults__]
        elif isinstance(value, (type, types.ModuleType)):
            self._meets(value)
        elif is_opaque(value):
            self.unreadable.append(f"reads a {type(value).__qualname__}")
            del self._seen[id(value)]  # what a library may hold, a model may not
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
            return parts_of(value)
        if self._function is WHOLE_FUNCTION:
            return (WHOLE_FUNCTION,)
        return () if is_library(value.__module__) else (FUNCTION,)

    def same(self) -> bool:
        """Whether all of them hold the same objects still (or equal numbers and texts)."""
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
            if len(seen) > _MAX_VOUCHED or not _shows_all(value):
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
        """Undoes changes."""
        changed = self._changed()
        for value, kind, before, _ in changed:
            _put(value, kind, before)
        for value, kind, before, _ in changed:
            # What a weak reference led to is gone for others, too: the forward did not do that.
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
    # The attributes of an object are a dictionary as well, and are met after it.
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
    # Equal now may differ later, unlike one object: who goes by the answer asks again.
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
    if kind in _SCALARS:
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
    """Returns what a value that is compared by what it holds consists of, in order; else None."""
    kind, kinds = type(value), kinds_of(value)
    is_named = isinstance(value, tuple) and hasattr(kind, "_fields")
    if not (is_named or any(row.is_whole and kind in row.classes for row in kinds)):
        usual: Any = object.__eq__  # equal to itself alone
        if not all(row.is_fixed for row in kinds) or kind.__eq__ is usual or not is_whole(kind):
            return None
    items = [item for row in kinds for item in row.read(value)]
    return items + [part for name, _, held in attribute_parts(value) for part in (name, held)]

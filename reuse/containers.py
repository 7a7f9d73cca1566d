"""Objects that hold tensors and are changed in place: taken apart, put together, updated.

A container is an object, and the lists and dictionaries in it. Its contents are sorted: tensors
and whole numbers are leaves, which differ from call to call; everything else (classes, names,
flags) is its form, which is compared. A container that holds anything that is neither has no form.

What a call returns may be, or hold, a container that it was given. It is then *known* by its
number, and is brought up to date in place of being made anew: whoever holds it, or a part of it,
sees what eager would have left there.

The containers that are known are the caches of transformers (``DynamicCache``, ``StaticCache``,
``EncoderDecoderCache``): plain Python objects that hold tensors, and that a model changes in place.
They are known by their class, once the user's code has imported transformers; nothing is imported
or registered here. This module alone says the names of transformers.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch

_CACHES_MODULE = "transformers.cache_utils"
_GROWING = ("DynamicLayer", {"keys": -2, "values": -2, "cumulative_length": -1})
_BASES = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
_COUNTS = ("cumulative_length", "cumulative_length_int")


def cache_classes() -> tuple[type, ...]:
    """Returns what caches and their layers derive from; nothing before transformers is there."""
    module = sys.modules.get(_CACHES_MODULE)
    return () if module is None else _classes_of(module)


@lru_cache(maxsize=1)
def _classes_of(module: Any) -> tuple[type, ...]:
    found = (getattr(module, name, None) for name in _BASES)
    return tuple(cls for cls in found if isinstance(cls, type))


def growing_dims(kind: type) -> Mapping[str, int]:
    """Returns the attributes of a container that grow from call to call: tensors, and where.

    A whole number, as layers with a window count what came so far, is one dimension.
    """
    module = sys.modules.get(_CACHES_MODULE)
    name, dims = _GROWING
    base = None if module is None else getattr(module, name, None)
    return dims if isinstance(base, type) and issubclass(kind, base) else {}


def is_count(kind: type, name: Any) -> bool:
    """Whether an attribute of a container counts what came so far, if it is a whole number."""
    # What transformers does with it is known: arithmetic and comparisons.
    return name in _COUNTS and issubclass(kind, cache_classes())


_OUTPUTS_MODULE, _OUTPUTS = "transformers.utils.generic", "_registered_model_output_types"


def is_set_of_outputs(value: Any) -> bool:
    """Whether a value is that set; nothing is imported for it."""
    return type(value) is set and value is getattr(sys.modules.get(_OUTPUTS_MODULE), _OUTPUTS, None)


_CONSTANTS = (bool, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_LEAVES = (torch.Tensor, int, torch.SymInt)
# Most contents are exactly of these classes, so one look-up of the type decides.
_USUAL_CONSTANTS = frozenset(_CONSTANTS)
_USUAL_LEAVES = frozenset({torch.Tensor, int})

Part = tuple[Literal["leaf", "container", "constant"], Any]
"""A leaf; a container by its number; or a constant with its type, as ``1 == True``."""


_LEAF: Part = ("leaf", None)


class _FormlessError(Exception):
    """A container holds something that is neither leaf, constant nor container."""


class Container(NamedTuple):
    """The form of one container. A tuple, as one is made and compared for each at every call.

    Attributes:
        kind: its class.
        names: of its attributes, or its keys; of a list nothing.
        parts: what it holds, in that order.
        known: the number of the container that it is, among those that a call was given.
    """

    kind: type
    names: tuple[Any, ...]
    parts: tuple[Part, ...]
    known: int | None = None


class ContainerFlattener:
    """Takes containers apart, each once.

    Args:
        classes: objects of these are containers.
        known: numbers of containers that a call was given, by ``id``.

    Attributes:
        leaves: what differs from call to call.
        objects: the containers themselves.
    """

    def __init__(self, classes: tuple[type, ...], known: Mapping[int, int] | None = None) -> None:
        self.leaves: list[Any] = []
        self.objects: list[Any] = []
        self._classes = classes
        self._known = known or {}
        self._numbers: dict[int, int] = {}
        self._forms: dict[int, Container] = {}

    def add(self, value: Any) -> int:
        """Takes an object apart; returns its number as a container, or -1 if it has no form."""
        if not isinstance(value, self._classes):
            return -1
        num_leaves, num_objects = len(self.leaves), len(self.objects)
        try:
            return self._add(value)
        except _FormlessError:
            # As if nothing had been taken apart.
            for formless in self.objects[num_objects:]:
                del self._numbers[id(formless)]
            del self.leaves[num_leaves:], self.objects[num_objects:]
            return -1

    def _add(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is not None:
            return number
        number = self._numbers[id(value)] = len(self.objects)
        self.objects.append(value)
        kind = type(value)
        names, held = _held_in(value)
        parts, leaves = list[Part](), self.leaves
        for part in held:
            if type(part) in _USUAL_LEAVES:
                leaves.append(part)
                parts.append(_LEAF)
            elif type(part) in _USUAL_CONSTANTS:
                parts.append(("constant", (type(part), part)))
            else:
                parts.append(self._part(part))
        self._forms[number] = Container(kind, names, tuple(parts), self._known.get(id(value)))
        return number

    def names_from(self, first: int, prefix: str) -> list[str]:
        """Names the leaves of the containers from a number on: ``prefix.layers.0.keys``."""
        if first == len(self.objects):
            return []
        return [path for *_, path in held(self.forms, first, set(range(first)), prefix)]

    @property
    def forms(self) -> tuple[Container, ...]:
        """The forms of the containers, by number."""
        return tuple(self._forms[number] for number in range(len(self.objects)))

    def _part(self, value: Any) -> Part:
        if isinstance(value, _CONSTANTS):
            return ("constant", (type(value), value))
        if isinstance(value, _LEAVES):
            self.leaves.append(value)
            return _LEAF
        if type(value) in (list, tuple, dict) or isinstance(value, self._classes):
            return ("container", self._add(value))
        if isinstance(value, type):
            return ("constant", (type(value), value))
        raise _FormlessError(type(value).__qualname__)


def _held_in(value: Any) -> tuple[tuple[Any, ...], Iterator[Any] | Sequence[Any]]:
    kind: Any = type(value)
    if kind is list or kind is tuple:
        return (), value
    if kind is not dict and (not hasattr(value, "__dict__") or _has_slots(kind)):
        raise _FormlessError(kind.__qualname__)
    table = value if kind is dict else vars(value)
    return tuple(table), table.values()  # type: ignore[return-value]


@functools.lru_cache(maxsize=256)
def _has_slots(kind: type) -> bool:
    return any(vars(base).get("__slots__") for base in kind.__mro__)


class ContainerBuilder:
    """Puts containers together from their forms and leaves.

    Args:
        forms: of all containers.
        leaves: in the order in which they were taken out.
        given: the containers that the call was given, to be brought up to date where they are
            known; without them, all are made anew.
    """

    def __init__(
        self, forms: Sequence[Container], leaves: Iterator[Any], given: Sequence[Any] = ()
    ) -> None:
        self._forms = forms
        self._leaves = leaves
        self._given = given
        self._made: dict[int, Any] = {}

    def container(self, number: int) -> Any:
        """Returns a container by its number; one not made yet takes the next leaves."""
        if number in self._made:
            return self._made[number]
        form = self._forms[number]
        if form.kind is tuple:
            made = self._made[number] = tuple(map(self._part, form.parts))
            return made
        if form.known is not None and self._given:
            made = self._given[form.known]
        else:
            new: Any = form.kind.__new__  # not its constructor, which does as it likes
            made = new(form.kind)
        self._made[number] = made
        parts = [self._part(part) for part in form.parts]
        if form.kind is list:
            made[:] = parts
            return made
        table = made if form.kind is dict else vars(made)
        # In place, since others may hold the table; emptied only if a name is gone.
        if tuple(table) != form.names and table.keys() - set(form.names):
            table.clear()
        table.update(zip(form.names, parts, strict=True))
        return made

    def _part(self, part: Part) -> Any:
        what, value = part
        if what == "leaf":
            return next(self._leaves)
        return self.container(value) if what == "container" else value[1]


def numbered(objects: Sequence[Any]) -> dict[int, int]:
    """Returns the number of each container by its ``id``."""
    return dict(zip(map(id, objects), itertools.count()))


def held(
    forms: Sequence[Container], number: int, seen: set[int], path: str = ""
) -> Iterator[tuple[type, Any, str]]:
    """Yields for each leaf of a container the class of what holds it, its name there, and its path.

    Args:
        forms: of all containers.
        number: of this one.
        seen: containers whose leaves were taken already; takes up those seen here.
        path: of this one.
    """
    if number in seen:
        return
    seen.add(number)
    form = forms[number]
    for name, (what, value) in zip(form.names or itertools.count(), form.parts, strict=False):
        inner = f"{path}.{name}" if path else str(name)
        if what == "leaf":
            yield form.kind, name, inner
        elif what == "container":
            yield from held(forms, value, seen, inner)

"""Objects that a block is given, watched while it is traced: which of their parts it reads, writes.

While :func:`watched` is open, in the capturing thread only, the attributes of objects of some
classes are reported as they are read and written, and a list or a dictionary among them is handed
out as a look-alike that reports its items. A look-alike holds nothing itself: C code that takes it
for a list, past its methods, finds nothing of use there and raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from ...reuse.objects import ABSENT, OWN_PATCH, is_own_patch, own_table
from ...reuse.open_index import is_index, untold

_SAFE = frozenset({"__class__", "__doc__", "__module__"})
_HIDDEN = object()


class ObjectWatcher(Protocol):
    """What is told of watched objects."""

    def watches(self) -> bool:
        """Whether what happens now is to be told."""

    def found(self, holder: Any, step: Any, value: Any) -> Any:
        """Takes what was read at a step from an object; returns what the reader gets."""

    def writes(self, holder: Any, step: Any, value: Any) -> Any:
        """Takes what is to be written there; returns what is written."""

    def key(self, key: Any) -> Any:
        """Returns the step that the key of an item is."""

    def whole(self, holder: Any) -> None:
        """An object is read or changed in a way that is not told step by step."""


@contextmanager
def watched(classes: tuple[type, ...], watcher: ObjectWatcher) -> Iterator[None]:
    """Lets ``watcher`` see what this thread does to objects of some classes."""
    thread = threading.get_ident()
    undo = [_patch(cls, watcher, thread) for cls in classes]
    try:
        yield
    finally:
        for restore in reversed(undo):
            restore()


def is_watched(kind: type) -> bool:
    """Whether reads and writes of the objects of a class pass through the watcher."""
    got: Any = kind.__getattribute__
    put: Any = kind.__setattr__
    deleted: Any = kind.__delattr__
    return (
        all(map(is_own_patch, (got, put, deleted)))
        and not hasattr(kind, "__getattr__")
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
    )


def _patch(cls: type, watcher: ObjectWatcher, thread: int) -> Callable[[], None]:
    lookup: Any = cls.__getattribute__
    store: Any = cls.__setattr__
    delete: Any = cls.__delattr__
    if any(f is not getattr(object, f.__name__) for f in (lookup, store, delete)):
        return lambda: None  # code of its own: what it does is not known

    def is_told() -> bool:
        return threading.get_ident() == thread and watcher.watches()

    def getattribute(self: Any, name: str) -> Any:
        if name in _SAFE or not is_told():
            return lookup(self, name)
        held = (own_table(self) or {}).get(name, ABSENT)
        if name[:2] == "__":
            watcher.whole(self)
        else:
            got = watcher.found(self, ("attribute", name), held)
        value = lookup(self, name)
        if value is held and name[:2] != "__":
            return got
        if held is not ABSENT:
            watcher.whole(self)  # a property of that name hides it
        return value

    def setattr_(self: Any, name: str, value: Any) -> None:
        store(self, name, watcher.writes(self, ("attribute", name), value) if is_told() else value)

    def delattr_(self: Any, name: str) -> None:
        if is_told():
            watcher.whole(self)
        delete(self, name)

    patches = {"__getattribute__": getattribute, "__setattr__": setattr_, "__delattr__": delattr_}
    for name, patch in patches.items():
        setattr(patch, OWN_PATCH, True)
        setattr(cls, name, patch)

    def restore() -> None:
        for name in patches:
            delattr(cls, name)

    return restore


class SeenList(list[Any]):
    """Stands for a list that a watched object holds."""

    def __init__(self, original: list[Any], watcher: ObjectWatcher) -> None:
        super().__init__([_HIDDEN] * len(original))
        self.original = original
        self._watcher = watcher

    def __len__(self) -> int:
        count = len(self.original)
        self._watcher.found(self.original, ("length", None), count)
        return count

    def __bool__(self) -> bool:
        return len(self) > 0

    def __getitem__(self, key: Any) -> Any:
        step = self._watcher.key(key)
        if step is None:
            self._watcher.whole(self.original)
            return self.original[key]
        kind = self.original[_plain(key)]
        return self._watcher.found(self.original, step, kind)

    def __setitem__(self, key: Any, value: Any) -> None:
        step = self._watcher.key(key)
        if step is None:
            self._watcher.whole(self.original)
            self.original[key] = value
        else:
            self.original[_plain(key)] = self._watcher.writes(self.original, step, value)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __reversed__(self) -> Iterator[Any]:
        return (self[number] for number in reversed(range(len(self))))


class SeenDict(dict[Any, Any]):
    """Stands for a dictionary that a watched object holds."""

    def __init__(self, original: dict[Any, Any], watcher: ObjectWatcher) -> None:
        super().__init__()
        self.original = original
        self._watcher = watcher

    def _found(self, key: Any) -> Any:
        step = self._watcher.key(key)
        held = self.original.get(_plain(key), ABSENT)
        if step is None:
            self._watcher.whole(self.original)
            return held
        return self._watcher.found(self.original, step, held)

    def __getitem__(self, key: Any) -> Any:
        found = self._found(key)
        return self.original[_plain(key)] if found is ABSENT else found

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns an item, or what stands for one that is missing."""
        found = self._found(key)
        return default if found is ABSENT else found

    def __contains__(self, key: Any) -> bool:
        return self._found(key) is not ABSENT

    def __setitem__(self, key: Any, value: Any) -> None:
        step = self._watcher.key(key)
        if step is None:
            self._watcher.whole(self.original)
        self.original[_plain(key)] = self._watcher.writes(self.original, step, value)

    def __len__(self) -> int:
        return len(self._keys())

    def __bool__(self) -> bool:
        return bool(self._keys())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys())

    def keys(self) -> Any:
        """Returns the keys."""
        return dict.fromkeys(self._keys()).keys()

    def values(self) -> Any:
        """Returns the items."""
        return [self[key] for key in self._keys()]

    def items(self) -> Any:
        """Returns keys and items."""
        return [(key, self[key]) for key in self._keys()]

    def _keys(self) -> Sequence[Any]:
        keys = tuple(self.original)
        self._watcher.found(self.original, ("length", None), keys)
        return keys


def _plain(key: Any) -> Any:
    return untold(key) if is_index(key) else key


def original_of(value: Any) -> Any:
    """Returns what a look-alike stands for; anything else as it is."""
    return value.original if type(value) in (SeenList, SeenDict) else value


def _as_a_whole(name: str) -> Callable[..., Any]:
    """Returns a method that is not followed step by step: it is the original's."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._watcher.whole(self.original)
        result = getattr(self.original, name)(*map(original_of, args), **kwargs)
        return self if result is self.original else result

    return method


_LEFT_AS_THEY_ARE = frozenset(
    f"__{name}__"
    for name in (
        *("class", "dir", "getattribute", "setattr", "delattr"),
        *("new", "init", "init_subclass", "subclasshook"),
    )
)

for _cls in (SeenList, SeenDict):
    for _name in {*dir(_cls)} - {*vars(_cls)} - _LEFT_AS_THEY_ARE:
        if callable(getattr(_cls, _name)):
            setattr(_cls, _name, _as_a_whole(_name))

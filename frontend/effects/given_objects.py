"""Objects that blocks are given, such as a cache: which of their parts a block reads and writes.

While :func:`watched` is open, reads and writes of attributes of objects of some classes are
reported, in the capturing thread only. A list or dictionary in them is replaced by a proxy that
reports reads and writes of its items. A proxy has no contents itself: C code that uses it as a list
without calling its methods finds unusable items, and raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.evidence.module_state import Places, module_state
from ...reuse.evidence.reads import Reads
from ...reuse.evidence.slots import Index, OpenIndex, SlotReads, Step, is_index, peek, reveal
from ...reuse.kinds import ABSENT, OWN_PATCH, is_own_patch, own_table
from ..tracing.torch_patches import replace_attributes
from ..tracing.torch_tracing import is_fake

_SAFE = frozenset({"__class__", "__doc__", "__module__"})
_HIDDEN = object()


@contextmanager
def watched(classes: tuple[type, ...], watcher: GivenObjects) -> Iterator[None]:
    """Reports to ``watcher`` what this thread does to objects of some classes."""
    thread = threading.get_ident()
    with ExitStack() as undo:
        for cls in classes:
            undo.callback(_patch(cls, watcher, thread))
        yield


def is_watched(kind: type) -> bool:
    """Whether reads and writes of the objects of a class are reported."""
    got: Any = kind.__getattribute__
    put: Any = kind.__setattr__
    deleted: Any = kind.__delattr__
    return (
        all(map(is_own_patch, (got, put, deleted)))
        and not hasattr(kind, "__getattr__")
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
    )


def _patch(cls: type, watcher: GivenObjects, thread: int) -> Callable[[], None]:
    lookup: Any = cls.__getattribute__
    store: Any = cls.__setattr__
    delete: Any = cls.__delattr__
    if any(f is not getattr(object, f.__name__) for f in (lookup, store, delete)):
        return lambda: None  # its own access methods may do anything

    def is_told() -> bool:
        return threading.get_ident() == thread and watcher.watches()

    def getattribute(self: Any, name: str) -> Any:
        if name in _SAFE or not is_told():
            return lookup(self, name)
        held = (own_table(self) or {}).get(name, ABSENT)
        # ``__dict__`` and others like it give access to everything.
        if name[:2] == "__":
            watcher.whole(self)
        else:
            got = watcher.found(self, ("attribute", name), held)
        value = lookup(self, name)
        if value is held and name[:2] != "__":
            return got
        if held is not ABSENT:
            watcher.whole(self)  # a property of that name returned something else
        return value

    def setattr_(self: Any, name: str, value: Any) -> None:
        store(self, name, watcher.writes(self, ("attribute", name), value) if is_told() else value)

    def delattr_(self: Any, name: str) -> None:
        if is_told():
            watcher.whole(self)
        delete(self, name)

    patches = {"__getattribute__": getattribute, "__setattr__": setattr_, "__delattr__": delattr_}
    for patch in patches.values():
        setattr(patch, OWN_PATCH, True)
    return replace_attributes(cls, patches)


class _Seen:
    """Base of the proxies of lists and dictionaries."""

    original: Any
    _watcher: GivenObjects

    def __setitem__(self, key: Any, value: Any) -> None:
        step = self._watcher.key(key)
        if step is None:
            self._watcher.whole(self.original)
            self.original[key] = value
        else:
            self.original[_plain(key)] = self._watcher.writes(self.original, step, value)

    def __bool__(self) -> bool:
        return len(self) > 0  # type: ignore[arg-type]


class SeenList(_Seen, list[Any]):
    """Proxy of a list that a watched object holds."""

    def __init__(self, original: list[Any], watcher: GivenObjects) -> None:
        # C code that does not call the methods sees the right length, and unusable items.
        super().__init__([_HIDDEN] * len(original))
        self.original = original
        self._watcher = watcher

    def __len__(self) -> int:
        count = len(self.original)
        self._watcher.found(self.original, ("length", None), count)
        return count

    def __getitem__(self, key: Any) -> Any:
        step = self._watcher.key(key)
        if step is None:
            self._watcher.whole(self.original)
            return self.original[key]
        kind = self.original[_plain(key)]
        return self._watcher.found(self.original, step, kind)


class SeenDict(_Seen, dict[Any, Any]):
    """Proxy of a dictionary that a watched object holds."""

    def __init__(self, original: dict[Any, Any], watcher: Any) -> None:
        # C code that does not call the methods must not see an empty dict: the item is unusable.
        super().__init__({_HIDDEN: _HIDDEN})
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
        """Returns an item, or the default if it is missing."""
        found = self._found(key)
        return default if found is ABSENT else found


class SeenNames(SeenDict):
    """Proxy of the ``__dict__`` of a module."""

    def __contains__(self, name: Any) -> bool:
        return self._found(name) is not ABSENT


def _plain(key: Any) -> Any:
    return peek(key) if is_index(key) else key


def original_of(value: Any) -> Any:
    """Returns the object behind a proxy; anything else unchanged."""
    return value.original if type(value) in (SeenList, SeenDict) else value


def _as_a_whole(name: str) -> Callable[..., Any]:
    """Returns a method that calls the original's, and reports a use of the whole object."""

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
    for _name in {*dir(_cls)} - {*vars(_cls), *vars(_Seen)} - _LEFT_AS_THEY_ARE:
        if callable(getattr(_cls, _name)):
            setattr(_cls, _name, _as_a_whole(_name))


_LOOK_ALIKES: dict[type, Any] = {list: SeenList, dict: SeenDict}
LOOK_ALIKES: Mapping[Any, type] = {SeenList: list, SeenDict: dict, SeenNames: dict}
"""For each class of proxies, the class of the objects behind them."""


class GivenObjects:
    """Reports to the blocks that are being traced what happens to the objects that they were given.

    ``readers`` returns the records of the blocks being traced, inner before outer; none while
    capture's own code runs, as ``quietly`` marks it. Blocks get proxies while it ``is_open``; if
    not, the objects in a block's arguments are flattened. If a block got one (``was_used``), a
    failing capture may be tried again without.
    """

    def __init__(
        self,
        places: Places,
        readers: Callable[[], Iterable[SlotReads]],
        quietly: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._places = places
        self._readers = readers
        self._quietly = quietly
        self._indexes: dict[tuple[int, str], OpenIndex] = {}
        self._owners: dict[int, Index] = {}
        self.is_open = True
        self.was_used = False

    def flatten(self, arguments: Any) -> tuple[list[Any], torch_pytree.TreeSpec]:
        """Flattens a block's arguments down to the objects whose parts are watched."""
        leaves, outer = torch_pytree.flatten_outer(arguments)
        objects = [leaf for leaf in leaves if torch_pytree.is_container(leaf)]
        if not objects or (self.is_open and all(is_watched(type(x)) for x in objects)):
            return leaves, outer
        return torch_pytree.flatten(arguments)

    def reads_of(self, leaves: Sequence[Any]) -> SlotReads | None:
        """Returns a record of what a block does to the objects in its arguments, if it has any."""
        given = {i: leaf for i, leaf in enumerate(leaves) if torch_pytree.is_container(leaf)}
        if not given or not self.is_open:
            return None
        self.was_used = True
        return SlotReads(given, torch_pytree.containers(list(given.values())))

    # ---- ints that are only used as indexes ----------------------------------------------

    @cached_property
    def _varying(self) -> set[tuple[type, str]]:
        """The int attributes that differ among instances of a class, such as ``layer_idx``."""
        found: dict[tuple[type, str], set[int]] = {}
        for _, module in self._places:
            for name, value in module_state(module).items():
                if type(value) is int:
                    found.setdefault((type(module), name), set()).add(value)
        # The index of a layer in a cache is less than the number of modules.
        most = len(self._places)
        return {
            k for k, seen in found.items() if len(seen) > 1 and 0 <= min(seen) <= max(seen) < most
        }

    def number(self, module: nn.Module, name: str, value: int, reads: Reads) -> Any:
        """Returns an int attribute, as a proxy if it may be an index into a given object."""
        known = self._indexes.get((id(module), name))
        if reads.slots is None or (type(module), name) not in self._varying:
            reveal(known)
            return value
        if known is None:
            known = self._indexes[id(module), name] = OpenIndex(value)
            self._owners[id(known)] = Index(module, name)
        # The attribute has changed since the proxy was made, which has the old number.
        if peek(known) != value or module_state(module).get(name) is not value:
            return reveal(known)
        reads.indexes[id(module), name] = known
        return known

    # ---- reads and writes of watched objects ------------------------------------

    def watches(self) -> bool:
        """Whether a block that was given objects is being traced."""
        return any(True for _ in self._readers())

    def found(self, holder: Any, step: Step, value: Any) -> Any:
        """Notes what was read; returns a proxy of a list or dictionary."""
        knowing = [reader for reader in self._readers() if reader.knows(holder)]
        if not knowing:
            return value
        is_container, is_table = torch_pytree.is_container(value), type(value) in _LOOK_ALIKES
        with self._quietly():
            for reader in knowing:
                if is_container and not is_watched(type(value)):
                    reader.refuse(f"it is given a {type(value).__qualname__} with code of its own")
                if isinstance(value, torch.Tensor) and not is_fake(value):
                    reader.refuse("it is given an object that holds a tensor from outside")
                reader.read(holder, step, value, is_container or is_table)
        return _LOOK_ALIKES[type(value)](value, self) if is_table else value

    def writes(self, holder: Any, step: Step, value: Any) -> Any:
        """Notes a write."""
        # A proxy must not stay in an object of the user's after the capture.
        value = original_of(reveal(value))
        is_object = torch_pytree.is_container(value) or type(value) in _LOOK_ALIKES
        for reader in self._readers():
            if is_object and reader.knows(holder):
                reader.refuse(f"it puts a {type(value).__qualname__} into an argument")
            reader.write(holder, step)
        return value

    def key(self, key: Any) -> Step | None:
        """Returns the step of an item's key; None if it is not a plain key (but a slice, say)."""
        if is_index(key) and id(key) in self._owners:
            return "index", self._owners[id(key)]
        return ("item", key) if type(key) in (int, str) else None

    def whole(self, holder: Any) -> None:
        """Notes that an object is used in a way that is not reported item by item."""
        for reader in self._readers():
            if reader.knows(holder):
                reader.refuse(f"it uses a {type(holder).__qualname__} of an argument as a whole")

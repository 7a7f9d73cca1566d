"""Notes what a block reads and writes of objects among its arguments: its part of a cache.

A *way* leads from an argument to a place: ``cache``, its ``layers``, the item at the block's own
``layer_idx``, that one's ``keys``. What a block finds at the end of its ways is its input, and what
it leaves there is its result, as if they were passed and returned. Another instance shares if its
own ways, which may lead to other places, find equal values there and meet in the same objects.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..freeze import Freezer, describe
from ..ir.types import TensorType
from ..kinds import ABSENT, own_table
from ..once import once
from ..torch_names import bytes_if_known, memory_id
from .module_state import raw_attribute


class OpenIndex:
    """Represents a whole number that differs from one instance of a block to another.

    Comparisons are noted with their results: another instance may share if its number compares the
    same. Any other use reveals the value, except as a key of a watched list or dictionary.
    """

    __slots__ = ("_tests", "_value", "_was_asked")

    def __init__(self, value: int) -> None:
        self._value = value
        self._tests: dict[tuple[str, int], bool] = {}
        self._was_asked = False

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":  # what isinstance asks
            return int
        if name in OpenIndex.__slots__:
            return object.__getattribute__(self, name)
        return getattr(reveal(self), name)


def is_index(value: Any) -> bool:
    """Whether a value represents a layer's index."""
    return type(value) is OpenIndex


def reveal(value: Any) -> Any:
    """Returns the number of an index and marks it as read; returns other values unchanged."""
    if type(value) is not OpenIndex:
        return value
    value._was_asked = True
    return value._value


def peek(index: Any) -> int:
    """Returns the number of an index without marking it as read: to look up an item."""
    value: int = index._value
    return value


def tests_of(index: Any) -> tuple[tuple[str, int, bool], ...] | None:
    """Returns the comparisons made with an index, and their results; None if it was revealed."""
    if index._was_asked:
        return None
    return tuple((name, other, answer) for (name, other), answer in index._tests.items())


def answers_alike(value: Any, tests: Sequence[tuple[str, int, bool]]) -> bool:
    """Whether another whole number compares as an index did."""
    return type(value) is int and all(
        getattr(operator, name)(value, other) is answer for name, other, answer in tests
    )


def _tested(name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(operator, name)

    def test(index: Any, other: Any) -> Any:
        if type(other) is not int:
            return compare(reveal(index), reveal(other))
        answer = index._tests[name, other] = compare(index._value, other)
        return answer

    return test


def _telling(apply: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: apply(*map(reveal, values))


def _reflected(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda index, other: apply(reveal(other), reveal(index))


_TESTS = ("lt", "le", "gt", "ge", "eq", "ne")
_BINARY = ("add", "sub", "mul", "mod", "truediv", "floordiv", "and_", "or_", "xor", "lshift")
_KEPT = frozenset(["__new__", *vars(OpenIndex)])

for _name in vars(int).keys() - _KEPT:
    if callable(getattr(int, _name)):
        setattr(OpenIndex, _name, _telling(getattr(int, _name)))
for _name in _TESTS:
    setattr(OpenIndex, f"__{_name}__", _tested(_name))
for _apply in (*(getattr(operator, name) for name in _BINARY), operator.rshift, pow, divmod):
    _name = _apply.__name__.strip("_")
    setattr(OpenIndex, f"__{_name}__", _telling(_apply))
    setattr(OpenIndex, f"__r{_name}__", _reflected(_apply))
OpenIndex.__reduce_ex__ = lambda index, protocol: (int, (reveal(index),))  # type: ignore[method-assign,assignment]


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
_EXACT = (bool, int, str, type(None))
_WHOLE = (torch.SymInt, type)


class Index(NamedTuple):
    """A key in a way: the whole number that a module of the block has as an attribute."""

    module: Any  # the module itself in SlotReads, its path in the block in SlotEvidence
    name: str


Step = tuple[str, Any]
"""``("attribute", name)``, ``("item", key)`` or ``("index", Index)``; ``("length", None)``."""
Way = tuple[Any, ...]  # the number of an argument, and steps from it


@dataclass(eq=False)
class SlotReads:
    """Records what a traced block reads and writes of objects among its arguments.

    ``given`` are the objects, by their numbers among the flat arguments; ``holders`` are these, and
    every mutable object in them.
    """

    given: Mapping[int, Any]
    holders: Sequence[Any]
    # What was read at each place, before anything was written there.
    found: dict[Way, Any] = field(default_factory=dict)
    # The tensors that were read, with their layouts at that time.
    tensors: dict[Way, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    # Places in the order in which they were first written.
    written: dict[tuple[int, Any], tuple[Any, Step]] = field(default_factory=dict)
    unseen: str = ""  # why the record is incomplete; empty if it is complete

    def __post_init__(self) -> None:
        self.objects: dict[Way, Any] = {}
        self._ways: dict[int, list[Way]] = {}
        # Code in C may change them unseen, so they are compared at the end.
        self._before = [(holder, _contents(holder)) for holder in self.holders]
        for number, value in self.given.items():
            self._reach((number,), value)

    def _reach(self, way: Way, value: Any) -> None:
        # Several ways may lead to one object; a step from it extends each of them.
        if way not in self.objects:
            self.objects[way] = value
            self._ways.setdefault(id(value), []).append(way)

    def read(self, holder: Any, step: Step, value: Any, is_object: bool) -> None:
        """Notes the value read at one place; ``is_object`` if reads inside it are noted, too."""
        ways = self._ways.get(id(holder), ())
        if not ways or (id(holder), place_of(step, holder)) in self.written:
            return
        if step[0] == "length" and any(one == id(holder) for one, _ in self.written):
            self.refuse("it counts what an argument holds after it has changed it")
        for way in [(*way, step) for way in ways]:
            if way not in self.found:
                self.found[way] = self._frozen(way, value, is_object)
            if is_object:
                self._reach(way, value)

    def _frozen(self, way: Way, value: Any, is_object: bool) -> Any:
        if is_object:
            return type(value)
        if isinstance(value, torch.Tensor):
            self.tensors[way] = (value, _layout(value))
            return torch.Tensor
        if not (_is_plain(value) or value is ABSENT or way[-1][0] == "length"):
            self.refuse(f"it reads a {type(value).__qualname__} of an argument")
        return _frozen(value)

    def write(self, holder: Any, step: Step) -> None:
        """Notes that a place is about to be written."""
        if id(holder) in self._ways:
            # The first write decides the order in which other instances write.
            self.written.setdefault((id(holder), place_of(step, holder)), (holder, step))

    def knows(self, holder: Any) -> bool:
        """Whether a way leads to an object."""
        return id(holder) in self._ways

    def tensors_in_holders(self) -> list[torch.Tensor]:
        """Returns the tensors that the objects held before the block ran."""
        held = (value for _, before in self._before for value in before.values())
        return [value for value in held if isinstance(value, torch.Tensor)]

    def results(self) -> list[Any]:
        """Returns the final values of the written places; refuses changes that were not seen."""
        for holder, before in self._before:
            now = _contents(holder)
            for key in {**before, **now}:
                same = now.get(key, ABSENT) is before.get(key, ABSENT)
                if not same and (id(holder), key) not in self.written:
                    self.refuse("its forward changes an argument")
        found = [held_at(holder, step) for holder, step in self.written.values()]
        for value in found:
            if value is ABSENT or not (isinstance(value, torch.Tensor) or _is_plain(value)):
                self.refuse("it leaves more than tensors and numbers in an argument")
        return found

    def refuse(self, why: str) -> None:
        """Notes why the record is incomplete; the first reason stays."""
        self.unseen = self.unseen or why


class Written(NamedTuple):
    """A place that a block writes: the way to what holds it, and the last step."""

    holder: Way
    step: Step


class SlotEvidence:
    """Holds what another instance must find in its arguments, by what the traced one ``reads``."""

    def __init__(
        self,
        reads: SlotReads,
        paths: Mapping[int, str],
        arguments: Sequence[Any],
        is_own: Callable[[torch.Tensor], bool],
    ) -> None:
        def portable(way: Way) -> Way:
            return tuple(_portable(step, paths) for step in way)

        self.unseen = reads.unseen
        self.tensors = [tensor for tensor, _ in reads.tensors.values()]
        self._objects = [portable(way) for way in reads.objects]
        self._partition = _partition(reads.objects.values())
        self._found = {portable(way): frozen for way, frozen in reads.found.items()}
        self._layouts = {portable(way): layout for way, (_, layout) in reads.tensors.items()}
        self._memory = _memory(arguments, self.tensors)
        self._is_own = is_own
        # Reversed, so that the first of several ways to an object stays.
        first = {id(value): portable(way) for way, value in reversed(reads.objects.items())}
        self.written = [
            Written(first[id(holder)], _portable(step, paths))
            for holder, step in reads.written.values()
        ]
        ways = (*self._objects, *self._found, *((*w.holder, w.step) for w in self.written))
        if any(step[0] == "index" and step[1].module is None for w in ways for step in w[1:]):
            self.unseen = self.unseen or "an index of another module leads to what it reads"
        if any(map(is_own, self.tensors)):
            self.unseen = self.unseen or "it is given an object that holds a tensor of the model"

    def found_by(
        self, arguments: Sequence[Any], modules: Mapping[str, nn.Module]
    ) -> FoundSlots | str:
        """Follows the ways of another instance; returns what is there, or why it cannot share."""
        found = FoundSlots(arguments, modules)
        objects = [found.at(way) for way in self._objects]
        for way, frozen in self._found.items():
            value = found.at(way)
            is_tensor = isinstance(value, torch.Tensor)
            if isinstance(frozen, type):
                agrees = is_tensor if frozen is torch.Tensor else type(value) is frozen
            else:
                agrees = not is_tensor and _frozen(value) == frozen
            if not agrees:
                is_kind = isinstance(frozen, type)
                wanted = f"a {frozen.__qualname__}" if is_kind else describe(frozen)
                return f"{_text(way)} is {_described(value)}, not {wanted}"
        for way, layout in self._layouts.items():
            if _layout(found.at(way)) != layout or self._is_own(found.at(way)):
                return f"{_text(way)} is {TensorType.of(found.at(way))}, not {layout[0]}"
        found.tensors = [found.at(way) for way in self._layouts]
        if _partition(objects) != self._partition:
            return "two ways into its arguments lead to one object, or no longer do"
        if _memory(arguments, found.tensors) != self._memory:
            return "what it reads of its arguments shares memory in another way"
        return found

    def replay(self, found: FoundSlots) -> Iterator[tuple[Any, Step, Any]]:
        """Yields what another instance would have read: holder, step, value."""
        for way in self._found:
            yield found.at(way[:-1]), found.step(way[-1]), found.at(way)


class FoundSlots:
    """The objects that one instance finds at the end of its ways; the tensors that it reads."""

    def __init__(self, arguments: Sequence[Any], modules: Mapping[str, nn.Module]) -> None:
        self._arguments = arguments
        self._modules = modules
        self.tensors: list[torch.Tensor] = []

    @once
    def at(self, way: Way) -> Any:
        """Returns what a way leads to, or ABSENT."""
        if len(way) == 1:
            return self._arguments[way[0]]
        # Kept, since many ways begin with the same steps.
        return held_at(self.at(way[:-1]), self.step(way[-1]))

    def step(self, step: Step) -> Step:
        """Returns a step with this instance's module in it."""
        if step[0] != "index":
            return step
        return "index", Index(self._modules[step[1].module], step[1].name)


def place_of(step: Step, holder: Any) -> Any:
    """Returns a key for the place that a step leads to, equal for all steps to that place."""
    kind, key = step
    if kind == "index":
        key = _number(key)
    if type(holder) is list and type(key) is int and key < 0:
        key += len(holder)
    return kind if kind == "length" else ("item" if kind == "index" else kind, key)


def held_at(holder: Any, step: Step) -> Any:
    """Returns what an object, a list or a dictionary itself holds, or ABSENT."""
    kind, key = step
    if kind == "length":
        keys = tuple(holder) if _is_dict(holder) else ABSENT
        return len(holder) if type(holder) is list else keys
    if kind == "attribute":
        return (own_table(holder) or {}).get(key, ABSENT)
    key = _number(key) if kind == "index" else key
    if type(holder) is list and type(key) is int:
        return holder[key] if -len(holder) <= key < len(holder) else ABSENT
    return holder.get(key, ABSENT) if _is_dict(holder) else ABSENT


def _contents(holder: Any) -> dict[Any, Any]:
    """Returns what an object, a list or a dictionary holds, by place."""
    if type(holder) in (list, tuple):
        return {("item", number): value for number, value in enumerate(holder)}
    if _is_dict(holder):
        return {("item", key): value for key, value in holder.items()}
    return {("attribute", name): value for name, value in (own_table(holder) or {}).items()}


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or isinstance(value, _WHOLE)


def _is_dict(value: Any) -> bool:
    return type(value) is dict


def put_at(holder: Any, step: Step, value: Any) -> None:
    """Puts a value where a step leads to."""
    kind, key = step
    table: Any = own_table(holder) if kind == "attribute" else holder
    table[_number(key) if kind == "index" else key] = value


def _number(index: Index) -> Any:
    value = raw_attribute(index.module, index.name)
    return value if type(value) is int else ABSENT


def _portable(step: Any, paths: Mapping[int, str]) -> Any:
    # Modules differ from instance to instance; the paths to them do not.
    if type(step) is tuple and step[0] == "index":
        return "index", Index(paths.get(id(step[1].module)), step[1].name)
    return step


def _frozen(value: Any) -> Any:
    kind = type(value)
    return (kind, value) if kind in _EXACT else Freezer().freeze(value)


def _layout(tensor: Any) -> Any:
    number = bytes_if_known(tensor)
    return TensorType.of(tensor), tensor.requires_grad, tensor.storage_offset(), number


def _partition(objects: Any) -> list[int]:
    numbers: dict[int, int] = {}
    return [numbers.setdefault(id(value), len(numbers)) for value in objects]


def _memory(arguments: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Describes which tensors, arguments and reads alike, are identical or share memory."""
    if not tensors:
        return []
    found = [*(x for x in arguments if isinstance(x, torch.Tensor)), *tensors]
    memory: dict[int, int] = {}
    same = _partition(found)
    return [
        (memory.setdefault(memory_id(x), len(memory)), n) for x, n in zip(found, same, strict=True)
    ]


def name_of(way: Way, names: Sequence[str]) -> str:
    """Names a place after the argument that leads there: ``cache.layers.layer_idx.keys``."""
    return ".".join([names[way[0]], *map(_step_text, way[1:])])


def _step_text(step: Step) -> str:
    return str(step[1].name if isinstance(step[1], Index) else step[1])


def _described(value: Any) -> str:
    return describe(_frozen(value)) if _is_plain(value) else f"a {type(value).__qualname__}"


def _text(way: Way) -> str:
    return f"{'.'.join(map(_step_text, way[1:]))} of an argument"

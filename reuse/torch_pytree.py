"""Adapter: flattening nested arguments and results, through PyTorch's own tree registry.

``torch.utils._pytree`` is the registry that Hugging Face's ``ModelOutput`` and others register
with, so it is used rather than a public look-alike. This module alone names it.

The caches of transformers (``DynamicCache``, ``StaticCache``, ``EncoderDecoderCache``) are taken
apart further. Each is a *container*: plain Python objects, lists and dictionaries that hold tensors
and that a model changes in place. Tensors and whole numbers in one are leaves, which differ from
call to call; everything else (classes, names, flags) is its form, which is compared. A container
that holds anything that is neither has no form. They are known by their class, once the user's code
has imported transformers; this module alone says its names.

The graphs of PyG (``torch_geometric.data.Data``, its batches and classes derived from it) are
registered when one is first met: what they hold is what a call is given.

What a call returns may be, or hold, a container that it was given. It is then *known* by its
number, and is brought up to date in place of being made anew: whoever holds it, or a part of it,
sees what eager would have left there.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree

_CACHES_MODULE = "transformers.cache_utils"
_GROWING = ("DynamicLayer", {"keys": -2, "values": -2, "cumulative_length": -1})
_BASES = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
_COUNTS = ("cumulative_length", "cumulative_length_int")


def cache_classes() -> tuple[type, ...]:
    """Returns what caches and their layers derive from; nothing before transformers is there."""
    module = sys.modules.get(_CACHES_MODULE)
    return () if module is None else _classes_of(module)


@functools.lru_cache(maxsize=1)
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
    """The form of one container. A tuple, as one is made and compared for each at every call."""

    kind: type  # its class
    names: tuple[Any, ...]  # of its attributes, or its keys; of a list nothing
    parts: tuple[Part, ...]  # what it holds, in that order
    # The number of the container that it is, among those that a call was given.
    known: int | None = None


class ContainerFlattener:
    """Takes containers, objects of ``classes``, apart: into leaves, which differ at each call.

    ``known`` numbers those that a call was given, by ``id``.
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

    Leaves of containers in ``seen`` were taken already; those seen here are added.
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


_GRAPHS_MODULE, _GRAPHS, _STORE = "torch_geometric.data.data", "Data", "_store"
_STORED, _OF_STORE = "_mapping", ("_mapping", "_parent", "_cached_attr")


def _register_graphs(leaves: Sequence[Any]) -> bool:
    """Registers the classes of PyG's graphs among some leaves; says whether there were any.

    A graph holds its entries in a store, which knows the graph; the store holds what the batch was
    made of besides.
    """
    # Only if the user's code has imported PyG: importing it here would take seconds.
    base = getattr(sys.modules.get(_GRAPHS_MODULE), _GRAPHS, None)
    found = {type(x) for x in leaves if isinstance(base, type) and isinstance(x, base)}
    for kind in found:
        _pytree.register_pytree_node(kind, _graph_apart, functools.partial(_graph_made, kind))
    return bool(found)


def _graph_apart(graph: Any) -> tuple[list[Any], tuple[type, ...]]:
    store = vars(graph)[_STORE]
    of_store = {name: value for name, value in vars(store).items() if name not in _OF_STORE}
    others = {name: value for name, value in vars(graph).items() if name != _STORE}
    return [dict(vars(store)[_STORED]), of_store, others], (type(store),)


def _graph_made(kind: type, held: Iterable[Any], kinds: tuple[type, ...]) -> Any:
    stored, of_store, others = held
    new: Any = object.__new__
    graph, store = new(kind), new(kinds[0])
    vars(store).update(of_store, **{_STORED: stored})
    vars(graph).update(others, **{_STORE: store})
    store._parent = graph  # a weak reference, as it does it
    return graph


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_UNNESTED = frozenset({*_TENSORS, bool, int, float, str, type(None)})


class Nested(NamedTuple):
    """The shape of a structure with containers in it. A tuple, as one is made at every call."""

    outer: _pytree.TreeSpec  # the structure down to them
    # For each leaf of that the number of the container that it is, or -1.
    containers: tuple[int, ...]
    forms: tuple[Container, ...]  # of all containers


TreeSpec: TypeAlias = _pytree.TreeSpec | Nested


def flatten(tree: Any, known: Mapping[int, int] | None = None) -> tuple[list[Any], TreeSpec]:
    """Returns the leaves of a structure, and its shape; ``known`` as in :func:`unflatten`."""
    leaves, outer = flatten_outer(tree)
    leaves, spec, _ = _taken_apart(leaves, outer, known)
    return leaves, spec


def _taken_apart(
    leaves: list[Any], outer: _pytree.TreeSpec, known: Mapping[int, int] | None = None
) -> tuple[list[Any], TreeSpec, Sequence[Any]]:
    """Takes the containers among some leaves apart; returns them, too."""
    classes = cache_classes()
    if not any(isinstance(leaf, classes) for leaf in leaves):
        return leaves, outer, ()
    apart = ContainerFlattener(classes, known)
    numbers = []
    for leaf in leaves:
        numbers.append(apart.add(leaf))
        if numbers[-1] < 0:
            apart.leaves.append(leaf)
    return apart.leaves, Nested(outer, tuple(numbers), apart.forms), apart.objects


def flatten_call(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], TreeSpec, Sequence[Any]]:
    """Returns what :func:`flatten` returns for ``(args, kwargs)``, and its containers.

    These are what :func:`containers` returns. Where nothing is nested, the registry is not asked.
    """
    # Most calls pass tensors alone, and need not pay for the registry.
    if not kwargs and _TENSORS.issuperset(map(type, args)):
        return list(args), _flat_call(len(args), ()), ()
    leaves, classes = [*args, *kwargs.values()], cache_classes()
    if all(type(x) in _UNNESTED or isinstance(x, classes) for x in leaves):
        return _taken_apart(leaves, _flat_call(len(args), tuple(kwargs)))
    return _taken_apart(*flatten_outer((args, kwargs)))


def flatten_outer(tree: Any) -> tuple[list[Any], _pytree.TreeSpec]:
    """Returns the leaves of a structure, containers among them, and its shape down to them."""
    classes = cache_classes()
    # A user may have registered a class of containers, and would then be handed a copy.
    is_leaf = (lambda value: isinstance(value, classes)) if classes else None
    leaves, spec = _pytree.tree_flatten(tree, is_leaf=is_leaf)
    if _register_graphs(leaves):
        return _pytree.tree_flatten(tree, is_leaf=is_leaf)
    return leaves, spec


def is_container(value: Any) -> bool:
    """Whether an object holds tensors and is changed in place, as the caches of transformers do."""
    classes = cache_classes()
    return bool(classes) and isinstance(value, classes)


def outer_names(tree: Any) -> list[str]:
    """Returns a readable name for each leaf that :func:`flatten_outer` returns."""
    return [".".join(path) for path, _ in _leaves_with_paths(tree, cache_classes())]


def containers(tree: Any) -> list[Any]:
    """Returns the containers in a structure, and those in them, by number."""
    return list(_taken_apart(*flatten_outer(tree))[2])


def growing_leaves(spec: TreeSpec) -> list[int | None]:
    """Returns for each leaf which dimension grows from call to call by nature, or None.

    A structure without containers says so of no leaf, by an empty list.
    """
    dims = ((None if one is None else growing_dims(one[0]).get(one[1])) for one in _holders(spec))
    return list(dims)


def counting_leaves(spec: TreeSpec) -> frozenset[int]:
    """Returns which leaves are counts of a container, which vary as sizes do."""
    holders = enumerate(_holders(spec))
    return frozenset(index for index, one in holders if one is not None and is_count(*one[:2]))


def _holders(spec: TreeSpec) -> Iterator[tuple[type, Any, str] | None]:
    """Yields for each leaf what :func:`held` says; None for one that no container holds."""
    if not isinstance(spec, Nested):
        return
    seen: set[int] = set()
    for number in spec.containers:
        if number < 0:
            yield None
        else:
            yield from held(spec.forms, number, seen)


def formless(leaves: Sequence[Any]) -> str:
    """Names the class of a flat argument or result that is a cache and could not be taken apart."""
    classes = cache_classes()
    found = (type(leaf).__qualname__ for leaf in leaves if classes and isinstance(leaf, classes))
    return next(found, "")


@functools.lru_cache(maxsize=256)
def _flat_call(num_args: int, names: tuple[str, ...]) -> _pytree.TreeSpec:
    return _pytree.tree_structure(((0,) * num_args, dict.fromkeys(names, 0)))


def unflatten(leaves: list[Any], spec: TreeSpec, given: Sequence[Any] = ()) -> Any:
    """Rebuilds a structure from what :func:`flatten` returns.

    The containers that it knew, by their numbers there, are those in ``given``; without them they
    are made anew.
    """
    if not isinstance(spec, Nested):
        return _rebuilt(iter(leaves), spec)
    rest = iter(leaves)
    together = ContainerBuilder(spec.forms, rest, given)
    found = [next(rest) if n < 0 else together.container(n) for n in spec.containers]
    return unflatten(found, spec.outer)


def _rebuilt(leaves: Iterator[Any], spec: _pytree.TreeSpec) -> Any:
    if spec.is_leaf():
        return next(leaves)
    held = [_rebuilt(leaves, child) for child in _children(spec)]
    if spec.type is torch.Size:  # PyTorch would make it a tuple
        return torch.Size(held)
    return _pytree.SUPPORTED_NODES[spec.type].unflatten_fn(held, spec.context)


def _children(spec: _pytree.TreeSpec) -> Sequence[_pytree.TreeSpec]:
    return spec.children() if hasattr(spec, "children") else spec.children_specs


def named_fields(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Returns the fields of a named tuple, a container or a kind of dictionary; None of others."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, dict) and type(value) is not dict:
        return dict.items(value)
    return vars(value).items() if is_container(value) else None


def register(
    kind: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Lets objects of a class of ours be parts of structures."""
    _pytree.register_pytree_node(kind, flatten, unflatten)


def changeable_parts(tree: Any) -> list[Any]:
    """Returns the lists, dictionaries and the like in a structure, each as often as it is there."""
    found: list[Any] = []
    classes = cache_classes()

    def is_leaf(value: Any) -> bool:
        if isinstance(value, (MutableSequence, MutableMapping)):
            found.append(value)
        return isinstance(value, classes)

    _pytree.tree_flatten(tree, is_leaf=is_leaf)
    return found


def flatten_with_names(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves with readable names, such as ``position_embeddings.0``."""
    leaves, spec = flatten(tree)
    names, seen = outer_names(tree), set[int]()
    if isinstance(spec, Nested):  # of what a container holds: cache.layers.0.keys
        named = zip(names, spec.containers, strict=True)
        inner = (held(spec.forms, n, seen, name) if n >= 0 else [(name,)] for name, n in named)
        names = [str(path) for found in inner for *_, path in found]
    return list(zip(names, leaves, strict=True))


def _leaves_with_paths(tree: Any, classes: tuple[type, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """Returns the leaves, each with the names of the levels that it is in."""
    # A class that was registered without names is named by keys, or by position.
    try:
        pairs, _ = _pytree.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, classes))
        return [(tuple(map(_key_text, path)), leaf) for path, leaf in pairs]
    except ValueError:
        held, _ = _pytree.tree_flatten(tree, is_leaf=lambda x: x is not tree)  # one level of it
    try:
        pairs, _ = _pytree.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
        names = [_key_text(path[-1]) for path, _ in pairs]
    except ValueError:
        has_keys = isinstance(tree, Mapping) and len(tree) == len(held)
        names = list(map(str, tree if has_keys else range(len(held))))
    below = (
        (name, _leaves_with_paths(value, classes)) for name, value in zip(names, held, strict=True)
    )
    return [((name, *path), leaf) for name, found in below for path, leaf in found]


def _key_text(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)

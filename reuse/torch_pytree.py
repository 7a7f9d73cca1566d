"""Adapter: flattening nested arguments and results, through PyTorch's own tree registry.

``torch.utils._pytree`` is the registry that Hugging Face's ``ModelOutput`` and others register
with, so it is used rather than a public look-alike. This module alone names it. Objects that hold
tensors and that a model changes in place (the caches of transformers) are taken apart further.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree

from .containers import (
    Container,
    ContainerBuilder,
    ContainerFlattener,
    cache_classes,
    growing_dims,
    held,
    is_count,
)

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_LEAVES = frozenset({*_TENSORS, bool, int, float, str, type(None)})


class Nested(NamedTuple):
    """The shape of a structure with containers in it. A tuple, as one is made at every call.

    Attributes:
        outer: the structure down to them.
        containers: for each leaf of that the number of the container that it is, or -1.
        forms: of all containers.
    """

    outer: _pytree.TreeSpec
    containers: tuple[int, ...]
    forms: tuple[Container, ...]


TreeSpec: TypeAlias = _pytree.TreeSpec | Nested


def flatten(tree: Any, known: Mapping[int, int] | None = None) -> tuple[list[Any], TreeSpec]:
    """Returns the leaves of a nested structure and its shape.

    Args:
        tree: the structure.
        known: numbers of containers that a call was given, by ``id``; see :func:`unflatten`.
    """
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
    if not kwargs and _TENSORS.issuperset(map(type, args)):
        return list(args), _flat_call(len(args), ()), ()
    leaves, classes = [*args, *kwargs.values()], cache_classes()
    if all(type(x) in _LEAVES or isinstance(x, classes) for x in leaves):
        return _taken_apart(leaves, _flat_call(len(args), tuple(kwargs)))
    return _taken_apart(*flatten_outer((args, kwargs)))


def flatten_outer(tree: Any) -> tuple[list[Any], _pytree.TreeSpec]:
    """Returns the leaves of a structure, containers among them, and its shape down to them."""
    classes = cache_classes()
    if not classes:
        return _pytree.tree_flatten(tree)
    # A user may have registered a class of containers, and would then be handed a copy.
    return _pytree.tree_flatten(tree, is_leaf=lambda value: isinstance(value, classes))


def is_container(value: Any) -> bool:
    """Whether an object holds tensors and is changed in place, as the caches of transformers do."""
    classes = cache_classes()
    return bool(classes) and isinstance(value, classes)


def outer_names(tree: Any) -> list[str]:
    """Returns a readable name for each leaf that :func:`flatten_outer` returns."""
    return [".".join(path) for path, _ in _leaves_with_paths(tree, cache_classes())]


def containers(tree: Any) -> list[Any]:
    """Returns the containers in a structure, and those in them, by number."""
    classes = cache_classes()
    apart = ContainerFlattener(classes)
    for leaf in flatten_outer(tree)[0]:
        apart.add(leaf)
    return apart.objects


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
    """Rebuilds a nested structure.

    Args:
        leaves: what :func:`flatten` returns.
        spec: the shape.
        given: the containers that known ones in it are to be; without them they are made anew.
    """
    if not isinstance(spec, Nested):
        if spec.is_leaf():
            return leaves[0]
        return _rebuilt(iter(leaves), spec) if _has_size(spec) else spec.unflatten(leaves)
    rest = iter(leaves)
    together = ContainerBuilder(spec.forms, rest, given)
    found = [next(rest) if n < 0 else together.container(n) for n in spec.containers]
    return unflatten(found, spec.outer)


def _has_size(spec: _pytree.TreeSpec) -> bool:
    """Whether a ``torch.Size`` is in a structure: PyTorch would make it a tuple."""
    is_flat = spec.num_leaves == spec.num_children
    return spec.type is torch.Size or (not is_flat and any(map(_has_size, _children(spec))))


def _rebuilt(leaves: Iterator[Any], spec: _pytree.TreeSpec) -> Any:
    if spec.is_leaf():
        return next(leaves)
    held = [_rebuilt(leaves, child) for child in _children(spec)]
    if spec.type is torch.Size:
        return torch.Size(held)
    return _pytree.SUPPORTED_NODES[spec.type].unflatten_fn(held, spec.context)


def _children(spec: _pytree.TreeSpec) -> Sequence[_pytree.TreeSpec]:
    return spec.children() if hasattr(spec, "children") else spec.children_specs


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
    classes = cache_classes()
    apart, named = ContainerFlattener(classes), []
    for path, leaf in _leaves_with_paths(tree, classes):
        name = ".".join(path)
        num_leaves, num_objects = len(apart.leaves), len(apart.objects)
        if apart.add(leaf) < 0:
            named.append((name, leaf))
        else:
            names = apart.names_from(num_objects, name)
            named += zip(names, apart.leaves[num_leaves:], strict=True)
    return named


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

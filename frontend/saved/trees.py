"""Nested arguments and results as plain data: the tree structure and a description of each leaf.

An object of a user's or library's class is stored as class name and fields, because a file refers
to no code. It is loaded as a :class:`Record`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...backend.cache.codec import NotCacheableError, decode_value, encode_value
from ...reuse import torch_pytree
from ...reuse.errors import FileError
from ...reuse.ir.parser import parse_size
from ...reuse.ir.torch_symbols import SIZE_TYPES, ReadSizes, SizeLiteral, expression_of


class Record(dict[str, Any]):
    """An object loaded from a file: a dict of its fields, which are attributes as well.

    As attributes, they take precedence over methods of dict.
    """

    def __init__(self, class_name: str, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        vars(self).update(fields)
        self._class_name = class_name

    def __getitem__(self, key: Any) -> Any:
        """Returns a field by its name or its position."""
        return self.to_tuple()[key] if isinstance(key, (int, slice)) else super().__getitem__(key)

    def to_tuple(self) -> tuple[Any, ...]:
        """Returns the fields in order."""
        return tuple(dict.values(self))


torch_pytree.register(
    Record,
    lambda record: (list(dict.values(record)), (record._class_name, tuple(record))),
    lambda values, told: Record(told[0], dict(zip(told[1], values, strict=True))),
)


@dataclass(frozen=True)
class _Place:
    """A leaf of a tree, with its description."""

    said: Any


def tree_data(leaves: Sequence[Any], spec: torch_pytree.TreeSpec) -> Any:
    """Returns a tree as JSON data; NotCacheableError if a leaf's description is not plain."""
    return encode_value(torch_pytree.unflatten(list(map(_Place, leaves)), spec), _own)


def _own(value: Any) -> Any:
    if isinstance(value, _Place):
        return {"leaf": encode_value(value.said, _size)}
    fields = torch_pytree.named_fields(value)
    if fields is None:
        return None
    name = value._class_name if isinstance(value, Record) else type(value).__name__
    # A cache of transformers holds constants besides its tensors; classes are left out.
    kept = [[k, encode_value(_leaves_in(v), _own)] for k, v in fields if not isinstance(v, type)]
    return {"record": [name, kept]}


def _size(value: Any) -> Any:
    """Returns a symbolic size as JSON data; None for anything else."""
    size = value.size if isinstance(value, SizeLiteral) else value
    if not isinstance(value, (SizeLiteral, *SIZE_TYPES)):
        return None
    text = str(expression_of(size)).replace(" ", "")
    if parse_size(text, ReadSizes()) != expression_of(size):
        raise NotCacheableError(f"the size {text}")
    return {"size": text}


def _leaves_in(held: Any) -> Any:
    """Replaces each constant in an object's field by a leaf."""
    if type(held) is dict:
        return {key: _leaves_in(value) for key, value in held.items()}
    if type(held) in (list, tuple):
        return type(held)(map(_leaves_in, held))
    is_nested = isinstance(held, _Place) or torch_pytree.named_fields(held) is not None
    return held if is_nested else _Place(("constant", held))


def tree_of(
    data: Any, size_of: Callable[[str], Any] | None = None
) -> tuple[list[Any], torch_pytree.TreeSpec]:
    """Returns the leaves and the tree structure that :func:`tree_data` wrote.

    ``size_of`` parses a symbolic size, if leaves may be such.
    """
    places, spec = torch_pytree.flatten(decode_value(data, partial(_read, size_of)))
    if not all(isinstance(place, _Place) for place in places):
        raise FileError("a structure holds what is no leaf")
    return [place.said for place in places], spec


def _read(size_of: Callable[[str], Any] | None, kind: str, inner: Any) -> Any:
    own = partial(_read, size_of)
    if kind == "leaf":
        return _Place(decode_value(inner, own))
    if kind == "size" and size_of is not None:
        return SizeLiteral(size_of(inner))
    if kind == "record":
        name, fields = inner
        return Record(str(name), {str(key): decode_value(held, own) for key, held in fields})
    raise FileError(f"a structure holds {kind}")

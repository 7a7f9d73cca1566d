"""Nested arguments and results as plain data: what is nested how, and what each leaf is.

A class of the user's, or of a library, is its name and its fields: a file names no code. Where such
a result is made again it is a :class:`Record`.
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
    """Stands for an object of a class that a file only names: its fields, as attributes too.

    Args:
        class_name: of the object.
        fields: by name. One that is called as a method of dictionaries is the attribute.
    """

    def __init__(self, class_name: str, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        vars(self).update(fields)
        self._class_name = class_name

    def __getitem__(self, key: Any) -> Any:
        """Returns a field by its name, or by its place among them."""
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
    """Stands where a leaf is in a structure."""

    said: Any


def tree_data(leaves: Sequence[Any], spec: torch_pytree.TreeSpec) -> Any:
    """Returns a structure as JSON holds it.

    Args:
        leaves: what is said of each leaf.
        spec: their structure.

    Raises:
        NotCacheableError: if a leaf says what data cannot.
    """
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
    """Returns the text of a size that is computed of symbols; None of anything else."""
    size = value.size if isinstance(value, SizeLiteral) else value
    if not isinstance(value, (SizeLiteral, *SIZE_TYPES)):
        return None
    text = str(expression_of(size)).replace(" ", "")
    if parse_size(text, ReadSizes()) != expression_of(size):
        raise NotCacheableError(f"the size {text}")
    return {"size": text}


def _leaves_in(held: Any) -> Any:
    """Makes a leaf of each constant in an object's field."""
    if type(held) is dict:
        return {key: _leaves_in(value) for key, value in held.items()}
    if type(held) in (list, tuple):
        return type(held)(map(_leaves_in, held))
    is_nested = isinstance(held, _Place) or torch_pytree.named_fields(held) is not None
    return held if is_nested else _Place(("constant", held))


def tree_of(
    data: Any, size_of: Callable[[str], Any] | None = None
) -> tuple[list[Any], torch_pytree.TreeSpec]:
    """Returns the leaves and the structure that :func:`tree_data` wrote.

    Args:
        data: of them.
        size_of: reads an expression of symbols, where leaves may be some.
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

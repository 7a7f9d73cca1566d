"""Adapter: words of memory that change when a tensor is laid out anew, or gets other memory.

A tensor's sizes, strides, type, device and storage lie in one object of 24 words (c10::TensorImpl),
the address of its numbers in another (c10::StorageImpl). Whether it wants a gradient lies
elsewhere. What is known here of these objects is tried out before it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from .python_words import read_word, tells_versions
from .watch import Words

_WORD_BYTES = 8
_IN_OBJECT = range(2, 8)  # words in which the Python object may say which tensor it is
_IN_TENSOR = range(2, 24)  # past its table of functions and the number of its users
_IN_STORAGE = range(2, 7)
_MAX_DIM = 5  # sizes of more dimensions lie elsewhere
_LINE_BYTES, _PAGE_BYTES, _LINES_PER_PAGE = 64, 4096, 4
_MAX_FETCHED_BYTES = 2**20  # as much as a core's own cache takes


def words_of(tensors: Sequence[torch.Tensor]) -> Words | None:
    """Returns where something changes when the layout or the address of one of them does."""
    return _words_of(tensors) if tells_layouts() else None


def touched_by(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Returns where a run with these tensors begins to read each of their pages."""
    starts = [(t.data_ptr(), t.numel() * t.element_size()) for t in tensors]
    if sum(size for _, size in starts) > _MAX_FETCHED_BYTES:
        return []
    return [
        line
        for start, size in starts
        for page in (start, *range(_after(start), start + size, _PAGE_BYTES))
        for line in range(
            page, min(page + _LINES_PER_PAGE * _LINE_BYTES, start + size), _LINE_BYTES
        )
    ]


def _after(address: int) -> int:
    return (address // _PAGE_BYTES + 1) * _PAGE_BYTES


def _words_of(tensors: Sequence[torch.Tensor]) -> Words | None:
    found: list[int] = []
    storages = []
    for tensor in tensors:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not plain or tensor.layout != torch.strided or tensor.dim() > _MAX_DIM:
            return None
        if tensor.device.type not in ("cpu", "cuda"):
            return None
        own = [id(tensor) + i * _WORD_BYTES for i in _IN_OBJECT]
        named = [a for a in own if read_word(a) == tensor._cdata]
        if len(named) != 1:
            return None
        storage = tensor.untyped_storage()
        storages.append(storage)
        found += named
        found += [tensor._cdata + i * _WORD_BYTES for i in _IN_TENSOR]
        found += [storage._cdata + i * _WORD_BYTES for i in _IN_STORAGE]
    return Words(tuple(dict.fromkeys(found)), (list(tensors), storages))


@functools.cache
def tells_layouts() -> bool:
    """Whether every way to change a tensor's layout or address shows in its words, tried out."""
    if not tells_versions():
        return False
    try:
        return all(_is_told(change) for change in _CHANGES)
    except (RuntimeError, AttributeError):
        return False


def _is_told(change: Callable[[torch.nn.Parameter], object]) -> bool:
    probe = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
    with torch.no_grad():
        words = _words_of([probe])
        if words is None:
            return False
        before = [read_word(a) for a in words.addresses]
        probe.add_(1)
        probe.grad = torch.zeros_like(probe)
        users = [probe.detach(), probe.untyped_storage()]
        quiet = before == [read_word(a) for a in words.addresses]
        change(probe)
        told = before != [read_word(a) for a in words.addresses]
    return quiet and told and len(users) == 2


def _swap(probe: torch.nn.Parameter) -> None:
    other = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
    torch._C._swap_tensor_impl(probe, other)


def _move(name: str) -> Callable[[torch.nn.Parameter], object]:
    def change(probe: torch.nn.Parameter) -> None:
        data = probe.data
        ways = {
            "memory": lambda: torch.zeros_like(data),
            "strides": lambda: data.t(),
            "sizes": lambda: data.view(2, 8),
            "dimensions": lambda: data.view(16),
            "offset": lambda: data.view(16)[1:5].expand(4, 4),
            "type": lambda: data.view(torch.float64),
            "conjugate": lambda: data.conj(),
            "negative": lambda: torch._neg_view(data),
        }
        probe.data = ways[name]()

    return change


_CHANGES: tuple[Callable[[torch.nn.Parameter], object], ...] = (
    *map(_move, ("memory", "strides", "sizes", "dimensions", "offset", "conjugate", "negative")),
    _move("type"),
    lambda probe: probe.set_(torch.zeros(4, 4, dtype=torch.complex64)),  # type: ignore[call-overload]
    lambda probe: probe.untyped_storage().resize_(2**16),
    lambda probe: probe.as_strided_((2, 4), (1, 1)),
    lambda probe: probe.unsqueeze_(0),
    lambda probe: probe.t_(),
    _swap,
)

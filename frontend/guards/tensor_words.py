"""Adapter: words of memory that change when a tensor is laid out anew, or gets other memory.

A tensor's sizes, strides, type, device and storage lie in one object (c10::TensorImpl), the address
of its numbers in another (c10::StorageImpl), its gradient, whether it wants one, and hooks on it
in a third (AutogradMeta), which is made when one is wanted. What is known here of these objects is
tried out before it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ...reuse.evidence.python_words import read_word, tells_versions
from ...reuse.evidence.watch import Words

_WORD_BYTES = 8
_IN_OBJECT = range(2, 8)  # words in which the Python object may say which tensor it is
_IN_TENSOR = range(2, 24)  # past its table of functions and the number of its users, at most
_NUM_TRIES = 4
_IN_STORAGE = range(2, 7)
_IN_AUTOGRAD = range(1, 20)  # past its table of functions, up to the wish in all versions
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
        found += _wants_of(tensor)
        found += [tensor._cdata + i * _WORD_BYTES for i in _in_tensor()]
        found += [storage._cdata + i * _WORD_BYTES for i in _IN_STORAGE]
    return Words(tuple(dict.fromkeys(found)), (list(tensors), storages))


class _AutogradPlaces(NamedTuple):
    """Numbers of words: in a tensor, its AutogradMeta; in that, its gradient, and its wish."""

    meta: int
    gradient: int
    wish: int

    def word_of(self, tensor: torch.Tensor, number: int) -> int | None:
        """Returns the address of a word in a tensor's AutogradMeta, if it has one."""
        start = read_word(tensor._cdata + self.meta * _WORD_BYTES)
        return start + number * _WORD_BYTES if start else None


def _vector() -> torch.Tensor:
    return torch.zeros(4, device="cpu")  # whatever the user's default device is


def _square() -> torch.Tensor:
    return torch.zeros(4, 4, dtype=torch.complex64, device="cpu")


@functools.cache
def _in_tensor() -> range:
    """The words of a tensor, up to its last, which says what kinds of numbers its memory holds.

    What lies after it belongs to something else and changes at any time.
    """
    told = []
    for _ in range(_NUM_TRIES):
        probe = _vector()
        before = _read(probe._cdata, _IN_TENSOR)
        probe.data = torch._neg_view(probe.data)
        after = _read(probe._cdata, _IN_TENSOR)
        told.append({i for i in _IN_TENSOR if before[i] != after[i]})
    return range(_IN_TENSOR.start, max(set.intersection(*told), default=_IN_TENSOR.stop - 1) + 1)


def object_of(tensor: torch.Tensor) -> int:
    """Returns where the C++ object of a tensor is."""
    return int(tensor._cdata)


def gradients_of(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Returns where each of these tensors says which C++ object is its ``.grad``.

    The words can be read for as long as those of :func:`words_of` are the same.
    """
    places = _autograd_places()
    found = [places.word_of(t, places.gradient) for t in tensors] if places else [None]
    return [a for a in found if a] if all(found) else None


def _wants_of(tensor: torch.Tensor) -> list[int]:
    """Where a tensor says whether it wants a gradient; one that never wanted any says so itself."""
    places = _autograd_places()
    word = places.word_of(tensor, places.wish) if places else None
    return [word] if word else []


def tells_wants() -> bool:
    """Whether the words of a tensor change when it begins or ceases to want a gradient."""
    return tells_layouts() and _autograd_places() is not None


@functools.cache
def _autograd_places() -> _AutogradPlaces | None:
    """Finds the words by what changes in them."""
    probe = _vector()
    before = _read(probe._cdata, _IN_TENSOR)
    probe.requires_grad_()
    after = _read(probe._cdata, _IN_TENSOR)
    made = [i for i in _IN_TENSOR if not before[i] and after[i]]
    if len(made) != 1 or made != [i for i in _IN_TENSOR if before[i] != after[i]]:
        return None
    start = after[made[0]]
    gradients = [_vector(), _vector()]
    states = []
    for gradient in (*gradients, None):
        probe.grad = gradient
        states.append(_read(start, _IN_AUTOGRAD))
    held = [g._cdata for g in gradients]
    places = [i for i in _IN_AUTOGRAD if [s[i] for s in states[:2]] == held]
    for wish in (False, True):
        probe.requires_grad_(wish)
        states.append(_read(start, _IN_AUTOGRAD))
    wishes = [i for i in _IN_AUTOGRAD if states[2][i] == states[4][i] != states[3][i]]
    same = read_word(probe._cdata + made[0] * _WORD_BYTES) == start
    if not same or len(places) != 1 or len(wishes) != 1 or states[2][places[0]] in held:
        return None
    return _AutogradPlaces(made[0], places[0], wishes[0])


def hooks_of(tensors: Sequence[torch.Tensor]) -> dict[int, int] | None:
    """Returns words, and what they are now, that change when a first hook is put on a gradient.

    They also change when somebody gets hold of the node that adds to ``.grad``, where hooks can be
    put too; None if somebody holds one now. To be compared in their order: one may be readable only
    while those before it are the same.
    """
    places, own = _hook_places(), _autograd_places()
    if places is None or own is None or not tells_layouts():
        return None
    found: dict[int, int] = {}
    for tensor in tensors:
        start = own.word_of(tensor, 0)
        if start is None:
            return None
        words = [start + i * _WORD_BYTES for i in (*places.hooks, *places.receiver)]
        found |= {a: read_word(a) for a in words}
        users = {a: read_word(a) for a in _users_of(found[words[-1]])}
        if any(map(_is_used, users.values())):
            return None
        found |= users
    return found


class _HookPlaces(NamedTuple):
    """Numbers of words in an AutogradMeta: those of hooks, and what says which node adds up."""

    hooks: tuple[int, ...]
    receiver: tuple[int, ...]


def _users_of(counted: int) -> list[int]:
    """Where an object, or what counts its users, says how many there are; nothing for none."""
    return [counted + _WORD_BYTES] if counted else []


def _is_used(count: int) -> bool:
    """Whether that word counts any users, and not only those who ask whether there are some."""
    return bool(count & 0xFFFFFFFF)


@functools.cache
def _hook_places() -> _HookPlaces | None:
    """Finds the words by what changes in them."""
    own = _autograd_places()
    if own is None:
        return None
    hooks: set[int] = set()
    for put in (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook):
        made, _ = _made_by(own, lambda probe, put=put: put(probe, lambda gradient: None))  # type: ignore[misc]
        if not made:
            return None
        hooks |= made
    receiver, (probe, node) = _made_by(own, lambda probe: probe.expand(4, 4))
    start = own.word_of(probe, 0)
    if not receiver or hooks & receiver or start is None:
        return None
    (users,) = _users_of(read_word(start + max(receiver) * _WORD_BYTES))
    is_counted = _is_used(read_word(users))
    del node
    is_counted &= not _is_used(read_word(users))
    return _HookPlaces(tuple(sorted(hooks)), tuple(sorted(receiver))) if is_counted else None


def _made_by(
    own: _AutogradPlaces, change: Callable[[torch.Tensor], object]
) -> tuple[set[int], tuple[torch.Tensor, object]]:
    """Returns the words of a new AutogradMeta that something fills in, the tensor and result."""
    with torch.inference_mode(False), torch.enable_grad():
        probe = _vector().requires_grad_()
        start = own.word_of(probe, 0) or 0
        before = _read(start, _IN_AUTOGRAD)
        result = change(probe)
    after = _read(start, _IN_AUTOGRAD)
    made = {i for i in _IN_AUTOGRAD if before[i] != after[i]}
    return made, (probe, result)


def _read(start: int, numbers: Iterable[int]) -> dict[int, int]:
    return {i: read_word(start + i * _WORD_BYTES) for i in numbers}


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
    probe = torch.nn.Parameter(_square())
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
    other = torch.nn.Parameter(_square())
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
    lambda probe: probe.set_(_square()),  # type: ignore[call-overload]
    lambda probe: probe.untyped_storage().resize_(2**16),
    lambda probe: probe.as_strided_((2, 4), (1, 1)),
    lambda probe: probe.unsqueeze_(0),
    lambda probe: probe.t_(),
    _swap,
)

"""Arenas of a planned program: who works in one, and which are kept while nobody does."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ...reuse.process import ProcessLock
from ..link.torch_generated import Runner

_MAX_IDLE_ARENAS = 4  # an arena is as large as all activations: more of them are no saving
_NUM_SPELLS = 4  # that are remembered, so that a lone forward between steps frees no arena

address_of = torch.Tensor.data_ptr


def new_memory(num_bytes: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    """Allocates an arena."""
    return torch.empty(max(num_bytes, 64), dtype=torch.uint8, device=device, pin_memory=pinned)


class Lender(Protocol):
    """Lends arenas: a program."""

    def release(self, lease: Lease) -> None:
        """Takes an arena back."""


class Use:
    """Counts the arenas in use now and lately: so many are kept when they are idle.

    A spell of use begins with the first lease and ends when all are given back.
    """

    def __init__(self) -> None:
        self._num_leased = self._most = 0
        self._spells: deque[int] = deque(maxlen=_NUM_SPELLS)

    def begin(self) -> None:
        """Counts one more."""
        self._num_leased += 1
        self._most = max(self._most, self._num_leased)

    def end(self) -> None:
        """Counts one less."""
        self._num_leased -= 1
        if not self._num_leased:
            self._spells.append(self._most)
            self._most = 0

    @property
    def num_idle_kept(self) -> int:
        """Returns the number of idle arenas that are worth their memory."""
        lately = max((self._most, *self._spells))
        return min(lately - self._num_leased, _MAX_IDLE_ARENAS)


@dataclass(frozen=True)
class Arena:
    """An arena in which nobody runs, and what is bound in it, by shape."""

    memory: torch.Tensor
    others: Mapping[torch.device, torch.Tensor]
    bound: dict[object, Lease] = field(default_factory=dict)


class Arenas:
    """The arenas of a program, in which it runs with the numbers of any shape.

    Attributes:
        addresses: of the tensors that are bound in idle ones.
        idle: those in which nobody runs.
        use: how many are in use.
        lock: collecting garbage inside may give a lease back.
    """

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.idle: list[Arena] = []
        self.use = Use()
        self.lock = ProcessLock()
        self._pinned: tuple[Callable[[], torch.Tensor | None], int, object] | None = None

    def taken(self, key: object) -> Arena | None:
        """Returns an idle arena, one in which a shape is bound if there is one."""
        bound = (i for i, arena in enumerate(self.idle) if key in arena.bound)
        return self.idle.pop(next(bound, -1)) if self.idle else None

    def forget(self, key: object) -> None:
        """Drops what is bound for a shape, and arenas in which none is."""
        for arena in self.idle:
            arena.bound.pop(key, None)
        self.idle[:] = [arena for arena in self.idle if arena.bound]
        if not self.idle:
            self.addresses = []

    def pin(self, arena: torch.Tensor, key: object) -> None:
        """Notes where results lie until the next run, of whatever shape."""
        self._pinned = weakref.ref(arena), arena.data_ptr(), key

    def pinned_by_others(self, key: object) -> tuple[torch.Tensor] | None:
        """Returns the arena of another shape in which results lie, if it is whole."""
        made, start, owner = self._pinned or (lambda: None, 0, key)
        arena = made() if owner is not key else None
        if arena is None or arena.data_ptr() != start:
            return None
        return (arena,) if arena.untyped_storage().nbytes() >= arena.numel() else None


@dataclass(eq=False, slots=True)
class Lease:
    """One arena in use: its runners work in it until it is released or dropped."""

    code: object
    arena: torch.Tensor
    runners: tuple[Runner, ...]
    tensors: list[torch.Tensor]
    addresses: list[int]
    owner: Lender | None
    others: Mapping[torch.device, torch.Tensor] = field(default_factory=dict)
    home: Arena | None = None
    _starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._starts = [memory.data_ptr() for memory in self._arenas()]

    def owned_by(self, owner: Lender | None, home: Arena | None = None) -> Lease:
        """Returns a lease on the same arena that gives it back to this program."""
        bound = (self.code, self.arena, self.runners, self.tensors, self.addresses)
        return Lease(*bound, owner, self.others, home)

    def is_bound_to(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors are where they were when the arena was bound."""
        return list(map(address_of, tensors)) == self.addresses

    def has_its_arena(self) -> bool:
        """Whether the arena is where it was bound, and whole: operators of the user's see it."""
        return all(
            memory.data_ptr() == start and memory.untyped_storage().nbytes() >= memory.numel()
            for memory, start in zip(self._arenas(), self._starts, strict=True)
        )

    def _arenas(self) -> list[torch.Tensor]:
        return [self.arena, *self.others.values()]

    def hand_over(self) -> None:
        """Leaves the arena to another lease on it."""
        self.owner = None

    def release(self) -> None:
        """Gives the arena back to its program."""
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.release(self)

    def __del__(self) -> None:
        self.release()

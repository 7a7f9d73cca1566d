"""Arenas of a planned program: which are in use, and how many idle ones are kept."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...reuse.process import ProcessLock
from ..link.torch_generated import Runner

_MAX_IDLE_ARENAS = 4  # an arena is as large as all activations, so few are kept
_NUM_SPELLS = 4  # so many are remembered, so that a lone forward between steps frees no arena

address_of = torch.Tensor.data_ptr


def new_memory(num_bytes: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    """Allocates an arena."""
    return torch.empty(max(num_bytes, 64), dtype=torch.uint8, device=device, pin_memory=pinned)


class Use:
    """Counts the arenas in use, now and lately: as many are kept when they are idle.

    A spell begins with the first lease and ends when all leases are released.
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
        """Returns how many idle arenas to keep."""
        lately = max((self._most, *self._spells))
        return min(lately - self._num_leased, _MAX_IDLE_ARENAS)


@dataclass(frozen=True)
class Arena:
    """An idle arena, and the leases bound in it, by the key of their shapes."""

    memory: torch.Tensor
    others: Mapping[torch.device, torch.Tensor]
    bound: dict[object, Lease] = field(default_factory=dict)


class Arenas:
    """The arenas of a program, shared by all shapes that it runs with."""

    def __init__(self) -> None:
        self.addresses: list[int] = []  # of the tensors that are bound in idle arenas
        self.idle: list[Arena] = []  # the arenas that no lease uses
        self.use = Use()  # how many are in use
        # Reentrant, since a garbage collection while it is held may release a lease.
        self.lock = ProcessLock()
        self._pinned: tuple[Callable[[], torch.Tensor | None], int, object] | None = None

    def taken(self, key: object) -> Arena | None:
        """Returns an idle arena, if possible one with a lease bound for this key."""
        bound = (i for i, arena in enumerate(self.idle) if key in arena.bound)
        return self.idle.pop(next(bound, -1)) if self.idle else None

    def forget(self, key: object) -> None:
        """Drops the leases bound for a key, and arenas without any."""
        for arena in self.idle:
            arena.bound.pop(key, None)
        self.idle[:] = [arena for arena in self.idle if arena.bound]
        if not self.idle:
            self.addresses = []

    def pin(self, arena: torch.Tensor, key: object) -> None:
        """Notes the arena that holds the results until the next run, of any shape."""
        self._pinned = weakref.ref(arena), arena.data_ptr(), key

    def pinned_by_others(self, key: object) -> tuple[torch.Tensor] | None:
        """Returns the arena with another shape's results, if its storage is still whole."""
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
    take_back: Callable[[Lease], None] | None  # of the program that lends the arena
    others: Mapping[torch.device, torch.Tensor] = field(default_factory=dict)
    home: Arena | None = None
    _starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._starts = [memory.data_ptr() for memory in self._arenas()]

    def owned_by(
        self, take_back: Callable[[Lease], None] | None, home: Arena | None = None
    ) -> Lease:
        """Returns a lease on the same arena, which it gives back by calling this."""
        bound = (self.code, self.arena, self.runners, self.tensors, self.addresses)
        return Lease(*bound, take_back, self.others, home)

    def is_bound_to(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors are at the addresses that were bound."""
        return list(map(address_of, tensors)) == self.addresses

    def has_its_arena(self) -> bool:
        """Whether the arena is unmoved and whole: a user's operator may have resized it."""
        return all(
            memory.data_ptr() == start and memory.untyped_storage().nbytes() >= memory.numel()
            for memory, start in zip(self._arenas(), self._starts, strict=True)
        )

    def _arenas(self) -> list[torch.Tensor]:
        return [self.arena, *self.others.values()]

    def release(self) -> None:
        """Gives the arena back to its program."""
        take_back, self.take_back = self.take_back, None
        if take_back is not None:
            take_back(self)

    def __del__(self) -> None:
        self.release()

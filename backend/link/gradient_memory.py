"""Activations in memory that gradients will fill.

A gradient belongs to the user, in memory of its own. Until the launch that writes it, that memory
is idle. So the memory of large gradients (*hosts*) is allocated as the forward begins, and buffers
that are dead by the time the gradient is written (*guests*) lie in it. A host is handed out after
its last guest died, and nothing of ours looks at it again: what the user receives is an ordinary
tensor that shares its memory with nothing.

Everything is planned as one address space, so that one proof covers it and one cache keeps it: the
arena first, then the gradients, each with its guests inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..arena.arena import ALIGNMENT, ArenaPlan, plan
from ..arena.live_ranges import Buffers, IntArray, lower_bound
from ..arena.packing import FirstFit, lowest_gap
from .layout import Instance, Layout, buffers_of

# Smaller gradients are no hosts: allocating them early costs more than they can hold.
_MIN_HOST_BYTES = 64 * 1024
# A host may get more memory than its gradient has, which stays with it. This much in all.
_MAX_GROWTH = 0.01
_MAX_SQUEEZED = 64  # buffers for which that is tried


@dataclass(frozen=True)
class Overlay:
    """Which gradients are hosts, and where guests lie.

    Attributes:
        hosts: instance of a gradient -> bytes of its memory.
        guests: arena instance -> its host, and the offset in it in bytes.
    """

    hosts: dict[int, int] = field(default_factory=dict)
    guests: dict[int, tuple[int, int]] = field(default_factory=dict)


def gradients_of(layout: Layout) -> list[int]:
    """Returns the instances that a backward makes for the user."""
    return [
        i
        for i, b in enumerate(layout.instances)
        if (b.kind, b.part) == ("result", 1) and b.num_bytes
    ]


def movable(layout: Layout, placed: Sequence[int]) -> list[bool]:
    """Which instances only native launches use: those take any address, run by run."""
    fixed = {
        launch.bases[view.buffer][0]
        for part in layout.parts
        for launch in part.launches
        if launch.launch.native is None
        for view in launch.launch.views()
    }
    return [i not in fixed and layout.instances[i].num_bytes > 0 for i in placed]


def buffers_with_gradients(instances: Sequence[Instance], gradients: Sequence[Instance]) -> Buffers:
    """Returns columns of the arena's instances, then of gradients, which live on."""
    end = max(b.death for b in (*instances, *gradients))
    kept = [replace(b, death=max(end, b.birth + 1)) for b in gradients]
    return buffers_of([*instances, *kept])


def plan_overlaid(
    buffers: Buffers, can_move: Sequence[bool], fit: FirstFit, *, effort_s: float, enough: float
) -> ArenaPlan:
    """Plans ``len(can_move)`` buffers, in memory of the gradients that follow or in an arena."""
    padded = buffers.aligned(ALIGNMENT)
    num_placed = len(can_move)
    hosts = _Hosts(padded, buffers.size, num_placed)
    waiting = hosts.fill(np.flatnonzero(can_move), fit)
    hosts.squeeze_in(waiting)
    rest = np.flatnonzero(hosts.of < 0)
    arena = plan(buffers.take(rest), effort_s=effort_s, enough=enough, fit=fit)
    starts, peak_bytes = hosts.starts(arena.peak_bytes)
    offsets = np.concatenate([hosts.place, starts])
    guests = np.flatnonzero(hosts.of >= 0)
    offsets[guests] += offsets[hosts.of[guests]]
    offsets[rest] = arena.offsets
    return ArenaPlan(offsets, peak_bytes, lower_bound(padded), f"overlay, {arena.method}")


class _Hosts:
    """The gradients of a problem, being filled.

    Attributes:
        of: which host each buffer lies in, -1 for none.
        place: at which offset in it.
    """

    def __init__(self, padded: Buffers, sizes: IntArray, num_placed: int) -> None:
        self._padded = padded
        self._first = num_placed
        self._extent = padded.size.copy()
        self._room = sizes // ALIGNMENT * ALIGNMENT
        hosts = num_placed + np.flatnonzero(self._room[num_placed:] >= _MIN_HOST_BYTES)
        # What is written last serves longest.
        self._hosts = hosts[np.argsort(-padded.birth[hosts], kind="stable")]
        self.of = np.full(num_placed, -1, np.int64)
        self.place = np.zeros(num_placed, np.int64)

    def fill(self, waiting: IntArray, fit: FirstFit) -> IntArray:
        """Packs one host after the other by first fit, what dies last first; returns the rest."""
        birth, death, size = self._padded.birth, self._padded.death, self._padded.size
        for host in self._hosts:
            room = self._room[host]
            found = waiting[(death[waiting] <= birth[host]) & (size[waiting] <= room)]
            if not len(found):
                continue
            sub = self._padded.take(found)
            places = fit(sub, np.lexsort((-sub.size, -sub.death)))
            fits = places + sub.size <= room
            self.of[found[fits]], self.place[found[fits]] = host, places[fits]
            waiting = np.setdiff1d(waiting, found[fits], assume_unique=True)
        return waiting

    def squeeze_in(self, waiting: IntArray) -> None:
        """Gives some host a little more memory for a buffer that fits nowhere."""
        allowed = int(_MAX_GROWTH * self._padded.size[self._first :].sum())
        birth, death, size = self._padded.birth, self._padded.death, self._padded.size
        for guest in waiting[np.argsort(-size[waiting], kind="stable")][:_MAX_SQUEEZED]:
            later = self._hosts[birth[self._hosts] >= death[guest]]
            ends = [(self._lowest(guest, host) + size[guest], host) for host in later]
            more, end, host = min(
                ((max(end - self._room[host], 0), end, host) for end, host in ends),
                default=(allowed + 1, 0, 0),
            )
            if more <= allowed:
                allowed -= int(more)
                self._room[host] = max(self._room[host], end)
                self._extent[host] = max(self._extent[host], end)
                self.of[guest], self.place[guest] = host, end - size[guest]

    def _lowest(self, guest: int, host: int) -> int:
        """The lowest address in a host that is free all of a guest's life."""
        birth, death = self._padded.birth, self._padded.death
        beside = np.flatnonzero(self.of == host)
        beside = beside[(birth[beside] < death[guest]) & (death[beside] > birth[guest])]
        lows = self.place[beside]
        highs = lows + self._padded.size[beside]
        order = np.argsort(lows)
        size = int(self._padded.size[guest])
        return lowest_gap(lows[order], highs[order], size) if len(beside) else 0

    def starts(self, base: int) -> tuple[IntArray, int]:
        """Returns where each gradient starts, one after the other from ``base``, and the end."""
        ends = base + np.cumsum(self._extent[self._first :])
        return ends - self._extent[self._first :], int(ends[-1])


def overlay_of(
    found: ArenaPlan, placed: Sequence[int], gradients: Sequence[int], layout: Layout
) -> tuple[int, Overlay]:
    """Reads a plan of :func:`plan_overlaid`: the bytes of its arena, and who lies where."""
    offsets = found.offsets.tolist()
    starts = offsets[len(placed) :]
    ends = [*starts[1:], found.peak_bytes]
    arena_bytes = starts[0]
    overlay = Overlay()
    for instance, offset in zip(placed, offsets, strict=False):
        if offset < arena_bytes or not layout.instances[instance].num_bytes:
            continue
        index = int(np.searchsorted(starts, offset, side="right")) - 1
        host = gradients[index]
        overlay.guests[instance] = (host, offset - starts[index])
        exact, extent = layout.instances[host].num_bytes, ends[index] - starts[index]
        grown = extent > -(-exact // ALIGNMENT) * ALIGNMENT
        overlay.hosts[host] = extent if grown else exact
    return arena_bytes, overlay


def new_host(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, num_bytes: int
) -> torch.Tensor:
    """Makes a gradient in more memory than it needs. Only programs on CPU have such."""
    memory = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device="cpu")
    return memory.as_strided(shape, stride)


def copy_of_host(host: torch.Tensor) -> torch.Tensor:
    """Copies a host with everything in its memory."""
    memory = host.untyped_storage().clone()
    twin = torch.empty(0, dtype=host.dtype, device=host.device)
    return twin.set_(memory, host.storage_offset(), host.shape, host.stride())  # type: ignore[call-overload, no-any-return]

from __future__ import annotations
from dataclasses import dataclass
from collections.abc import Sequence


@dataclass
class ArenaPlan:
    offsets: Sequence[int]
    peak_bytes: int
    lower_bound_bytes: int


def plan_buffers(births, deaths, sizes):
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    placed = []
    off = [0] * len(sizes)
    for i in order:
        n = (sizes[i] + 63) // 64 * 64
        conf = sorted((o, e) for (b, d, o, e) in placed if not (d <= births[i] or deaths[i] <= b))
        o = 0
        for lo, hi in conf:
            if lo - o >= n:
                break
            o = max(o, hi)
        off[i] = o
        placed.append((births[i], deaths[i], o, o + n))
    ev = {}
    for b, d, s in zip(births, deaths, sizes):
        n = (s + 63) // 64 * 64
        ev[b] = ev.get(b, 0) + n
        ev[d] = ev.get(d, 0) - n
    m = c = 0
    for t in sorted(ev):
        c += ev[t]
        m = max(m, c)
    return ArenaPlan(off, max((e for *_, e in placed), default=0), m)

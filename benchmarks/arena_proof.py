"""The proof of a memory plan: no two buffers share a byte while both are live.

Nothing here is shared with the planner.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from lazyinline.reuse.errors import VerifyError


def check_no_overlap(
    birth: npt.ArrayLike, death: npt.ArrayLike, offset: npt.ArrayLike, size: npt.ArrayLike
) -> None:
    """Checks a plan by going along time with the live buffers sorted by address; n log n.

    Args:
        birth: first time at which each buffer is live.
        death: first time at which it is no longer live.
        offset: bytes from the start of the arena.
        size: bytes. A buffer of zero bytes, or one that never lives, overlaps nothing.

    Raises:
        VerifyError: two live buffers share a byte, or one begins before the arena does.
    """
    columns = (np.asarray(column) for column in (birth, death, offset, size))
    births, deaths, offsets, sizes = (column.tolist() for column in columns)
    sized = [i for i, num_bytes in enumerate(sizes) if num_bytes and births[i] < deaths[i]]
    leaving = sorted(sized, key=deaths.__getitem__)
    live: list[int] = []  # offsets, all different: these buffers do not overlap
    holder: dict[int, int] = {}
    num_left = 0
    for i in sorted(sized, key=births.__getitem__):
        while deaths[leaving[num_left]] <= births[i]:
            del live[bisect_left(live, offsets[leaving[num_left]])]
            num_left += 1
        start, end = offsets[i], offsets[i] + sizes[i]
        at = bisect_left(live, start)
        if at < len(live) and live[at] < end:
            raise VerifyError(_message(i, holder[live[at]], births, deaths, offsets, sizes))
        before = holder[live[at - 1]] if at else None
        if before is not None and offsets[before] + sizes[before] > start:
            raise VerifyError(_message(i, before, births, deaths, offsets, sizes))
        if start < 0:
            raise VerifyError(f"buffer {i} is at offset {start}, before the arena")
        live.insert(at, start)
        holder[start] = i


def _message(first: int, second: int, *columns: list[int]) -> str:
    births, deaths, offsets, sizes = columns
    texts = [
        f"buffer {i} (live in [{births[i]}, {deaths[i]}), "
        f"bytes [{offsets[i]}, {offsets[i] + sizes[i]}))"
        for i in sorted((first, second))
    ]
    return f"{texts[0]} and {texts[1]} share bytes while both are live"

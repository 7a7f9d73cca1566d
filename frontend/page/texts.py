"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

_EQUAL = 0.02
"""Ratios this close to one are called equal."""


def times_less(late: float, early: float) -> str:
    """Says how many times less the first is than the second: ``2.4x less``, ``equal``."""
    if not late or not early:
        return "equal" if late == early else "-"
    ratio = early / late
    if abs(ratio - 1) <= _EQUAL:  # a hundredth less is noise, and no news
        return "equal"
    return f"{ratio:.3g}\u00d7 less" if ratio > 1 else f"{1 / ratio:.3g}\u00d7 more"


def ratio_range(ratios: list[float]) -> str:
    """Writes ratios as a range: ``0.9-1.1x``, or ``1.0x`` where they agree."""
    low, high = (f"{r:.2f}" if r < 10 else f"{r:.0f}" for r in (min(ratios), max(ratios)))
    return f"{low}\u00d7" if low == high else f"{low}\u2013{high}\u00d7"


def bytes_text(num_bytes: float) -> str:
    """Writes a size: ``31.1 MiB``."""
    size, unit = _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def flops_text(flops: float) -> str:
    """Writes an amount of work: ``1.2 GFLOP``."""
    amount, unit = _scaled(flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))
    return f"{amount:.3g} {unit}"


def _scaled(value: float, step: int, units: Sequence[str]) -> tuple[float, str]:
    """Returns a value in the largest of some units in which it is not below one."""
    for unit in units[:-1]:
        if abs(value) < step:
            return value, unit
        value /= step
    return value, units[-1]


def seconds_text(seconds: float) -> str:
    """Writes a time: ``12.1 ms``, ``4.10 s``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} \u00b5s"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def error_text(error: float | str | None) -> str:
    """Writes an error in two digits: ``1.2e-07``, ``0``, or ``-`` if it is not known."""
    return "-" if error is None else "0" if error == 0 else f"{float(error):.1e}"


def count_text(number: int, noun: str) -> str:
    """Writes a number of things: ``1 call``, ``2,000 calls``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")

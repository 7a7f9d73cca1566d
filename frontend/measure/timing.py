"""The time of a step: interleaved rounds until they agree, and who else used the machine meanwhile.

Every step runs once per round, so that a disturbance meets all of them alike. On a machine that
others use, medians and minima part: both are told, with the largest, and a reader is warned.
"""

from __future__ import annotations

import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..report import cpu_seconds

Step = Callable[[], Any]
"""Runs one step; what it returns is dropped."""

NOISY_SPREAD = 1.25
"""Median over minimum from which times of steps are not to be trusted."""
BUSY_SHARE = 0.2
"""Part of the machine's cores from which other programs disturb."""
_TICKS = pathlib.Path("/proc/stat")


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of one step over interleaved rounds."""

    minimum_ms: float
    median_ms: float
    maximum_ms: float
    rounds: int

    @property
    def spread(self) -> float:
        """Median over minimum: 1 where every round takes the same."""
        return self.median_ms / self.minimum_ms if self.minimum_ms else 1.0

    @property
    def is_noisy(self) -> bool:
        """Whether rounds differ so much that neither number is to be trusted."""
        return self.spread > NOISY_SPREAD


@dataclass(frozen=True)
class Rounds:
    """When to stop.

    Attributes:
        fewest, most: rounds.
        budget_s: no round begins later, once there are the fewest.
        settled: largest spread, median over minimum, at which no more rounds are needed.
    """

    fewest: int = 5
    most: int = 200
    budget_s: float = 10.0
    settled: float = 1.05


ROUNDS = Rounds()


@dataclass(frozen=True)
class Timing:
    """What was timed.

    Attributes:
        steps: the time of each, by name.
        others_share: the part of all cores that other programs used meanwhile; None where the
            system does not tell.
    """

    steps: Mapping[str, StepTime]
    others_share: float | None


def time_steps(
    steps: Mapping[str, Step], devices: set[torch.device], rounds: Rounds | None = None
) -> Timing:
    """Times steps in interleaved rounds, until every step's rounds agree or time is up.

    Args:
        steps: what to run, by name.
        devices: those on which a step works.
        rounds: when to stop, if not as usual.
    """
    rounds = rounds or ROUNDS
    gpus = [device for device in devices if device.type == "cuda"]
    taken: dict[str, list[float]] = {name: [] for name in steps}
    names, others = list(steps), _Others()
    start = time.perf_counter()
    for number in range(rounds.most):
        if number >= rounds.fewest and (
            time.perf_counter() - start > rounds.budget_s
            or all(_time_of(times).spread <= rounds.settled for times in taken.values())
        ):
            break
        for name in _rotated(names, number):
            taken[name].append(_seconds(steps[name], gpus))
    return Timing({name: _time_of(times) for name, times in taken.items()}, others.share())


def noise(times: Sequence[StepTime], others_share: float | None) -> str:
    """Says why times of steps are not to be trusted; an empty text where they are."""
    reasons = []
    if others_share is not None and others_share > BUSY_SHARE:
        reasons.append(f"others used {others_share:.0%} of {os.cpu_count()} cores")
    worst = max((t.spread for t in times), default=1.0)
    if worst > NOISY_SPREAD:
        reasons.append(f"median {worst:.1f} x minimum")
    why = ", ".join(reasons)
    return f"busy machine, do not trust step times: {why}" if why else ""


def _time_of(times: Sequence[float]) -> StepTime:
    lowest, middle, highest = min(times), statistics.median(times), max(times)
    return StepTime(1e3 * lowest, 1e3 * middle, 1e3 * highest, len(times))


def _rotated(names: Sequence[str], by: int) -> list[str]:
    first = by % len(names)
    return [*names[first:], *names[:first]]


def _seconds(step: Step, gpus: Sequence[torch.device]) -> float:
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    start = time.perf_counter()
    step()
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    return time.perf_counter() - start


class _Others:
    """What other programs use of the cores from now on."""

    def __init__(self) -> None:
        self._wall, self._all, self._own = time.perf_counter(), _machine_s(), cpu_seconds()

    def share(self) -> float | None:
        """Returns their part of all cores' time so far."""
        now = _machine_s()
        wall = time.perf_counter() - self._wall
        if now is None or self._all is None or not wall:
            return None
        used = now - self._all - (cpu_seconds() - self._own)
        return min(max(used / (wall * (os.cpu_count() or 1)), 0.0), 1.0)


def _machine_s() -> float | None:
    """CPU-seconds that all programs of the machine have used; None where it does not say."""
    try:
        user, nice, system, _idle, _waiting, *more = map(int, _TICKS.read_text().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")

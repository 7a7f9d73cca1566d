"""The exact contiguous partition of layers over stages.

Minimises ``sum(T) + (M - 1) * max(T)``, the time of M micro-batches through stages that take T
each, where T of a stage may be infinite (it does not fit its memory). (Zheng et al., "Alpa",
2022, minimise the same by trying every bound on ``max(T)``.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Partition:
    """Where each stage begins, and what it costs.

    Attributes:
        bounds: unit at which each stage begins, and the number of units.
        objective: the minimised time.
    """

    bounds: tuple[int, ...]
    objective: float


def partition(times: FloatArray, num_micro_batches: int) -> Partition | None:
    """Returns the best partition, or None if there is none.

    Args:
        times: ``times[s, i, j]`` is the time of stage s if it runs units i to j - 1, infinite if it
            cannot; empty stages are not allowed.
        num_micro_batches: M above.
    """
    return _Search(times, num_micro_batches).best()


@dataclass
class _Search:
    """Bisects over bounds on the longest stage; between equal sums nothing can be better.

    The smallest sum of times under a bound never grows with the bound, so an interval of bounds
    is left out if even its best corner is no better than what is known.
    """

    times: FloatArray
    num_micro_batches: int
    _sums: dict[int, float] = field(default_factory=dict)

    def best(self) -> Partition | None:
        finite = self.times[np.isfinite(self.times)]
        self._bounds = np.unique(finite)
        if not len(self._bounds) or not np.isfinite(self._sum(len(self._bounds) - 1)):
            return None
        low, high = self._lowest_feasible(), len(self._bounds) - 1
        self._best = (np.inf, low)
        for index in (low, high):
            self._note(index)
        self._between(low, high)
        objective, index = self._best
        return Partition(self._traced(index), float(objective))

    def _lowest_feasible(self) -> int:
        low, high = 0, len(self._bounds) - 1
        while low < high:
            middle = (low + high) // 2
            if np.isfinite(self._sum(middle)):
                high = middle
            else:
                low = middle + 1
        return low

    def _note(self, index: int) -> None:
        objective = self._sum(index) + (self.num_micro_batches - 1) * self._bounds[index]
        if objective < self._best[0]:
            self._best = (objective, index)

    def _between(self, low: int, high: int) -> None:
        stack = [(low, high)]
        while stack:
            low, high = stack.pop()
            if high - low < 2 or self._sum(low) == self._sum(high):
                continue
            least = self._sum(high) + (self.num_micro_batches - 1) * self._bounds[low + 1]
            if least >= self._best[0]:
                continue
            middle = (low + high) // 2
            self._note(middle)
            stack += [(middle, high), (low, middle)]

    def _sum(self, index: int) -> float:
        """The smallest sum of times with no stage longer than a bound."""
        if index not in self._sums:
            self._sums[index] = float(self._tables(index)[-1][-1])
        return self._sums[index]

    def _tables(self, index: int) -> list[FloatArray]:
        """For each number of stages, the smallest sum for each number of units."""
        num_stages, size, _ = self.times.shape
        allowed = np.where(self.times <= self._bounds[index], self.times, np.inf)
        table = np.full(size, np.inf)
        table[0] = 0.0
        tables = [table]
        for stage in range(num_stages):
            table = np.min(table[:, None] + allowed[stage], axis=0)
            tables.append(table)
        return tables

    def _traced(self, index: int) -> tuple[int, ...]:
        """Where the stages begin in a best partition under a bound."""
        tables = self._tables(index)
        allowed = np.where(self.times <= self._bounds[index], self.times, np.inf)
        end = self.times.shape[1] - 1
        bounds = [end]
        for stage in reversed(range(self.times.shape[0])):
            end = int(np.argmin(tables[stage] + allowed[stage][:, end]))
            bounds.append(end)
        return tuple(reversed(bounds))

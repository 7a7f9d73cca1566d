"""Two products of a backward in two threads, beside one after the other with two threads each.

``python benchmarks/two_threads.py`` prints the ratio of their times: below 1 two threads win.
The products are those of a linear layer's backward, which need nothing of each other: the gradient
of the weight, and that of the input. This is why a program has one order on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable

import torch

SIZES = ((128, 256, 256), (128, 1024, 256), (512, 1024, 1024), (1024, 2048, 2048))


def timed(run: Callable[[], None]) -> float:
    """Returns the seconds of a run."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


class Worker:
    """A thread that waits for work, with one thread of PyTorch's."""

    def __init__(self) -> None:
        self._work: Callable[[], None] | None = None
        self._begin, self._done = threading.Event(), threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._begin.wait()
            self._begin.clear()
            assert self._work is not None
            self._work()
            self._done.set()

    def start(self, work: Callable[[], None]) -> None:
        """Begins work."""
        self._work = work
        self._done.clear()
        self._begin.set()

    def wait(self) -> None:
        """Waits for its end."""
        self._done.wait()


def compare(rows: int, width: int, inner: int, rounds: int, worker: Worker) -> float:
    """Returns the time in two threads over that one after the other, medians of rounds."""
    x, weight = torch.randn(rows, width), torch.randn(inner, width)
    gradient = torch.randn(rows, inner)
    of_weight, of_input = torch.empty(inner, width), torch.empty(rows, width)

    def first() -> None:
        torch.mm(gradient.t(), x, out=of_weight)

    def second() -> None:
        torch.mm(gradient, weight, out=of_input)

    def beside() -> None:
        worker.start(first)
        second()
        worker.wait()

    def in_turn() -> None:
        first()
        second()

    times: dict[str, list[float]] = {"beside": [], "in turn": []}
    repeats = max(1, 2**28 // (rows * width * inner))
    for _ in range(rounds):
        for name, run, threads in (("beside", beside, 1), ("in turn", in_turn, 2)):
            torch.set_num_threads(threads)
            times[name].append(timed(lambda run=run: [run() for _ in range(repeats)]))
    return statistics.median(times["beside"]) / statistics.median(times["in turn"])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    worker = Worker()
    for rows, width, inner in SIZES:
        ratio = compare(rows, width, inner, rounds, worker)
        print(f"{rows:>5} x {width:>4} x {inner:>4}   two threads / in turn {ratio:.2f}")


if __name__ == "__main__":
    main()

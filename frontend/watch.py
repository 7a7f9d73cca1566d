"""Watches words of memory that stand for many checks: while none changed, all checks hold still."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .python_words import read_word

Check = Callable[[], bool]
SameWords = Callable[[int, int, int, int], int]
"""``(addresses, expected, count, num_touched)``: as the native library has it."""


class Watch:
    """Checks that run again only when a word that stands for them changed.

    A word that changes although its checks hold (the version of a dictionary that the user writes
    something else to at each step) stands for them no longer: from then on they run at each call.

    Args:
        words: for each check, the addresses of its words, which must stay readable for as long as
            this lives, or None where nothing stands for it.
        make: makes one function of the checks at some places in ``words``.
        same_words: compares words of memory.
        touched: addresses to fetch on the way, which need not be readable.
    """

    def __init__(
        self,
        words: Sequence[tuple[int, ...] | None],
        make: Callable[[Sequence[int]], Check],
        same_words: SameWords,
        touched: Iterable[int] = (),
    ) -> None:
        self._words = words
        self._make = make
        self._same_words = same_words
        self._touched = list(touched)
        self._all = make(range(len(words)))
        self._restless: set[int] = set()
        self._known: dict[int, int] = {}
        # One tuple, so that a thread sees all of it or nothing.
        self._state = self._state_of({}, self._all)
        self._hold_again()

    def holds(self) -> bool:
        """Whether all checks hold."""
        addresses, expected, count, num_touched, rest, _ = self._state
        if self._same_words(addresses, expected, count, num_touched):
            return rest is None or rest()
        return self._hold_again()

    def _hold_again(self) -> bool:
        """Runs all checks, and learns the words if they hold."""
        if not self._all():
            return False
        found = {a: read_word(a) for words in self._words for a in words or ()}
        if not self._all():  # what changes from here on has a word that is not the one just read
            return False
        known = self._known
        self._restless |= {a for a, word in known.items() if found[a] != word}
        self._known = found
        checks = [i for i, words in enumerate(self._words) if self._is_restless(words)]
        watched = {
            a: found[a]
            for words in self._words
            if not self._is_restless(words)
            for a in words or ()
        }
        self._state = self._state_of(watched, self._make(checks) if checks else None)
        return True

    def _is_restless(self, words: tuple[int, ...] | None) -> bool:
        return words is None or not self._restless.isdisjoint(words)

    def _state_of(
        self, watched: dict[int, int], rest: Check | None
    ) -> tuple[int, int, int, int, Check | None, object]:
        addresses = np.array([*watched, *self._touched], np.int64)
        expected = np.array([*watched.values(), 0], np.int64)
        count, kept = len(watched), (addresses, expected)
        return addresses.ctypes.data, expected.ctypes.data, count, len(self._touched), rest, kept

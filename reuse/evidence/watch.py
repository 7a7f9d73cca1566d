"""Watches words of memory that stand for many checks: while none changed, all checks hold still."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from .python_words import read_word

Check = Callable[[], bool]
SameWords = Callable[[int, int, int, int], int]
"""``(addresses, expected, count, num_touched)``: as the native library has it."""


class Words(NamedTuple):
    """Addresses of words that change when something else does, and what keeps them readable."""

    addresses: tuple[int, ...]
    kept: object = None


Where = Callable[[], Words | None]
"""Says where the words are now; None where there are none."""

# A word that changed so often, each time within so many calls, stands for nothing any more: other
# compiles change a few, and then no more.
_PATIENCE = 16
_MAX_CHANGES = 4


class _State(NamedTuple):
    """What one call compares: one object, so that a thread sees all of it or nothing."""

    addresses: int
    expected: int
    num_watched: int
    num_touched: int
    rest: Check | None
    kept: object


class Watch:
    """Checks that run again only when a word that stands for them changed.

    A word that keeps changing although its checks hold (the version of a dictionary that the user
    writes something else to at each step) stands for them no longer: they run at each call.

    Args:
        words: for each check, what stands for it, or None if nothing does.
        make: makes one function of the checks at some places in ``words``.
        same_words: compares words of memory.
        touched: addresses to fetch on the way, which need not be readable.

    Attributes:
        token: another object each time that something changed.
    """

    def __init__(
        self,
        words: Sequence[Words | Where | None],
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
        self._num_changes: Counter[int] = Counter()
        self._known: dict[int, int] = {}
        self._watched: dict[int, int] = {}
        self._num_quiet = _PATIENCE
        self.token = object()
        self._rest: tuple[list[int], Check | None] = ([], None)
        self._state = self._state_of({}, self._all, None)
        self._hold_again()

    def holds(self) -> bool:
        """Whether all checks hold."""
        addresses, expected, count, num_touched, rest, _ = self._state
        if self._same_words(addresses, expected, count, num_touched):
            self._num_quiet += 1
            return rest is None or rest()
        return self._hold_again()

    def stands_for(self, words: Words | None) -> bool:
        """Whether none of these words can have changed without a new token."""
        return words is not None and all(a in self._watched for a in words.addresses)

    def _hold_again(self) -> bool:
        """Runs all checks, and learns the words if they hold."""
        if not self._all():
            return False
        places = self._places()
        found = {a: read_word(a) for words in places if words for a in words.addresses}
        # What changes from here on has a word that is not the one just read.
        if not self._all():
            return False
        if [w and w.addresses for w in self._places()] == [w and w.addresses for w in places]:
            self._learn(places, found)
        return True

    def _places(self) -> list[Words | None]:
        return [words() if callable(words) else words for words in self._words]

    def _learn(self, places: Sequence[Words | None], found: dict[int, int]) -> None:
        known = self._known
        if self._num_quiet < _PATIENCE:
            changed = [a for a, word in found.items() if known.get(a, word) != word]
            self._num_changes.update(changed)
            self._restless |= {a for a in changed if self._num_changes[a] > _MAX_CHANGES}
        self._known, self._num_quiet = found, 0
        self.token = object()
        checks = [
            i
            for i, words in enumerate(places)
            if words is None or not self._restless.isdisjoint(words.addresses)
        ]
        if checks != self._rest[0]:
            self._rest = (checks, self._make(checks))
        unwatched = set(checks)
        self._watched = {
            a: found[a]
            for i, words in enumerate(places)
            if words and i not in unwatched
            for a in words.addresses
        }
        self._state = self._state_of(self._watched, self._rest[1], places)

    def _state_of(self, watched: dict[int, int], rest: Check | None, kept: object) -> _State:
        addresses = np.array([*watched, *self._touched], np.int64)
        expected = np.array([*watched.values(), 0], np.int64)
        return _State(
            addresses.ctypes.data,
            expected.ctypes.data,
            len(watched),
            len(self._touched),
            rest,
            (addresses, expected, kept),
        )

"""Builds C++ kernels in bundles: one run of the C++ compiler makes all that wait for it.

Python writes kernels one closure after another. Whenever a compiler is free it starts on all
kernels written so far, so that writing and building overlap, and bundles grow by themselves to the
size at which both keep up. At the end what is left is split over all cores.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from ..files.disk import DiskCache, MissingObjectError
from ..launches.built_kernel import BuiltKernel, loaded_kernel
from .source import KernelSource, bundle_text

_LOG = logging.getLogger("lazyinline")
# Reading the headers costs as much as building six kernels: fewer than this wait for others.
_LEAST = 8
_LONGEST_BUILD_S = 600.0

Kernel = Callable[..., Any]


class Promise:
    """A kernel that may still be under way.

    Args:
        made: ends with the kernel; cancelled if its compile was given up.
        make: makes the kernel then.
    """

    def __init__(self, made: Future[Kernel], make: Callable[[], Kernel]) -> None:
        self._made = made
        self._make = make

    def result(self) -> Kernel:
        """Waits for the kernel, and returns it.

        Raises:
            Exception: what the C++ compiler says.
        """
        return self._make() if self._made.cancelled() else self._made.result()

    def __call__(self, *args: Any) -> Any:
        """Runs the kernel; a wrapper of a compile that failed may still hold its promise."""
        return self.result()(*args)


def kept(value: Any) -> Any:
    """Returns the result of a promise; any other value as it is."""
    return value.result() if isinstance(value, Promise) else value


class BuiltKernels:
    """Which kernels are built already, by source and setting, for all processes.

    Args:
        store: keeps them; None keeps nothing.
        setting: all that decides what is made of a source: flags, compiler, versions.
    """

    def __init__(self, store: DiskCache | None, setting: str) -> None:
        self._store = store
        self.setting = setting

    def find(self, source: KernelSource) -> BuiltKernel | None:
        """Returns a kernel that was built before, or None."""
        key = self._key(source)
        digest = self._store.read(key) if self._store else None
        if self._store is None or digest is None:
            return None
        try:
            return self._store.loaded(digest, functools.partial(_kernel_in, source=source))
        except MissingObjectError:
            return None
        except (AttributeError, ValueError) as error:
            self._store.reject(key, f"it names another object ({error})")
            return None

    def keep(self, sources: Sequence[KernelSource], path: Path) -> list[BuiltKernel]:
        """Keeps a shared object that holds these kernels; returns them.

        Raises:
            OSError, AttributeError: if it does not load, or does not hold them.
        """
        built = [_kernel_in(path, source) for source in sources]
        digest = self._store.write_object(path) if self._store else None
        if self._store and digest:
            for source in sources:
                self._store.write(self._key(source), digest)
            self._store.trim()
        return built

    @contextlib.contextmanager
    def claimed(
        self, sources: Sequence[KernelSource], wait_s: float = 0.0
    ) -> Iterator[list[KernelSource]]:
        """Yields the kernels that no other process is building, which wait for this one then."""
        if self._store is None:
            yield list(sources)
            return
        keys = {self._key(source): source for source in sources}
        with self._store.claimed(keys, wait_s) as mine:
            yield [keys[key] for key in mine]

    def _key(self, source: KernelSource) -> str:
        return hashlib.sha256(f"{self.setting}\n{source.symbol}".encode()).hexdigest()


def _kernel_in(path: Path, source: KernelSource) -> BuiltKernel:
    return loaded_kernel(path, source.symbol, source.argument_types)


class Bundles:
    """The kernels of one compile.

    Args:
        known: opens what says which kernels are built; not called while there are no kernels.
        build: makes a shared object of a C++ file.
        build_alone: Inductor's own way for one kernel; takes its parameters' types and source.
        num_threads: how many compilers may run at once.
    """

    def __init__(
        self,
        known: Callable[[], BuiltKernels],
        build: Callable[[str], Path],
        build_alone: Callable[[Sequence[str], str], Kernel],
        num_threads: int,
    ) -> None:
        self._known = functools.cache(known)
        self._build = build
        self._build_alone = build_alone
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "lazyinline-kernels")
        self._lock = threading.Lock()
        self._asked: dict[KernelSource, Future[Kernel]] = {}
        self._beside: dict[Callable[[], Any], Future[Any]] = {}
        self._waiting: list[KernelSource] = []
        self._num_running = 0
        self._all_written = self._is_closed = False

    def ask(self, source: KernelSource) -> Promise:
        """Returns a kernel that is there, or will be."""
        if source not in self._asked:
            future: Future[Kernel] = Future()
            self._asked[source] = future
            found = self._known().find(source)
            if found is not None:
                future.set_result(found)
            else:
                with self._lock:
                    self._waiting.append(source)
        alone = functools.partial(self._build_alone, source.argument_types, source.original)
        return Promise(self._asked[source], alone)

    def start(self) -> None:
        """Starts what a free compiler can take; one core is left to who writes."""
        with self._lock:
            limit = self._num_threads if self._all_written else max(1, self._num_threads - 1)
            parts = _split(self._waiting, max(0, limit - self._num_running), self._all_written)
            if parts:
                self._waiting = []
            self._num_running += len(parts)
        for part in parts:
            self._pool.submit(contextvars.copy_context().run, self._run, part)

    def beside(self, function: Callable[[], Any]) -> None:
        """Runs what will be needed after this compile, the first time it is given."""
        if function not in self._beside:
            self._beside[function] = self._pool.submit(function)

    def finish(self) -> None:
        """Builds what is left. What cannot be built raises when its promise is asked."""
        self._all_written = True
        self.start()
        wait(self._asked.values())

    def close(self) -> None:
        """Gives the threads back; what is not built yet is not promised any more."""
        with self._lock:
            self._waiting, self._is_closed = [], True
        for future in self._asked.values():
            future.cancel()
        self._pool.shutdown(wait=False)

    def _run(self, sources: list[KernelSource]) -> None:
        try:
            self._make(sources)
        except Exception as error:
            for source in sources:
                self._settle(source, error)
        finally:
            with self._lock:
                self._num_running -= 1
            self.start()

    def _make(self, sources: list[KernelSource]) -> None:
        with self._known().claimed(sources) as mine:
            self._make_missing(mine)
        for source in sources:
            if not self._asked[source].done():
                with self._known().claimed([source], _LONGEST_BUILD_S):
                    self._make_missing([source])

    def _make_missing(self, sources: Sequence[KernelSource]) -> None:
        """Builds what no other process has built meanwhile."""
        missing = []
        for source in () if self._is_closed else sources:
            found = self._known().find(source)
            if found is None:
                missing.append(source)
            else:
                self._settle(source, found)
        if not missing:
            return
        try:
            text = bundle_text(missing, self._known().setting)
            built = self._known().keep(missing, self._build(text))
        except Exception as error:
            _LOG.info("%d kernels are built one by one: %s", len(missing), error)
            for source in missing:
                self._make_alone(source)
            return
        for source, kernel in zip(missing, built, strict=True):
            self._settle(source, kernel)

    def _make_alone(self, source: KernelSource) -> None:
        if self._is_closed:  # an interrupt ends compilers, too: what failed is not to be repeated
            return
        try:
            self._settle(source, self._build_alone(source.argument_types, source.original))
        except Exception as error:
            self._settle(source, error)

    def _settle(self, source: KernelSource, result: Kernel | Exception) -> None:
        future = self._asked[source]
        with contextlib.suppress(InvalidStateError):  # given up meanwhile, or settled before
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


def _split(
    sources: Sequence[KernelSource], num_free: int, all_written: bool
) -> list[list[KernelSource]]:
    """Returns the bundles to start now."""
    wanted = len(sources) // _LEAST
    if all_written and sources:
        wanted = max(wanted, 1)
    num_parts = min(num_free, wanted if all_written else min(wanted, 1))
    longest_first = sorted(sources, key=lambda source: -len(source.text))
    return [longest_first[i::num_parts] for i in range(num_parts)]

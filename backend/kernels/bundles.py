"""Builds C++ kernels in bundles: one run of the C++ compiler builds all kernels that wait for it.

A C++ compiler spends most of its time on headers, so a file with twenty kernels costs little more
than a file with one. A kernel may share a file with others only if it is a single function and adds
nothing else to the file; any other kernel is built alone. In both cases its parallel regions are
made safe.

Kernels are generated one closure after another. A compiler that is free takes all kernels generated
so far, so that generating and building overlap, and bundles grow to the size at which both keep up.
At the end the kernels that are left are split over all cores.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.torch_store import DiskCache
from ..launches.torch_native import CHECKED, BuiltKernel, is_known_type, loaded_kernel

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
_ENTRY = re.compile(
    rf'\s*{re.escape(HEADER)}\s*extern "C"\s+void\s+kernel\((?P<parameters>[^()]*)\)\s*'
    r"(?P<body>\{.*\})\s*",
    re.DOTALL,
)
# Text that could affect code outside of the function, or that depends on the function's name.
_NOT_SELF_CONTAINED = re.compile(
    r"\bkernel\b|\bextern\b|^[ \t]*#(?![ \t]*pragma\b)|\\[ \t]*$|R\"", re.MULTILINE
)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
_PREAMBLE = f"""{HEADER}
#include <exception>

static int lazyinline_report(char* message, int64_t size, const char* what) {{
  int64_t i = 0;
  for (; i + 1 < size && what[i]; ++i) message[i] = what[i];
  message[i] = 0;
  return 1;
}}
"""
_PARALLEL = re.compile(r"[ \t]*#[ \t]*pragma[ \t]+omp[ \t]+parallel\b(?P<clauses>[^\n]*)\n")
_SHARED = re.compile(r"#[ \t]*pragma[ \t]+omp[ \t]+(?P<kind>for|single)\b(?P<clauses>[^\n]*)\n")
_ANY_BUT_SIMD = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+omp\b(?![ \t]+simd)[^\n]*\n", re.MULTILINE)
_NUM_THREADS = re.compile(r"\bnum_threads\((\d+)\)")
_COLLAPSED = re.compile(r"\bcollapse\((\d+)\)")
_FOR = re.compile(r"\s*for\s*(?=\()")
_BLOCK = re.compile(r"\s*(?=\{)")
_THROWS = re.compile(r"TORCH_CHECK|\bthrow\b")
# From torch 2.13 on a kernel records a division by zero in a global flag, so that only one kernel
# of a process may run at a time. Without these lines the division throws.
_DIVISION_FLAG = re.compile(
    r"^[ \t]*(?:std::atomic<int> inductor_cpu_integer_div_error\{0\}"
    r"|inductor_cpu_integer_div_error_flag = (?:&inductor_cpu_integer_div_error|nullptr)"
    r"|inductor_cpu_throw_if_integer_div_error\(inductor_cpu_integer_div_error\));[ \t]*\n",
    re.MULTILINE,
)
_THROWN = "lazyinline_thrown"
_CATCH = f"""catch (...) {{
#pragma omp critical({_THROWN})
{_THROWN} = std::current_exception();
}}"""


@dataclass(frozen=True)
class KernelSource:
    """One kernel."""

    symbol: str  # the function's name, by a digest of its content
    argument_types: tuple[str, ...]  # C++ types of the parameters
    text: str  # the function, under that name
    original: str  # Inductor's whole source, under Inductor's name


def kernel_source(argument_types: Sequence[str], source: str) -> KernelSource | None:
    """Returns a kernel that may share a file with others, or None."""
    found = _ENTRY.fullmatch(source)
    if found is None or not all(map(is_known_type, argument_types)):
        return None
    body = found["body"]
    if _NOT_SELF_CONTAINED.search(body) or not _is_one_block(body):
        return None
    content = "\n".join([*argument_types, source])
    symbol = f"kernel_{hashlib.sha256(content.encode()).hexdigest()[:40]}"
    text = f'extern "C" void {symbol}({found["parameters"]})\n{body}\n'
    return KernelSource(symbol, tuple(argument_types), text, source)


def bundle_text(sources: Iterable[KernelSource], setting: str) -> str:
    """Returns one C++ file with all kernels; ``setting`` is part of the text."""
    mark = f"// {hashlib.sha256(setting.encode()).hexdigest()}\n"
    return "\n".join([mark + _PREAMBLE, *(kernel.text + _checked(kernel) for kernel in sources)])


def _is_one_block(body: str) -> bool:
    """Whether the first brace of a text is closed at the end of the text and not before."""
    plain = _STRING.sub("", body)
    with contextlib.suppress(_UnknownError):
        return _end_of_block(plain, 0) == len(plain)
    return False


def _checked(kernel: KernelSource) -> str:
    names = [f"a{i}" for i in range(len(kernel.argument_types))]
    typed = [f"{t} {n}" for t, n in zip(kernel.argument_types, names, strict=True)]
    parameters = ", ".join([*typed, "char* message", "int64_t size"])
    return f"""extern "C" int {kernel.symbol}{CHECKED}({parameters}) {{
  try {{
    {kernel.symbol}({", ".join(names)});
    return 0;
  }} catch (std::exception const& error) {{
    return lazyinline_report(message, size, error.what());
  }} catch (...) {{
    return lazyinline_report(message, size, "unhandled error");
  }}
}}
"""


class _UnknownError(Exception):
    """A parallel region has an unexpected form."""


def guarded(source: str, num_threads: int) -> str:
    """Returns a kernel with safe parallel regions.

    A kernel has arrays with an element per thread, for the number of threads at the time when it is
    generated; later it may run with more. And an exception (an index out of range) must not leave a
    parallel region, or the process ends. So each region is limited to the threads that it was
    generated for, and exceptions in its loops are kept and rethrown after the region. A kernel with
    regions of an unexpected form runs on one thread.
    """
    source = _DIVISION_FLAG.sub("", source)
    plain = _STRING.sub(lambda found: " " * len(found[0]), source)  # places are the same
    done, at = [], 0
    try:
        for found in _PARALLEL.finditer(plain):
            if found.start() < at:
                raise _UnknownError  # a region inside a region
            end, text = _region(source, plain, found, num_threads)
            done += [source[at : found.start()], text]
            at = end
    except _UnknownError:
        return _ANY_BUT_SIMD.sub("", source)
    return "".join([*done, source[at:]])


def _region(source: str, plain: str, found: re.Match[str], num_threads: int) -> tuple[int, str]:
    """Returns where a region ends, and the text that replaces it."""
    clauses, start = found["clauses"], found.end()
    if re.match(r"[ \t]*for\b", clauses):
        blocks = [_loop_body(plain, start, clauses)]
        end = blocks[0][1]
    else:
        end = _end_of_block(plain, _after(_BLOCK, plain, start))
        blocks = list(_shared_blocks(plain, start, end))
    text, at = "", start
    for first, last in blocks:
        if _THROWS.search(plain, at, first):
            raise _UnknownError
        text += f"{source[at:first]}{{ try {source[first:last]} {_CATCH} }}"
        at = last
    if _THROWS.search(plain, at, end):
        raise _UnknownError
    return end, (
        f"{{ std::exception_ptr {_THROWN};\n"
        f"#pragma omp parallel{_limited(clauses, source, num_threads)}\n"
        f"{text}{source[at:end]}\n"
        f"if ({_THROWN}) std::rethrow_exception({_THROWN}); }}"
    )


def _limited(clauses: str, source: str, num_threads: int) -> str:
    """Limits a region's threads; fewer than it was generated for are correct (after a fork)."""
    if "num_threads" not in clauses:
        if "omp_get_max_threads" in source:  # arrays of as many elements as there are threads
            return clauses
        clauses = f"{clauses} num_threads({num_threads})"
    return _NUM_THREADS.sub(r"num_threads(std::min<int>(\1, omp_get_max_threads()))", clauses)


def _shared_blocks(plain: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields the blocks of a region that are each run by one thread as a whole."""
    for found in _SHARED.finditer(plain, start, end):
        if found["kind"] == "for":
            yield _loop_body(plain, found.end(), found["clauses"])
        else:
            first = _after(_BLOCK, plain, found.end())
            yield first, _end_of_block(plain, first)


def _loop_body(plain: str, start: int, clauses: str) -> tuple[int, int]:
    """Returns the block inside as many loops as a pragma collapses."""
    collapsed = _COLLAPSED.search(clauses)
    at = start
    for depth in range(int(collapsed[1]) if collapsed else 1):
        if depth and plain[at : at + 1] == "{":
            at += 1
        at = _end_of_block(plain, _after(_FOR, plain, at), "()")
        at = _after(_BLOCK, plain, at)
    return at, _end_of_block(plain, at)


def _after(pattern: re.Pattern[str], plain: str, start: int) -> int:
    found = pattern.match(plain, start)
    if found is None:
        raise _UnknownError
    return found.end()


def _end_of_block(plain: str, start: int, braces: str = "{}") -> int:
    depth = 0
    for at in range(start, len(plain)):
        depth += (plain[at] == braces[0]) - (plain[at] == braces[1])
        if not depth:
            return at + 1
    raise _UnknownError


_LOG = logging.getLogger("lazyinline")
# Reading the headers costs as much as building a few kernels: fewer than this wait for more.
_LEAST = 24
_LONGEST_BUILD_S = 600.0

Kernel = Callable[..., Any]


class Promise:
    """A kernel that may not be built yet; ``make`` builds it if its compile was given up."""

    def __init__(self, made: Future[Kernel], make: Callable[[], Kernel]) -> None:
        self._made = made
        self._make = make

    def result(self) -> Kernel:
        """Waits for the kernel, and returns it; an error has the C++ compiler's output."""
        return self._make() if self._made.cancelled() else self._made.result()

    def __call__(self, *args: Any) -> Any:
        """Runs the kernel: the wrapper of a failed compile may still hold its promise."""
        return self.result()(*args)


def kept(value: Any) -> Any:
    """Returns the result of a promise; returns other values unchanged."""
    return value.result() if isinstance(value, Promise) else value


class BuiltKernels:
    """The built kernels, by source and all else that affects a build, shared by all processes."""

    def __init__(self, store: DiskCache | None, setting: str) -> None:
        self._store = store
        self.setting = setting

    def find(self, source: KernelSource) -> BuiltKernel | None:
        """Returns a kernel that was built before, or None."""
        store = self._store
        if store is None:
            return None
        load = functools.partial(_kernel_in, source=source)
        found = store.decoded(self._key(source), lambda digest: store.loaded(digest, load))
        return found[0] if found else None

    def keep(self, sources: Sequence[KernelSource], path: Path) -> list[BuiltKernel]:
        """Keeps a shared object that holds these kernels; returns them, or raises an error."""
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
        """Claims the kernels that no other process is building, and yields them."""
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
    """The kernels of one compile."""

    def __init__(
        self,
        known: Callable[[], BuiltKernels],  # not called while there are no kernels
        build: Callable[[str], Path],  # builds a shared object from a C++ file
        # Builds one kernel as Inductor does, from its parameters' types and source.
        build_alone: Callable[[Sequence[str], str], Kernel],
        num_threads: int,  # how many compilers may run at once
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
        """Returns a promise of a kernel, which is built if it was not before."""
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
        """Starts free compilers; leaves one core to the thread that generates kernels."""
        with self._lock:
            limit = self._num_threads if self._all_written else max(1, self._num_threads - 1)
            parts = _split(self._waiting, max(0, limit - self._num_running), self._all_written)
            if parts:
                self._waiting = []
            self._num_running += len(parts)
        for part in parts:
            self._pool.submit(contextvars.copy_context().run, self._run, part)

    def beside(self, function: Callable[[], Any]) -> None:
        """Runs a function in another thread, once: for results needed after this compile."""
        if function not in self._beside:
            self._beside[function] = self._pool.submit(function)

    def finish(self) -> None:
        """Builds the kernels that are left; the promise of one that fails raises the error."""
        self._all_written = True
        self.start()
        wait(self._asked.values())

    def close(self) -> None:
        """Ends the threads, and cancels the promises of kernels that are not built yet."""
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
        """Builds the kernels that no other process has built meanwhile."""
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
        if self._is_closed:  # an interrupt ends compilers, too: do not build again after that
            return
        try:
            self._settle(source, self._build_alone(source.argument_types, source.original))
        except Exception as error:
            self._settle(source, error)

    def _settle(self, source: KernelSource, result: Kernel | Exception) -> None:
        future = self._asked[source]
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile, or has a result
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

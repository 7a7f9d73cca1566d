"""Text of Inductor's C++ kernels: recognised strictly, made safe, and put together in one file.

Most of what a C++ compiler does for one kernel is reading headers, so one file with twenty kernels
costs little more than one with one. A kernel may only share a file with others if it is a single
function that brings nothing else into the file: whatever is not exactly that is left alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..launches.built_kernel import CHECKED, is_known_type

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
_ENTRY = re.compile(
    rf'\s*{re.escape(HEADER)}\s*extern "C"\s+void\s+kernel\((?P<parameters>[^()]*)\)\s*'
    r"(?P<body>\{.*\})\s*",
    re.DOTALL,
)
# What could reach beyond the function, or would mean something else under another name.
_REACHES_OUT = re.compile(
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
# From torch 2.13 on a division by zero is noted, for one kernel at a time in a process. Where none
# takes the note the division throws.
_NOTES = re.compile(
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
    """One kernel.

    Attributes:
        symbol: a name made of the content.
        argument_types: C++ types of the parameters.
        text: the function, under that name.
        original: Inductor's whole source, under Inductor's name.
    """

    symbol: str
    argument_types: tuple[str, ...]
    text: str
    original: str


def kernel_source(argument_types: Sequence[str], source: str) -> KernelSource | None:
    """Returns a kernel that may share a file with others, or None."""
    found = _ENTRY.fullmatch(source)
    if found is None or not all(map(is_known_type, argument_types)):
        return None
    body = found["body"]
    if _REACHES_OUT.search(body) or not _is_one_block(body):
        return None
    content = "\n".join([*argument_types, source])
    symbol = f"kernel_{hashlib.sha256(content.encode()).hexdigest()[:40]}"
    text = f'extern "C" void {symbol}({found["parameters"]})\n{body}\n'
    return KernelSource(symbol, tuple(argument_types), text, source)


def bundle_text(sources: Iterable[KernelSource], setting: str) -> str:
    """Returns one C++ file with all kernels; another ``setting`` gives another text."""
    mark = f"// {hashlib.sha256(setting.encode()).hexdigest()}\n"
    return "\n".join([mark + _PREAMBLE, *(kernel.text + _checked(kernel) for kernel in sources)])


def _is_one_block(body: str) -> bool:
    """Whether the brace that opens a text is closed at its end and not before."""
    depth = 0
    plain = _STRING.sub("", body)
    for index, letter in enumerate(plain):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return index == len(plain) - 1
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
    """A region is not what is expected."""


def guarded(source: str, num_threads: int) -> str:
    """Returns a kernel whose parallel regions are safe, whatever happens when they run.

    A kernel has arrays with an element for each thread that there is when it is written, and may be
    run by more threads later. And what it throws inside a parallel region (an index out of range)
    must not leave that region, or the process ends. So each region is held to the threads that it
    was written for, and what its loops throw is kept and thrown again behind it. A kernel whose
    regions are not what is expected here runs on one thread.

    Args:
        source: as Inductor writes it.
        num_threads: how many threads it was written for.
    """
    source = _NOTES.sub("", source)
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
    """Returns where a region ends, and what stands in its place."""
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
    """Fewer threads than a kernel was written for are right, and may be all that a fork has."""
    if "num_threads" not in clauses:
        if "omp_get_max_threads" in source:  # arrays of as many elements as there are threads
            return clauses
        clauses = f"{clauses} num_threads({num_threads})"
    return _NUM_THREADS.sub(r"num_threads(std::min<int>(\1, omp_get_max_threads()))", clauses)


def _shared_blocks(plain: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields the blocks between two places that one thread runs as a whole."""
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

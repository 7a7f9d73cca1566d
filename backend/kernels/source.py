"""Text of Inductor's C++ kernels: recognised strictly, and put together in one file.

Most of what a C++ compiler does for one kernel is reading headers, so one file with twenty kernels
costs little more than one with one. A kernel may only stand beside others if it is a single
function that brings nothing else into the file: whatever is not exactly that is left alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
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
    """Returns a kernel that may stand beside others in a file, or None."""
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

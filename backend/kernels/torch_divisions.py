"""Adapter: integers divided by zero in Inductor's C++ kernels. Its names for that live here.

From torch 2.13 on its kernels notice that, but for a quotient that is rounded towards zero: there
the processor ends the process, where eager raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_MESSAGE = '"ZeroDivisionError"'
_ONE = f"[](auto divisor) {{ TORCH_CHECK(divisor != 0, {_MESSAGE}); return divisor; }}"
_MANY = (
    "[](auto divisor) { std::array<typename decltype(divisor)::value_type, "
    "decltype(divisor)::size()> each; divisor.store(each.data()); "
    f"for (auto one : each) TORCH_CHECK(one != 0, {_MESSAGE}); return divisor; }}"
)


@contextmanager
def quotients_checked() -> Iterator[None]:
    """Lets kernels that are written within this context throw instead."""
    from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

    kinds: list[tuple[Any, str]] = [(CppOverrides, _ONE), (CppVecOverrides, _MANY)]
    originals = [(kind, kind.__dict__["truncdiv"]) for kind, _ in kinds]
    for kind, check in kinds:
        kind.truncdiv = staticmethod(_checked(kind.truncdiv, check))
    try:
        yield
    finally:
        for kind, original in originals:
            kind.truncdiv = original


def _checked(quotient: Callable[[Any, Any], str], check: str) -> Callable[[Any, Any], str]:
    def truncdiv(a: Any, b: Any) -> str:
        dividend, divisor = quotient(a, b).split(" / ", 1)
        return f"{dividend} / {check}({divisor})"

    return truncdiv

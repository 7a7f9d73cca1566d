"""What a forward calls in C: what only computes is listed, a setting is compared, the rest runs."""

from __future__ import annotations

import builtins
import collections
import importlib
import itertools
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from models import Made
from torch import Tensor, nn

import lazyinline
from lazyinline.frontend.effects.torch_allowed_calls import is_allowed
from lazyinline.frontend.tracing.torch_state import settings


class Asks(nn.Module):
    """Adds what a function says to a product."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x) * 2 + number_of(self.ask())


def number_of(value: Any) -> float:
    return float(sum(map(ord, str(value))) % 1009)


def other(value: Any) -> Any:
    """Returns another value that a setting may have."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    values = (
        ("warn", "error"),
        ("highest", "high"),
        ("auto", "greedy"),
        (torch.float32, torch.float64),
    )
    return next((there for here, there in values if here == value), None)


# Setting them has lasting effects on a process, or none without hardware that is not here.
LEFT_ALONE = ("interop", "qengine", "blas", "linalg", "miopen", "rocm", "carveout", "name")
LEFT_ALONE += ("executor", "allocator", "autocast_cache")


def quietly(function: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


def put_back(setter: Callable[[Any], Any], before: Any) -> None:
    """Sets what was set before; a precision that is set in the old way stays set in the new."""
    quietly(setter, before)
    for owner in (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul):
        owner.fp32_precision = "none"


def can_be_set(getter: Callable[[], Any], setter: Callable[[Any], Any]) -> bool:
    before = getter()
    try:
        quietly(setter, other(before))
        return bool(getter() == other(before))
    except (RuntimeError, ValueError, TypeError):
        return False
    finally:
        put_back(setter, before)


SETTINGS = [
    pytest.param(getter, setter, id=name)
    for name, getter, setter in settings().all
    if setter is not None
    and other(getter()) is not None
    and not any(word in name for word in LEFT_ALONE)
    and can_be_set(getter, setter)
]


@pytest.mark.parametrize(("getter", "setter"), SETTINGS)
@pytest.mark.sweep(
    keep=[
        *("cudnn_benchmark", "default_dtype", "num_threads", "flash_sdp", "grad_enabled"),
        *("__future__", "mkldnn_enabled", "warnAlways", "matmul_precision", "multithreading"),
    ]
)
def test_a_setting_is_asked_for_and_left_changed_at_each_call(getter: Any, setter: Any) -> None:
    before, x = getter(), torch.ones(2, 2)
    asking = Asks(lambda: getter())
    asks = lazyinline.compile(asking, backend="eager")
    sets = lazyinline.compile(Asks(lambda: setter(other(before))), backend="eager")
    try:
        for value in (before, other(before), before):
            quietly(setter, value)
            assert torch.equal(asks(x), asking(x))
        for _ in range(3):
            put_back(setter, before)
            quietly(sets, x)
            assert getter() == other(before)
    finally:
        put_back(setter, before)


def public_getters() -> Iterator[Any]:
    """Every function of PyTorch's without arguments that tells a setting."""
    places = ["torch", "torch.__future__", "torch.backends.cuda", "torch.backends.mha"]
    places += ["torch.backends.opt_einsum", "torch.autograd", "torch.distributed", "torch.random"]
    for place in places:
        module: Any = importlib.import_module(place)
        for name in sorted(vars(getattr(module, "m", module))):
            is_getter = name.startswith(("get_", "is_", "are_")) or name.endswith("_enabled")
            is_getter &= name[0] != "_" and "_ipu" not in name and "_xla" not in name
            value = getattr(module, name)
            if is_getter and isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
                try:
                    answer = quietly(value)
                except (TypeError, RuntimeError, ValueError, ImportError, AssertionError):
                    continue
                if isinstance(answer, (bool, int, str, torch.dtype, torch.device)):
                    yield pytest.param(value, id=f"{place}.{name}")


def test_asking_pytorch_does_not_keep_a_model_from_being_compiled() -> None:
    """All in one model; what names no setting is left out of the look at its report."""
    getters = [getter.values[0] for getter in public_getters()]
    told = [g for g in getters if not any(w in g.__name__ for w in ("anomaly", "cache", "vitals"))]
    for asked in (told, getters):
        model = Asks(lambda asked=asked: [getter() for getter in asked])
        compiled, x = lazyinline.compile(model, backend="eager"), torch.ones(2, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                assert torch.equal(compiled(x), model(x))
        assert asked is getters or not compiled.last_report.ran_eagerly
        assert compiled.last_report.num_compiles <= 1


PURE = ("math", "cmath", "_operator", "_bisect", "_heapq", "_struct", "_string", "_functools")
OUTWARD = (
    *("time", "_thread", "_socket", "_signal", "_random", "_locale", "_decimal", "_queue", "gc"),
    *("_posixsubprocess", "select", "mmap", "_ctypes", "_csv", "_io", "atexit", "faulthandler"),
    *("_datetime", "_tracemalloc", "fcntl", "resource", "_sqlite3", "marshal", "errno"),
)


def functions_of(names: tuple[str, ...]) -> list[Any]:
    found = []
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError:  # this Python has it under another name, or not at all
            continue
        found += [f for f in vars(module).values() if isinstance(f, types.BuiltinFunctionType)]
    return found


def test_every_function_of_a_pure_module_is_allowed_and_none_that_reaches_out() -> None:
    assert [f for f in functions_of(PURE) if not is_allowed(f)] == []
    assert [f for f in functions_of(OUTWARD) if is_allowed(f)] == []
    system = functions_of((os.name,))
    assert {f.__name__ for f in system if is_allowed(f)} <= {"fspath"} | {
        name for name in dir(sys.modules[os.name]) if name.startswith("_path_")
    }


def test_methods_of_numbers_texts_and_containers_are_allowed() -> None:
    things: list[Any] = [1, 1.0, 1j, "a", b"a", bytearray(), [], (), {}, set(), frozenset()]
    things += [range(3), collections.deque(), collections.OrderedDict(), np.ones((2, 2))]
    things += [torch.ones(1, 1), torch.float32, torch.Size((1,)), itertools.count()]
    outward = {"tofile", "dump", "dumps", "setflags", "__setstate__", "send"}
    for thing in things:
        for name in dir(type(thing)):
            method = getattr(type(thing), name, None)
            if isinstance(method, types.MethodDescriptorType) and name not in outward:
                method = method.__get__(thing)
                assert is_allowed(method), (type(thing), name)


def product(x: Tensor) -> Tensor:
    return x @ x


WITHIN: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "sdpa_kernel": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "set_grad_enabled": lambda: torch.set_grad_enabled(True),
    "set_multithreading_enabled": lambda: torch.autograd.set_multithreading_enabled(False),
}


@pytest.mark.parametrize("name", WITHIN)
def test_what_holds_in_a_with_block_of_a_forward_is_compiled(name: str) -> None:
    def within(self: Any, x: Tensor) -> Tensor:
        with WITHIN[name]():
            return product(x).float()

    model, x = Made(within), torch.randn(3, 3)
    compiled = lazyinline.compile(model, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(x), model(x))
    assert not compiled.last_report.ran_eagerly
    assert compiled.last_report.num_compiles == 1


def test_what_is_refused_names_function_and_line() -> None:
    compiled = lazyinline.compile(Asks(lambda: os.getcwd()), backend="eager")
    compiled(torch.ones(2, 2))
    assert "calls posix.getcwd" in compiled.last_report.ran_eagerly or os.name != "posix"
    assert "test_allowed_calls.py" in compiled.last_report.ran_eagerly


def test_builtins_that_reach_out_are_not_allowed() -> None:
    outward = ("breakpoint", "input", "open", "print")
    identity = ("dir", "hash", "id")  # what tells equal objects apart
    named = [f for f in vars(builtins).values() if isinstance(f, types.BuiltinFunctionType)]
    assert {f.__name__ for f in named if not is_allowed(f)} <= {*outward, *identity}
    refused = ("input", "open", "breakpoint", *identity)
    assert not any(is_allowed(getattr(builtins, name)) for name in refused)


def test_arrays_that_numpy_makes_stand_in_the_program() -> None:
    # As Fourier operators make their grid: np.linspace converts by a class of its own in C.
    model = Made(lambda self, x: x * torch.tensor(np.meshgrid(np.linspace(0, 1, 2), [1, 2])[0]))
    compiled, x = lazyinline.compile(model, backend="eager"), torch.ones(2, 2)
    assert torch.equal(compiled(x), model(x))
    assert not compiled.last_report.ran_eagerly


def test_what_numpy_calls_is_refused_at_the_line_of_the_model() -> None:
    compiled = lazyinline.compile(Asks(lambda: np.isclose(1, 2)), backend="eager")
    compiled(torch.ones(2, 2))
    assert "_make_extobj" in compiled.last_report.ran_eagerly
    assert "at test_allowed_calls.py" in compiled.last_report.ran_eagerly

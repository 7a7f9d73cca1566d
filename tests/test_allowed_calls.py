"""What a forward calls in C: what only computes is listed, a setting is compared, the rest runs."""

from __future__ import annotations

import builtins
import collections
import copy
import decimal
import importlib
import itertools
import multiprocessing
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lazyinline
from lazyinline.frontend.effects.torch_allowed_calls import ALLOWED, is_allowed
from lazyinline.frontend.tracing.torch_settings import settings


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
        "cudnn_benchmark",
        "default_dtype",
        "num_threads",
        "flash_sdp",
        "grad_enabled",
        "__future__",
    ]
)
def test_a_setting_that_a_forward_asks_for_is_asked_for_at_each_call(
    getter: Callable[[], Any], setter: Callable[[Any], Any]
) -> None:
    model = Asks(lambda: getter())
    compiled, x, before = lazyinline.compile(model, backend="eager"), torch.ones(2, 2), getter()
    try:
        for value in (before, other(before), before):
            quietly(setter, value)
            assert torch.equal(compiled(x), model(x))
    finally:
        put_back(setter, before)


@pytest.mark.parametrize(("getter", "setter"), SETTINGS)
@pytest.mark.sweep(
    keep=[
        "mkldnn_enabled",
        "default_dtype",
        "num_threads",
        "warnAlways",
        "matmul_precision",
        "multithreading",
    ]
)
def test_a_setting_that_a_forward_leaves_changed_is_changed_at_each_call(
    getter: Callable[[], Any], setter: Callable[[Any], Any]
) -> None:
    before = getter()
    compiled = lazyinline.compile(Asks(lambda: setter(other(before))), backend="eager")
    try:
        for _ in range(3):
            put_back(setter, before)
            quietly(compiled, torch.ones(2, 2))
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
    told = [g for g in getters if not any(w in g.__name__ for w in ("anomaly", "cache"))]
    for asked in (told, getters):
        model = Asks(lambda asked=asked: [getter() for getter in asked])
        compiled, x = lazyinline.compile(model, backend="eager"), torch.ones(2, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                assert torch.equal(compiled(x), model(x))
        assert asked is getters or not compiled.last_report.ran_eagerly
        assert compiled.last_report.num_compiles <= 1


# ---- Python's own modules in C ------------------------------------------------------------------

PURE = ("math", "cmath", "_operator", "_bisect", "_heapq", "_struct", "_string", "_functools")
OUTWARD = (
    *("time", "_thread", "_socket", "_signal", "_random", "_locale", "_decimal", "_queue", "gc"),
    *("_posixsubprocess", "select", "mmap", "_ctypes", "_csv", "_io", "atexit", "faulthandler"),
    *(
        "_warnings",
        "_datetime",
        "_tracemalloc",
        "fcntl",
        "resource",
        "_sqlite3",
        "marshal",
        "errno",
    ),
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


def test_the_list_is_short_and_each_group_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    num_homes = sum(len(group.homes) for group in ALLOWED)
    num_names = sum(len(group.names) for group in ALLOWED)
    print(f"{len(ALLOWED)} groups, {num_homes} modules and classes, {num_names} single functions")
    assert all(group.reason for group in ALLOWED)
    assert len(ALLOWED) <= 20 and num_homes <= 100 and num_names <= 120
    assert capsys.readouterr().out


EVENT, LOCK, SHARED = threading.Event(), threading.Lock(), multiprocessing.Value("i", 0)
FOLDERS = (os.getcwd(), os.path.dirname(os.__file__), os.getcwd())


def set_precision(step: int) -> None:
    decimal.getcontext().prec = 28 + step % 2


def set_shared(step: int) -> None:
    SHARED.value = step


def set_event(step: int) -> None:
    EVENT.set() if step % 2 else EVENT.clear()


def set_errors(step: int) -> None:
    np.seterr(over="raise" if step % 2 else "warn")


def set_arguments(step: int) -> None:
    sys.argv[1:] = ["x"] * step


def set_environment(step: int) -> None:
    os.environ["LAZYINLINE_ASKED"] = str(step)


READINGS: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
    "the working folder": (lambda: os.getcwd(), lambda step: os.chdir(FOLDERS[step])),
    "a decimal context": (lambda: decimal.getcontext().prec, set_precision),
    "numpy's errors": (lambda: np.geterr(), set_errors),
    "an event": (lambda: EVENT.is_set(), set_event),
    "a shared number": (lambda: SHARED.value, set_shared),
    "a lock": (lambda: LOCK.locked(), lambda step: LOCK.acquire(blocking=False)),
    "arguments": (lambda: sys.argv, set_arguments),
    "a variable of the environment": (lambda: os.environ.get("LAZYINLINE_ASKED"), set_environment),
    "the recursion limit": (
        lambda: sys.getrecursionlimit(),
        lambda step: sys.setrecursionlimit(2000 + step),
    ),
}


@pytest.fixture
def restored() -> Iterator[None]:
    limit, arguments, folder, errors = (
        sys.getrecursionlimit(),
        sys.argv[:],
        os.getcwd(),
        np.geterr(),
    )
    yield
    sys.setrecursionlimit(limit)
    sys.argv[:] = arguments
    os.chdir(folder)
    np.seterr(**errors)
    decimal.getcontext().prec = 28
    os.environ.pop("LAZYINLINE_ASKED", None)
    if LOCK.locked():
        LOCK.release()


@pytest.mark.parametrize("name", READINGS)
def test_what_a_forward_reads_of_the_interpreter_is_read_at_each_call(
    name: str, restored: None
) -> None:
    ask, change = READINGS[name]
    model = Asks(ask)
    compiled, x = lazyinline.compile(model, backend="eager"), torch.ones(2, 2)
    for step in range(3):
        change(step)
        assert torch.equal(compiled(x), model(x)), step


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
    class Within(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with WITHIN[name]():
                return product(x).float()

    model, x = Within(), torch.randn(3, 3)
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
    asked_of_objects = ("dir", "hash", "id")  # not refused: see the test below
    named = [f for f in vars(builtins).values() if isinstance(f, types.BuiltinFunctionType)]
    assert {f.__name__ for f in named if not is_allowed(f)} <= {*outward, *asked_of_objects}
    assert not any(is_allowed(getattr(builtins, name)) for name in ("input", "open", "breakpoint"))


class Held:
    """Calls by an attribute what code then does not name."""

    def __init__(self, value: Any) -> None:
        self.value = value


BY_ADDRESS: dict[int, float] = {}
SHOWN: dict[str, Callable[[Any], Any]] = {
    "dir": lambda block: len(dir(block)),
    "dir, by an attribute": lambda block: len(block.held.value(block)),
    "__dir__": lambda block: len(block.__dir__()),
    "__getattribute__": lambda block: object.__getattribute__(block, "number"),
    "copy": lambda block: copy.copy(block).number,
    "__reduce_ex__": lambda block: block.__reduce_ex__(2)[2]["number"],
    "id, by an attribute": lambda block: BY_ADDRESS[block.held.value(block)],
}


@pytest.mark.parametrize("way", SHOWN)
@pytest.mark.parametrize("changed", [0, 2])
@pytest.mark.sweep(keep=["[2-", "[0-dir]"])
def test_what_shows_a_whole_object_is_compared_and_an_address_shares_nothing(
    way: str, changed: int
) -> None:
    @lazyinline.lazy_inline
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.held = Held(id if way.startswith("id") else dir)
            self.number = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * SHOWN[way](self)

    model = nn.Sequential(*(Block() for _ in range(3)))
    BY_ADDRESS.update({id(block): float(i + 1) for i, block in enumerate(model)})
    compiled, x = lazyinline.compile(model, backend="eager"), torch.randn(2, 4)
    assert torch.equal(compiled(x), model(x))
    model[changed].number = 2.0
    model[changed].more = 1
    for _ in range(2):
        assert torch.equal(compiled(x), model(x))

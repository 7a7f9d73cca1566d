"""Worlds: a model and what lies around it, made from Python text and played twice, to be compared.

A row of a table says as text what is held, how a forward reads it and what changes it. The text
runs in a module made for it, so that eager and compiled play one scene without sharing any object,
and a scene may change globals, classes and modules without putting them back.
"""

import functools
import importlib
import itertools
import random
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import models
import numpy as np
import torch
import torch.nn.functional as F
from comparing import PARTS, assert_same, run_once, seed_all, state_of
from torch import Tensor, nn

import lazyinline
from lazyinline.reuse import torch_pytree

MODULES = (
    *("abc", "array", "builtins", "collections", "contextvars", "copy", "dataclasses", "datetime"),
    *("decimal", "enum", "fractions", "functools", "gc", "hashlib", "inspect", "io", "ipaddress"),
    *("itertools", "locale", "logging", "math", "mmap", "multiprocessing", "operator", "os"),
    *("pathlib", "pickle", "queue", "random", "re", "string", "struct", "sys", "threading", "time"),
    *("types", "uuid", "warnings", "weakref", "zlib"),
)


def made(value: Any, *statements: str) -> Any:
    """Returns a value ``v`` after some statements about it."""
    for statement in statements:
        exec(statement, {**NAMES, "v": value})
    return value


class Beside(nn.Module):
    """Gives the same input to each of its layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> list[Any]:
        return [layer(x) for layer in self.layers]


# What the text of a world may name.
NAMES: dict[str, Any] = {name: importlib.import_module(name) for name in MODULES}
NAMES |= {"torch": torch, "nn": nn, "F": F, "Tensor": Tensor, "np": np, "lazyinline": lazyinline}
NAMES |= {name: getattr(models, name) for name in ("Around", "Stack", "block", "example", "linear")}
NAMES |= {"Beside": Beside, "lazy_inline": lazyinline.lazy_inline, "made": made}
_worlds = itertools.count()


class World:
    """What the text made: a ``model`` and, if it says so, ``inputs()``.

    Two worlds of one text have no code object in common, nor an equal one: those are told apart by
    their lines.
    """

    def __init__(self, *texts: str) -> None:
        self._first_line = next(_worlds) * 1000
        self.scope = vars(types.ModuleType("world"))
        self.scope |= NAMES
        seed_all(1)
        for text in texts:
            self.run(textwrap.dedent(text))

    def run(self, statements: str) -> None:
        """Runs statements in the world."""
        exec(_moved(_compiled(statements), self._first_line), self.scope)

    def value(self, expression: str) -> Any:
        """Returns what an expression gives in the world."""
        return eval(expression, self.scope)

    @property
    def model(self) -> Any:
        """The model as it is now."""
        return self.scope["model"]

    def call(self, run: Any, look: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls something; returns what there is to look at of the result."""
        result = run(*args, **kwargs)
        return self.value(f"lambda r, *given: {look}")(result, *args) if look else result

    def inputs(self, *, grad: bool = True) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns positional and keyword arguments, made anew."""
        # Without derivatives the first block's input is to be as the others' are: else none share.
        made_by = self.scope.get("inputs", lambda: (models.example(grad=grad),))
        return tuple(made_by()), self.scope.get("keywords", dict)()


@functools.cache
def _compiled(statements: str) -> types.CodeType:
    return compile(statements, "<world>", "exec")


def _moved(code: types.CodeType, num_lines: int) -> types.CodeType:
    """Returns code that says it stands further down, and all code in it."""
    held = (_moved(x, num_lines) if isinstance(x, types.CodeType) else x for x in code.co_consts)
    return code.replace(co_firstlineno=code.co_firstlineno + num_lines, co_consts=tuple(held))


@dataclass
class Outcome:
    """What became of a scene.

    Attributes:
        compiled: the compiled model.
        reports: of the program that ran, call by call.
        seen: all that eager showed, call by call.
    """

    compiled: Any
    reports: list[Any] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)

    @property
    def shared(self) -> int:
        """How many block calls were shared in the last compile."""
        return sum(decision.shared for decision in self.reports[-1].decisions)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why others were not."""
        return tuple(d.reason for d in self.reports[-1].decisions if d.reason)

    @property
    def eagerly(self) -> list[str]:
        """Why calls ran eagerly, of those that did."""
        return [report.ran_eagerly for report in self.reports if report.ran_eagerly]


def assert_as_eager(
    *texts: str,
    scene: Sequence[str] = ("", ""),
    state: str = "None",
    look: str = "",
    grad: bool = True,
    raises: bool = False,
    tolerance: float = 1e-10,
    **options: Any,
) -> Outcome:
    """Plays a scene by eager and compiled, in a world of its own each; all that shows is equal.

    Args:
        texts: what makes the world.
        scene: statements; the model is called after each of them.
        state: an expression; what it gives after each call is compared, too.
        look: an expression of a result ``r``, and what was ``given``, to be compared in its place.
        grad: the mode in which both are called.
        raises: whether calls may raise an error, which is compared then.
        tolerance: relative and absolute.
        options: of `lazyinline.compile`.
    """
    eager = World(*texts)  # played to its end first: worlds share what is the process's own
    expected = list(
        _played(eager, lambda: eager.model, scene, state, look, grad=grad, raises=raises)
    )
    world = World(*texts)
    compiled = lazyinline.compile(world.model, **{"backend": "eager", **options})
    outcome = Outcome(compiled, seen=expected)
    for call, found in enumerate(
        _played(world, lambda: compiled, scene, state, look, grad=grad, raises=raises)
    ):
        for what, theirs in expected[call].items():
            assert_same(found.get(what), theirs, f"call {call}: {what}", tolerance)
        outcome.reports.append(compiled.last_report)
    return outcome


def _played(
    world: World,
    run: Callable[[], Any],
    scene: Sequence[str],
    state: str,
    look: str,
    *,
    grad: bool,
    raises: bool,
) -> Iterator[dict[str, Any]]:
    for call, statements in enumerate(scene):
        seed_all(100 + call)
        world.run(statements)
        args, kwargs = world.inputs(grad=grad)
        with warnings.catch_warnings(), torch.set_grad_enabled(grad):
            warnings.simplefilter("ignore")
            try:
                parts = run_once(lambda *a, **k: world.call(run(), look, a, k), args, kwargs, call)
                found = dict(zip(PARTS, parts, strict=True))
            except lazyinline.LazyInlineError:
                raise
            except Exception as error:  # eager raises it, too, and nothing else is compared then
                if not raises:
                    raise
                found = {"error": type(error).__name__}
        found |= {"model": state_of(world.model), "state": shown(world.value(state))}
        leaves, spec = torch_pytree.flatten(found)
        yield torch_pytree.unflatten(
            [_kept(x) if isinstance(x, Tensor) else x for x in leaves], spec
        )


def _kept(tensor: Tensor) -> Tensor:
    """Returns a copy in equal memory: what is compared later may be written to before."""
    if tensor.is_conj() or tensor.is_neg() or tensor.layout is not torch.strided:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    held = tensor.detach().untyped_storage().clone()
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    twin = torch.empty(0, dtype=tensor.dtype).set_(held, *place)  # type: ignore[call-overload]
    return twin.requires_grad_(tensor.requires_grad)  # type: ignore[no-any-return]


def assert_refused(*texts: str, state: str = "None") -> str:
    """A training step refuses the model and leaves all as it was; returns the error's text."""
    world = World(*texts)
    before = shown(world.value(state)), state_of(world.model), random.getstate()
    step = lazyinline.compile_step(world.model, loss_fn=_total, backend="eager")
    args, kwargs = world.inputs()
    try:
        step(*(x.detach() if isinstance(x, Tensor) else x for x in args), **kwargs)
    except lazyinline.CaptureError as error:
        after = shown(world.value(state)), state_of(world.model), random.getstate()
        assert_same(after, before, "after the refusal", 0.0)
        return str(error)
    raise AssertionError("the step was compiled")


def _total(output: Any) -> Tensor:
    tensors = [t for t in torch_pytree.flatten(output)[0] if isinstance(t, Tensor)]
    return torch.stack([t.double().sum() for t in tensors]).sum()


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def shown(value: Any, depth: int = 8) -> Any:
    """Returns what can be compared of a value in another world: names of classes and contents."""
    if isinstance(value, Tensor):
        assert type(value) in (Tensor, nn.Parameter), f"a {type(value).__name__} was left"
        return value.detach()
    name = type(value).__qualname__
    if depth == 0 or isinstance(value, (nn.Module, type)):
        return name
    if isinstance(value, _PLAIN):
        return f"{name} {value!r}"
    if isinstance(value, np.ndarray):
        return [name, str(value.dtype), *map(shown, value.tolist())]
    if isinstance(value, (bytearray, memoryview)):
        return [name, bytes(value)]
    held: list[Any] = []
    if hasattr(value, "items"):
        held = [part for entry in value.items() for part in entry]
    elif isinstance(value, (list, tuple, set, frozenset)) or hasattr(value, "append"):
        held = list(value)
    slots = [n for n in getattr(type(value), "__slots__", ()) if hasattr(value, n)]
    held += [p for n in slots for p in (n, getattr(value, n))]
    held += [part for entry in getattr(value, "__dict__", {}).items() for part in entry]
    return [name, *(shown(item, depth - 1) for item in held)]

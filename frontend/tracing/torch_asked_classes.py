"""Adapter: makes class checks on fakes and symbolic sizes answer as in eager, or refuses them.

In a trace a tensor is fake and a size that varies is a symbol. ``isinstance`` answers as in eager
for both: a fake is a tensor, and ``__class__`` of a symbol is patched here. ``type(x)`` and
``n is m`` cannot be intercepted, so the bytecode of each user function is searched for them when it
begins. If it names ``type``, its module gets a global ``type`` that answers as in eager; a module
with one of its own, or code that compares with ``type`` by ``is``, is refused. A reference to the
builtin ``type`` is refused where the model reads it (:mod:`...reuse.freeze`). Identities and
``__class__`` are checked after the run, on the values that the functions' frames still hold.
"""

from __future__ import annotations

import builtins
import dis
import functools
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ...reuse.errors import CaptureError
from ...reuse.ir.torch_symbols import SIZE_TYPES
from ...reuse.kinds import OWN_PATCH, own_table
from .frames import is_library_frame, is_user_frame, user_line
from .torch_patches import replace_attributes
from .torch_tracing import is_traced

_NUMBERS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_COMPUTES_WITH_SYMBOLS = "sympy"
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_SIZES = frozenset(("shape", "size", "numel", "stride"))
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_NAMES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")
_ITERATED = ".0"  # Python's name for the argument of a comprehension
# Functions that use type() and do the same for a fake tensor's class, with the reason.
_ALIKE = frozenset(
    (
        # Tests if the class's text begins with "torch"; runs for every model output.
        ("transformers.utils.generic", "infer_framework_from_repr"),
    )
)
# Calls type() on the class of each object that it copies, and does not pass the answer on.
_HARMLESS_CALLER = ("copy", "deepcopy")


# ---- sizes that answer as numbers --------------------------------------------------------------


@contextmanager
def sizes_like_numbers() -> Iterator[None]:
    """Makes symbolic sizes look like numbers to the model's Python in this thread.

    If its text is used, or an attribute that only a number has, a size is specialized. A comparison
    is a condition on the sizes: many of PyTorch's functions take a bool, and no symbolic one.
    """
    thread = threading.get_ident()
    with ExitStack() as undo:
        for kind, number in _NUMBERS.items():
            undo.callback(_patched(kind, number, thread))
        yield


def _patched(kind: Any, number: Callable[[Any], Any], thread: int) -> Callable[[], None]:
    shown, lookup = kind.__repr__, object.__getattribute__
    libraries: dict[int, CodeType] = {}  # by id, because it is looked up 100,000 times

    def is_asked() -> bool:
        frame = sys._getframe(2)
        return threading.get_ident() == thread and _is_models(frame)

    def getattribute(self: Any, name: str) -> Any:
        if name != "__class__":
            return lookup(self, name)
        frame = sys._getframe(1)
        if id(frame.f_code) in libraries:
            return kind
        if is_library_frame(frame):
            libraries[id(frame.f_code)] = frame.f_code
            return kind
        return number if is_asked() else kind

    def missing(self: Any, name: str) -> Any:
        if name[:2] == "__" or not is_asked():
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        return getattr(number(self), name)

    def text(self: Any) -> str:
        return repr(number(self)) if is_asked() else shown(self)

    def formatted(self: Any, how: str) -> str:
        return format(number(self), how) if is_asked() else format(shown(self), how)

    def comparing(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def compared(self: Any, other: Any) -> Any:
            answer = compare(self, other)
            return bool(answer) if type(answer) is torch.SymBool and is_asked() else answer

        return compared

    added = {"__getattribute__": getattribute, "__getattr__": missing, "__format__": formatted}
    own = {name: comparing(vars(kind)[name]) for name in _COMPARISONS if name in vars(kind)}
    return replace_attributes(kind, {**added, **own, "__repr__": text})


def _is_models(frame: FrameType) -> bool:
    """Whether a frame runs a model's code, not PyTorch's or SymPy's for symbols."""
    name = str(frame.f_globals.get("__name__"))
    return name.partition(".")[0] != _COMPUTES_WITH_SYMBOLS and is_user_frame(frame)


def _name(frame: FrameType) -> tuple[Any, str]:
    return frame.f_globals.get("__name__"), frame.f_code.co_name


# ---- tensors that answer as eager's ------------------------------------------------------------


def _class_in_eager(value: Any, known: Mapping[int, type]) -> Any:
    kind = type(value)
    if kind is not FakeTensor or not is_traced(value):
        return kind
    made = nn.Parameter if getattr(value, "_is_param", False) else torch.Tensor
    return known.get(id(value), made)


class _LikeType(type):
    """Metaclass of a stand-in for ``type``, which also works in other threads."""

    _known: Mapping[int, type]
    _shown: Mapping[type, type]
    _thread: int
    _types: list[str]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        found = _class_in_eager(args[0], cls._known)
        if threading.get_ident() != cls._thread:
            return found
        if found is type and _name(sys._getframe(1)) != _HARMLESS_CALLER:
            cls._types.append(user_line())  # Python's ``type``, which reveals a fake's class
        return cls._shown.get(found, found)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is type

    def __hash__(cls) -> int:
        return hash(type)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, type)


def _classes_shown(known: Mapping[int, type]) -> Callable[[], None]:
    """Patches ``__class__`` of fakes to answer as in eager; returns what undoes it."""

    def class_of(self: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name == "__instancecheck__":
            frame = frame.f_back  # the caller of isinstance counts
        return _class_in_eager(self, known) if is_user_frame(frame) else type(self)

    # As a base class after torch.Tensor, which has no ``__class__`` of its own. Setting it on
    # FakeTensor itself would change the class of that class.
    kind, bases = FakeTensor, FakeTensor.__bases__
    kind.__bases__ = (*bases, type("Shown", (), {"__class__": property(class_of)}))

    def restore() -> None:
        kind.__bases__ = bases

    return restore


# ---- class and identity checks in user functions -----------------------------------------------

_Path: TypeAlias = tuple[Any, ...]
"""The path to a value: ``a.b[0]`` is ``("a", ".b", 0)``, and ``a[i]`` is ``("a", _ANY)``."""

_ANY: Any = object()


class _Question(NamedTuple):
    """A ``type``, ``.__class__`` or ``... is ...`` in a function."""

    line: int  # its line
    # ``"type"``, ``"__class__"``, ``"is"``, or ``"is type"`` for a comparison with ``type``.
    way: str
    paths: tuple[_Path, ...] = ()  # paths to the values that it may be applied to
    # Whether there may be other values, because the operand is computed, or a variable had several
    # values. Then every value that the function holds is checked.
    is_open: bool = False
    kinds: tuple[type, ...] = ()  # classes whose instances would answer differently than in eager


class AskedClasses:
    """Notes the functions of a model that check the class or identity of an object.

    ``known`` has the classes of tensors from outside the trace, by ``id`` of their fakes; ``shown``
    for each class of proxies that of the objects behind them. Identity checks are noted
    ``of_sizes``, if these are symbolic.
    """

    def __init__(
        self, known: Mapping[int, type], shown: Mapping[Any, type], *, of_sizes: bool
    ) -> None:
        self._of_sizes = of_sizes
        # By id, because hashing a code object is slow.
        self._known: dict[int, tuple[CodeType, Sequence[_Question]]] = {}
        self._asking: list[tuple[FrameType, Sequence[_Question], list[Mapping[str, Any]]]] = []
        self._classes = known
        self._types: list[str] = []  # lines that reveal Python's ``type``
        own = {OWN_PATCH: True, "_known": known, "_thread": threading.get_ident()}
        own |= {"_shown": {**_NUMBERS, **shown}, "_types": self._types}
        self._type: Any = _LikeType("type", (type,), own)
        self._undo = ExitStack()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Makes class checks inside answer as in eager, where that is possible."""
        with self._undo:
            self._undo.callback(_classes_shown(self._classes))
            yield

    def began(self, frame: FrameType) -> None:
        """Called when a function of the model begins: notes its class and identity checks."""
        code = frame.f_code
        questions = self._asked_by(frame)
        for question in questions:
            if question.way == "is type" or (question.way == "type" and not self._shows(frame)):
                self._types.append(_place(frame, question))
        if any(question.kinds for question in questions):
            # The values that a comprehension iterates over are in the function around it.
            around = frame.f_back if _ITERATED in code.co_varnames else None
            given: list[Mapping[str, Any]] = [dict(frame.f_locals)]
            given += [] if around is None else [around.f_locals]
            self._asking.append((frame, questions, given))

    def _asked_by(self, frame: FrameType) -> Sequence[_Question]:
        code = frame.f_code
        if _name(frame) in _ALIKE:
            return ()
        known = self._known.get(id(code))
        if known is None:
            found = [q for q in _questions(code) if self._of_sizes or q.way != "is"]
            known = self._known[id(code)] = (code, found)
        return known[1]

    def _shows(self, frame: FrameType) -> bool:
        """Gives a function's module a ``type`` that answers as in eager, unless it has its own."""
        scope = frame.f_globals
        if "type" not in scope:
            self._undo.callback(_remove_type, scope, self._type)
            scope["type"] = self._type
        return scope["type"] is self._type

    def refuse(self) -> None:
        """Refuses checks in the functions that have run whose answer differs from eager's."""
        if self._types:
            _refuse("type", self._types[0])
        for frame, questions, given in self._asking:
            for question in questions:
                for value in _asked(question, [frame.f_locals, *given], frame.f_globals):
                    if isinstance(value, question.kinds):
                        _refuse(question.way, _place(frame, question))

    def release(self) -> None:
        """Drops references to the frames that have run."""
        self._asking.clear()


def _place(frame: FrameType, question: _Question) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{question.line}"


def _refuse(way: str, line: str) -> None:
    if way == "is":
        raise CaptureError(
            f"The model's forward checks the identity of a size at {line}, and a size that varies "
            "is a symbol, not a Python number."
        )
    raise CaptureError(
        f"The model's forward reads the class of a class, or another type than type(), at {line}. "
        "The builtin type gives a traced tensor another class than in eager. Use isinstance()."
    )


def _remove_type(scope: dict[str, Any], own: Any) -> None:
    if scope.get("type") is own:
        del scope["type"]


def _asked(
    question: _Question, variables: Sequence[Mapping[str, Any]], scope: Mapping[str, Any]
) -> Iterator[Any]:
    """Yields the values that a check may have been applied to."""
    for table in (*variables, scope, vars(builtins)):
        for path in question.paths:
            yield from _at(path, table)
    for table in variables if question.is_open else ():
        for value in table.values():
            yield from _with_items(value)


def _at(path: _Path, table: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the value at a path, or candidates if the path cannot be followed to its end."""
    value = table.get(path[0])
    for step in path[1:]:
        found: Sequence[Any]
        if isinstance(value, torch.Tensor) and str(step)[1:] in _SIZES:
            found = [value.shape]
        elif step == ".__class__":
            found = [type(value)]
        elif isinstance(step, str) and step[:1] == ".":
            found = [held[step[1:]] for held in _tables(value) if step[1:] in held]
        elif isinstance(value, (list, tuple)):
            found = value[step : step + 1 or None] if isinstance(step, int) else value
        elif isinstance(value, dict) and step is not _ANY:
            found = [value[step]] if step in value else []
        else:
            found = list(_with_items(value))
        if len(found) != 1:
            yield from found or (value,)
            return
        value = found[0]
    yield from _with_items(value) if isinstance(value, torch.Size) else (value,)


def _tables(value: Any) -> list[Mapping[str, Any]]:
    """Returns the dicts with the attributes of an object, without running code of its class."""
    tables: list[Mapping[str, Any]] = [own_table(value) or {}]
    if isinstance(value, nn.Module):
        tables += [value._parameters, value._buffers]
    return tables


def _with_items(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()


# ---- reading the code --------------------------------------------------------------------------


def _questions(code: CodeType) -> Sequence[_Question]:
    """Returns the checks in a function, except ``is None``, which is the same for a fake."""
    asks = "type" in code.co_names or "__class__" in (*code.co_names, *code.co_consts)
    return _read(code) if asks or dis.opmap["IS_OP"] in code.co_code[::2] else ()


@functools.lru_cache(maxsize=4096)  # without it, a tenth of the time of a small model's capture
def _read(code: CodeType) -> Sequence[_Question]:
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    found, line = [], code.co_firstlineno
    for index, step in enumerate(steps):
        line = _line(step) or line
        if step.opname == "IS_OP" and not _is_none(steps[index - 1]):
            asked, kinds, way = _operands(steps, index, 2), SIZE_TYPES, "is"
            right = _operands(steps, index, 1)
            sides = right, asked[: -len(right)]
            if any(len(side) == 1 and _is_builtin(side[0]) for side in sides):
                found.append(_Question(line, "is type"))
        elif step.opname.startswith(_ATTRIBUTES) and step.argval == "__class__":
            # ``__class__`` of a class is the builtin ``type``.
            asked, kinds, way = _operands(steps, index, 1), (type,), "__class__"
            kinds = (object,) if any(map(_is_builtin, asked)) else kinds
        elif step.opname == "LOAD_CONST" and step.argval == "__class__":  # getattr(x, "__class__")
            asked, kinds, way = _operands(steps, index, 1), (type,), "__class__"
        else:
            if _is_builtin(step):
                found.append(_Question(line, "type"))
            continue
        paths, is_computed = _paths(asked)
        is_open = is_computed or _is_set_again({path[0] for path in paths}, code, steps)
        is_open = is_open and kinds != (type,)  # few values are classes: check only the paths
        found.append(_Question(line, way, paths, is_open, kinds))
    return found


def _is_builtin(step: dis.Instruction) -> bool:
    return step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval == "type"


def _line(step: Any) -> int | None:
    """Returns the line that begins with an instruction; the attribute depends on the Python."""
    number = getattr(step, "line_number", None)
    return number if number is not None or isinstance(step.starts_line, bool) else step.starts_line


def _is_none(step: dis.Instruction) -> bool:
    return step.opname in ("LOAD_CONST", "LOAD_COMMON_CONSTANT") and step.argval is None


def _operands(steps: list[dis.Instruction], index: int, num_values: int) -> list[dis.Instruction]:
    """Returns the instructions that compute the operands of an instruction."""
    first, needed = index, num_values
    while needed > 0 and first > 0:
        first -= 1
        needed -= _pushed(steps[first])
    return steps[first:index]


def _pushed(step: dis.Instruction) -> int:
    has_argument = step.opcode >= dis.HAVE_ARGUMENT
    return dis.stack_effect(step.opcode, step.arg if has_argument else None, jump=False)


def _paths(steps: list[dis.Instruction]) -> tuple[tuple[_Path, ...], bool]:
    """Returns the paths to the values in an expression, and whether it computes other values."""
    found: list[_Path] = []
    is_computed = False
    for step in steps:
        if step.opname.startswith(_NAMES):
            found += [(name,) for name in _argvals(step) if isinstance(name, str)]
        elif step.opname.startswith(_ATTRIBUTES) and found:
            found[-1] = (*found[-1], f".{step.argval}")
        elif step.opname.startswith("LOAD_"):
            found.append((None, step.argval))
        elif (step.opname == "BINARY_SUBSCR" or step.argrepr == "[]") and len(found) > 1:
            first, *key = found.pop()
            found[-1] = (*found[-1], *(key if first is None else (_ANY,)))
        elif step.opname != "PRECALL":
            is_computed = True
    return tuple(path for path in found if path[0] is not None), is_computed


def _is_set_again(names: Collection[str], code: CodeType, steps: Sequence[dis.Instruction]) -> bool:
    """Whether one of the variables may have had several values: in a loop, or by two stores."""
    stores = [step for step in steps if step.opname.startswith(("STORE_FAST", "STORE_DEREF"))]
    stored = [name for step in stores for name in _argvals(step) if name in names]
    is_looped = bool(stored) and any(step.opname.startswith("FOR_ITER") for step in steps)
    given = set(code.co_varnames[: code.co_argcount])
    return is_looped or len(set(stored)) < len(stored) or not given.isdisjoint(stored)


def _argvals(step: dis.Instruction) -> tuple[Any, ...]:
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)

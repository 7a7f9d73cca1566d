"""The key of a block: its class and the arguments that its constructor was given.

An instance is asked what it shows of them: ``self.heads = heads``, ``self.norm = Norm(width)``.
Nothing is recorded while a model is built, so instances made before the mark have a key as well,
and a value that was changed since counts as it is now. The key only proposes which instances are
alike: evidence decides.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...reuse.evidence.module_state import module_state

_MAX_DEPTH = 4
_MAX_TEXT = 40
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_UNKNOWN: Any = object()


@dataclass(frozen=True)
class InitArgument:
    """One argument of a constructor.

    Attributes:
        name: of the parameter.
        text: the value as a person reads it.
        identity: what two equal arguments have in common: the text of a plain value, the identity
            of an object.
        is_default: whether it is what the constructor assumes.
    """

    name: str
    text: str
    identity: str | int
    is_default: bool = False

    def __str__(self) -> str:
        return f"{self.name}={self.text}"


@dataclass(frozen=True)
class InitKey:
    """A class and its constructor's arguments, as far as an instance shows them."""

    class_name: str
    arguments: tuple[InitArgument, ...] = ()

    def __str__(self) -> str:
        shown = [str(a) for a in self.arguments if not a.is_default]
        return f"{self.class_name}({', '.join(shown)})"

    def differing(self, other: InitKey) -> list[str]:
        """Returns the names of the arguments that another key of the class has otherwise."""
        mine, others = ({a.name: a.identity for a in k.arguments} for k in (self, other))
        return [n for n in {**mine, **others} if mine.get(n, n) != others.get(n, n)]

    def argument(self, name: str) -> InitArgument | None:
        """Returns the argument of a name, if the instance shows it."""
        return next((a for a in self.arguments if a.name == name), None)


NO_KEY = InitKey("")


def text_of_keys(keys: Sequence[InitKey]) -> str:
    """Writes keys of one class as one; an argument that varies shows its first and last value."""
    first, last = keys[0], keys[-1]
    varying = {name for key in keys for name in first.differing(key)}
    arguments = []
    for argument in first.arguments:
        end = last.argument(argument.name)
        if argument.name in varying and end is not None:
            arguments.append(f"{argument.name}={argument.text}..{end.text}")
        elif not argument.is_default:
            arguments.append(str(argument))
    return f"{first.class_name}({', '.join(arguments)})"


class InitKeys:
    """Reads the keys of instances; each class's constructor is looked at once."""

    def __init__(self) -> None:
        self._constructors: dict[type, _Constructor | None] = {}

    def key(self, module: nn.Module) -> InitKey:
        """Returns the key of an instance."""
        cls = type(module)
        constructor = self.constructor(cls)
        if constructor is None:
            return InitKey(cls.__name__)
        found = []
        for name, default in constructor.defaults.items():
            value = self._shown(module, cls, name, _MAX_DEPTH)
            if value is not _UNKNOWN:
                text, identity = _described(value)
                found.append(InitArgument(name, text, identity, _is_same(value, default)))
        return InitKey(cls.__name__, tuple(found))

    def constructor(self, cls: type) -> _Constructor | None:
        """Returns what the source of a class says about its constructor, if it can be read."""
        if cls not in self._constructors:
            self._constructors[cls] = _Constructor.of(cls)
        return self._constructors[cls]

    def _shown(self, module: nn.Module, cls: type, name: str, depth: int) -> Any:
        """Returns the argument of one parameter as an instance shows it, or _UNKNOWN."""
        constructor = self.constructor(cls)
        if constructor is None or depth == 0:
            return _UNKNOWN
        for attribute in constructor.attributes.get(name, ()):
            value = _held(module, attribute)
            if value is not _UNKNOWN:
                return value
        for place, call in constructor.calls.get(name, ()):
            child = module if place is None else _held(module, place)
            kind = constructor.base if place is None else type(child)
            if isinstance(child, nn.Module) and kind is not None:
                inner = self._parameter(kind, call, name)
                shown = self._shown(child, kind, inner, depth - 1) if inner else _UNKNOWN
                if shown is not _UNKNOWN:
                    return shown
        return _UNKNOWN

    def _parameter(self, cls: type, call: ast.Call, name: str) -> str:
        """Returns which parameter of a class a call hands the variable of some name to."""
        for keyword in call.keywords:
            if keyword.arg is not None and _is_name(keyword.value, name):
                return keyword.arg
        constructor = self.constructor(cls)
        names = [] if constructor is None else list(constructor.defaults)
        for position, argument in enumerate(call.args[: len(names)]):
            if isinstance(argument, ast.Starred):
                break
            if _is_name(argument, name):
                return names[position]
        return ""


@dataclass(frozen=True)
class _Constructor:
    """What the source of a constructor says about its parameters.

    Attributes:
        defaults: the parameters, with their defaults.
        attributes: for each, the attributes that are set to it as it is.
        calls: for each, the attributes that are set to the result of a call which is given it as
            it is; None stands for the constructor of the base class.
        base: the class whose constructor ``super().__init__`` is.
        used: for each attribute, the parameters that the expression it is set to speaks of.
    """

    defaults: Mapping[str, Any]
    attributes: Mapping[str, Sequence[str]]
    calls: Mapping[str, Sequence[tuple[str | None, ast.Call]]]
    base: type | None
    used: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, kind: type) -> _Constructor | None:
        owner = next((base for base in kind.__mro__ if "__init__" in vars(base)), object)
        init = vars(owner).get("__init__")
        if owner in (nn.Module, object) or not inspect.isfunction(init):
            return None
        try:
            parameters = list(inspect.signature(init).parameters.values())[1:]
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(init))))
        except (OSError, SyntaxError, TypeError, ValueError):
            return None
        plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        names = {p.name: p.default for p in plain}
        attributes: dict[str, list[str]] = {}
        calls: dict[str, list[tuple[str | None, ast.Call]]] = {}
        used: dict[str, frozenset[str]] = {}
        for attribute, value in _assignments(tree):
            used.setdefault(attribute, frozenset(_names(value)) & names.keys())
            if isinstance(value, ast.Name):
                attributes.setdefault(value.id, []).append(attribute)
            elif isinstance(value, ast.Call):
                for name in _given(value):
                    calls.setdefault(name, []).append((attribute, value))
        for call in _base_calls(tree):
            for name in _given(call):
                calls.setdefault(name, []).append((None, call))
        base = kind.__mro__[kind.__mro__.index(owner) + 1]
        return cls(names, attributes, calls, base, used)


def _assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yields what an instance holds and the expression that made it, with the place in a list."""
    appended: Counter[str] = Counter()
    for attribute, value in _plain_assignments(tree):
        yield attribute, value
        items = value.args if isinstance(value, ast.Call) else []
        if len(items) == 1 and isinstance(items[0], (ast.List, ast.Tuple)):
            items = items[0].elts
        yield from ((f"{attribute}.{index}", item) for index, item in enumerate(items))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        listed = node.func.value
        if (
            node.func.attr == "append"
            and isinstance(listed, ast.Attribute)
            and _is_name(listed.value, "self")
        ):
            yield f"{listed.attr}.{appended[listed.attr]}", node.args[0]
            appended[listed.attr] += 1


def _plain_assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yields every ``self.attribute = value``."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for part, value in _pairs(target, node.value):
                if isinstance(part, ast.Attribute) and _is_name(part.value, "self"):
                    yield part.attr, value


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Pairs what is assigned with what it is assigned to: ``self.a, self.b = a, b``."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def _base_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yields every ``super().__init__(...)``."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "__init__"
            and isinstance(node.func.value, ast.Call)
            and _is_name(node.func.value.func, "super")
        ):
            yield node


def _given(call: ast.Call) -> Iterator[str]:
    for value in (*call.args, *(keyword.value for keyword in call.keywords)):
        if isinstance(value, ast.Name):
            yield value.id


def _names(value: ast.expr) -> Iterator[str]:
    return (node.id for node in ast.walk(value) if isinstance(node, ast.Name))


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _held(module: nn.Module, path: str) -> Any:
    """Returns what a module holds under a path, without running any code of its class."""
    outer, _, name = path.rpartition(".")
    if outer:
        module = _held(module, outer)
    if not isinstance(module, nn.Module):
        return _UNKNOWN
    state = module_state(module)
    for table in (state, state["_parameters"], state["_buffers"], state["_modules"]):
        if name in table:
            return table[name]
    return _UNKNOWN


def _described(value: Any) -> tuple[str, str | int]:
    """Returns how a value is shown, and what it has in common with an equal one."""
    if isinstance(value, (*_PLAIN, tuple, list)):
        text = repr(value)
        return (text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."), text
    return getattr(value, "__name__", type(value).__name__), id(value)


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (
        type(value) is type(default) and _described(value) == _described(default)
    )

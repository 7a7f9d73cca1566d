"""The key of a block: its class and the arguments of its constructor, as an instance shows them.

An argument shows where the instance, or a module inside it, holds something under the name of the
parameter (``self.heads = heads``). Nothing is recorded while a model is built, so instances made
before the mark have a key as well, and a value that was changed since counts as it is now. The key
only proposes which instances are alike: evidence decides.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...reuse.evidence.module_state import module_state, walk_modules

_MAX_DEPTH = 4
_MAX_TEXT = 40
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_UNKNOWN: Any = object()


@dataclass(frozen=True)
class InitArgument:
    """Holds one argument of a constructor.

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
        self._parameters: dict[type, Mapping[str, Any]] = {}

    def key(self, module: nn.Module) -> InitKey:
        """Returns the key of an instance."""
        cls = type(module)
        if cls not in self._parameters:
            self._parameters[cls] = _parameters(cls)
        found = []
        places = _near(module)
        for name, default in self._parameters[cls].items():
            # A parameter or a module is seldom what the argument of its name was (``bias=True``).
            held = (module_state(place).get(name, _UNKNOWN) for place in places)
            value = next((v for v in held if v is not _UNKNOWN), _UNKNOWN)
            if value is not _UNKNOWN:
                described = _described(value)
                is_alike = type(value) is type(default) and described == _described(default)
                found.append(InitArgument(name, *described, value is default or is_alike))
        return InitKey(cls.__name__, tuple(found))


def _parameters(cls: type) -> Mapping[str, Any]:
    """Returns the parameters of a module class's constructor, with their defaults."""
    owner = next((base for base in cls.__mro__ if "__init__" in vars(base)), object)
    init = vars(owner).get("__init__")
    if owner in (nn.Module, object) or not inspect.isfunction(init):
        return {}
    try:
        parameters = list(inspect.signature(init).parameters.values())[1:]
    except (TypeError, ValueError):
        return {}
    return {
        p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }


def _near(module: nn.Module) -> list[nn.Module]:
    """Returns a module and those inside it, the nearest first."""
    places = ((path.count(".") + bool(path), one) for path, one in walk_modules(module))
    near = (place for place in places if place[0] <= _MAX_DEPTH)
    return [one for _, one in sorted(near, key=lambda place: place[0])]


def _described(value: Any) -> tuple[str, str | int]:
    """Returns how a value is shown, and what it has in common with an equal one."""
    if isinstance(value, (*_PLAIN, tuple, list)):
        text = repr(value)
        return (text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."), text
    return getattr(value, "__name__", type(value).__name__), id(value)

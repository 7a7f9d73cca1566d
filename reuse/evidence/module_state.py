"""What a module holds, and what is in its tree, read past any code of the user's."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from ..objects import ABSENT
from ..torch_names import CALL_SLOT, HookKind, global_hook_tables

OWN_PREFIX = "_lazy_inline"  # of what the mark keeps on an instance
WHOLE = "__dict__"  # the name under which a module's own table is read as a whole

Places = list[tuple[str, nn.Module]]
Where = Literal["", "_parameters", "_buffers", "_modules", "class"]
"""Where a module has an attribute: in its own ``__dict__``, in a table there, or in its class."""
_TENSORS_AND_MODULES: tuple[Where, ...] = ("_parameters", "_buffers", "_modules")
HOOK_TABLES = tuple(
    sorted(n for n in nn.Module().__dict__ if n.endswith(("_hooks", "_hooks_with_kwargs")))
)


def raw_attribute(module: nn.Module, name: str) -> Any:
    """Returns what a module itself holds under a name, without running any of its code.

    Under ``"__dict__"`` those are the names of what it holds, but for what the mark keeps there.
    """
    return find_attribute(module, name)[1]


def find_attribute(module: nn.Module, name: str) -> tuple[Where, Any]:
    """The same, and where it is."""
    state = module_state(module)
    if name == WHOLE:
        return "", tuple(own_names(state))
    if name in state:
        return "", state[name]
    for table in _TENSORS_AND_MODULES:
        if name in state.get(table, ()):
            return table, state[table][name]
    return "class", class_attribute(type(module), name)


def own_names(state: dict[str, Any]) -> list[str]:
    """Returns the names in a module's ``__dict__`` that are the user's or ``nn.Module``'s."""
    return [name for name in state if not name.startswith(OWN_PREFIX) and name != CALL_SLOT]


def class_attribute(kind: type, name: str) -> Any:
    """Returns what a class holds under a name, or ABSENT."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return ABSENT


def module_state(module: nn.Module) -> dict[str, Any]:
    """Returns a module's ``__dict__`` past any ``__getattribute__``."""
    state: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return state


def walk_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns every (path, module) of a tree, a shared module once per place it has.

    The order is that of ``named_modules``, so that a shared tensor gets the name that
    ``named_parameters`` gives it.
    """
    found, todo = [], [("", root)]
    while todo:
        path, module = todo.pop()
        found.append((path, module))
        prefix = f"{path}." if path else ""
        children = module_state(module).get("_modules", {}).items()  # none: TorchScript
        todo += [(prefix + name, child) for name, child in reversed(children) if child is not None]
    return found


def has_hooks(module: nn.Module, kind: HookKind) -> bool:
    """Whether hooks run in a module's ``"forward"``, or ``"backward"``: its own, or everybody's."""
    return has_own_hooks(module, kind) or any(global_hook_tables(kind))


def has_own_hooks(module: nn.Module, kind: HookKind) -> bool:
    """Whether hooks were put on this very module."""
    state = module_state(module)
    return any(kind in table and state.get(table) for table in HOOK_TABLES)


def own_hooks(module: nn.Module, kind: HookKind) -> list[int]:
    """Returns the numbers under which PyTorch keeps the hooks on this very module."""
    state = module_state(module)
    return [number for table in HOOK_TABLES if kind in table for number in state.get(table, ())]

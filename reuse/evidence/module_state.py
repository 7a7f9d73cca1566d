"""Reads what a module and its tree hold, without running any code of the user's."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from ..freeze import Freezer, Identity
from ..ir.types import TensorType
from ..kinds import ABSENT, follow
from ..torch_names import HookKind, global_hook_tables

Places = list[tuple[str, nn.Module]]
Where = Literal["", "_parameters", "_buffers", "_modules", "class"]
"""Where a module has an attribute: in its own ``__dict__``, in a table there, or in its class."""
_TENSORS_AND_MODULES: tuple[Where, ...] = ("_parameters", "_buffers", "_modules")
HOOK_TABLES = tuple(
    sorted(n for n in nn.Module().__dict__ if n.endswith(("_hooks", "_hooks_with_kwargs")))
)


def raw_attribute(module: nn.Module, name: str) -> Any:
    """Returns what a module itself holds under a name, without running any of its code."""
    return find_attribute(module, name)[1]


def find_attribute(module: nn.Module, name: str) -> tuple[Where, Any]:
    """Returns where a module has an attribute, and its value."""
    state = module_state(module)
    if name in state:
        return "", state[name]
    for table in _TENSORS_AND_MODULES:
        if name in state.get(table, ()):
            return table, state[table][name]
    held = (base.__dict__[name] for base in type(module).__mro__ if name in base.__dict__)
    return "class", next(held, ABSENT)


def module_state(module: nn.Module) -> dict[str, Any]:
    """Returns a module's ``__dict__`` past any ``__getattribute__``."""
    state: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return state


def walk_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns every (path, module) of a tree, a shared module once per place it has."""
    found, todo = [], [("", root)]
    while todo:
        path, module = todo.pop()
        found.append((path, module))
        prefix = f"{path}." if path else ""
        children = module_state(module).get("_modules", {}).items()  # none: TorchScript
        # In the order of ``named_modules``, so that a shared tensor gets the name that
        # ``named_parameters`` gives it.
        todo += [(prefix + name, child) for name, child in reversed(children) if child is not None]
    return found


def has_hooks(module: nn.Module, kind: HookKind) -> bool:
    """Whether a module's ``"forward"`` or ``"backward"`` runs hooks, its own or global ones."""
    return has_own_hooks(module, kind) or any(global_hook_tables(kind))


def has_own_hooks(module: nn.Module, kind: HookKind) -> bool:
    """Whether a module has hooks of its own."""
    return bool(own_hooks(module, kind))


def own_hooks(module: nn.Module, kind: HookKind) -> list[int]:
    """Returns the numbers under which PyTorch keeps a module's own hooks."""
    state = module_state(module)
    return [number for table in HOOK_TABLES if kind in table for number in state.get(table, ())]


TensorPath = tuple[Any, ...]  # (module path, attribute name, *keys inside the attribute)


def tensor_facts(tensor: torch.Tensor) -> Any:
    """Returns all that a trace can see of a tensor, except its values."""
    facts = (type(tensor), TensorType.of(tensor), tensor.requires_grad)
    return (*facts, _attributes_of(tensor) if tensor.__dict__ else ())


def _attributes_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns the Python attributes of a tensor, as of ``weight.scale = 2.0``, frozen."""
    freeze = Freezer(on_tensor=lambda inner, keys: Identity(inner)).freeze
    return tuple((name, freeze(value)) for name, value in sorted(tensor.__dict__.items()))


def module_paths(places: list[tuple[str, nn.Module]]) -> dict[int, str]:
    """Returns the first path of each module, by its ``id``."""
    paths: dict[int, str] = {}
    for path, module in places:
        paths.setdefault(id(module), path)
    return paths


def structure_of(places: list[tuple[str, nn.Module]]) -> list[tuple[Any, ...]]:
    """Describes a module tree: one row per module, in a fixed order."""
    rows: list[tuple[Any, ...]] = []
    first_place: dict[int, int] = {}  # of a tensor; equal numbers mean that it is tied
    module_place: dict[int, int] = {}
    paths: dict[int, str] | None = None
    for path, module in places:
        state = module_state(module)
        hooks: Any = ()
        if any(map(state.get, HOOK_TABLES)):
            paths = paths or module_paths(places)
            freezer = Freezer(paths)
            hooks = tuple(
                freezer.freeze(list(state[t].values())) for t in HOOK_TABLES if t in state
            )
        tensors = tuple(
            (
                name,
                None
                if t is None
                else (*tensor_facts(t), first_place.setdefault(id(t), len(first_place))),
            )
            for table in (state["_parameters"], state["_buffers"])
            for name, t in table.items()
        )
        alias = module_place.setdefault(id(module), len(module_place))
        rows.append((path, type(module), state["training"], alias, tensors, hooks))
    return rows


def structure_mismatch(expected: list[tuple[Any, ...]], found: list[tuple[Any, ...]]) -> str:
    """Says where two descriptions differ; empty if they are equal."""
    if expected == found:
        return ""
    labels = (
        "sub-module name",
        "class",
        "train/eval mode",
        "sub-module sharing",
        "parameters",
        "hooks",
    )
    for row, other in zip(expected, found, strict=False):
        for label, a, b in zip(labels, row, other, strict=True):
            if a != b:
                return f"{label} of {other[0] or 'the block'} differs{_name_tensor(label, a, b)}"
    return f"it has {len(found)} sub-modules, not {len(expected)}"


def _name_tensor(label: str, expected: Any, found: Any) -> str:
    if label == "train/eval mode":
        return f" (training is {found}, not {expected})"
    if label != "parameters":
        return ""
    for a, b in zip(expected, found, strict=False):
        if a != b and a[0] == b[0] and a[1] and b[1]:
            facts = ("class", "layout", "requires_grad", "attributes", "tying")
            changed = [f for f, x, y in zip(facts, a[1], b[1], strict=True) if x != y]
            return f" ({b[0]}: {', '.join(changed)})"
    return ""


def follow_tensor_path(root: nn.Module, path: TensorPath) -> torch.Tensor:
    """Returns the tensor at a path in another instance."""
    module = root
    for name in path[0].split(".") if path[0] else ():
        module = module_state(module)["_modules"][name]
    value = raw_attribute(module, path[1])
    for key in path[2:]:
        value = follow(value, key)
    assert isinstance(value, torch.Tensor)
    return value

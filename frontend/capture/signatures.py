"""Call signatures: arguments by name, and what about them decides whether a closure fits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.evidence.module_state import module_state, walk_modules
from ...reuse.freeze import Freezer, Identity, describe
from ...reuse.ir.types import TensorType
from ...reuse.torch_names import memory_id

CallKey = tuple[type, torch_pytree.TreeSpec, "CallSignature", Any, tuple[tuple[str, str], ...]]
"""Equal for two calls that may share: class, nesting, signature, modes, marks inside."""

_PLAIN_TYPES = (bool, int, str, type(None))


class CallSignature:
    """Compares the arguments of calls in full: layouts, shared memory, and all other values.

    Args:
        module: the block called.
        leaves: its flattened arguments; tensors are fake.
        own_fakes: ``id(fake) -> id(real tensor)`` of the model's tensors, to notice an argument
            that is one of the block's own tensors.
    """

    __slots__ = ("_rows",)

    def __init__(
        self, module: nn.Module, leaves: Sequence[Any], own_fakes: Mapping[int, int]
    ) -> None:
        places: list[tuple[str, nn.Module]] = []
        freezer: Freezer | None = None
        rows: list[Any] = []
        if any(id(leaf) in own_fakes for leaf in leaves):
            places = walk_modules(module)
            rows = _own_tensors(places, leaves, own_fakes)
        seen: dict[int, int] = {}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                memory = seen.setdefault(memory_id(leaf), len(seen))
                same = seen.setdefault(id(leaf), len(seen))
                offset = leaf.storage_offset()
                rows.append((TensorType.of(leaf), leaf.requires_grad, memory, same, offset))
            elif type(leaf) in _PLAIN_TYPES:
                rows.append((type(leaf), leaf))
            elif torch_pytree.is_container(leaf):  # what is read in it is compared apart
                rows.append((type(leaf), seen.setdefault(id(leaf), len(seen))))
            else:
                places = places or walk_modules(module)
                freezer = freezer or Freezer({id(m): p for p, m in places})
                rows.append(freezer.freeze(leaf))
        self._rows = rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallSignature) and self._rows == other._rows

    def __hash__(self) -> int:
        return len(self._rows)

    def difference(self, other: CallSignature, names: Sequence[str]) -> str:
        """Says which argument another call passes in another way; ``names`` are of the leaves."""
        rows, others = (x._rows[len(x._rows) - len(names) :] for x in (self, other))
        if len(rows) != len(others):
            return ""
        for name, row, earlier in zip(names, rows, others, strict=True):
            if row != earlier:
                return (
                    f"argument {name} is {_row_text(row, earlier)}, not {_row_text(earlier, row)}"
                )
        return ""


def _row_text(row: Any, other: Any) -> str:
    """Describes one argument, as far as is needed to tell it from the other."""
    if not (isinstance(row, tuple) and row and isinstance(row[0], TensorType)):
        return describe(row)
    facts = [str(row[0])]
    if isinstance(other, tuple) and len(other) == len(row) and row[0] == other[0]:
        if row[1] != other[1]:
            facts.append("that requires grad" if row[1] else "without grad")
        if row[2:] != other[2:]:
            facts.append("in memory shared in another way")
    return " ".join(facts)


def _own_tensors(
    places: Sequence[tuple[str, nn.Module]],
    leaves: Sequence[Any],
    own_fakes: Mapping[int, int],
) -> list[Any]:
    positions = {own_fakes.get(id(leaf)): i for i, leaf in enumerate(leaves)}
    rows: list[Any] = []
    for path, inner in places:
        state = module_state(inner)
        for name, tensor in (*state["_parameters"].items(), *state["_buffers"].items()):
            position = positions.get(id(tensor))
            if position is not None:
                rows.append(("own tensor", path, name, position))
    return rows


def freeze_arguments(leaves: Sequence[Any], tree: torch_pytree.TreeSpec) -> Any:
    """Freezes a call's flat arguments, to notice that the call changed one of them."""

    def frozen(leaf: Any) -> Any:
        apart = isinstance(leaf, torch.Tensor) or torch_pytree.is_container(leaf)
        return Identity(leaf) if apart else Freezer().freeze(leaf)

    return list(map(frozen, leaves)), tree


def argument_names(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Names the flat arguments of a call after forward's parameters, in the order of these."""
    arguments = bind_arguments(forward_signature(model), args, kwargs)
    named: dict[int, list[str]] = {}
    for name, leaf in torch_pytree.flatten_with_names(arguments):
        named.setdefault(id(leaf), []).append(name)
    leaves = torch_pytree.flatten((tuple(args), dict(kwargs)))[0]
    return [named[id(leaf)].pop(0) if named.get(id(leaf)) else "" for leaf in leaves]


def bind_arguments(
    signature: inspect.Signature | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a call's arguments by name, defaults applied."""
    try:
        bound = None if signature is None else signature.bind(*args, **kwargs)
    except TypeError:
        bound = None
    if bound is None:
        return {"args": list(args), "kwargs": dict(kwargs)}
    bound.apply_defaults()
    return dict(bound.arguments)


def forward_signature(module: nn.Module) -> inspect.Signature | None:
    """Returns the signature of a module's forward, or None if it has none that can be read."""
    own = module_state(module).get("forward")
    forward = own if own is not None else type(module).forward.__get__(module)
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def shapes_of(leaves: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of flat inputs; of a whole number itself, of others nothing."""
    return tuple(
        tuple(x.shape) if isinstance(x, torch.Tensor) else (x,) if type(x) is int else ()
        for x in leaves
    )

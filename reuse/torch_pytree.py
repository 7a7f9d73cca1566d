"""Adapter: flattening nested arguments and results, through PyTorch's own tree registry.

``torch.utils._pytree`` is the registry that Hugging Face's ``ModelOutput`` and others register
with, so it is used rather than a public look-alike. This module alone names it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import _pytree

TreeSpec = _pytree.TreeSpec
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Returns the leaves of a nested structure and its shape."""
    return _pytree.tree_flatten(tree)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """Returns what :func:`flatten` returns for ``(args, kwargs)``, at once for tensors alone."""
    if not kwargs and _TENSORS.issuperset(map(type, args)):
        return list(args), _tensors_only(len(args))
    return _pytree.tree_flatten((args, kwargs))


@functools.cache
def _tensors_only(num_args: int) -> TreeSpec:
    return _pytree.tree_structure(((0,) * num_args, {}))


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """Rebuilds a nested structure."""
    return leaves[0] if spec.is_leaf() else _pytree.tree_unflatten(leaves, spec)


def flatten_with_names(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves with readable names, such as ``position_embeddings.0``."""
    pairs, _ = _pytree.tree_flatten_with_path(tree)
    return [(".".join(_key_text(key) for key in path), leaf) for path, leaf in pairs]


def _key_text(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)

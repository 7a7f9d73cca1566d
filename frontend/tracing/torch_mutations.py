"""Adapter: operators of somebody else that change their operands, as a pure operator and a copy.

PyTorch turns its own in-place operators into pure ones; of others it knows only what their schema
says (``torch.library.custom_op(mutates_args=...)``). Each gets a twin that works on copies and
returns them. Autograd does not see such a change in eager either, so the copy back is hidden from
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...reuse import torch_pytree

_OWN_NAMESPACES = """
    _c10d_functional _c10d_functional_autograd _dtensor _native _quantized _test aten c10d cuda
    debug_mode_ops debugprims export fsdp higher_order inductor inductor_prims lazyinline_pure mkl
    mkldnn mkldnn_prepacked onednn prepacked prim prims profiler quantization quantized
    quantized_decomposed rngprims sparse static_runtime streams symm_mem xnnpack
"""
_PYTORCHS = tuple(f"{name}::" for name in _OWN_NAMESPACES.split())
_ALIAS = re.compile(r"\([a-zA-Z0-9_|]+!?( -> [a-zA-Z0-9_|*]+)?\)")


def pure_forms() -> dict[Any, Callable[..., Any]]:
    """Returns, for each operator of somebody else that changes operands, what does it on copies."""
    names = torch._C._dispatch_get_all_op_names()
    found = [_named(name) for name in names if not name.startswith(_PYTORCHS)]
    return {o: _on_copies(o) for o in found if o is not None and o._schema.is_mutable}


def _named(name: str) -> Any:
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, space), packet, None)
    return None if found is None else getattr(found, overload or "default", None)


def _on_copies(operator: Any) -> Callable[..., Any]:
    schema = operator._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = _named_arguments(schema, args, kwargs)
        targets = _tensors_of(given, written)
        made = _pure_form(operator, written, len(targets))(*args, **kwargs)
        made = list(made) if isinstance(made, (tuple, list)) else [made]
        states = made[len(made) - len(targets) :]
        with torch.no_grad():
            for target, state in zip(targets, states, strict=True):
                target.detach().copy_(state)
        own = iter(made)
        results = [
            given[_operand_of(schema, r)] if r.alias_info else next(own) for r in schema.returns
        ]
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    return run


def _named_arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}


def _tensors_of(given: Mapping[str, Any], names: Sequence[str]) -> list[torch.Tensor]:
    found, _ = torch_pytree.flatten([given.get(name) for name in names])
    return [value for value in found if isinstance(value, torch.Tensor)]


def _operand_of(schema: Any, result: Any) -> str:
    """Names the operand that a result is."""
    same = (a for a in schema.arguments if a.alias_info)
    found = (a for a in same if a.alias_info.before_set & result.alias_info.before_set)
    return str(next(found).name)


def _pure_form(operator: Any, written: Sequence[str], num_states: int) -> Any:
    """Returns the twin of an operator, which returns what it would change after its results."""
    schema = operator._schema
    name = re.sub(r"\W", "_", f"{operator}_{num_states}")
    space = torch.ops.lazyinline_pure
    if hasattr(space, name):
        return getattr(space, name).default
    kept = [i for i, r in enumerate(schema.returns) if not r.alias_info]
    types = [str(schema.returns[i].type) for i in kept] + ["Tensor"] * num_states
    arguments = _ALIAS.sub("", str(schema).partition(" -> ")[0].partition("(")[2])

    def twin(*args: Any, **kwargs: Any) -> Any:
        given = _named_arguments(schema, args, kwargs)
        copies = {id(t): t.clone() for t in _tensors_of(given, written)}
        leaves, tree = torch_pytree.flatten(given)
        given = torch_pytree.unflatten([copies.get(id(leaf), leaf) for leaf in leaves], tree)
        made = operator(**given)
        made = made if isinstance(made, tuple) else (made,)
        found = [made[i] for i in kept] + _tensors_of(given, written)
        return found[0] if len(found) == 1 else tuple(found)

    made = torch.library.custom_op(
        f"lazyinline_pure::{name}",
        twin,
        mutates_args=(),
        schema=f"({arguments} -> ({', '.join(types)})",
    )
    made.register_fake(twin)
    return getattr(space, name).default

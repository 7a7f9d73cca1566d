"""Adapter: operators that a capture takes in another form: changes of operands, and other layouts.

PyTorch turns its own in-place operators into pure ones; of somebody else's it knows only what their
schema says (``torch.library.custom_op(mutates_args=...)``). Each gets a twin that works on copies
and returns them. Autograd does not see such a change in eager either, so the copy back is hidden
from it.

Where a kernel takes more than PyTorch's rule for fake tensors allows, the rule stands in the way of
capture only. What is added here states the layout of the result, as the kernel makes it; the kernel
itself goes on checking its operands. Where a rule says another layout than the kernel's, results
would be handed out in that one: what is known is put right. (What is not known is copied into the
layout that the rule says, where a kernel is recorded.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict

from ...reuse import torch_pytree
from ...reuse.torch_names import operator_named

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
    found = [operator_named(name) for name in names if not name.startswith(_PYTORCHS)]
    return {o: _on_copies(o) for o in found if o is not None and o._schema.is_mutable}


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


LAID_OUT_AS_SUGGESTED = frozenset(
    {
        torch.ops.aten.native_group_norm.default,
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten._native_batch_norm_legit.default,
        torch.ops.aten._native_batch_norm_legit.no_stats,
        torch.ops.aten.native_channel_shuffle.default,
        torch.ops.aten.channel_shuffle.default,
        torch.ops.aten.roll.default,
    }
)
"""Operators whose first result on a CPU is channels-last if the first operand is, else contiguous.
"""

_ROW_BYTES = 16  # rows of a grouped product start at multiples of this


@contextmanager
def kernels_own_rules() -> Iterator[None]:
    """Adds the rule inside, where PyTorch has none of its own."""
    operator = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)
    if operator is None or operator in op_implementations_dict:
        yield
        return
    op_implementations_dict[operator] = _grouped_mm
    try:
        yield
    finally:
        del op_implementations_dict[operator]


def laid_out_by_kernel(operator: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Returns the result of one of these operators, fake, in its kernel's layout."""
    if isinstance(result, tuple | list):
        return (laid_out_by_kernel(operator, args, result[0]), *result[1:])
    if not isinstance(result, torch.Tensor) or result.device.type != "cpu":
        return result
    wanted = suggest_memory_format(args[0])
    if result.is_contiguous(memory_format=wanted):
        return result
    return torch.empty_like(result, memory_format=wanted)


def _grouped_mm(fake_mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Product by groups of rows: PyTorch's rule knows bfloat16 only, and no padding of rows."""
    a, b = args[:2]
    offsets: Any = args[2] if len(args) > 2 else kwargs.get("offs")
    others = [*args[3:], *(kwargs.get(name) for name in ("bias", "out_dtype"))]
    if a.dtype not in _kinds(a.device) or b.dtype != a.dtype or any(x is not None for x in others):
        return NotImplemented
    groups = (offsets.shape[0],) if (a.dim(), b.dim()) == (2, 2) else ()
    groups = (a.shape[0],) if (a.dim(), b.dim()) == (3, 3) else groups
    shape = (*groups, a.shape[-2], b.shape[-1])
    multiple = _ROW_BYTES // a.element_size()
    row = (shape[-1] + multiple - 1) // multiple * multiple
    strides = (shape[-2] * row, row, 1)[-len(shape) :]
    with fake_mode:
        return torch.empty_strided(shape, strides, dtype=a.dtype, device=a.device)


def _kinds(device: torch.device) -> tuple[torch.dtype, ...]:
    known = () if device.type == "cuda" else (torch.bfloat16,)  # a GPU's layout is PyTorch's rule
    return (torch.float32, torch.float16, *known)

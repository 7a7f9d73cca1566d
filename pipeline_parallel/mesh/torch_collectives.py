"""Adapter: collectives as operators that wait for their result, each with an ``out=`` form.

The graph of a sharded leaf holds PyTorch's functional collectives, each with a wait. Here such a
pair is one operator of ours, so that a plan of memory can place its result, and so that an error
names the collective, this rank and the dimension of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from ...reuse.errors import PlanError
from ..process_groups import first_line

_LIBRARY = torch.library.Library("lazyinline", "FRAGMENT")
_WHERE = "str group, str axis"
_SCHEMAS = {
    "all_reduce": f"Tensor x, str op, {_WHERE}",
    "all_gather": f"Tensor x, int size, {_WHERE}",
    "reduce_scatter": f"Tensor x, str op, int size, {_WHERE}",
}


# Their names are others from PyTorch 2.14 on.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_reduce(x: torch.Tensor, op: str, group: Any, out: torch.Tensor) -> Any:
    # PyTorch's sum is in place, and others may read the operand after it.
    out.copy_(x)
    if not out.is_contiguous():
        raise PlanError("A sum over ranks needs a contiguous result.")
    return dist.all_reduce(out, _reduction(op), group)


def _all_gather(x: torch.Tensor, size: int, group: Any, out: torch.Tensor) -> Any:
    return _gather(out, x.contiguous(), group=group)


def _reduce_scatter(x: torch.Tensor, op: str, size: int, group: Any, out: torch.Tensor) -> Any:
    return _scatter(out, x.contiguous(), op=_reduction(op), group=group)


def _reduction(op: str) -> Any:
    # gloo has no mean: the sum is divided afterwards.
    return getattr(dist.ReduceOp, {"avg": "SUM", "mean": "SUM"}.get(op, op.upper()))


_STARTS: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


def _made_by(name: str, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Returns memory for a collective's result."""
    rows = x.shape[0] if x.dim() else 1
    if name == "all_gather":
        rows *= args[0]
    elif name == "reduce_scatter":
        rows //= args[1]
    elif name == "all_reduce":
        return x.new_empty(x.shape)
    return x.new_empty((rows, *x.shape[1:]))


def _define(name: str) -> None:
    words = name.replace("_", "-")

    def run_into(x: torch.Tensor, *args: Any, out: torch.Tensor) -> torch.Tensor:
        *own, group_name, axis = args
        group = _resolve_process_group(group_name)
        try:
            _STARTS[name](x, *own, group, out)
        except RuntimeError as error:
            num_bytes = x.numel() * x.element_size()
            ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
            raise PlanError(
                f"Rank {dist.get_rank()} stopped in an {words} of {num_bytes:,} bytes over "
                f"{axis!r} (ranks {ranks}). {first_line(error)} Another rank has ended or hangs: "
                "look at its output first."
            ) from error
        if own and own[0] in ("avg", "mean"):
            out.div_(dist.get_world_size(group))
        return out

    def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return run_into(x, *args, out=_made_by(name, x, *args))

    schema = _SCHEMAS[name]
    _LIBRARY.define(f"{name}({schema}) -> Tensor")
    _LIBRARY.define(f"{name}.out({schema}, *, Tensor(a!) out) -> Tensor(a!)")
    # No derivative: a program is differentiated before it is sharded.
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
        _LIBRARY.impl(f"{name}.out", run_into, key)
    _LIBRARY.impl(name, partial(_made_by, name), "Meta")


for _name in _SCHEMAS:
    _define(_name)

_OWN = torch.ops.lazyinline
_FUNCTIONAL = torch.ops._c10d_functional
COLLECTIVES = frozenset(getattr(_OWN, name).default for name in _SCHEMAS)
"""The operators."""


def with_own_collectives(
    module: torch.fx.GraphModule, axes: Mapping[str, str]
) -> torch.fx.GraphModule:
    """Puts an operator of ours in place of each functional collective and its wait, in place.

    Args:
        module: the graph.
        axes: the dimension of the mesh, by the name of its process group.

    Raises:
        PlanError: if there is one that has none.
    """
    graph = module.graph
    for node in list(graph.nodes):
        space = getattr(node.target, "namespace", "")
        if space not in ("_c10d_functional", "_dtensor", "c10d_functional"):
            continue
        if node.target is _FUNCTIONAL.wait_tensor.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        made = _own_form(node)
        if made is None:
            raise PlanError(f"There is no way to run the collective {node.target} here.")
        target, args = made
        *own, group = args
        if group not in axes:
            raise PlanError(f"A collective runs in the group {group}, which is none of the mesh's.")
        with graph.inserting_before(node):
            new = graph.call_function(target, (*own, group, axes[group]))
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return module


def _own_form(node: torch.fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns the operator of ours for a functional collective, and its arguments."""
    target, args = node.target, node.args
    if target is _FUNCTIONAL.all_reduce.default:
        return _OWN.all_reduce.default, args
    if target is _FUNCTIONAL.all_gather_into_tensor.default:
        return _OWN.all_gather.default, args
    if target is _FUNCTIONAL.reduce_scatter_tensor.default:
        return _OWN.reduce_scatter.default, args
    return None


def axes_of(mesh: DeviceMesh) -> dict[str, str]:
    """Returns, by the name of its process group, each dimension of a mesh."""
    names = mesh.mesh_dim_names or ()
    return {mesh.get_group(i).group_name: name for i, name in enumerate(names)}

"""Adapter: a collective as two operators of ours, one that starts it and one that waits.

The graph of a sharded leaf holds PyTorch's functional collectives. Each becomes an operator with an
``out=`` form, whose result the memory plan can place, and a ``wait`` for that result. The wait
returns a view of the result, and also takes the operand if it is read until then, so the plan keeps
both from the start to the wait. A collective names a dimension of the mesh and no process group, so
one program serves every process that has such a mesh. An error names the collective, the rank and
the dimension.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import placement_types
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.fx import Graph, GraphModule, Node

from ...reuse.errors import PlanError, VerifyError
from ..process_groups import stopped

_LIBRARY = torch.library.Library("lazyinline", "FRAGMENT")
_SCHEMAS = {
    "all_reduce": "Tensor x, str op, str axis",
    "all_gather": "Tensor x, int size, str axis",
    "reduce_scatter": "Tensor x, str op, int size, str axis",
    "all_to_all": "Tensor x, int size, str axis",
}


_exchange: Any = dist.all_to_all_single
# PyTorch 2.14 renamed them.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_OPS = ("sum", "avg", "mean", "max", "min", "product")


def _all_reduce(x: Tensor, op: str, group: Any, out: Tensor) -> Any:
    # PyTorch reduces in place. The memory plan may have placed the result on the operand.
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    if not out.is_contiguous():
        raise PlanError("A sum over ranks needs a contiguous result.")
    return dist.all_reduce(out, _reduction(op), group, True)


def _reduction(op: str) -> Any:
    # gloo cannot average, so the sum is divided afterwards.
    return getattr(dist.ReduceOp, {"avg": "SUM", "mean": "SUM"}.get(op, op.upper()))


_STARTS: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_gather": lambda x, size, group, out: _gather(out, x, group=group, async_op=True),
    "reduce_scatter": lambda x, op, size, group, out: _scatter(
        out, x, op=_reduction(op), group=group, async_op=True
    ),
    "all_to_all": lambda x, size, group, out: _exchange(out, x, group=group, async_op=True),
}


def _made_by(name: str, x: Tensor, *args: Any) -> Tensor:
    """Allocates a collective's result."""
    rows = x.shape[0] if x.dim() else 1
    if name == "all_gather":
        rows *= args[0]
    elif name == "reduce_scatter":
        rows //= args[1]
    else:
        return x.new_empty(x.shape)
    return x.new_empty((rows, *x.shape[1:]))


@dataclass(frozen=True)
class _Started:
    """A collective that is not waited for yet: PyTorch's handle, and what it reads and writes.

    Its operand must stay allocated. ``what`` has its kind, its group, the dimension of the mesh,
    and the number that a mean is divided by.
    """

    work: Any
    operand: Tensor
    result: Tensor
    what: tuple[str, Any, str, int]


class _UnderWay(threading.local):
    """The collectives that a thread has started and not waited for, by address of the result."""

    def __init__(self) -> None:
        self._by_address: dict[int, _Started] = {}
        self._groups: Mapping[str, Any] = {}

    @contextmanager
    def over(self, groups: Mapping[str, Any]) -> Iterator[None]:
        """Runs collectives inside in these process groups, given by dimension of the mesh."""
        before, self._groups = self._groups, groups
        try:
            yield
        finally:
            self._groups = before

    def start(self, name: str, x: Tensor, *args: Any, out: Tensor) -> Tensor:
        """Starts a collective that writes into ``out``."""
        if out.numel() and out.data_ptr() in self._by_address:
            raise VerifyError(f"The {name} writes where another one is still under way.")
        *own, axis = args
        if axis not in self._groups:
            raise PlanError(f"The {name} over {axis!r} is run outside of a step over such a mesh.")
        group = self._groups[axis]
        parts = dist.get_world_size(group) if own and own[0] in ("avg", "mean") else 1
        # All ranks start collectives in the program's order, so they match.
        x, what = x if name == "all_reduce" else x.contiguous(), (name, group, axis, parts)
        try:
            work = _STARTS[name](x, *own, group, out)
        except RuntimeError as error:
            raise self._failed(x, what, error) from error
        self._by_address[out.data_ptr()] = _Started(work, x, out, what)
        return out

    def wait(self, result: Tensor, operand: Tensor | None = None) -> Tensor:
        """Waits for the collective that writes a result."""
        started = self._by_address.pop(result.data_ptr())
        try:
            if started.work is not None:
                started.work.wait()
        except RuntimeError as error:
            raise self._failed(started.operand, started.what, error) from error
        if started.what[-1] > 1:
            result.div_(started.what[-1])
        return result.view(result.shape)

    def settle(self) -> None:
        """Waits for collectives that a failed step did not wait for; every rank calls it."""
        while self._by_address:
            self.wait(next(iter(self._by_address.values())).result)

    def _failed(self, x: Tensor, what: tuple[str, Any, str, int], error: RuntimeError) -> PlanError:
        # Other collectives stay listed: if only a thread of the process group still referenced a
        # tensor, it would abort a process that exits meanwhile.
        name, group, axis, _ = what
        num_bytes = x.numel() * x.element_size()
        where = f"in an {name.replace('_', '-')} of {num_bytes:,} bytes over {axis!r}"
        return PlanError(stopped(where, group, error))


_UNDER_WAY = _UnderWay()
settle, collectives_over = _UNDER_WAY.settle, _UNDER_WAY.over


def _define(name: str) -> None:
    run_into = partial(_UNDER_WAY.start, name)

    def run(x: Tensor, *args: Any) -> Tensor:
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
_LIBRARY.define("wait(Tensor(a) result, Tensor? operand=None) -> Tensor(a)")
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("wait", _UNDER_WAY.wait, _key)
_LIBRARY.impl("wait", lambda result, operand=None: result.view(result.shape), "Meta")

_OWN = torch.ops.lazyinline
_FUNCTIONAL = torch.ops._c10d_functional
COLLECTIVES = frozenset(getattr(_OWN, name).default for name in _SCHEMAS)
INTO = frozenset(getattr(_OWN, name).out for name in _SCHEMAS)
"""Operators that start a collective: those that allocate, and those that write into ``out``."""
_OWN_FORMS: Mapping[Any, Any] = {
    _FUNCTIONAL.all_reduce.default: _OWN.all_reduce.default,
    _FUNCTIONAL.all_gather_into_tensor.default: _OWN.all_gather.default,
    _FUNCTIONAL.reduce_scatter_tensor.default: _OWN.reduce_scatter.default,
    _FUNCTIONAL.all_to_all_single.default: _OWN.all_to_all.default,
}
WAIT = _OWN.wait.default
"""Waits for the result of a collective; also takes its operand, if that is read until then."""
OWN = COLLECTIVES | {WAIT}


def check_collective(node: Node, sizes: Mapping[str, int]) -> None:
    """Raises PlanError for a collective that does not fit a mesh of such sizes."""
    taken: tuple[Any, ...] = node.args
    _, *told, axis = taken
    if axis not in sizes:
        raise PlanError(f"a collective runs over {axis!r}, and the mesh has {', '.join(sizes)}")
    if not all(x == sizes[axis] if isinstance(x, int) else x in _OPS for x in told):
        raise PlanError(
            f"a collective over {axis!r}, which has {sizes[axis]} ranks, is told {told}"
        )


def with_own_collectives(module: GraphModule, axes: Mapping[str, str]) -> GraphModule:
    """Replaces each functional collective of a graph by our two operators, in place.

    The dimensions of the mesh are given by the names of their process groups. Raises PlanError if
    we have no such collective, or its group is not of the mesh.
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
        target, args = _OWN_FORMS.get(node.target), node.args
        if node.target is _FUNCTIONAL.all_to_all_single.default:
            x, made, given, group = args
            target = target if made == given and len(set(given)) == 1 else None
            args = (x, len(given), group)
        if target is None:
            raise PlanError(f"There is no way to run the collective {node.target} here.")
        *own, group = args
        if group not in axes:
            raise PlanError(f"A collective runs in the group {group}, which is none of the mesh's.")
        with graph.inserting_before(node):
            new = started(graph, target, (*own, axes[group]), node.meta["val"])
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return module


def started(graph: Graph, target: Any, args: tuple[Any, ...], example: Tensor) -> Node:
    """Adds a collective and its wait to a graph; returns the wait, whose result is ``example``."""
    start = graph.call_function(target, args)
    # An all-reduce runs in place on its result, so it no longer reads the operand once started.
    read = () if target is _OWN.all_reduce.default else args[:1]
    wait = graph.call_function(WAIT, (start, *read))
    start.meta["val"] = wait.meta["val"] = example
    return wait


_LOCK = threading.RLock()


@contextmanager
def exchanges() -> Iterator[None]:
    """Makes DTensor move a shard from one dimension to another by one all-to-all, in this thread.

    DTensor itself gathers and chunks on a CPU, and has an operator of its own on a GPU.
    """
    thread = threading.get_ident()

    def move(*args: Any) -> Tensor:
        made: Tensor = (_exchanged if threading.get_ident() == thread else own)(*args)
        return made

    with _LOCK:
        own = placement_types.shard_dim_alltoall
        placement_types.shard_dim_alltoall = move
        try:
            yield
        finally:
            placement_types.shard_dim_alltoall = own


def _exchanged(x: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, axis: int) -> Tensor:
    size, group = mesh.size(axis), mesh.get_group(axis).group_name
    parts, one_of_each = x.unflatten(shard_dim, (size, -1)).movedim(shard_dim, 0), [1] * size
    rows = parts.reshape(size, -1)
    begun = _FUNCTIONAL.all_to_all_single(rows, one_of_each, one_of_each, group)
    made: Tensor = _FUNCTIONAL.wait_tensor(begun)
    return made.view(parts.shape).movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)


def groups_of(mesh: DeviceMesh) -> dict[str, Any]:
    """Returns this rank's process group along each dimension of a mesh."""
    return {name: mesh.get_group(i) for i, name in enumerate(mesh.mesh_dim_names or ())}


def axes_of(mesh: DeviceMesh) -> dict[str, str]:
    """Returns, by the name of its process group, each dimension of a mesh."""
    return {group.group_name: name for name, group in groups_of(mesh).items()}


# ---- ranks that are not there --------------------------------------------------------------------


@contextmanager
def absent_ranks(axes: Mapping[str, int], rank: int = 0) -> Iterator[DeviceMesh]:
    """Makes this process a rank of a mesh whose other ranks do not exist; nothing is moved.

    Raises PlanError if this process has a process group already, or the sizes are invalid.
    """
    sizes = axes.values() if isinstance(axes, Mapping) else ()
    if not sizes or not all(type(n) is int and 0 < n <= 2**20 for n in sizes):
        raise PlanError(
            f"mesh={axes!r} is not the number of ranks, 1 to {2**20:,}, along each dimension by "
            'its name, such as {"fsdp": 8, "tp": 2}.'
        )
    if dist.is_initialized():
        raise PlanError(
            "torch.distributed is initialized in this process, and a mesh of ranks that are not "
            "there needs it for itself. Do this in a process of its own."
        )
    # The import registers the backend, whose own store differs between versions.
    import_module("torch.testing._internal.distributed.fake_pg")
    hook = sys.excepthook  # init_process_group replaces it
    num_ranks = math.prod(axes.values())
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=dist.HashStore())
    forget_meshes()
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()
        forget_meshes()
        sys.excepthook = hook


def become(mesh: DeviceMesh, coordinate: Sequence[int]) -> None:
    """Makes this process another rank of a mesh whose ranks are absent."""
    # The mesh object is kept, because PyTorch's caches by mesh save most of the cost of a trace.
    mesh._coordinate_on_dim = tuple(coordinate)


def forget_meshes() -> None:
    """Clears PyTorch's caches by mesh, which may hold results of another rank of an equal mesh."""
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()

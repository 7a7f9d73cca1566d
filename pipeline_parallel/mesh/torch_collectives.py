"""Adapter: collectives as operators of ours, one that starts and one that waits.

The graph of a sharded leaf holds PyTorch's functional collectives. Each becomes an operator with an
``out=`` form, so that the memory plan can place its result, and a ``wait`` on that result. The wait
also takes an operand that is read until then, and returns a view of the result: so the plan keeps
both from the start to the wait. A collective names its mesh dimension, not a process group: one
program serves every process with such a mesh, and whoever runs it gives the groups. An error names
the collective, this rank and the dimension.
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import placement_types
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

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
# Their names are others from PyTorch 2.14 on.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_OPS = ("sum", "avg", "mean", "max", "min", "product")


def _all_reduce(x: torch.Tensor, op: str, group: Any, out: torch.Tensor) -> Any:
    # PyTorch reduces in place. The plan may have put the result where the operand is.
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    if not out.is_contiguous():
        raise PlanError("A sum over ranks needs a contiguous result.")
    return dist.all_reduce(out, _reduction(op), group, True)


def _reduction(op: str) -> Any:
    # gloo has no mean: the sum is divided afterwards.
    return getattr(dist.ReduceOp, {"avg": "SUM", "mean": "SUM"}.get(op, op.upper()))


_STARTS: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_gather": lambda x, size, group, out: _gather(out, x, group=group, async_op=True),
    "reduce_scatter": lambda x, op, size, group, out: _scatter(
        out, x, op=_reduction(op), group=group, async_op=True
    ),
    "all_to_all": lambda x, size, group, out: _exchange(out, x, group=group, async_op=True),
}


def _made_by(name: str, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Returns memory for a collective's result."""
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
    """A collective under way.

    Attributes:
        work: PyTorch's handle to wait on; None if there is nothing to wait for.
        operand: stays allocated until the end.
        result: where it writes.
        what: kind, group, dimension of the mesh, and the ranks to divide by after a mean.
    """

    work: Any
    operand: torch.Tensor
    result: torch.Tensor
    what: tuple[str, Any, str, int]


class _UnderWay(threading.local):
    """The collectives that a rank's thread has started and not yet waited for, by address."""

    def __init__(self) -> None:
        self._by_address: dict[int, _Started] = {}
        self._groups: Mapping[str, Any] = {}

    @contextmanager
    def over(self, groups: Mapping[str, Any]) -> Iterator[None]:
        """Runs collectives in these groups, by the dimensions of a mesh."""
        before, self._groups = self._groups, groups
        try:
            yield
        finally:
            self._groups = before

    def start(self, name: str, x: torch.Tensor, *args: Any, out: torch.Tensor) -> torch.Tensor:
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

    def wait(self, result: torch.Tensor, operand: torch.Tensor | None = None) -> torch.Tensor:
        """Waits until a result is there."""
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
        """Waits for collectives that a step with an error left under way, on all ranks alike."""
        while self._by_address:
            self.wait(next(iter(self._by_address.values())).result)

    def _failed(
        self, x: torch.Tensor, what: tuple[str, Any, str, int], error: RuntimeError
    ) -> PlanError:
        # The others stay listed until they have ended: if a thread of the process group held the
        # last reference to a tensor, it would abort a process that exits meanwhile.
        name, group, axis, _ = what
        num_bytes = x.numel() * x.element_size()
        where = f"in an {name.replace('_', '-')} of {num_bytes:,} bytes over {axis!r}"
        return PlanError(stopped(where, group, error))


_UNDER_WAY = _UnderWay()
settle, collectives_over = _UNDER_WAY.settle, _UNDER_WAY.over


def _define(name: str) -> None:
    run_into = partial(_UNDER_WAY.start, name)

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
_LIBRARY.define("wait(Tensor(a) result, Tensor? operand=None) -> Tensor(a)")
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("wait", _UNDER_WAY.wait, _key)
_LIBRARY.impl("wait", lambda result, operand=None: result.view(result.shape), "Meta")

_OWN = torch.ops.lazyinline
_FUNCTIONAL = torch.ops._c10d_functional
COLLECTIVES = frozenset(getattr(_OWN, name).default for name in _SCHEMAS)
INTO = frozenset(getattr(_OWN, name).out for name in _SCHEMAS)
"""The operators that start a collective, and their ``out=`` forms."""
_OWN_FORMS: Mapping[Any, Any] = {
    _FUNCTIONAL.all_reduce.default: _OWN.all_reduce.default,
    _FUNCTIONAL.all_gather_into_tensor.default: _OWN.all_gather.default,
    _FUNCTIONAL.reduce_scatter_tensor.default: _OWN.reduce_scatter.default,
    _FUNCTIONAL.all_to_all_single.default: _OWN.all_to_all.default,
}
WAIT = _OWN.wait.default
"""Waits for the result of one of them; also takes its operand, if that is read until then."""
OWN = COLLECTIVES | {WAIT}


def check_collective(node: torch.fx.Node, sizes: Mapping[str, int]) -> None:
    """Raises PlanError for a collective that ranks of a mesh of such sizes could not run."""
    taken: tuple[Any, ...] = node.args
    _, *told, axis = taken
    if axis not in sizes:
        raise PlanError(f"a collective runs over {axis!r}, and the mesh has {', '.join(sizes)}")
    if not all(x == sizes[axis] if isinstance(x, int) else x in _OPS for x in told):
        raise PlanError(
            f"a collective over {axis!r}, which has {sizes[axis]} ranks, is told {told}"
        )


def with_own_collectives(
    module: torch.fx.GraphModule, axes: Mapping[str, str]
) -> torch.fx.GraphModule:
    """Replaces each functional collective by a start and a wait of ours, in place.

    Args:
        module: the graph.
        axes: the dimension of the mesh, by the name of its process group.

    Raises:
        PlanError: if a collective has no such operators, or no group of the mesh.
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


def started(
    graph: torch.fx.Graph, target: Any, args: tuple[Any, ...], example: torch.Tensor
) -> torch.fx.Node:
    """Adds a collective and its wait to a graph; returns the wait, which gives ``example``."""
    start = graph.call_function(target, args)
    # An all-reduce runs in place on its result: once started, it no longer reads the operand.
    read = () if target is _OWN.all_reduce.default else args[:1]
    wait = graph.call_function(WAIT, (start, *read))
    start.meta["val"] = wait.meta["val"] = example
    return wait


_LOCK = threading.RLock()


@contextmanager
def exchanges() -> Iterator[None]:
    """Lets DTensor redistribute from one sharded dimension to another by one all-to-all.

    By itself it does an all-gather and a chunk on a CPU, and has an operator of its own on a GPU.
    Other threads are not affected.
    """
    thread = threading.get_ident()

    def move(*args: Any) -> torch.Tensor:
        made: torch.Tensor = (_exchanged if threading.get_ident() == thread else own)(*args)
        return made

    with _LOCK:
        own = placement_types.shard_dim_alltoall
        placement_types.shard_dim_alltoall = move
        try:
            yield
        finally:
            placement_types.shard_dim_alltoall = own


def _exchanged(
    x: torch.Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, axis: int
) -> torch.Tensor:
    size, group = mesh.size(axis), mesh.get_group(axis).group_name
    parts, one_of_each = x.unflatten(shard_dim, (size, -1)).movedim(shard_dim, 0), [1] * size
    rows = parts.reshape(size, -1)
    begun = _FUNCTIONAL.all_to_all_single(rows, one_of_each, one_of_each, group)
    made: torch.Tensor = _FUNCTIONAL.wait_tensor(begun)
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
    """Makes this process a rank of a mesh inside the context; its collectives move no data.

    Args:
        axes: name and size of each dimension.
        rank: which one.

    Raises:
        PlanError: if this process is one of several already, or there is no mesh of such sizes.
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
    # Importing it registers the backend. Its own store differs from version to version.
    import_module("torch.testing._internal.distributed.fake_pg")
    hook = sys.excepthook  # which init_process_group wraps
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
    # The mesh object is kept, since what PyTorch caches by it is most of the cost of a trace.
    mesh._coordinate_on_dim = tuple(coordinate)


def forget_meshes() -> None:
    """Clears PyTorch's caches by mesh: an equal mesh may have been that of another rank."""
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()

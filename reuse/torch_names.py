"""Adapter: the few private PyTorch names that the core needs, of tensors, operators and graphs.

A graph module's Python code is generated when it first runs. Passes make and change dozens of
graphs for each one that runs, and to generate and compile the code takes as long as to make one.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeAlias

import torch
import torch.fx
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx._symbolic_trace import _wrapped_fns_to_patch

_FEW_BYTES = 64

OPERATOR_TYPES: tuple[type, ...] = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)

RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
"""Both return views, though the schema of the second does not say so."""

CALL_SLOT = "_compiled_call_impl"
"""Where a module's ``__call__`` looks first for something compiled (``nn.Module.compile``)."""

MARKED_BY_DYNAMO = "___needs_generation_tag_patch"
"""Attribute that the first ``torch.compile`` of a process adds to ``nn.Module``."""


@functools.cache
def operators_tagged(tag: torch.Tag) -> tuple[Any, ...]:
    """Returns the operators of ATen that PyTorch gives a tag."""
    names = torch._C._dispatch_get_all_op_names()
    found = (operator_named(name) for name in names if name.startswith("aten::"))
    return tuple(operator_ for operator_ in found if tag in getattr(operator_, "tags", ()))


def operator_named(name: str) -> Any:
    """Returns the operator of a name as the dispatcher writes it, ``aten::add.Tensor``, or None."""
    printed = name.replace("::", ".")
    return operator_as_printed(printed if "." in name else f"{printed}.default")


def operator_as_printed(name: str) -> Any:
    """Returns the operator of a name such as ``aten.add.Tensor``; None if there is none."""
    for is_last in (False, True):
        found: Any = torch.ops
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, OPERATOR_TYPES):
            return found
        if is_last or not name.startswith(("prims.", "inductor.")):
            return None
        # Inductor defines some when it is imported, which is slow.
        importlib.import_module("torch._inductor.inductor_prims")


def memory_id(tensor: torch.Tensor) -> int:
    """Returns the identity of a tensor's storage: equal for two tensors if they share memory."""
    return int(tensor.untyped_storage()._cdata)


def own_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns a tensor's Python attributes, without Dynamo's, which are not the model's."""
    held = vars(tensor)
    return {name: held[name] for name in held if not name.startswith("_dynamo_")} if held else held


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values differ from its memory: conjugated, negated, or lazy zeros."""
    return tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()


def bytes_if_known(tensor: torch.Tensor) -> Any:
    """Returns a fake tensor's constant value, in a form to compare; None if it has none."""
    constant = getattr(tensor, "constant", None)
    if constant is None:
        return None
    memory = constant.untyped_storage()
    if memory.device.type != "cpu" or memory.nbytes() > _FEW_BYTES:
        return id(constant)
    return ctypes.string_at(memory.data_ptr(), memory.nbytes())  # not an operator: a trace sees it


def new_cpu_tensor(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Returns an uninitialized tensor, allocated as for Inductor's kernels: without dispatch."""
    return torch._C._dynamo.guards._empty_strided_cpu(shape, stride, dtype)  # type: ignore[attr-defined]


def operator_schema(node: torch.fx.Node) -> Any:
    """Returns the schema of the operator a node calls, or None if it is not an operator."""
    return schema_of(node.target)


def schema_of(function: object) -> Any:
    """Returns the schema of an operator, or None if it is not one."""
    return getattr(function, "_schema", None)


def own_device_type() -> str:
    """Returns the name of the type of device that is left to users (``PrivateUse1``)."""
    return torch._C._get_privateuse1_backend_name()


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often a tensor has been changed in place."""
    return int(tensor._version)


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Returns the versions of several tensors, by one loop in C."""
    return list(map(_VERSION, tensors))


_VERSION = operator.attrgetter("_version")


_NEW_PATCHER = torch.fx._symbolic_trace._new_patcher


@contextmanager
def modules_left() -> Iterator[None]:
    """Keeps this thread's next trace from patching ``nn.Module``: ``make_fx`` does not need it.

    To patch a method of a class, Python walks its subclasses, which takes milliseconds where a
    process has thousands of them, four times for each trace.
    """
    thread = threading.get_ident()

    @contextmanager
    def without_methods() -> Iterator[Any]:
        with _NEW_PATCHER() as patcher:
            if threading.get_ident() == thread:
                put_back()  # a trace inside the traced code may need the patches
                patcher.patch_method = lambda *_, **__: None  # type: ignore[method-assign]
            yield patcher

    def put_back() -> None:
        torch.fx._symbolic_trace._new_patcher = _NEW_PATCHER

    torch.fx._symbolic_trace._new_patcher = without_methods
    try:
        yield
    finally:
        put_back()


def matmul_precision() -> tuple[str, str]:
    """Returns the precision of float32 matmuls on CUDA and on CPU, by whichever setting."""
    # ``torch.get_float32_matmul_precision`` raises after a setting by ``fp32_precision``. Where
    # nothing was set ("none") products are exact ("ieee").
    of = torch._C._get_fp32_precision_getter
    cuda, cpu = of("cuda", "matmul"), of("mkldnn", "matmul")
    return "ieee" if cuda == "none" else cuda, "ieee" if cpu == "none" else cpu


HookKind: TypeAlias = Literal["forward", "backward"]


def global_hook_tables(kind: HookKind) -> list[dict[int, Any]]:
    """Returns the tables of hooks on all modules: ``"forward"`` or ``"backward"`` ones."""
    return [getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS[kind]]


_GLOBAL_HOOKS = {
    "forward": ("_global_forward_pre_hooks", "_global_forward_hooks"),
    "backward": ("_global_backward_pre_hooks", "_global_backward_hooks"),
}


def module_of(graph: torch.fx.Graph, root: torch.nn.Module | None = None) -> torch.fx.GraphModule:
    """Wraps a graph in a module whose code is generated when it first runs."""
    return _LazyGraphModule(torch.nn.Module() if root is None else root, graph)


def lazy_modules() -> AbstractContextManager[None]:
    """Makes the modules that PyTorch traces inside lazy, too, as in PyTorch's own compiles."""
    return _use_lazy_graph_module(True)


@contextmanager
def wrapped_globals_left() -> Iterator[Callable[[], None]]:
    """Keeps a tracer that starts inside from patching the globals that ``torch.fx.wrap`` marks.

    Patched, the traced Python would read other globals than a later run. Yields a function to call
    once the tracer has started: traces inside the traced Python may patch.
    """
    table = _wrapped_fns_to_patch
    held = dict(table)
    table.clear()

    def started() -> None:
        table.update(held)
        held.clear()

    try:
        yield started
    finally:
        started()

"""Adapter: a GPU that is not here, as PyTorch, Inductor and Triton see it.

Inductor generates Triton kernels from a few facts of the device. Within :func:`gpu_described` these
come from the table of targets, and a kernel that Inductor would compile is kept as text.

PyTorch's autograd needs the device, so a program for an absent GPU is traced and differentiated for
the CPU, and its leaves are then moved. Below autograd an operator is the same on any device, and
Inductor asks for its layout on the GPU. Composite operators that depend on the device (attention,
dropout) were replaced before.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.fx
from torch.utils import _triton

from ...autodiff.traces.torch_make_fx import fake_tensor, new_fake_mode
from ...autodiff.traces.torch_partition import copy_graph
from ...reuse.errors import PlanError
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import Leaf
from ...reuse.ir.types import HOST, TensorType, map_type
from ..launches.torch_native import built_library
from .targets import Target
from .torch_cuda import TritonKernel


@contextmanager
def gpu_described(target: Target) -> Iterator[None]:
    """Describes a GPU to PyTorch inside, where nothing can run on it; PlanError without Triton."""
    if not _triton.has_triton_package():
        raise PlanError(
            "Programs for a GPU need Triton, which this PyTorch came without: pip install triton "
            "(Linux)."
        )
    _fake_tensors_on_cuda()
    from torch._inductor.runtime.hints import DeviceProperties

    facts, answers = _device_properties(target), _answers(target)
    patches: list[Any] = [
        *(mock.patch.object(torch.cuda, name, answer) for name, answer in answers.items()),
        mock.patch.object(DeviceProperties, "create", classmethod(lambda cls, device: facts)),
        # Inductor puts the hash of Triton's backend into each kernel; that needs a driver.
        mock.patch.object(_triton, "triton_hash_with_backend", lambda: target.name),
        # Generated code imports it; a PyTorch without CUDA does not have it.
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", no_stream, create=True),
    ]
    _forget_gpus()
    with ExitStack() as stack:
        # Again at the end: the facts of this GPU must not stay in PyTorch's caches.
        stack.callback(_forget_gpus)
        for one in patches:
            stack.enter_context(one)
        yield


def kernels_as_text() -> AbstractContextManager[Any]:
    """Makes Inductor's generated code hold its Triton kernels as text."""
    from torch._inductor.async_compile import AsyncCompile

    def text(
        self: Any, kernel_name: str, source_code: str, *args: Any, **kwargs: Any
    ) -> TritonKernel:
        return TritonKernel(kernel_name, source_code)

    return mock.patch.object(AsyncCompile, "triton", text)


def _forget_gpus() -> None:
    """Clears PyTorch's caches of whether there is a GPU, and which."""
    from torch._inductor import utils

    for module in (_triton, utils):
        for value in list(vars(module).values()):
            if clear := getattr(value, "cache_clear", None):
                clear()


@functools.cache
def _fake_tensors_on_cuda() -> None:
    """Enables fake CUDA tensors in a PyTorch without CUDA, once and for all."""
    # Fake tensors need a device guard, which such a PyTorch does not have for CUDA.
    if torch.version.cuda is None:
        file = Path(__file__).with_name("native_device_guard.cpp")
        built_library(file.read_text(), [file], ["c10"])


def _properties(target: Target) -> types.SimpleNamespace:
    """Returns the properties of a GPU, as PyTorch names them."""
    return types.SimpleNamespace(
        name=target.board,
        major=target.capability[0],
        minor=target.capability[1],
        multi_processor_count=target.num_multiprocessors,
        # These four are the same on all targets.
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        warp_size=32,
        total_memory=target.memory_bytes,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=target.shared_memory_bytes,
        L2_cache_size=target.l2_bytes,
        gcnArchName="",
    )


def _answers(target: Target) -> dict[str, Callable[..., Any]]:
    """Returns replacements of functions of ``torch.cuda``."""
    properties = _properties(target)
    state = torch.zeros(16, dtype=torch.uint8, device="cpu")
    return {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: target.capability,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "synchronize": lambda device=None: None,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_lazy_init": lambda: None,
        "get_rng_state": lambda device="cuda": state,
        "set_rng_state": lambda state, device="cuda": None,
    }


def _device_properties(target: Target) -> Any:
    from torch._inductor.runtime.hints import DeviceProperties

    major, minor = target.capability
    known = {**vars(_properties(target)), "type": "cuda", "index": 0, "cc": major * 10 + minor}
    return DeviceProperties(**{name: known[name] for name in DeviceProperties._fields})


def no_stream(device: int) -> int:
    """Returns a placeholder for the stream of a launch, which is known only when it runs."""
    return 0


def moved_leaf(leaf: Leaf, device: torch.device) -> Leaf:
    """Returns a leaf of the ATen level moved to a device; the same leaf if it is there."""
    types = flat_types((*leaf.input_types, *leaf.output_types))
    if all(type_.device.type == device.type for type_ in types):
        return leaf
    module = copy_graph(leaf.module)
    mode = new_fake_mode(module)

    def on_it(type_: TensorType) -> TensorType:
        return type_ if type_.device == HOST else replace(type_, device=device)

    def moved(value: Any) -> Any:
        """Returns a device or a fake tensor, moved to the device."""
        if isinstance(value, torch.device):
            return value if value == HOST else device
        if isinstance(value, torch.Tensor):
            return fake_tensor(mode, on_it(TensorType.of(value)))
        return value

    for node in module.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, moved)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, moved)
        if "val" in node.meta:
            node.meta["val"] = torch.fx.node.map_aggregate(node.meta["val"], moved)
    module.recompile()
    both = (leaf.input_types, leaf.output_types)
    inputs, outputs = (tuple(map_type(type_, on_it) for type_ in types) for types in both)
    return replace(leaf, module=module, input_types=inputs, output_types=outputs)

"""A model on a GPU that is not here: compiled as on one that is, up to where memory is allocated.

Tensors of the model are on the CPU, and their types say CUDA. PyTorch differentiates on a device
only where it is there, so leaves are traced on the CPU and moved. For a process of its own: a CUDA
device is never asked for again.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

import lazyinline
from lazyinline.autodiff.derivative import Differentiator
from lazyinline.backend.gpu import torch_gpu
from lazyinline.backend.gpu.targets import target_named
from lazyinline.backend.kernels.lower import InductorBackend
from lazyinline.backend.launches.torch_native import built_library
from lazyinline.backend.run.planned import PlannedProgram
from lazyinline.frontend.passes import context
from lazyinline.frontend.tracing.torch_tracing import Tracer
from lazyinline.frontend.training_step import TrainingStep
from lazyinline.reuse.ir.program import Leaf
from lazyinline.reuse.ir.types import TensorType

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Compiled(BaseException):
    """Ends a step whose program is there, before anything is allocated for it."""

    program: PlannedProgram
    report: lazyinline.CompileReport


def program_on_a_gpu(
    step: Callable[[], Any], target: str
) -> tuple[PlannedProgram, lazyinline.CompileReport]:
    """Returns the program that a step of a model on a GPU is compiled to, and the report."""
    try:
        with model_on_a_gpu(target):
            step()
    except Compiled as done:
        return done.program, done.report
    raise AssertionError("nothing was compiled")


@contextmanager
def model_on_a_gpu(target: str) -> Iterator[None]:
    """Has PyTorch say that a GPU is there, and every tensor on it."""
    library = _no_guard_and_attention_of_a_gpu()
    patches = [
        mock.patch.object(Tracer, "to_fake", _to_fake),
        mock.patch.object(TensorType, "of", classmethod(_type_of)),
        mock.patch.object(Differentiator, "_leaf", _differentiated),
        mock.patch.object(context, "decompose_leaf", _decomposed),
        mock.patch.object(TrainingStep, "_entry", _ended),
        torch_gpu.gpu_described(target_named(target)),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
    del library


@functools.cache
def _no_guard_and_attention_of_a_gpu() -> torch.library.Library:
    file = pathlib.Path(torch_gpu.__file__).with_name("native_device_guard.cpp")
    built_library(file.read_text(), [file], ["c10"])
    library = torch.library.Library("aten", "IMPL")
    for key in ("CUDA", "AutogradCUDA"):
        library.impl("scaled_dot_product_attention", _laid_out_by_tokens, key)
    return library


def _laid_out_by_tokens(query: torch.Tensor, key: Any, value: Any, *args: Any, **_: Any) -> Any:
    """Stands for attention in a capture, where only the layout of its result counts."""
    whole = query + 0 * key.sum() + 0 * value.sum()
    return whole.transpose(1, 2).contiguous().transpose(1, 2)


def _to_fake(tracer: Any, tensor: torch.Tensor) -> torch.Tensor:
    with tracer.untraced(), tracer.fake_mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=GPU)
        return made.requires_grad_(tensor.requires_grad)


_TYPE_OF = TensorType.of.__func__  # type: ignore[attr-defined]


def _type_of(cls: Any, tensor: torch.Tensor) -> TensorType:
    made: TensorType = _TYPE_OF(cls, tensor)
    is_real = not isinstance(tensor, FakeTensor) and not tensor.is_meta
    return replace(made, device=GPU) if is_real else made


_LEAF, _DECOMPOSE = Differentiator._leaf, context.decompose_leaf
_ALL_ON_GPU = mock.patch.object(InductorBackend, "_is_on_gpu", lambda backend, leaf: True)


def _differentiated(self: Differentiator, request: Any, leaf: Leaf) -> Any:
    on_cpu = torch_gpu.moved_leaf(leaf, CPU)
    with _ALL_ON_GPU:
        made = _LEAF(self, replace(request, closure=on_cpu), on_cpu)
    if made is None:
        return None
    forward, backward = (torch_gpu.moved_leaf(x, GPU) for x in (made.forward, made.backward))  # type: ignore[arg-type]
    return replace(made, forward=forward, backward=backward)


def _decomposed(leaf: Leaf, backend: Any) -> Leaf:
    with _ALL_ON_GPU:
        return torch_gpu.moved_leaf(_DECOMPOSE(torch_gpu.moved_leaf(leaf, CPU), backend), GPU)


def _ended(self: TrainingStep, made: Any, leaves: Any) -> Any:
    done = Compiled()
    done.program, done.report = made.compiled.runner, made.report
    raise done

"""Adapter: fake tensors of given types, for traces to run on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from ...reuse.ir.torch_symbols import environment_of, size_in
from ...reuse.ir.types import TensorType


def new_fake_mode(module: torch.fx.GraphModule | None = None) -> FakeTensorMode:
    """Returns a fake mode for one compilation (Inductor's passes bring real constants).

    Sizes of its tensors may be those of the module's shape environment.
    """
    environment = None if module is None else environment_of(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment, static_shapes=True)
    if environment is not None:
        # The mode's cache of results hardly ever fits where sizes are symbols.
        mode.cache_enabled = False
    return mode


def sizes_kept_open(mode: FakeTensorMode) -> AbstractContextManager[Any]:
    """Within it operators that would read a size as a number leave it a symbol, if there are any.

    ``constant_pad_nd`` is one: in C++ it reads numbers, and PyTorch has it in Python beside.
    """
    return nullcontext() if mode.shape_env is None else enable_python_dispatcher()


def fake_tensor(mode: FakeTensorMode, type_: TensorType) -> torch.Tensor:
    """Returns a fake tensor of a type."""
    shape, stride = ([size_in(mode.shape_env, n) for n in ns] for ns in (type_.shape, type_.stride))
    with mode:
        return torch.empty_strided(shape, stride, dtype=type_.dtype, device=type_.device)

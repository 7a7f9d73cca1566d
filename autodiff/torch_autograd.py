"""Adapter: the state of PyTorch's autograd around a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_autograd() -> Iterator[None]:
    """Autograd inside runs without anomaly checks and without hooks on saved tensors."""
    with contextlib.ExitStack() as stack:
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
            stack.enter_context(hooks)  # the innermost hooks count
        yield


def graph_is_kept() -> bool:
    """Whether the running backward was started with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())

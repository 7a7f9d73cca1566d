"""A second device in one process: memory of the CPU under a name of its own, for a whole process.

PyTorch leaves one type of device to users (``PrivateUse1``). Here that is ``second``: operators run
on the CPU, and a tensor of the CPU is refused among its own, as on a GPU.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

import torch
from link_tree import ROOT
from torch.utils import cpp_extension


def second_device() -> Callable[[], int]:
    """Makes the device; returns what counts the copies to and from it."""
    source = Path(__file__).with_name("second_device.cpp")
    # Of this checkout: one that another checkout has built would be built again, as its path is.
    built = ROOT / "build" / "second_device"
    built.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        "lazyinline_second_device",
        [str(source)],
        extra_cflags=["-O0"],
        build_directory=str(built),
        is_python_module=False,
    )
    torch.utils.rename_privateuse1_backend("second")
    state = torch.zeros(8, dtype=torch.uint8)
    module = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        get_rng_state=lambda device=None: state,
        set_rng_state=lambda state, device=None: None,
    )
    torch._register_device_module("second", module)
    torch.ops.second_device.set_hooks()
    return torch.ops.second_device.num_copies

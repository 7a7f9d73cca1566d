"""Adapter: names and facts of PyTorch that cached things depend on.

Operators by name, fake values of rebuilt graphs, and the facts about PyTorch that decide what a
compile makes.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...reuse import torch_names
from ...reuse.ir.torch_updates import IN_PLACE
from ...reuse.ir.types import TensorType
from ...reuse.torch_names import OPERATOR_TYPES, matmul_precision

# Operators of PyTorch's own. What an operator of the user's does, its name does not say.
# Ours are collectives, which PyTorch finds once a mesh has been imported.
_NAMESPACES = frozenset(["aten", "prims", "mkldnn", "inductor", "lazyinline"])
_FUNCTIONS: dict[str, Any] = {
    **{f"torch.{f.__name__}": f for f in (torch.mm, torch.addmm, torch.bmm, torch.baddbmm)},
    "getitem": operator.getitem,
    **{f"lazyinline.{f.__name__}": f for f in IN_PLACE.values()},
}
_VECTORS = "ATEN_CPU_CAPABILITY"  # PyTorch reads it once, Inductor for each kernel
# Settings that say how Inductor works and not what it makes.
_NO_MATTER = (
    "trace.",
    "compile_threads",
    "worker_start_method",
    "fx_graph_",
    "autotune_",
    "_save_",
    "xpu.cutlass_dir",  # by default a part of the working directory, wherever a process began
)
_PLAIN: tuple[type, ...] = (bool, int, float, str, type(None), torch.dtype, *OPERATOR_TYPES)


# ---- operators ---------------------------------------------------------------------------------


def operator_name(target: Any) -> str | None:
    """Returns the name of an operator of PyTorch's own, or None."""
    if not isinstance(target, OPERATOR_TYPES):
        return None
    # Two operators may print alike: a name is one only if it leads back.
    name = str(target)
    with contextlib.suppress(LookupError):
        if operator_named(name) is target:
            return name
    return None


def operator_named(name: str) -> Any:
    """Returns PyTorch's own operator of a name; raises LookupError if this PyTorch has none."""
    parts = name.split(".")
    if parts[0] not in _NAMESPACES or not 2 <= len(parts) <= 3:
        raise LookupError(f"{name} is no operator of PyTorch's own")
    found = torch_names.operator_as_printed(name)
    if found is None:
        raise LookupError(f"there is no operator {name}")
    return found


def function_name(function: Any) -> str | None:
    """Returns the name of what a graph or a launch calls; None if it is not PyTorch's own."""
    for name, known in _FUNCTIONS.items():
        if function is known:
            return name
    return operator_name(function)


def function_named(name: str) -> Any:
    """Returns what :func:`function_name` named."""
    return _FUNCTIONS[name] if name in _FUNCTIONS else operator_named(name)


# ---- graphs ------------------------------------------------------------------------------------


def fake_values(layouts: Sequence[Any]) -> list[Any]:
    """Makes fake tensors, all of one mode.

    A layout is a type, the number of a storage (equal numbers share one) and an offset in it in
    elements; a list of these for a list of tensors; or None.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memories: dict[int, torch.UntypedStorage] = {}

    def value(layout: Any) -> Any:
        if not isinstance(layout, tuple):
            return None if layout is None else [value(part) for part in layout]
        type_, memory, offset = layout
        assert isinstance(type_, TensorType)
        meta = type_.empty("meta")
        if memory in memories or offset:
            whole = memories.setdefault(memory, meta.untyped_storage())
            meta = torch.empty(0, dtype=type_.dtype, device="meta")
            meta.set_(whole, offset, type_.shape, type_.stride)
        else:
            memories[memory] = meta.untyped_storage()
        return FakeTensor(mode, meta, type_.device)

    return list(map(value, layouts))


# ---- facts that decide what is made ------------------------------------------------------------


def facts() -> Mapping[str, Any] | None:
    """Returns what, besides a graph, decides what PyTorch compiles it to.

    None means that a user's Python function takes part, which no key can describe.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    settings = {
        "inductor": inductor_config.get_config_copy(),
        "functorch": functorch_config.get_config_copy(),
    }
    if any(_runs_python(v) for config in settings.values() for v in config.values()):
        return None
    return {**machine_facts(), **{name: _sorted(config) for name, config in settings.items()}}


def machine_facts() -> Mapping[str, Any]:
    """Returns what decides whether something that PyTorch compiled elsewhere is valid here."""
    return {
        "torch": [torch.__version__, str(torch.version.git_version), str(torch.version.cuda)],
        # Inductor writes the number of threads into kernels that run in parallel.
        "threads": torch.get_num_threads(),
        "cpu": [torch.backends.cpu.get_cpu_capability(), os.environ.get(_VECTORS), cpu_kind()],
        "gpu": _gpu_kind(),
        "numbers": _number_settings(),
    }


def _runs_python(value: Any) -> bool:
    """Whether a setting holds code of the user's: a pass, a callback."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_runs_python, value))
    if isinstance(value, dict):
        return any(map(_runs_python, (*value.keys(), *value.values())))
    return not isinstance(value, _PLAIN)


def _sorted(settings: Mapping[str, Any]) -> list[str]:
    kept = {n: v for n, v in settings.items() if not n.startswith(_NO_MATTER)}
    return [f"{name}={_stable(value)}" for name, value in sorted(kept.items())]


def _stable(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(repr, value))) + "}"
    return repr(value)


def _number_settings() -> list[Any]:
    """Settings that change which kernels PyTorch picks, or how they compute."""
    sdp = torch.backends.cuda
    return [
        str(torch.get_default_dtype()),
        matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.mkldnn.enabled,
        torch.backends.mkldnn.is_available(),
        torch.backends.mkl.is_available(),
        [sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled()],
        sdp.cudnn_sdp_enabled(),
    ]


def for_this_cpu(source: str) -> str:
    """Returns a C++ source, marked so that an object made of it stays with its kind of CPU."""
    # Inductor finds what it has built by source and flags, and the flags only say "for this CPU".
    # Where machines share its folder, an object may use instructions that the next one lacks.
    return f"{source}\n// {cpu_kind()}\n"


def cpu_kind() -> str:
    """Returns a digest of what the kernel says about the CPU's model and instruction sets."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        import platform

        return f"{platform.machine()} {platform.processor()}"
    kept = ("vendor_id", "model name", "flags", "features", "cpu part")
    wanted = dict.fromkeys(line for line in lines if line.lower().startswith(kept))
    return hashlib.sha256("\n".join(wanted).encode()).hexdigest()


def _gpu_kind() -> list[str]:
    if not torch.cuda.is_initialized():  # to ask would initialize it, and forbid a fork
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]

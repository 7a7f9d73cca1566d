"""Wrappers that train a model on several devices: their Python runs around every pass.

A program would not run it again, and each replica would then train on its own. So it is kept: the
wrapper runs as it is, around programs of what it wraps. Wrappers are told by name, so that nothing
of ``torch.distributed`` is imported for it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import nn

from ...reuse.errors import FinalCaptureError
from ...reuse.evidence.module_state import has_own_hooks, walk_modules

Way = Literal["calls", "hooks", "none"]
"""How a wrapper stands around a model: it calls it, by hooks on it, or as none that is kept."""

_IN_PLACE = "Wrap a model that is compiled in place: lazyinline.compile(m, in_place=True)."
_NOT_YET = "Use fully_shard or DistributedDataParallel, or leave this model to eager."


class _Wrapper(NamedTuple):
    home: str
    way: Way
    what_to_do: str = _IN_PLACE


_WRAPPERS = {
    "DistributedDataParallel": _Wrapper("torch.nn.parallel", "calls"),
    "DataParallel": _Wrapper("torch.nn.parallel", "none", _NOT_YET),
    "DDP": _Wrapper("torch.distributed", "none", _NOT_YET),  # replicate
    "ReplicateModule": _Wrapper("torch.distributed", "none", _NOT_YET),
    "FullyShardedDataParallel": _Wrapper("torch.distributed.fsdp", "none", _NOT_YET),
    "FSDPModule": _Wrapper("torch.distributed.fsdp", "hooks"),  # fully_shard
}


def is_compiled_by_torch(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` puts around another."""
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch.")


def wrapper_name(module: nn.Module) -> str:
    """Returns which wrapper a module is, or was made (``fully_shard``); empty for none."""
    for base in type(module).__mro__:
        known = _WRAPPERS.get(base.__name__)
        if known is not None and base.__module__.startswith(known.home):
            return base.__name__
    return ""


def way_of(module: nn.Module) -> Way:
    """Returns how a module stands, as a wrapper that can be kept, around what it wraps."""
    name = wrapper_name(module)
    return _WRAPPERS[name].way if name else "none"


def wrapped_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns (path, module) of what is compiled where wrappers are kept; nothing where none is.

    Those are the innermost wrappers' models. What lies between wrappers runs as it is.
    """
    wrappers = [(path, m) for path, m in walk_modules(model) if way_of(m) != "none"]
    found: dict[int, tuple[str, nn.Module]] = {}
    for path, module in wrappers:
        prefix = f"{path}." if path else ""
        if any(other.startswith(prefix) and m is not module for other, m in wrappers):
            continue
        inner = model_inside(module)
        part = (path, module) if inner is None else (f"{prefix}module", inner)
        found.setdefault(id(part[1]), part)
    return list(found.values())


def model_inside(module: nn.Module) -> nn.Module | None:
    """Returns the model that a wrapper calls; None if a module is no wrapper that does."""
    if way_of(module) != "calls":
        return None
    inner: nn.Module = module.module  # type: ignore[assignment]
    return inner


def refuse_unknown_wrappers(model: nn.Module) -> None:
    """Raises FinalCaptureError if a wrapper is in a model's tree that is not kept."""
    for path, module in walk_modules(model):
        if way_of(module) == "none":
            refuse_wrapper(module, path)


def refuse_wrappers(model: nn.Module) -> None:
    """Raises FinalCaptureError if a wrapper of PyTorch's for several devices is in a model's tree.

    One that stands around a module by hooks is none while it has no hooks.
    """
    for path, module in walk_modules(model):
        if way_of(module) != "hooks" or has_own_hooks(module, "forward"):
            refuse_wrapper(module, path)


def refuse_wrapper(module: nn.Module, path: str) -> None:
    """Raises FinalCaptureError if a module is such a wrapper, or was made one (``fully_shard``)."""
    name = wrapper_name(module)
    if name:
        raise FinalCaptureError(
            f"{path or 'The model'} is a {name}, whose Python must run at every pass, "
            f"and a compiled program does not run it. {_WRAPPERS[name].what_to_do}"
        )

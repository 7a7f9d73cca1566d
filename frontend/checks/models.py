"""Refuses models that no capture can take, and finds wrappers for several devices.

Wrappers train a model on several devices; their Python runs around every pass. A program would not
run it again, and each replica would then train on its own. So it is kept: the wrapper runs as it
is, around programs of what it wraps. Wrappers are recognised by name, so that nothing of
``torch.distributed`` is imported for it.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ...reuse.errors import CaptureError, FinalCaptureError, PlanError
from ...reuse.evidence.module_state import Places, has_hooks, has_own_hooks, walk_modules
from ..marks import is_compiled


def refuse_uncapturable(model: nn.Module) -> None:
    """Raises CaptureError for wrappers, for what is compiled already, and for what is no Python."""
    places = walk_modules(model)
    refuse_wrappers(places)
    refuse_compiled(places)
    refuse_scripted(places)


def refuse_compiled(places: Places) -> None:
    """Raises CaptureError if one of some modules is compiled already."""
    for path, module in places:
        if is_compiled(module):
            raise CaptureError(
                f"{path or 'The model'} is a compiled module already. Compile the outer model with "
                "the original module in it."
            )
        if is_compiled_by_torch(module):
            raise CaptureError(
                f"{path or 'The model'} is what torch.compile returned, which is compiled already. "
                "Compile the module itself: lazyinline.compile(m), where torch.compile(m) was."
            )


def refuse_scripted(places: Places) -> None:
    """Raises CaptureError if one of some modules is no Python that can be watched."""
    for path, module in places:
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or 'The model'} was scripted or traced by torch.jit, which hides its "
                "Python and its attributes. Put the original module in its place."
            )


def backward_hooked(model: nn.Module) -> str:
    """Names a module of the tree that has a backward hook, or returns an empty text."""
    for path, module in walk_modules(model):
        if has_hooks(module, "backward"):
            return f"{path or 'The model'} ({type(module).__name__})"
    return ""


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raises CaptureError if a module of the tree has a backward hook."""
    hooked = backward_hooked(model)
    if hooked:
        raise CaptureError(
            f"{hooked} has a backward hook, which a program could not call. Remove it, or put "
            "hooks on parameters or on the compiled model. (compile() runs such a model eagerly.)"
        )


def check_example(what: str, model: Any, args: Any) -> None:
    """Raises PlanError for a model that is none, and for one input without a tuple around it.

    Args:
        what: the function that was called.
        model: its model.
        args: its positional example inputs.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"{what} takes an nn.Module, not {type(model).__name__}.")
    if not isinstance(args, (tuple, list)):
        raise PlanError(
            f"args is a tuple of the model's positional inputs, not {type(args).__name__}; "
            "write (x,) for one input."
        )


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


def refuse_unknown_wrappers(places: Places) -> None:
    """Raises FinalCaptureError if one of some modules is a wrapper that is not kept."""
    for path, module in places:
        if way_of(module) == "none":
            refuse_wrapper(module, path)


def refuse_wrappers(places: Places) -> None:
    """Raises FinalCaptureError if one of some modules is a wrapper for several devices.

    One that stands around a module by hooks is none while it has no hooks.
    """
    for path, module in places:
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

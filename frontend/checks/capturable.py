"""What no capture can take: modules that are no Python, and Python that runs in each backward."""

from __future__ import annotations

import torch
from torch import nn

from ...reuse.errors import CaptureError
from ...reuse.evidence.module_state import Places, has_hooks, walk_modules
from ..marks import is_compiled
from .wrappers import is_compiled_by_torch, refuse_wrappers


def refuse_uncapturable(model: nn.Module) -> None:
    """Raises CaptureError for wrappers, for what is compiled already, and for what is no Python."""
    refuse_wrappers(model)
    refuse_compiled(model)
    refuse_scripted(walk_modules(model))


def refuse_compiled(model: nn.Module) -> None:
    """Raises CaptureError if a module of the tree is compiled already."""
    for path, module in walk_modules(model):
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
            "hooks on parameters or on the compiled model. (compile() runs such a model itself.)"
        )

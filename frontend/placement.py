"""Parts of a model on devices of their own: where they are, and what copies tensors there and back.

The copies are hooks on the module, so eager makes the same ones, and a capture sees two operators.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..reuse import torch_pytree
from ..reuse.errors import PlanError, ReuseError
from ..reuse.evidence.module_state import HOOK_TABLES, module_state, walk_modules
from ..reuse.torch_names import global_hook_tables


def place(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Puts a part of a model on another device; returns the module.

    Its parameters and buffers move there, as by ``module.to(device)``. At each call its tensor
    arguments are copied there, and the tensors that it returns to the device that its parameters
    came from: that is where they were before, for the model around it, and an embedding on the host
    may be given indices on the host.
    Gradients and the optimizer's state are where the parameters are. Call it on a model that is
    where it should be, before an optimizer is made. To place it back on the device that it came
    from takes the mark off.

    Args:
        module: has parameters or buffers, all on one device.
        device: as PyTorch names it.

    Raises:
        ReuseError: if the target is no module.
        PlanError: if the module's tensors are on several devices, it has none, or a part of it is
            placed already.

    Example:
        >>> model.cuda()
        >>> lazyinline.place(model.embedding, "cpu")
    """
    if not isinstance(module, nn.Module):
        raise ReuseError(f"place takes a module, not {module!r}.")
    name = type(module).__name__
    inner = [path for path, part in walk_modules(module) if path and home_of(part) is not None]
    if inner:
        raise PlanError(f"{inner[0]} in this {name} is placed already: place {name} first.")
    tensors = [*module.parameters(), *module.buffers()]
    found = sorted({str(tensor.device) for tensor in tensors})
    if len(found) != 1:
        where = f"are on {', '.join(found)}" if found else "do not exist, so nothing can be placed"
        raise PlanError(f"The parameters and buffers of this {name} {where}.")
    home = home_of(module) or tensors[0].device
    _move(module, torch.device(device))
    there = next(chain(module.parameters(), module.buffers())).device
    old = [n for hooks in _hooks_of(module) for n, hook in hooks.items() if _copies(hook)]
    for table in HOOK_TABLES:
        for number in old:
            module_state(module)[table].pop(number, None)
    if there != home:
        # The first before the forward and, so far, the last after it.
        copied_in = partial(_copied_in, there)
        module.register_forward_pre_hook(copied_in, with_kwargs=True, prepend=True)
        module.register_forward_hook(partial(_copied_out, home))
    return module


def _move(module: nn.Module, device: torch.device) -> None:
    """Moves a module's tensors; parameters stay the objects that they are."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    # Between memories of two kinds PyTorch would make new parameters, and untie tied ones.
    is_plain = {device.type, next(chain(module.parameters(), module.buffers())).device.type}
    torch.__future__.set_swap_module_params_on_conversion(swaps or not is_plain <= {"cpu", "cuda"})
    try:
        module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def home_of(module: nn.Module) -> torch.device | None:
    """Returns the device that a placed module came from, None if it is not placed."""
    _, after = _hooks_of(module)
    return next((hook.args[0] for hook in after.values() if _copies(hook)), None)


def only_copies(module: nn.Module) -> bool:
    """Whether a module's own forward hooks only copy tensors to a device."""
    return not any(global_hook_tables("forward")) and all(
        map(_copies, chain(*(hooks.values() for hooks in _hooks_of(module))))
    )


def _hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Returns the hooks before a module's forward, and after it (none: TorchScript)."""
    state = module_state(module)
    return state.get("_forward_pre_hooks", {}), state.get("_forward_hooks", {})


def _copies(hook: Any) -> bool:
    return isinstance(hook, partial) and hook.func in (_copied_in, _copied_out)


def _copied_in(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _copied(device, (args, kwargs))


def _copied_out(device: torch.device, module: nn.Module, args: Any, result: Any) -> Any:
    return _copied(device, result)


def _copied(device: torch.device, tree: Any) -> Any:
    leaves, spec = torch_pytree.flatten_outer(tree)  # a cache stays the one it is
    moved = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return torch_pytree.unflatten(moved, spec)

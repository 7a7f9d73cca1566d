"""Marks that users put on modules: what to share, what to recompute, and in which stage it runs.

``lazy_inline`` is only a hint: capture shares two instances if their evidence agrees. ``place``
copies tensors to another device and back by hooks on the module, so that eager does the same, and a
capture records two operators.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from ..recompute.planner import POLICIES, PolicyName
from ..reuse import torch_pytree
from ..reuse.errors import PipelineError, PlanError, ReuseError
from ..reuse.evidence.module_state import HOOK_TABLES, module_state, walk_modules
from ..reuse.ir.program import RecomputeMark
from ..reuse.torch_names import global_hook_tables

_MARK = "__lazy_inline__"
STAGE_MARK = "_lazyinline_stage"  # attribute of a module that belongs to one pipeline stage
DISPATCHER_ATTRIBUTE = "_lazyinline_calls"
"""Attribute of the module that ``compile`` puts around a model."""
_RECOMPUTE = "_lazy_inline_recompute"
_SAVE = "save"
_SHARD = "_lazyinline_shard"

Target = TypeVar("Target", bound=Any)


def lazy_inline(target: Target) -> Target:
    """Marks a layer class: its instances are compiled once and kept as calls.

    Works as a decorator on the class or on its ``__init__``, and as a call on a class you do not
    own, also after instances exist. Subclasses are marked too. Numbers never depend on the mark.

    Args:
        target: a subclass of ``nn.Module``, or its ``__init__``.

    Returns:
        The target.

    Raises:
        ReuseError: if the target is neither.

    Example:
        >>> @lazy_inline
        ... class Block(nn.Module): ...
        >>> lazy_inline(LlamaDecoderLayer)
    """
    is_class = isinstance(target, type) and issubclass(target, nn.Module)
    if is_class or (inspect.isfunction(target) and target.__name__ == "__init__"):
        setattr(target, _MARK, True)
        return target
    raise ReuseError(
        f"lazy_inline marks a subclass of nn.Module or its __init__, not {_described(target)}. "
        "Put it above the class, above def __init__, or call lazy_inline(TheLayerClass)."
    )


def _described(target: Any) -> str:
    """Describes the wrong target of a mark, with its line."""
    if inspect.isfunction(target):
        code = target.__code__
        place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
        return f"the function {target.__qualname__} ({place})"
    if isinstance(target, type):
        return f"the class {target.__qualname__}"
    return f"a {type(target).__name__}"


def recompute(target: Target, policy: PolicyName | None = "full") -> Target:
    """Marks a module, or all modules of a class, for recompute, like ``torch.utils.checkpoint``.

    The mark goes before the ``recompute=`` of ``compile`` and ``compile_step``. Set it before the
    model is compiled. Numbers never depend on it.

    Args:
        target: a module (a layer, or a single operator such as an ``nn.GELU``), or a class.
        policy: ``"full"`` computes it again in the backward, ``"selective"`` all of it but matrix
            products, convolutions and attention; None saves what is needed, whatever ``recompute=``
            says.

    Returns:
        The target.

    Raises:
        PlanError: if there is no such policy.
        ReuseError: if the target is neither a module nor a class of modules.

    Example:
        >>> lazyinline.recompute(LlamaDecoderLayer)
        >>> lazyinline.recompute(model.layers[0].mlp, "selective")
    """
    if policy is not None and policy not in POLICIES:
        raise PlanError(
            f"recompute marks take None or one of {POLICIES}, not {policy!r}. A budget is for a "
            "whole program: compile(model, recompute=Budget(...))."
        )
    advice = " For a function, use torch.utils.checkpoint, which is honoured."
    return _marked(target, _RECOMPUTE, policy or _SAVE, "recompute", advice)


def _marked(target: Target, name: str, mark: Any, by: str, advice: str = "") -> Target:
    """Sets a mark on a module, or on a class of modules."""
    if isinstance(target, nn.Module):
        # Not by setattr, because a module may override __setattr__.
        target.__dict__[name] = mark
    elif isinstance(target, type) and issubclass(target, nn.Module):
        setattr(target, name, mark)
    else:
        raise ReuseError(f"{by} marks a module or a subclass of nn.Module, not {target!r}.{advice}")
    return target


def stage(module: nn.Module, number: int) -> nn.Module:
    """Marks a module for a pipeline stage; returns the module.

    What runs in no marked module goes to the first stage that has what it needs.

    Args:
        module: a layer, or anything that contains layers.
        number: the stage, counted from 0.

    Raises:
        PipelineError: if the number is negative.

    Example:
        >>> for i, layer in enumerate(model.layers):
        ...     lazyinline.stage(layer, i // 8)
    """
    if number < 0:
        raise PipelineError(f"stage {number}: stages are counted from 0.")
    module.__dict__[STAGE_MARK] = number
    return module


def shard(target: Target, parameters: Mapping[str, Any], *, output: Any = None) -> Target:
    """Pins how a module, or all modules of a class, is split by :func:`parallelize`.

    What is not pinned follows. Numbers never depend on it.

    Args:
        target: a module, or a class.
        parameters: placements on the mesh's dimension of tensor parallel, by the name of a
            parameter in the module.
        output: how the result lies, for a Linear or an Embedding.

    Returns:
        The target.

    Raises:
        ReuseError: if the target is neither a module nor a class of modules.

    Example:
        >>> lazyinline.shard(model.up, {"weight": Shard(0), "bias": Shard(0)})
    """
    return _marked(target, _SHARD, (dict(parameters), output), "shard")


def shard_mark(module: nn.Module) -> tuple[Mapping[str, Any], Any] | None:
    """Returns the pinned placements of a module's parameters and of its result."""
    own: tuple[Mapping[str, Any], Any] | None = module_state(module).get(_SHARD)
    return own or getattr(type(module), _SHARD, None)


def recompute_mark(module: nn.Module) -> RecomputeMark:
    """Returns the recompute mark of a module: a policy, ``"save"``, or ""."""
    own: RecomputeMark = module_state(module).get(_RECOMPUTE, "")
    return own or getattr(type(module), _RECOMPUTE, "")


def is_marked(cls: type) -> bool:
    """Whether a class, one of its bases, or their ``__init__`` carries the mark."""
    # By attribute lookup, so that subclasses are marked too, as the decorator promises.
    return hasattr(cls, _MARK) or hasattr(cls.__init__, _MARK)  # type: ignore[misc]


def is_block(module: nn.Module) -> bool:
    """Whether a module is captured as a block: its class is marked, or it has a stage mark."""
    return is_marked(type(module)) or STAGE_MARK in module_state(module)


# ---- parts on other devices ----------------------------------------------------------------------


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
        ReuseError: if the target is not a module.
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
        # The first hook before the forward, and the last so far after it.
        copied_in = partial(_copied_in, there)
        module.register_forward_pre_hook(copied_in, with_kwargs=True, prepend=True)
        module.register_forward_hook(partial(_copied_out, home))
    return module


def _move(module: nn.Module, device: torch.device) -> None:
    """Moves a module's tensors; parameters stay the objects that they are."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    # Between other kinds of devices PyTorch would make new parameters, and untie tied ones.
    is_plain = {device.type, next(chain(module.parameters(), module.buffers())).device.type}
    torch.__future__.set_swap_module_params_on_conversion(swaps or not is_plain <= {"cpu", "cuda"})
    try:
        module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def home_of(module: nn.Module) -> torch.device | None:
    """Returns the device that a placed module came from; None if it is not placed."""
    _, after = _hooks_of(module)
    return next((hook.args[0] for hook in after.values() if _copies(hook)), None)


def only_copies(module: nn.Module) -> bool:
    """Whether a module's own forward hooks only copy tensors to a device."""
    return not any(global_hook_tables("forward")) and all(
        map(_copies, chain(*(hooks.values() for hooks in _hooks_of(module))))
    )


def _hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Returns the hooks before and after a module's forward; a TorchScript module has none."""
    state = module_state(module)
    return state.get("_forward_pre_hooks", {}), state.get("_forward_hooks", {})


def _copies(hook: Any) -> bool:
    return isinstance(hook, partial) and hook.func in (_copied_in, _copied_out)


def _copied_in(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _copied(device, (args, kwargs))


def _copied_out(device: torch.device, module: nn.Module, args: Any, result: Any) -> Any:
    return _copied(device, result)


def _copied(device: torch.device, tree: Any) -> Any:
    leaves, spec = torch_pytree.flatten_outer(tree)  # a cache object stays itself
    moved = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return torch_pytree.unflatten(moved, spec)

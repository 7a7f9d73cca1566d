"""Marks that users put on modules: what to share, what to compute again, and in which stage it is.

``lazy_inline`` is a wish, never a promise: capture shares two instances only on evidence.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from torch import nn

from ..recompute.planner import POLICIES, PolicyName
from ..reuse.errors import PipelineError, PlanError, ReuseError
from ..reuse.evidence.module_state import module_state
from ..reuse.ir.program import RecomputeMark

_MARK = "__lazy_inline__"
STAGE_MARK = "_lazyinline_stage"
"""Attribute of a module that belongs to one pipeline stage."""
DISPATCHER_ATTRIBUTE = "_lazyinline_calls"
"""Attribute of the module that ``compile`` puts around a model."""
_RECOMPUTE = "_lazy_inline_recompute"
_SAVE = "save"
_SHARD = "_lazyinline_shard"

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])
Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def lazy_inline(target: ModuleClass) -> ModuleClass: ...
@overload
def lazy_inline(target: Function) -> Function: ...


def lazy_inline(target: Any) -> Any:
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
    if isinstance(target, type) and issubclass(target, nn.Module):
        setattr(target, _MARK, True)
        return target
    if inspect.isfunction(target) and target.__name__ == "__init__":
        setattr(target, _MARK, True)
        return target
    raise ReuseError(
        f"lazy_inline marks a subclass of nn.Module or its __init__, not {_described(target)}. "
        "Put it above the class, above def __init__, or call lazy_inline(TheLayerClass)."
    )


def _described(target: Any) -> str:
    """Names what was marked, with its line, as its author knows it."""
    if inspect.isfunction(target):
        code = target.__code__
        place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
        return f"the function {target.__qualname__} ({place})"
    if isinstance(target, type):
        return f"the class {target.__qualname__}"
    return f"a {type(target).__name__}"


Target = TypeVar("Target", bound=Any)


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
    if isinstance(target, nn.Module):
        # Not by setattr: a module with a __setattr__ of its own need not know of marks.
        target.__dict__[_RECOMPUTE] = policy or _SAVE
    elif isinstance(target, type) and issubclass(target, nn.Module):
        setattr(target, _RECOMPUTE, policy or _SAVE)
    else:
        raise ReuseError(
            f"recompute marks a module or a subclass of nn.Module, not {target!r}. For a function, "
            "use torch.utils.checkpoint, which is honoured."
        )
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
    if isinstance(target, nn.Module):
        target.__dict__[_SHARD] = (dict(parameters), output)
    elif isinstance(target, type) and issubclass(target, nn.Module):
        setattr(target, _SHARD, (dict(parameters), output))
    else:
        raise ReuseError(f"shard marks a module or a subclass of nn.Module, not {target!r}.")
    return target


def shard_mark(module: nn.Module) -> tuple[Mapping[str, Any], Any] | None:
    """Returns what is pinned of a module: placements of parameters, and of its result."""
    own: tuple[Mapping[str, Any], Any] | None = module_state(module).get(_SHARD)
    return own or getattr(type(module), _SHARD, None)


def recompute_mark(module: nn.Module) -> RecomputeMark:
    """Returns how a module is marked for recompute: a policy, ``"save"``, or nothing."""
    own: RecomputeMark = module_state(module).get(_RECOMPUTE, "")
    return own or getattr(type(module), _RECOMPUTE, "")


def is_marked(cls: type) -> bool:
    """Says if a class, one of its bases, or their ``__init__`` carries the mark."""
    # By attribute lookup, so that subclasses are marked too, as the decorator promises.
    return hasattr(cls, _MARK) or hasattr(cls.__init__, _MARK)  # type: ignore[misc]


def is_block(module: nn.Module) -> bool:
    """Says if a module is captured as a block: its class is marked, or it is, for a stage."""
    return is_marked(type(module)) or STAGE_MARK in module_state(module)

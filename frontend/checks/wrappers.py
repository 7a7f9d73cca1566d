"""Wrappers that train a model on several devices: their Python runs around every pass.

A program would not run it again, and each replica would then train on its own. They are told by
name, so that nothing of ``torch.distributed`` is imported for it.
"""

from __future__ import annotations

from torch import nn

from ...reuse.errors import CaptureError
from ...reuse.evidence.module_state import walk_modules

_INSIDE = "Compile the model inside and put the wrapper around that: {name}(lazyinline.compile(m))."
_NOT_YET = (
    "Train with DistributedDataParallel(lazyinline.compile(m)), or leave this model to eager."
)
_WRAPPERS = {
    "DistributedDataParallel": ("torch.nn.parallel", _INSIDE),
    "DataParallel": ("torch.nn.parallel", _INSIDE),
    "DDP": ("torch.distributed", _NOT_YET),  # replicate
    "ReplicateModule": ("torch.distributed", _NOT_YET),
    "FullyShardedDataParallel": ("torch.distributed.fsdp", _NOT_YET),
    "FSDPModule": ("torch.distributed.fsdp", _NOT_YET),  # fully_shard
}


def is_compiled_by_torch(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` puts around another."""
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch.")


def refuse_wrappers(model: nn.Module) -> None:
    """Raises CaptureError if a wrapper of PyTorch's for several devices is in a model's tree."""
    for path, module in walk_modules(model):
        refuse_wrapper(module, path)


def refuse_wrapper(module: nn.Module, path: str) -> None:
    """Raises CaptureError if a module is such a wrapper, or was made one (``fully_shard``)."""
    for base in type(module).__mro__:
        home, what_to_do = _WRAPPERS.get(base.__name__, ("", ""))
        if home and base.__module__.startswith(home):
            raise CaptureError(
                f"{path or 'The model'} is a {base.__name__}, whose Python must run at every pass, "
                f"and a compiled program does not run it. {what_to_do.format(name=base.__name__)}"
            )

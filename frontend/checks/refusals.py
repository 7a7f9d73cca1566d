"""What a model takes or returns that no call of a compiled program could watch."""

from __future__ import annotations

import gc
import types
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.errors import CaptureError, PlanError
from ...reuse.evidence.snapshot import is_constant
from ...reuse.ir.torch_symbols import SIZE_TYPES
from ...reuse.kinds import function_parts, is_unrepeatable, kinds_of

_MAX_SEARCHED = 10_000  # objects
DIFFERENTIATES = "differentiates inside"
"""In the reason why a forward is refused that runs a backward of its own."""
ITERATES = "reads an iterator"
"""In the reason why a forward runs itself whose parts might be handed an iterator: a capture of a
part would move it on."""
SETS_FOR_BACKWARDS = "may set what a backward of a torch.autograd.Function reads"
"""In the reason why a forward runs itself whose parts run themselves, too: a backward reads what
the last of them set."""

CANNOT = "cannot be captured"
"""In the reason why a forward runs itself, before the line and what stands in the way."""


class RaisedError(CaptureError):
    """The model's Python raises.

    Attributes:
        after_sharing: whether blocks were shared before, which may be what it raises at.
    """

    after_sharing = False

    @property
    def raised(self) -> str:
        """What it raises, and at which line."""
        return str(self).partition(CANNOT)[2]


class WrongCallError(RaisedError):
    """The same with sizes and numbers as they are: eager may refuse the call, too."""


def refuse_recurrent(module: nn.Module) -> None:
    """Raises CaptureError for PyTorch's own recurrent networks, whose steps would be unrolled.

    PyTorch has kernels that loop; a program would have as many operators as there are steps.
    """
    if isinstance(module, nn.RNNBase):
        raise CaptureError(
            f"A {type(module).__name__} loops over its steps in kernels of PyTorch's own, and a "
            "program would have operators for each step."
        )


def refuse_unlike_constants(results: Sequence[Any]) -> None:
    """Raises CaptureError for a result that no program could return at every call.

    That is what gives something else at each use, and what leads to a tensor or module.
    """
    for result in results:
        if isinstance(result, (torch.Tensor, *SIZE_TYPES)) or is_constant(result):
            continue
        name = type(result).__qualname__
        if is_unrepeatable(result):
            raise CaptureError(
                f"The model returns a {name}, which gives something else at each use, and a "
                "compiled program would return the same at every call. Return a list or a tuple."
            )
        if _leads_to_tensors(result):
            raise CaptureError(
                f"The model returns a {name}, which holds tensors and is unknown to PyTorch. "
                "Return a tuple, a dict or a NamedTuple, or register the class "
                "(torch.export.register_dataclass)."
            )


def _leads_to_tensors(value: Any) -> bool:
    """Whether a tensor or module can be reached from a value, in C as in Python."""
    todo, seen = [value], set[int]()
    while todo:
        value = todo.pop()
        if isinstance(value, (torch.Tensor, nn.Module)) or len(seen) > _MAX_SEARCHED:
            return True
        if id(value) in seen or isinstance(value, (type, types.ModuleType, types.CodeType)):
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            todo += [part for _, part in function_parts(value)]
        else:
            todo += gc.get_referents(value)  # and what rows say: a weak reference is none of these
            todo += [part for kind in kinds_of(value) for part in kind.read(value)]
    return False


def refuse_containers(tree: torch_pytree.TreeSpec, what: str) -> None:
    """Raises PlanError if an argument is an object that holds tensors and that a model changes."""
    if isinstance(tree, torch_pytree.Nested):
        form = tree.forms[max(tree.containers)]
        raise PlanError(
            f"{what} does not bring a {form.kind.__qualname__} among its arguments up to date. "
            "lazyinline.compile(model) does; or pass tensors."
        )


def refuse_read_attributes(inputs: Sequence[torch.Tensor], names: Collection[str]) -> None:
    """Raises CaptureError if code may read what Python put on an input: no call checks it."""
    for tensor in inputs:
        for name in vars(tensor):
            if name in names:
                raise CaptureError(
                    f"An input tensor has the attribute {name!r}, and the model's forward speaks "
                    "of that name. A compiled program would use what it holds now at every call: "
                    "pass it in as an argument."
                )

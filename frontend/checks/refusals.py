"""Refuses what no compiled program can take or return: tensors, containers, writes, operands."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.fx
from torch import nn

from ...reuse import torch_pytree
from ...reuse.errors import CaptureError, PlanError
from ...reuse.evidence.snapshot import is_constant
from ...reuse.ir.leaf import stamp_of
from ...reuse.ir.program import (
    Leaf,
    ModelTensor,
    Program,
    UserInput,
    walk_closures,
    wants_gradient,
)
from ...reuse.ir.torch_symbols import SIZE_TYPES
from ...reuse.kinds import is_unrepeatable, reachable
from ...reuse.torch_names import is_lazy
from .torch_state import why_no_memory, why_watched

_MAX_SEARCHED = 10_000  # objects
DIFFERENTIATES = "differentiates inside"
"""In the reason why a forward is refused that runs a backward of its own."""
SETS_FOR_BACKWARDS = "may set what a backward of a torch.autograd.Function reads"
"""In the reason why a forward and its parts run eagerly: a backward reads what was set last."""

CANNOT = "cannot be captured"
"""In the reason why a forward runs eagerly, before the line and what stands in the way."""


class RaisedError(CaptureError):
    """The model's Python raises.

    Attributes:
        after_sharing: whether blocks were shared before, which may be what it raises at.
    """

    after_sharing = False

    @property
    def raised(self) -> str:
        """The error that the model's Python raises, and the line."""
        return str(self).partition(CANNOT)[2]


class WrongCallError(RaisedError):
    """The same with sizes and numbers as they are: eager may refuse the call, too."""


def refuse_recurrent(module: nn.Module) -> None:
    """Raises CaptureError for PyTorch's own recurrent networks, whose steps would be unrolled."""
    # PyTorch has kernels that loop; a program would have as many operators as there are steps.
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
    """Whether a tensor or module can be reached from a value, or more than can be looked at."""
    for count, found in enumerate(reachable([value])):
        if isinstance(found, (torch.Tensor, nn.Module)) or count > _MAX_SEARCHED:
            return True
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
                    f"An input tensor has the attribute {name!r}, and the model's forward uses "
                    "that name. A compiled program would use what it holds now at every call: pass "
                    "it in as an argument."
                )


def check_runnable(model: nn.Module) -> None:
    """Raises PlanError if a parameter or buffer has no data."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise PlanError(
                f"{name} is on the meta device and has no data, so the model can be captured but "
                "not run. Materialize it first: model.to_empty(device=...) and load a state_dict."
            )


def check_memory(program: Program) -> None:
    """Raises CaptureError if a tensor of the model is more or other than what its memory holds.

    Found by what the forward used: parameters and buffers, and what lies in attributes and globals.
    """
    for source in program.sources:
        if not isinstance(source, ModelTensor):
            continue
        name, tensor = source.name, source.tensor
        if why := why_watched((tensor,)):
            raise CaptureError(
                f"{name} is {why}, and kernels bypass it. Use a plain tensor, or call "
                "the model itself."
            )
        if is_lazy(tensor):
            raise CaptureError(
                f"{name} is a lazily {_lazy_kind(tensor)}, whose memory holds other numbers than "
                f"it does, and kernels read memory. Write the numbers: {name}.data = "
                f"{name}.data.{_RESOLVE[_lazy_kind(tensor)]}()."
            )


def check_leaves(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises PlanError if what a step gives gradients to was computed from something else."""
    for name, tensor in tensors:
        if tensor.requires_grad and tensor.grad_fn is not None:
            raise PlanError(
                f"{name} is computed outside of the forward ({tensor.grad_fn.name()}), and a step "
                "gives gradients to leaves alone: what it is computed from would get none. Compute "
                "it in the forward, as torch.nn.utils.parametrize does, or use lazyinline.compile."
            )


_RESOLVE = {"negated view": "resolve_neg", "conjugated view": "resolve_conj", "zero": "clone"}


def _lazy_kind(tensor: torch.Tensor) -> str:
    if tensor.is_neg():
        return "negated view"
    return "conjugated view" if tensor.is_conj() else "zero"


def check_writes(program: Program) -> None:
    """Raises CaptureError if the model changes, in place, an input that wants a gradient."""
    for _, target in program.writes:
        source = program.sources[target]
        if torch.is_grad_enabled() and wants_gradient(source):
            raise CaptureError(
                f"The model's forward changes {source.name} in place, and it requires grad. "
                "Outside no_grad PyTorch forbids that for a leaf; use the out-of-place operator, "
                "or change it outside the model."
            )


def check_batch_is_kept(program: Program) -> None:
    """Raises PlanError if the model changes its batch in place: a step works on a copy."""
    for _, target in program.writes:
        source = program.sources[target]
        if isinstance(source, UserInput):
            raise PlanError(
                f"The model's forward changes its argument {source.name} in place, and a compiled "
                "step works on copies of the batch. Use the out-of-place operator, or clone it "
                "first."
            )


def written_out(leaves: Sequence[Any]) -> list[Any] | None:
    """Returns the inputs with lazy ones (``x.conj()``) written out; None if there are none."""
    lazy = [isinstance(x, torch.Tensor) and not why_no_memory(x) and is_lazy(x) for x in leaves]
    if not any(lazy):
        return None
    # A clone, not a resolved view: gradients flow on through it to the lazy input.
    return [x.clone() if flag else x for x, flag in zip(leaves, lazy, strict=True)]


def watching_tensor(model: nn.Module, leaves: Sequence[Any]) -> str:
    """Says which tensor of a call no program can take as it is, or returns nothing.

    It is of a class that sees each operator, has no memory of its own, or a cache holds it that
    cannot be taken apart.
    """
    if why := why_watched(leaves):
        return f"an input is {why}"
    for leaf in leaves:
        why = why_no_memory(leaf) if isinstance(leaf, torch.Tensor) else ""
        if why and leaf.is_meta:
            check_runnable(model)  # a model without data is refused, as with inputs that have some
        if why:
            return f"an input is {why}, which has no memory that a kernel could read"
    formless = torch_pytree.formless(leaves)
    if formless:
        return f"an input is a {formless}, whose state is more than tensors and numbers"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if why := why_watched((tensor,)):
            return f"{name} is {why}"
        if tensor.is_nested:
            return f"{name} is a nested tensor, which says no sizes"
    return ""


_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.linear, _aten.matmul})


def check_operand_types(program: Program, model: str) -> None:
    """Looks at the products of each different closure once.

    PyTorch's rules for fake tensors do not look at these types; its kernels do, in the middle of a
    step and without saying which layer they work for.

    Raises:
        WrongCallError: if one multiplies tensors of different types; it has the line.
    """
    for closure in walk_closures(program):
        if isinstance(closure, Leaf):
            for node in closure.nodes:
                _check_operands(node, model)


def _check_operands(node: torch.fx.Node, model: str) -> None:
    if getattr(node.target, "overloadpacket", None) not in _PRODUCTS or stamp_of(node).autocast:
        return
    values = [n.meta.get("val") for n in node.all_input_nodes]
    types = dict.fromkeys(v.dtype for v in values if isinstance(v, torch.Tensor))
    if len(types) > 1:
        shown = " and ".join(str(t).removeprefix("torch.") for t in types)
        raise WrongCallError(
            f"{model} cannot be captured: {node.target} at {stamp_of(node).source} multiplies "
            f"{shown} tensors, and PyTorch multiplies equal types only. Convert one with "
            "x.to(w.dtype), or run the model under torch.autocast."
        )

"""Refuses what no compiled program can take or return: models, tensors, writes, operands.

Wrappers train a model on several devices; their Python runs around every pass. A program would not
run it again, and each replica would then train on its own. So it is kept: the wrapper runs as it
is, around programs of what it wraps. Wrappers are recognised by name, so that nothing of
``torch.distributed`` is imported for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.fx
from torch import nn

from ...reuse import torch_pytree
from ...reuse.errors import CaptureError, FinalCaptureError, PlanError
from ...reuse.evidence.module_state import (
    Places,
    has_hooks,
    has_own_hooks,
    module_state,
    walk_modules,
)
from ...reuse.freeze import is_constant
from ...reuse.ir.leaf import stamp_of
from ...reuse.ir.program import Leaf, ModelTensor, Program, UserInput, walk_closures, wants_gradient
from ...reuse.ir.torch_symbols import SIZE_TYPES
from ...reuse.kinds import is_unrepeatable, reachable
from ...reuse.torch_names import is_lazy
from ..marks import DISPATCHER_ATTRIBUTE
from .torch_state import why_no_memory, why_watched


def refuse_uncapturable(model: nn.Module) -> None:
    """Raises CaptureError for wrappers, for what is compiled already, and for what is no Python."""
    places = walk_modules(model)
    refuse_wrappers(places)
    refuse_compiled(places)
    refuse_scripted(places)


def refuse_compiled(places: Places) -> None:
    """Raises CaptureError if one of some modules is compiled already."""
    for path, module in places:
        if DISPATCHER_ATTRIBUTE in module_state(module):
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
    """Raises PlanError for a model that is none, and for one input without a tuple around it."""
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


# ---- tensors, containers, writes, operands -------------------------------------------------------


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


def check_runnable(model: nn.Module, target: str | None = None) -> None:
    """Raises PlanError if a parameter or buffer has no data; for a target nothing is run."""
    if target is not None:
        return
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


def watching_tensor(model: nn.Module, leaves: Sequence[Any]) -> str:
    """Says which tensor of a call or a model no program can take as it is, or returns nothing."""
    if why := watching_input(model, leaves):
        return why
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if why := why_watched((tensor,)):
            return f"{name} is {why}"
        if tensor.is_nested:
            return f"{name} is a nested tensor, which says no sizes"
    return ""


def watching_input(model: nn.Module, leaves: Sequence[Any]) -> str:
    """Says which input no program can take as it is, or returns nothing.

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
        if isinstance(leaf, torch.Tensor) and is_lazy(leaf):
            kind = _lazy_kind(leaf)
            return f"an input is a lazily {kind}: hand in what {_RESOLVE[kind]}() returns"
    formless = torch_pytree.formless(leaves)
    if formless:
        return f"an input is a {formless}, whose state is more than tensors and numbers"
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

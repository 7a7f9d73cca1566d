"""Refuses models, tensors, writes and operands that no compiled program can support.

Wrappers for several devices (DDP, FSDP) run Python around each forward and backward. A program that
skipped it would train each replica separately. So a wrapper runs eagerly, around programs of the
models that it wraps. Wrappers are recognized by name, to avoid importing ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.fx
from torch import nn

from ..autodiff.flows import trained_inputs
from ..reuse import torch_pytree
from ..reuse.errors import CaptureError, FinalCaptureError, PlanError
from ..reuse.evidence.module_state import (
    Places,
    has_hooks,
    has_own_hooks,
    module_state,
    walk_modules,
)
from ..reuse.freeze import is_constant
from ..reuse.ir.leaf import stamp_of
from ..reuse.ir.program import Leaf, ModelTensor, Program, UserInput, walk_closures, wants_gradient
from ..reuse.ir.torch_symbols import SIZE_TYPES
from ..reuse.kinds import is_unrepeatable, reachable
from ..reuse.torch_names import is_lazy
from .marks import DISPATCHER_ATTRIBUTE
from .tracing.torch_state import why_no_memory, why_watched


def refuse_compiled(places: Places) -> None:
    """Raises CaptureError if one of some modules is compiled already."""
    for path, module in places:
        if DISPATCHER_ATTRIBUTE in module_state(module):
            raise CaptureError(
                f"{path or 'The model'} is a compiled module already. Compile the outer model with "
                "the original module in it."
            )
        kind = type(module)
        if kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch."):
            raise CaptureError(
                f"{path or 'The model'} was returned by torch.compile, so it is compiled already. "
                "Compile the module itself: lazyinline.compile(m), where torch.compile(m) was."
            )


def refuse_scripted(places: Places) -> None:
    """Raises CaptureError if one of some modules is scripted, so that its Python cannot run."""
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
    """Raises PlanError if the model is not a module, or the inputs are not a tuple."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"{what} takes an nn.Module, not {type(model).__name__}.")
    if not isinstance(args, (tuple, list)):
        raise PlanError(
            f"args is a tuple of the model's positional inputs, not {type(args).__name__}; "
            "write (x,) for one input."
        )


Way = Literal["calls", "hooks", "none"]
"""How a wrapper works: it calls the model, or has hooks on it; ``"none"`` if not supported."""

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


def wrapper_name(module: nn.Module) -> str:
    """Returns the name of the wrapper that a module is, or was made into (``fully_shard``)."""
    for base in type(module).__mro__:
        known = _WRAPPERS.get(base.__name__)
        if known is not None and base.__module__.startswith(known.home):
            return base.__name__
    return ""


def way_of(module: nn.Module) -> Way:
    """Returns how a module works as a wrapper; ``"none"`` if it is not a supported wrapper."""
    name = wrapper_name(module)
    return _WRAPPERS[name].way if name else "none"


def wrapped_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns (path, module) of the models that are compiled inside wrappers, if there are any.

    These are the models of the innermost wrappers. Modules between wrappers run eagerly.
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
    """Returns the model that a wrapper calls; None if the module is not such a wrapper."""
    return module.module if way_of(module) == "calls" else None  # type: ignore[return-value]


def refuse_wrappers(places: Places) -> None:
    """Raises FinalCaptureError if one of some modules is a wrapper for several devices.

    One that works by hooks counts only while it has hooks.
    """
    for path, module in places:
        if way_of(module) != "hooks" or has_own_hooks(module, "forward"):
            refuse_wrapper(module, path)


def refuse_wrapper(module: nn.Module, path: str) -> None:
    """Raises FinalCaptureError if a module is a wrapper for several devices."""
    name = wrapper_name(module)
    if name:
        raise FinalCaptureError(
            f"{path or 'The model'} is a {name}, whose Python must run at every pass, "
            f"and a compiled program does not run it. {_WRAPPERS[name].what_to_do}"
        )


# ---- tensors, containers, writes, operands -------------------------------------------------------


_LAZY = "lazily conjugated, negated or zero"
_MAX_SEARCHED = 10_000  # objects
DIFFERENTIATES = "differentiates inside"
"""Part of the message for a forward that runs a backward itself."""
SETS_FOR_BACKWARDS = "may set what a backward of a torch.autograd.Function reads"
"""Part of the message for a forward that must run eagerly with its parts, because a backward may
read an attribute that the forward sets."""
GIVES_NONE = "returns None as the gradient of a tensor that requires one"
"""Part of the message for a forward that must run eagerly with its parts: autograd calls the
functions before such a one with zeros, but does not call ATen's operators."""


class RaisedError(CaptureError):
    """The model's Python raised an exception in a capture."""


class WrongCallError(RaisedError):
    """The model's Python raised although all sizes were numbers: eager may raise as well."""


def refuse_recurrent(module: nn.Module) -> None:
    """Raises CaptureError for PyTorch's recurrent networks, whose steps would be unrolled."""
    # PyTorch's own kernels loop; a program would have operators for each step.
    if isinstance(module, nn.RNNBase):
        raise CaptureError(
            f"A {type(module).__name__} loops over its steps in PyTorch's own kernels, and a "
            "program would have operators for each step."
        )


def refuse_nested(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises CaptureError for an encoder that eager runs on a nested tensor, without padding."""
    # A trace takes the other way, by which padded positions do not come out as zeros.
    if type(module).forward is not nn.TransformerEncoder.forward:
        return
    layers: Any = module.layers
    given = {**dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)), **kwargs}
    is_padded = given.get("src_key_padding_mask") is not None and given.get("mask") is None
    may_nest = getattr(module, "use_nested_tensor", False) and not layers[0].training
    if not (is_padded and may_nest and torch.backends.mha.get_fastpath_enabled()):
        return
    tensors = (given["src"], *layers[0].parameters())
    wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if not (wants_grad or torch.is_autocast_enabled()):
        raise CaptureError(
            f"A {type(module).__name__} in eval mode runs on a nested tensor where it is given "
            "src_key_padding_mask. Make it with enable_nested_tensor=False to have it compiled."
        )


def refuse_unlike_constants(results: Sequence[Any]) -> None:
    """Raises CaptureError for a result that a program could not return at every call.

    Such are iterators and generators, and unknown objects that hold a tensor or module.
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
        inside = enumerate(reachable([result]))
        if any(n > _MAX_SEARCHED or isinstance(x, (torch.Tensor, nn.Module)) for n, x in inside):
            raise CaptureError(
                f"The model returns a {name}, which holds tensors and is unknown to PyTorch. "
                "Return a tuple, a dict or a NamedTuple, or register the class "
                "(torch.export.register_dataclass)."
            )


def refuse_containers(tree: torch_pytree.TreeSpec, what: str) -> None:
    """Raises PlanError if an argument is an object that holds tensors and may be changed."""
    if isinstance(tree, torch_pytree.Nested):
        form = tree.forms[max(tree.containers)]
        raise PlanError(
            f"{what} does not update a {form.kind.__qualname__} among its arguments. "
            "lazyinline.compile(model) does; or pass tensors."
        )


def refuse_read_attributes(inputs: Sequence[torch.Tensor], names: Collection[str]) -> None:
    """Raises CaptureError if code may read a Python attribute of an input: no guard checks it."""
    for tensor in inputs:
        for name in vars(tensor):
            if name in names:
                raise CaptureError(
                    f"An input tensor has the attribute {name!r}, and the model's forward uses "
                    "that name. A compiled program would use its present value at every call: pass "
                    "it in as an argument."
                )


def check_runnable(model: nn.Module, target: str | None = None) -> None:
    """Raises PlanError if a parameter or buffer has no data, unless compiling for a ``target``."""
    if target is not None:
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise PlanError(
                f"{name} is on the meta device and has no data, so the model can be captured but "
                "not run. Materialize it first: model.to_empty(device=...) and load a state_dict."
            )


def check_memory(program: Program) -> None:
    """Raises CaptureError if kernels cannot read a tensor of the model from its memory.

    It may be of a class that intercepts operators, or lazily conjugated or negated. All tensors
    that the forward used are checked, including those in attributes and globals.
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
                f"{name} is {_LAZY}: its memory does not hold its values, and kernels read memory. "
                f"Write the values: {name}.data = {name}.data.clone()."
            )


def check_leaves(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises PlanError if a tensor that requires grad is not a leaf: a step could not train it."""
    for name, tensor in tensors:
        if tensor.requires_grad and tensor.grad_fn is not None:
            raise PlanError(
                f"{name} is computed outside of the forward ({tensor.grad_fn.name()}), and a step "
                "gives gradients to leaves alone: what it is computed from would get none. Compute "
                "it in the forward, as torch.nn.utils.parametrize does, or use lazyinline.compile."
            )


def check_writes(program: Program) -> None:
    """Raises CaptureError if the model changes an input that requires grad in-place."""
    for _, target in program.writes:
        source = program.sources[target]
        if torch.is_grad_enabled() and wants_gradient(source):
            raise CaptureError(
                f"The model's forward changes {source.name} in place, and it requires grad. "
                "Outside no_grad PyTorch forbids that for a leaf; use the out-of-place operator, "
                "or change it outside the model."
            )


def check_gradients_stay_in_call(program: Program) -> None:
    """Raises CaptureError if gradients of a call flow into the calls before it, by a buffer.

    A tensor that is changed in place to what requires grad has a history in eager. Later results
    that are computed from it, not only its own later values, send gradients into that.
    """
    written = dict(program.writes)
    flows = trained_inputs(program, but_zeros=True) if written else []
    wanted = {i for i, source in enumerate(program.sources) if wants_gradient(source)}
    read = frozenset().union(*(flow for i, flow in enumerate(flows) if i not in written))
    for output, target in written.items():
        if target in read and not wanted.isdisjoint(flows[output]):
            raise CaptureError(
                f"The model's forward changes {program.sources[target].name} in place to what "
                "requires grad, so that gradients of a later call flow into this one, and no "
                "program has them. Write what is detached: .copy_(new.detach())."
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
    """Describes an input, parameter or buffer that no program can take, or returns ""."""
    if why := watching_input(model, leaves):
        return why
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if why := why_watched((tensor,)):
            return f"{name} is {why}"
        if tensor.is_nested:
            return f"{name} is a nested tensor, which says no sizes"
    return ""


def watching_input(model: nn.Module, leaves: Sequence[Any]) -> str:
    """Describes an input that no program can take, or returns "".

    Its class intercepts operators, it has no storage of its own, or it is a cache with state
    besides tensors and numbers.
    """
    if why := why_watched(leaves):
        return f"an input is {why}"
    for leaf in leaves:
        why = why_no_memory(leaf) if isinstance(leaf, torch.Tensor) else ""
        if why and leaf.is_meta:
            check_runnable(model)  # raises if the model has no data either
        if why:
            return f"an input is {why}, which has no memory that a kernel could read"
        if isinstance(leaf, torch.Tensor) and is_lazy(leaf):
            return f"an input is {_LAZY}: hand in what clone() returns"
    formless = torch_pytree.formless(leaves)
    if formless:
        return f"an input is a {formless}, whose state is more than tensors and numbers"
    return ""


_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.linear, _aten.matmul})


def check_operand_types(program: Program, model: str) -> None:
    """Raises WrongCallError for a matrix product of different dtypes, with its line.

    PyTorch's rules for fake tensors do not check them. Its kernels do, but only in a run, and
    without naming the layer.
    """
    leaves = (closure for closure in walk_closures(program) if isinstance(closure, Leaf))
    for node in (node for leaf in leaves for node in leaf.nodes):
        is_product = getattr(node.target, "overloadpacket", None) in _PRODUCTS
        if not is_product or stamp_of(node).autocast:
            continue
        values = [n.meta.get("val") for n in node.all_input_nodes]
        types = dict.fromkeys(v.dtype for v in values if isinstance(v, torch.Tensor))
        if len(types) > 1:
            shown = " and ".join(str(t).removeprefix("torch.") for t in types)
            raise WrongCallError(
                f"{model} cannot be captured: {node.target} at {stamp_of(node).source} multiplies "
                f"{shown} tensors, and PyTorch multiplies equal types only. Convert one with "
                "x.to(w.dtype), or run the model under torch.autocast."
            )

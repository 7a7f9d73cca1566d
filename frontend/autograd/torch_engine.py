"""Adapter: the interface between programs and PyTorch's autograd engine.

It runs hooks where gradients arrive, detects batched cotangents (``is_grads_batched=True``), which
have no storage that kernels could read, and checks cotangents, saved tensors and gradients that
user code may have changed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...reuse.errors import PlanError
from ...reuse.ir.types import TensorType, Type, in_own_storage, reach
from ...reuse.torch_names import is_lazy, memory_id
from ..tracing.torch_state import TensorLayouts, plain_cotangent, why_watched

_MARK = "lazyinline"  # a key in the ``metadata`` of an autograd node


def have_hooks(tensors: Sequence[Tensor]) -> bool:
    """Returns whether a hook may run where gradients arrive at these tensors."""
    if any(t._backward_hooks or t._post_accumulate_grad_hooks for t in tensors):
        return True
    # The AccumulateGrad node of a tensor may have hooks, which PyTorch does not show. The node owns
    # the tensor and lives only while someone holds it: with a use count of 1, there is none.
    are_shared = any(t._use_count() != 1 for t in tensors)  # type: ignore[attr-defined]
    return are_shared and _are_held(tensors)


def _are_held(tensors: Sequence[Tensor]) -> bool:
    """Returns whether user code holds the AccumulateGrad node of one of these tensors."""
    # PyTorch makes a new node, without our mark, if nobody holds the old one.
    _mark(_receivers(tensors))
    return any([node.metadata.pop(_MARK, False) for node in _receivers(tensors)])


def _mark(nodes: Sequence[Any]) -> None:
    for node in nodes:
        node.metadata[_MARK] = True


def _receivers(tensors: Sequence[Tensor]) -> list[Any]:
    """Returns the autograd nodes that receive the gradients of these tensors."""
    with torch.inference_mode(False), torch.enable_grad():
        last = _Chain.apply(None, [], *tensors)
    # Before torch 2.13 a function's node is gone with its last result, which is held here.
    return [node for node, _ in last.grad_fn.next_functions if node] if last.grad_fn else []


def pass_through_autograd(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Sets ``.grad`` by PyTorch's own engine, so that hooks run as in one backward.

    Gradients arrive from the last parameter to the first, which a forward uses first; ``.grad``
    shares their memory unless a hook replaces it.
    """
    chain = _chain(parameters, gradients)
    if chain is not None:
        torch.autograd.backward(chain)


def _chain(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor | None:
    for parameter in parameters:
        if parameter.is_leaf:
            parameter.grad = None
    with torch.inference_mode(False), torch.enable_grad():
        chain = None
        for parameter, gradient in zip(parameters, gradients, strict=True):
            chain = _Chain.apply(chain, [gradient], parameter)
    return chain


class _Loss(torch.autograd.Function):
    """Ends a chain, and has the value of the loss."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, loss: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return torch.zeros((), device="cpu"), None


class _Chain(torch.autograd.Function):
    """Links a chain of nodes through which the engine visits one parameter after another."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor | None, gradients: list[Tensor], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        chain = cotangent if ctx.needs_input_grad[0] else None
        # A new tensor object, which the engine may store as `.grad` without a copy.
        return (chain, None, *(gradient.detach() for gradient in ctx.gradients))


def graph_is_kept() -> bool:
    """Returns whether the running backward was started with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def needed_edges(edges: Sequence[tuple[Any, int]]) -> tuple[int, ...]:
    """Returns which edges of a node the running backward will follow."""
    return tuple(i for i, (node, _) in enumerate(edges) if will_run(node))


def will_run(node: Any) -> bool:
    """Returns whether the running backward will execute a node."""
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised for the inputs of `torch.autograd.grad`, which it does reach
        return True


def are_batched(cotangents: Sequence[Tensor | None]) -> bool:
    """Returns whether some cotangents are a batch, as with ``is_grads_batched``."""
    of_batch = torch._C._functorch.is_legacy_batchedtensor
    return any(g is not None and of_batch(g) for g in cotangents)


@contextmanager
def outside_of_batch(cotangents: Sequence[Tensor | None]) -> Iterator[None]:
    """Leaves the vmap of batched cotangents, for code that does not depend on them."""
    if not are_batched(cotangents):
        yield
        return
    torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        torch._C._vmapmode_increment_nesting()


def current_backward() -> int:
    """Returns the number of the running backward."""
    return int(torch._C._current_graph_task_id())


def new_alias(result: Tensor) -> Tensor:
    """Returns a new tensor on the same storage, which autograd allows to be changed in-place.

    A view stays one, because autograd must refuse changes of a view that others share.
    """
    return result.view_as(result) if result._is_view() else result.detach()


def is_watched(tensor: Tensor) -> bool:
    """Returns whether a hook or ``retain_grad()`` observes the gradient of a result."""
    return tensor.retains_grad or bool(tensor._backward_hooks)


# ---- tensors that user code may have changed -----------------------------------------------------


def cotangent_like(type_: Type, gradient: Tensor | None = None) -> Tensor:
    """Returns a cotangent with the strides and dtype of a type, differentiably; zeros if None."""
    assert isinstance(type_, TensorType)
    if gradient is None:
        return type_.empty().zero_()
    # First, because a subclass would intercept the reads that follow.
    gradient = plain_cotangent(gradient)
    same = gradient.stride() == type_.stride and gradient.dtype == type_.dtype
    if same and not is_lazy(gradient):
        return gradient
    return type_.empty().copy_(gradient)


class GeneratorStates:
    """The present states of the random generators, of the CPU and further devices."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        # Each replay of a CUDA graph starts from another generator state.
        self._is_captured = bool(self._gpus) and torch.cuda.is_current_stream_capturing()
        gpus = () if self._is_captured else map(torch.cuda.get_rng_state, self._gpus)
        self._states = [torch.get_rng_state(), *gpus]

    def differ_from(self, others: GeneratorStates) -> bool:
        """Whether numbers were drawn between the two."""
        return not all(map(torch.equal, self._states, others._states))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Makes code inside draw the same numbers again, and restores the generators after it."""
        if self._is_captured:
            raise RuntimeError(
                "A CUDA graph captured a forward that draws random numbers: what it drew cannot be "
                "drawn again for its second derivative."
            )
        with torch.random.fork_rng(self._gpus):
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._gpus, self._states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


class Aliases:
    """Which tensors of a program share memory, learnt from the first run: it is always the same.

    ``roots`` are the bases of outputs, see :func:`flows.view_roots`; ``differentiable`` are the
    outputs that have a gradient.
    """

    def __init__(self, roots: Sequence[object], differentiable: Sequence[int]) -> None:
        self._roots = roots
        self._differentiable = frozenset(differentiable)
        # Outputs that share no element with an input or another returned output.
        self.owned: tuple[int, ...] | None = None
        # Outputs that are the same tensor object as an earlier one.
        self.repeated: tuple[int, ...] = ()
        # Inputs and outputs that share memory with a tensor that the backward needs. They are saved
        # as well, so that autograd detects in-place changes.
        self.guards: tuple[tuple[str, int], ...] = ()
        # Outputs that are views of an input or of another output, with their base.
        self.views: dict[int, tuple[str, int]] = {}

    def learn_forward(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        saved: Sequence[Tensor],
        kept: Sequence[int],
    ) -> None:
        """Learns from a forward, whose backward needs ``saved`` and the outputs ``kept``."""
        tensors = {("input", i): t for i, t in enumerate(inputs)}
        tensors |= {("output", i): t for i, t in enumerate(outputs)}
        memories = {place: memory_id(t) for place, t in tensors.items()}
        near = {
            i: {p: tensors[p] for p in tensors if memories[p] == memories["output", i]}
            for i in range(len(outputs))
        }
        for index, sharing in near.items():
            base = next((p for p in sharing if self._is_base(p, index, sharing)), None)
            if base is not None:
                self.views[index] = self.views.get(base[1], base) if base[0] == "output" else base
        returned = {p for p in tensors if p[0] == "input" or p[1] not in self.views}
        self.owned = tuple(
            i
            for i, sharing in near.items()
            if ("output", i) in returned
            and not any(
                _elements(sharing["output", i], t)[0]
                for p, t in sharing.items()
                if p in returned and p != ("output", i)
            )
        )
        known = [id(t) for t in outputs]
        self.repeated = tuple(i for i, key in enumerate(known) if known.index(key) != i)
        needed = {memory_id(t) for t in saved}
        needed |= {memories["output", i] for i in kept if i in self.views}
        self.guards = tuple(p for p, m in memories.items() if m in needed)

    def with_views(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the outputs, with each view made from its base by a PyTorch operator."""
        if not self.views:
            return outputs
        found = list(outputs)
        for index, (kind, place) in self.views.items():
            like = outputs[index]
            base = inputs[place] if kind == "input" else outputs[place]
            if index not in self._differentiable:
                base = base.detach()
            # Autograd then allows in-place changes of either, and knows that the other changes too.
            # It refuses them for views that are outputs of one ``torch.autograd.Function``.
            found[index] = base.as_strided(like.shape, like.stride(), like.storage_offset())
        return found

    def _is_base(
        self, place: tuple[str, int], index: int, sharing: Mapping[tuple[str, int], Tensor]
    ) -> bool:
        """Returns whether an output is a view of the tensor at a place, not the reverse."""
        kind, position = place
        base, view = sharing[place], sharing["output", index]
        root = position if kind == "input" else self._roots[position]
        if place == ("output", index) or root != self._roots[index] or base.dtype != view.dtype:
            return False
        trains = base.requires_grad if kind == "input" else position in self._differentiable
        if index in self._differentiable and not trains:
            return False
        _, is_whole = _elements(base, view)
        if kind == "output" and position > index and _elements(view, base)[1]:
            return False  # both have the same elements: the earlier one is the base
        return is_whole


def _elements(base: Tensor, view: Tensor) -> tuple[bool, bool]:
    """Returns whether some, and whether all elements of a view are elements of ``base``."""
    first = min(base.storage_offset(), view.storage_offset())
    ends = [t.storage_offset() + reach(t.shape, t.stride()) for t in (base, view)]
    if not base.numel() or not view.numel():
        return False, False
    mask = torch.zeros(max(ends) - first, dtype=torch.bool, device="cpu")
    mask.as_strided(base.shape, base.stride(), base.storage_offset() - first).fill_(True)
    found = mask.as_strided(view.shape, view.stride(), view.storage_offset() - first)
    # If elements of ``base`` overlap, it cannot serve as a base.
    is_plain = int(mask.sum()) == base.numel()
    return bool(found.any()), is_plain and bool(found.all())


class SavedTensors:
    """Checks saved tensors, and gives them the strides that a backward was compiled for."""

    def __init__(self, types: Sequence[TensorType]) -> None:
        self._types = types
        self._known: TensorLayouts | None = None

    def as_saved(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the tensors, with copies of those that have other strides; refuses all else."""
        if self._known is not None and self._known.same(tensors):
            return tensors
        watching, pairs = why_watched(tensors), zip(tensors, self._types, strict=True)
        found = [_as_saved(t, type_, watching and why_watched((t,))) for t, type_ in pairs]
        if all(map(operator.is_, found, tensors)):
            self._known = TensorLayouts(tensors)
        return found


def _as_saved(tensor: Tensor, type_: TensorType, watching: str) -> Tensor:
    same = (tensor.dtype, tensor.shape, tensor.device) == (type_.dtype, type_.shape, type_.device)
    if watching or not same:
        given = f"a {type(tensor).__name__}" if watching else f"{TensorType.of(tensor)}"
        raise PlanError(
            f"A hook on saved tensors gave back {given} on {tensor.device} for a saved {type_} on "
            f"{type_.device}, and a compiled backward reads memory as it was saved. Let unpack "
            "restore shape, type and device."
        )
    if tensor.stride() == type_.stride and not is_lazy(tensor):
        return tensor
    return type_.empty().copy_(tensor)


_grad_of = operator.attrgetter("grad")


def set_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Sets ``.grad`` of parameters where it is another tensor, and runs hooks."""
    # PyTorch's engine runs the hooks, so all gradients go through it.
    if have_hooks(parameters):
        pass_through_autograd(parameters, gradients)
        return
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is not gradient:
            parameter.grad = gradient


class HandedGradients:
    """The ``.grad`` tensors of parameters, on the memory to which a step writes its gradients.

    Parameters and gradients, the step's own tensors, are in the order of the parameters' first use.
    """

    def __init__(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        # In storages of their own, so that user code cannot reach the rest of the arena.
        self._handed = list(map(in_own_storage, gradients))
        self._layouts = TensorLayouts(self._handed)
        self._addresses = self._layouts.addresses(self._handed)
        self._given: list[Tensor | None] = []  # the ``.grad`` that the engine set

    def are_as_left(self) -> bool:
        """Returns whether each is still its parameter's ``.grad``, and no hook must run."""
        return self._are_held() and self.are_unmoved() and not have_hooks(self._parameters)

    def are_unmoved(self) -> bool:
        """Returns whether each still has its address and layout."""
        return (
            self._layouts.same(self._handed)
            and self._layouts.addresses(self._handed) == self._addresses
        )

    def are_of(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
        """Whether they are for these parameters, and on the memory of these gradients."""
        return (
            len(gradients) == len(self._handed)
            and all(map(operator.is_, parameters, self._parameters))
            and self._layouts.same(gradients)
            and self._layouts.addresses(gradients) == self._addresses
            and self.are_unmoved()
        )

    def hand_out(self) -> None:
        """Sets ``.grad`` of every parameter, and runs hooks."""
        set_gradients(self._parameters, self._handed)
        self._given = list(map(_grad_of, self._parameters))

    def as_graph_of(self, loss: Tensor) -> Tensor:
        """Returns a loss whose backward sets the gradients, for wrappers that need one."""
        self._given = []
        chain = _chain(self._parameters, self._handed)
        return loss if chain is None else _Loss.apply(chain, loss)

    def take_back(self, still_trained: Sequence[Tensor]) -> None:
        """Sets ``.grad`` to None where it is one of these gradients, except for some parameters."""
        kept = set(map(id, still_trained))
        given = self._given or self._handed
        for parameter, gradient in zip(self._parameters, given, strict=True):
            if id(parameter) not in kept and parameter.grad is gradient:
                parameter.grad = None

    def _are_held(self) -> bool:
        return all(map(operator.is_, map(_grad_of, self._parameters), self._handed))

"""Adapter: what a program and PyTorch's autograd engine hand each other, which others may change.

Hooks run where a gradient arrives. What autograd hands over in a batch (``is_grads_batched=True``)
has no memory of its own, which kernels would read: PyTorch takes such gradients. Cotangents, saved
tensors and gradients that were handed out may have been changed by others meanwhile.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...reuse.errors import PlanError
from ...reuse.ir.types import TensorType, Type, in_own_storage, reach
from ...reuse.torch_names import is_lazy, memory_id
from ..checks.torch_state import TensorLayouts, plain_cotangent, why_watched

_MARK = "lazyinline"  # under this name in the notes that PyTorch keeps for a node


def have_hooks(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether a hook may run where gradients arrive at these tensors."""
    if any(t._backward_hooks or t._post_accumulate_grad_hooks for t in tensors):
        return True
    # Whoever holds the node that adds to ``.grad`` may have put hooks on it, which PyTorch does not
    # show.
    # The node owns the tensor: of one that only its object in Python owns there is no node.
    are_shared = any(t._use_count() != 1 for t in tensors)  # type: ignore[attr-defined]
    return are_shared and _are_held(tensors)


def _are_held(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether somebody else holds a node that gradients of these tensors go to."""
    _mark(_receivers(tensors))
    return any([node.metadata.pop(_MARK, False) for node in _receivers(tensors)])


def _mark(nodes: Sequence[Any]) -> None:
    for node in nodes:
        node.metadata[_MARK] = True


def _receivers(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Returns the nodes that gradients of these tensors go to."""
    with torch.inference_mode(False), torch.enable_grad():
        end = _Chain.apply(None, [], *tensors).grad_fn
    return [node for node, _ in end.next_functions if node] if end else []


def pass_through_autograd(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> None:
    """Sets ``.grad`` by PyTorch's own engine, so that hooks run as in one backward.

    Gradients arrive from the last parameter to the first.

    Args:
        parameters: in the order in which a forward first uses them.
        gradients: of them; ``.grad`` shares their memory where no hook puts something else there.
    """
    chain = _chain(parameters, gradients)
    if chain is not None:
        torch.autograd.backward(chain)


def as_graph(
    loss: torch.Tensor, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Returns the loss with a graph, of which a backward gives parameters these gradients.

    Whatever stands around a forward and waits for its backward finds both. See
    :func:`pass_through_autograd`.
    """
    chain = _chain(parameters, gradients)
    return loss if chain is None else _Loss.apply(chain, loss)


def _chain(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    for parameter in parameters:
        if parameter.is_leaf:
            parameter.grad = None
    with torch.inference_mode(False), torch.enable_grad():
        chain = None
        for parameter, gradient in zip(parameters, gradients, strict=True):
            chain = _Chain.apply(chain, [gradient], parameter)
    return chain


class _Loss(torch.autograd.Function):
    """Ends a chain, with a loss for its value."""

    @staticmethod
    def forward(ctx: Any, chain: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.zeros((), device="cpu"), None


class _Chain(torch.autograd.Function):
    """Links a chain, by which the engine comes to one parameter after another."""

    @staticmethod
    def forward(
        ctx: Any, chain: torch.Tensor | None, gradients: list[torch.Tensor], *_: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        chain = cotangent if ctx.needs_input_grad[0] else None
        # A tensor of its own, which the engine may take for `.grad` as it is.
        return (chain, None, *(gradient.detach() for gradient in ctx.gradients))


def graph_is_kept() -> bool:
    """Returns whether the running backward was started with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def asked_inputs(edges: Sequence[tuple[Any, int]]) -> tuple[int, ...]:
    """Returns which edges the running backward goes on to, of those that lead from a node."""
    return tuple(i for i, (node, _) in enumerate(edges) if is_asked(node))


def is_asked(node: Any) -> bool:
    """Returns whether the running backward comes to a node."""
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # what `torch.autograd.grad` was called for, which PyTorch does not answer
        return True


def are_batched(cotangents: Sequence[torch.Tensor | None]) -> bool:
    """Returns whether some cotangents are a batch, as with ``is_grads_batched``."""
    of_batch = torch._C._functorch.is_legacy_batchedtensor
    return any(g is not None and of_batch(g) for g in cotangents)


@contextmanager
def outside_of_batch(cotangents: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """Runs what makes no use of cotangents once, and not for each row, where these are a batch."""
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


def renamed(result: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of its own in the same memory, so that autograd sees a change in place.

    That of a view, which others may share, autograd goes on refusing.
    """
    return result.view_as(result) if result._is_view() else result.detach()


def is_watched(tensor: torch.Tensor) -> bool:
    """Returns whether somebody sees the gradient of a result: a hook, or ``retain_grad()``."""
    return tensor.retains_grad or bool(tensor._backward_hooks)


# ---- tensors that others may have changed --------------------------------------------------------


def cotangent_like(type_: Type, gradient: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a cotangent in the layout of a type, differentiably; zeros if there is none."""
    assert isinstance(type_, TensorType)
    if gradient is None:
        return type_.empty().zero_()
    # First: a subclass would see the questions that follow.
    gradient = plain_cotangent(gradient)
    same = gradient.stride() == type_.stride and gradient.dtype == type_.dtype
    if same and not is_lazy(gradient):
        return gradient
    return type_.empty().copy_(gradient)


class GeneratorStates:
    """Holds the generators of random numbers as they are now.

    Args:
        devices: where numbers may be drawn, besides the CPU.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        # The numbers of a CUDA graph begin elsewhere in each replay.
        self._is_captured = bool(self._gpus) and torch.cuda.is_current_stream_capturing()
        gpus = () if self._is_captured else map(torch.cuda.get_rng_state, self._gpus)
        self._states = [torch.get_rng_state(), *gpus]

    def differ_from(self, others: GeneratorStates) -> bool:
        """Whether something was drawn between the two."""
        return not all(map(torch.equal, self._states, others._states))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within it the same numbers are drawn once more; later ones are as without."""
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
    """Holds which tensors of a program share memory: the same in every run, so the first tells.

    Args:
        roots: of each output, see :func:`flows.view_roots`.
        differentiable: the outputs that have a gradient.

    Attributes:
        owned: outputs whose elements are theirs alone among inputs and returned outputs.
        repeated: outputs that are the same tensor object as an earlier one.
        guards: inputs and outputs whose memory the backward needs under another name. They are
            saved with it, so that autograd notices a change in place.
        views: outputs that are views of an input or of another output, by PyTorch's operators.
    """

    def __init__(self, roots: Sequence[object], differentiable: Sequence[int]) -> None:
        self._roots = roots
        self._differentiable = frozenset(differentiable)
        self.owned: tuple[int, ...] | None = None
        self.repeated: tuple[int, ...] = ()
        self.guards: tuple[tuple[str, int], ...] = ()
        self.views: dict[int, tuple[str, int]] = {}

    def learn_forward(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor],
        kept: Sequence[int],
    ) -> None:
        """Looks at a forward. Its backward needs ``saved``, and of the outputs those ``kept``."""
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

    def with_views(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Returns the outputs, with views made of their bases by PyTorch."""
        if not self.views:
            return outputs
        found = list(outputs)
        for index, (kind, place) in self.views.items():
            like = outputs[index]
            base = inputs[place] if kind == "input" else outputs[place]
            if index not in self._differentiable:
                base = base.detach()
            # Made by PyTorch, so that a user may change either in place: autograd then knows that
            # the other changes, too. It refuses that for two outputs of one
            # ``torch.autograd.Function``.
            found[index] = base.as_strided(like.shape, like.stride(), like.storage_offset())
        return found

    def _is_base(
        self, place: tuple[str, int], index: int, sharing: Mapping[tuple[str, int], torch.Tensor]
    ) -> bool:
        """Returns whether an output is a view of what stands at a place, and not the reverse."""
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
            return False  # each is one of the other: the earlier is the base
        return is_whole


def _elements(base: torch.Tensor, view: torch.Tensor) -> tuple[bool, bool]:
    """Says whether some, and whether all elements of a view are in ``base``, in one memory."""
    first = min(base.storage_offset(), view.storage_offset())
    ends = [t.storage_offset() + reach(t.shape, t.stride()) for t in (base, view)]
    if not base.numel() or not view.numel():
        return False, False
    mask = torch.zeros(max(ends) - first, dtype=torch.bool, device="cpu")
    mask.as_strided(base.shape, base.stride(), base.storage_offset() - first).fill_(True)
    found = mask.as_strided(view.shape, view.stride(), view.storage_offset() - first)
    # Where elements of ``base`` overlap, no view can be called whole in it.
    is_plain = int(mask.sum()) == base.numel()
    return bool(found.any()), is_plain and bool(found.all())


class SavedTensors:
    """Gives saved tensors the layouts that a backward was compiled for."""

    def __init__(self, types: Sequence[TensorType]) -> None:
        self._types = types
        self._known: TensorLayouts | None = None

    def as_saved(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns the tensors, those that are laid out in another way copied.

        Raises:
            PlanError: for one of another shape, type, device, or of a class that sees operators.
        """
        if self._known is not None and self._known.same(tensors):
            return tensors
        found = [_as_saved(t, type_) for t, type_ in zip(tensors, self._types, strict=True)]
        if all(map(operator.is_, found, tensors)):
            self._known = TensorLayouts(tensors)
        return found


def _as_saved(tensor: torch.Tensor, type_: TensorType) -> torch.Tensor:
    watching = why_watched((tensor,))
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


class HandedGradients:
    """Tensors of the user's own on the memory that a step writes its gradients to.

    Args:
        parameters: in the order of ``gradients``, which is that of their first use.
        gradients: the step's own tensors.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        self._parameters = list(parameters)
        # In storages of their own, so that nothing reaches the rest of the arena through them.
        self._handed = list(map(in_own_storage, gradients))
        self._layouts = TensorLayouts(self._handed)
        self._addresses = self._layouts.addresses(self._handed)
        self._given: list[torch.Tensor | None] = []  # what the engine set ``.grad`` to

    def are_as_left(self) -> bool:
        """Returns whether each is still its parameter's ``.grad``, in place, with no hooks due."""
        return self._are_held() and self.lie_there_still() and not have_hooks(self._parameters)

    def lie_there_still(self) -> bool:
        """Returns whether each is laid out on the memory that it was made on."""
        return (
            self._layouts.same(self._handed)
            and self._layouts.addresses(self._handed) == self._addresses
        )

    def are_of(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> bool:
        """Whether they would be made again of these gradients, on the same memory."""
        return (
            len(gradients) == len(self._handed)
            and all(map(operator.is_, parameters, self._parameters))
            and self._layouts.same(gradients)
            and self._layouts.addresses(gradients) == self._addresses
            and self.lie_there_still()
        )

    def hand_out(self) -> None:
        """Sets ``.grad`` of every parameter that has another one, and has hooks run."""
        self._given = []
        # PyTorch's engine runs the hooks, so all gradients go through it.
        if have_hooks(self._parameters):
            pass_through_autograd(self._parameters, self._handed)
            self._given = list(map(_grad_of, self._parameters))
        elif not self._are_held():
            for parameter, gradient in zip(self._parameters, self._handed, strict=True):
                parameter.grad = gradient

    def as_graph_of(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns a loss whose backward hands the gradients out, for wrappers that need one."""
        self._given = []
        return as_graph(loss, self._parameters, self._handed)

    def take_back(self, still_trained: Sequence[torch.Tensor]) -> None:
        """Sets to None what these gradients are the ``.grad`` of, but for some parameters."""
        kept = set(map(id, still_trained))
        given = self._given or self._handed
        for parameter, gradient in zip(self._parameters, given, strict=True):
            if id(parameter) not in kept and parameter.grad is gradient:
                parameter.grad = None

    def _are_held(self) -> bool:
        return all(map(operator.is_, map(_grad_of, self._parameters), self._handed))

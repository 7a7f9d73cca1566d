"""Tensors that others may have changed: cotangents, saved tensors, gradients handed out."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch

from ...reuse.errors import PlanError
from ...reuse.ir.transfer import in_own_storage
from ...reuse.ir.types import TensorType, Type
from ...reuse.torch_names import is_lazy, memory_id
from ..checks.torch_state import TensorLayouts, plain_cotangent, why_watched
from .torch_engine import as_graph, have_hooks, pass_through_autograd


def cotangent_like(type_: Type, gradient: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a cotangent in the layout of a type, differentiably; zeros if there is none."""
    assert isinstance(type_, TensorType)
    if gradient is None:
        return torch.empty_strided(
            type_.shape, type_.stride, dtype=type_.dtype, device=type_.device
        ).zero_()
    # First: a subclass would see the questions that follow.
    gradient = plain_cotangent(gradient)
    same = gradient.stride() == type_.stride and gradient.dtype == type_.dtype
    if same and not is_lazy(gradient):
        return gradient
    target = torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device=type_.device)
    return target.copy_(gradient)


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
    ends = [
        t.storage_offset() + 1 + sum(s * (n - 1) for n, s in zip(t.shape, t.stride(), strict=True))
        for t in (base, view)
    ]
    if not base.numel() or not view.numel():
        return False, False
    mask = torch.zeros(max(ends) - first, dtype=torch.bool, device="cpu")
    mask.as_strided(base.shape, base.stride(), base.storage_offset() - first).fill_(True)
    found = mask.as_strided(view.shape, view.stride(), view.storage_offset() - first)
    # Where elements of ``base`` overlap, no view can be called whole in it.
    is_plain = int(mask.sum()) == base.numel()
    return bool(found.any()), is_plain and bool(found.all())


class SavedTensors:
    """Gives saved tensors the layouts that a backward was compiled for.

    Args:
        types: what it was compiled for.
    """

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
    made = torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device=type_.device)
    return made.copy_(tensor)


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

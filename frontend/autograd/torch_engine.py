"""Adapter: PyTorch's autograd engine: hooks where a gradient arrives, and cotangents in a batch.

What autograd hands over in a batch (``is_grads_batched=True``) has no memory of its own, which
kernels would read: a backward runs once for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...reuse.errors import PlanError

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


Backward = Callable[[Sequence[torch.Tensor | None], int], Sequence[torch.Tensor | None]]
"""Takes cotangents, and how many more will follow; returns gradients."""


def are_batched(cotangents: Sequence[torch.Tensor | None]) -> bool:
    """Returns whether some cotangents are a batch, as with ``is_grads_batched``."""
    of_batch = torch._C._functorch.is_legacy_batchedtensor
    return any(g is not None and of_batch(g) for g in cotangents)


def one_by_one(run: Backward, cotangents: Sequence[torch.Tensor | None]) -> list[Any]:
    """Runs a backward for each row of a batch of cotangents; returns gradients in a batch.

    Raises:
        PlanError: if they are to be differentiated in their turn.
    """
    if torch.is_grad_enabled():
        raise PlanError(
            "Gradients in a batch (is_grads_batched=True, vectorize=True) of a compiled module "
            "cannot be differentiated again. Ask for them one by one, or use "
            "lazyinline.func.jacobian."
        )
    of_batch: Any = torch._C._functorch.is_legacy_batchedtensor
    with _outside_of_batch() as level:
        batched = [g for g in cotangents if g is not None and of_batch(g)]
        size = max(len(torch._remove_batch_dim(g, level, 1, 0)) for g in batched)
        wholes = [
            None if g is None else torch._remove_batch_dim(g, level, size, 0) for g in cotangents
        ]
        rows = [
            run([None if g is None else g[i] for g in wholes], size - 1 - i) for i in range(size)
        ]
        columns = list(zip(*rows, strict=True))
        found = [None if column[0] is None else torch.stack(column) for column in columns]
    return [None if g is None else torch._add_batch_dim(g, 0, level) for g in found]


@contextmanager
def _outside_of_batch() -> Iterator[int]:
    """Yields the level of the batch; operators inside are of none."""
    level = torch._C._vmapmode_decrement_nesting() + 1
    try:
        yield level
    finally:
        torch._C._vmapmode_increment_nesting()

"""Adapter: cotangents that autograd hands over in a batch (``is_grads_batched=True``).

They have no memory of their own, which kernels would read: a backward runs once for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...reuse.errors import PlanError

Backward = Callable[[Sequence[torch.Tensor | None], int], Sequence[torch.Tensor | None]]
"""Takes cotangents, and how many more will follow; returns gradients."""


def are_batched(cotangents: Sequence[torch.Tensor | None]) -> bool:
    """Whether some cotangents stand for a batch of them."""
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

"""Compares a compiled model with eager PyTorch: outputs, gradients, buffers, what was shared."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import lazyinline
from lazyinline import CompiledModule
from lazyinline.reuse import torch_pytree

# float64 on both sides; only the order of sums may differ.
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Outcome:
    """What a compile decided, and the compiled model."""

    compiled: CompiledModule
    shared: int
    reasons: tuple[str, ...]


def assert_equals_eager(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    calls: int = 2,
    reference: nn.Module | None = None,
    tolerance: float = TOLERANCE,
) -> Outcome:
    """Runs a model compiled with eager kernels and a copy of it in PyTorch; all must be equal.

    Args:
        model: the model, compiled in place.
        args: positional inputs; those that require grad get one.
        kwargs: keyword inputs.
        calls: how often both run, so that state carried from call to call is compared.
        reference: the model to run in PyTorch; a deep copy unless given.
        tolerance: relative and absolute.
    """
    reference = copy.deepcopy(model) if reference is None else reference
    compiled = lazyinline.compile(model, backend="eager")
    for call in range(calls):
        expected = _run(reference, args, kwargs or {}, seed=call)
        found = _run(compiled, args, kwargs or {}, seed=call)
        for what, ours, theirs in zip(_PARTS, found, expected, strict=True):
            _assert_same(ours, theirs, f"call {call}: {what}", tolerance)
        _assert_same(_state(compiled), _state(reference), f"call {call}: state", tolerance)
    decisions = compiled.last_report.decisions
    shared = sum(d.shared for d in decisions)
    return Outcome(compiled, shared, tuple(d.reason for d in decisions if d.reason))


_PARTS = ("outputs", "inputs after the call", "gradients of inputs")


def _run(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], seed: int) -> Any:
    leaves, spec = torch_pytree.flatten((tuple(args), kwargs))
    copies: dict[int, torch.Tensor] = {}
    fresh = [_copy(x, copies) if isinstance(x, torch.Tensor) else x for x in leaves]
    inputs, keywords = torch_pytree.unflatten(fresh, spec)
    torch.manual_seed(seed)
    output = model(*inputs, **keywords)
    tensors = [t for t in torch_pytree.flatten(output)[0] if isinstance(t, torch.Tensor)]
    losses = [_weigh(t) for t in tensors if t.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    given = [x for x in fresh if isinstance(x, torch.Tensor)]
    gradients = [x.grad for x in copies.values()]
    return output, [x.detach() for x in given], gradients


def _copy(tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """Copies an input; one that is passed twice stays one tensor."""
    if id(tensor) not in copies:
        copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copies[id(tensor)]


def _weigh(tensor: torch.Tensor) -> torch.Tensor:
    """A loss that tells every element apart."""
    weights = torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64)
    return (tensor.double().reshape(-1) * weights).sum()


def _state(model: nn.Module) -> dict[str, Any]:
    gradients = {f"{n}.grad": p.grad for n, p in model.named_parameters()}
    tensors = {n: t.detach() for n, t in model.state_dict().items()}
    return {**tensors, **gradients}


def _assert_same(ours: Any, theirs: Any, what: str, tolerance: float) -> None:
    left, left_spec = torch_pytree.flatten(ours)
    right, right_spec = torch_pytree.flatten(theirs)
    assert left_spec == right_spec, f"{what}: another structure"
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        where = f"{what}, leaf {index}"
        assert type(a) is type(b), f"{where}: {type(a)} instead of {type(b)}"
        if isinstance(a, torch.Tensor):
            assert a.requires_grad == b.requires_grad, f"{where}: requires_grad"
            assert a.stride() == b.stride(), f"{where}: layout"
            torch.testing.assert_close(
                a, b, rtol=tolerance, atol=tolerance, msg=lambda m, where=where: f"{where}: {m}"
            )
        else:
            assert a is b or a == b, f"{where}: {a!r} instead of {b!r}"

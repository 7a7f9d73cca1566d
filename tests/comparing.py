"""Comparing a model that lazyinline compiled with the same model run by PyTorch."""

import copy
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lazyinline.reuse import torch_pytree

Model = TypeVar("Model", bound=nn.Module)

# Float32 kernels that add up in another order differ by about 1e-6 in norm; a wrong gradient
# differs by 1e-2 and more.
TOLERANCE = 1e-5


def twin(model: Model) -> Model:
    """Returns a copy that shares nothing, for eager PyTorch to run."""
    return copy.deepcopy(model)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns ||actual - expected|| / ||expected||."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = torch.linalg.vector_norm((actual.to(wide) - expected.to(wide)).flatten()).item()
    if difference == 0:
        return 0.0
    size = torch.linalg.vector_norm(expected.to(wide).flatten()).item()
    return difference / size if size else math.inf


def assert_close(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Compares results: tensors norm-wise and in layout, everything else exactly."""
    leaves, spec = torch_pytree.flatten(actual)
    wanted, wanted_spec = torch_pytree.flatten(expected)
    assert spec == wanted_spec
    for leaf, want in zip(leaves, wanted, strict=True):
        if not isinstance(want, Tensor):
            assert type(leaf) is type(want)
            assert leaf == want
            continue
        assert type(leaf) is type(want), f"{type(leaf)} and not {type(want)}"
        assert (leaf.dtype, leaf.shape, leaf.stride()) == (want.dtype, want.shape, want.stride())
        assert leaf.requires_grad == want.requires_grad
        error = relative_error(leaf.detach(), want.detach())
        assert error <= tolerance, f"relative error {error:.1e}"


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def gradient_errors(
    actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> dict[str, float]:
    """Returns the error of each gradient; one on one side only is infinitely wrong."""
    assert actual.keys() == expected.keys()
    errors = {}
    for name, want in expected.items():
        have = actual[name]
        if have is None or want is None:
            errors[name] = 0.0 if have is want else math.inf
        else:
            assert have.dtype == want.dtype
            errors[name] = relative_error(have, want)
    return errors


def assert_same_gradients(
    model: nn.Module, expected: nn.Module, tolerance: float = TOLERANCE
) -> None:
    """Every gradient equals, and where one model has none, the other has none either."""
    found = gradient_errors(gradients(model), gradients(expected))
    wrong = {name: error for name, error in found.items() if not error <= tolerance}
    assert not wrong, f"gradients differ: {wrong}"
    assert any(parameter.grad is not None for parameter in expected.parameters())


def assert_same_buffers(model: nn.Module, expected: nn.Module) -> None:
    buffers = dict(model.named_buffers())
    for name, want in expected.named_buffers():
        assert_close(buffers[name], want)

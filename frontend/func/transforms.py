"""``grad``, ``vjp``, ``jvp`` and ``hvp``: as in ``torch.func``, compiled, and to any order.

Each is written with ``torch.autograd.grad``, which a capture records: inside a model, or inside one
another, they become calls of derivatives, which are made once per different block. Arguments may be
nested.

Derivatives along directions have three modes with the same results. Taylor mode runs the function
once, with all coefficients of all directions; forward mode is its first order. Reverse mode
differentiates once more for each order. The first two need a capture; if PyTorch runs the function,
reverse mode is used.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...autodiff.forward_mode.jets import Series
from ...reuse.errors import PlanError, door
from ..compiled_module import compile
from ..tracing.gradients import (
    Argnums,
    Function,
    gradient_and_result,
    gradients,
    in_place_of,
    like,
    renamed,
    scalar,
    tensors_in,
)
from ..tracing.torch_tracing import follower

TaylorMode = Literal["auto", "taylor", "reverse"]
ForwardMode = Literal["auto", "forward", "reverse"]
Mode = TaylorMode | ForwardMode


def mode_taken(
    what: str, mode: Mode, along: Literal["taylor", "forward"], *, passes: int, passes_back: int
) -> str:
    """Returns the mode in which a derivative is computed: ``along`` directions or ``"reverse"``.

    ``passes`` says how often the linear maps of the function run along directions, ``passes_back``
    how often in reverse mode; the user's ``"auto"`` takes the mode with fewer.
    """
    if mode not in ("auto", along, "reverse"):
        raise PlanError(f"{what}: mode {mode!r} is none of auto, {along}, reverse.")
    watcher: Any = follower()
    # The modes along directions need a capture.
    if watcher is None or mode == "reverse":
        return "reverse"
    if mode == along:
        return along
    # By passes, which are known in advance; to compare costs, both would have to be made.
    is_along = passes <= passes_back
    few, many = (passes, passes_back) if is_along else (passes_back, passes)
    taken = along if is_along else "reverse"
    return watcher.open_mode(what, taken, f"{few} passes against {many}")


def taylor(result: Tensor, points: Tensor, directions: Tensor, series: Series) -> Tensor:
    """Returns the highest derivatives of a result along directions ``[K, *points.shape]``.

    They are ``[K, *result.shape]``, or if the series is collapsed their sum, ``[*result.shape]``.
    """
    watcher: Any = follower()
    ((*_, highest),) = watcher.series([result], [points], [directions], series)
    return highest * math.factorial(series.order)


_PASSES_OF_PRODUCT = 4
"""The function and its gradient, and a second pass of each: of tangents, or backward."""


@door
def grad(func: Function, argnums: Argnums = 0, has_aux: bool = False) -> nn.Module:
    """Returns a function that computes the gradient of one that returns a scalar.

    The signature is that of ``torch.func.grad``. The result is compiled at its first call, like a
    module by :func:`lazyinline.compile`; inside a model or another derivative it becomes part of
    that.

    Args:
        func: a function or a module; its result is a scalar.
        argnums: the positions of the arguments to differentiate by, one or several.
        has_aux: ``func`` returns ``(scalar, more)``, and the result is ``(gradient, more)``.

    Returns:
        A module with the arguments and the parameters of ``func``.

    Raises:
        PlanError: at a call, if ``func`` returns no scalar.

    Example:
        >>> slope = lazyinline.func.grad(lambda x: (x.sin() ** 2).sum())
        >>> curvature = lazyinline.func.grad(lambda x: slope(x).sum())
    """
    return compiled(Gradient(func, argnums, has_aux=has_aux))


def compiled(module: nn.Module) -> nn.Module:
    """Returns a module whose calls run a compiled program."""
    return compile(module, in_place=True)


class Gradient(nn.Module):
    """Computes the gradient of a function with a scalar result; see :func:`grad`."""

    def __init__(self, func: Function, argnums: Argnums, *, has_aux: bool) -> None:
        super().__init__()
        self.func = func
        self._argnums = argnums
        self._has_aux = has_aux

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the gradient, in the structure of the arguments."""
        found, result = gradient_and_result(
            self.func,
            self._argnums,
            args,
            kwargs,
            value_of=lambda result: scalar(result[0] if self._has_aux else result, "grad"),
        )
        return (found, result[1]) if self._has_aux else found


@door
def vjp(func: Function, *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Returns a function's result, and a function from its cotangent to those of the arguments.

    The signature is that of ``torch.func.vjp``. It runs ``func`` at once: compiled if ``func`` is a
    compiled module, or if this runs inside a compiled model.

    Args:
        func: a function or a module.
        primals: its arguments, trees of tensors.
        has_aux: ``func`` returns ``(result, more)``; the result is then
            ``(result, vjp_fn, more)``.

    Example:
        >>> value, back = lazyinline.func.vjp(compiled, x)
        >>> (slope,) = back(torch.ones_like(value))
    """
    goes_on = torch.is_grad_enabled()
    with torch.enable_grad():
        given, inputs = renamed(primals)
        result = func(*given)
    value, more = result if has_aux else (result, None)
    outputs = tensors_in(value, "the result of vjp's function")

    def back(*cotangents: Any) -> tuple[Any, ...]:
        seeds = tensors_in(cotangents if len(cotangents) > 1 else cotangents[0], "a cotangent")
        # The caller may differentiate further, even if grad mode was off when the function ran.
        goes_further = goes_on or torch.is_grad_enabled()
        with torch.enable_grad():
            found = gradients(outputs, inputs, seeds, goes_on=goes_further)
        return tuple(in_place_of(given, inputs, found))

    shown = value if goes_on else like(value, [y.detach() for y in outputs])
    return (shown, back, more) if has_aux else (shown, back)


@door
def jvp(
    func: Function, primals: tuple[Any, ...], tangents: tuple[Any, ...], *, has_aux: bool = False
) -> tuple[Any, ...]:
    """Returns a function's result, and its derivative along tangents.

    The signature is that of ``torch.func.jvp``. It runs at once; see :func:`vjp`. Inside a compiled
    model, tangents are computed along with the values; otherwise by two reverse derivatives, the
    second one of the first, which is linear in its cotangent.

    Args:
        func: a function or a module.
        primals: its arguments, trees of tensors.
        tangents: one for each, in the same structure.
        has_aux: ``func`` returns ``(result, more)``; the result is then
            ``(result, derivative, more)``.
    """
    goes_on = torch.is_grad_enabled()
    directions = _matching(primals, tangents)
    with torch.enable_grad():
        rows = [direction.unsqueeze(0) for direction in directions]  # before: see `tangents_of`
        given, inputs = renamed(primals)
        result = func(*given)
        value, more = result if has_aux else (result, None)
        outputs = tensors_in(value, "the result of jvp's function")
        found = [t.squeeze(0) for t in tangents_of(outputs, inputs, _of(given, inputs, rows))]
    found = found if goes_on else [tangent.detach() for tangent in found]
    derivative = like(value, found)
    shown = value if goes_on else like(value, [y.detach() for y in outputs])
    return (shown, derivative, more) if has_aux else (shown, derivative)


def tangents_of(outputs: list[Tensor], inputs: list[Tensor], rows: list[Tensor]) -> list[Tensor]:
    """Returns the derivative of each output, ``[K, *output.shape]``, along K directions.

    The directions of each input are ``[K, *input.shape]``. If they were made before the outputs, a
    capture computes outputs and tangents together.
    """
    watcher = follower()
    if watcher is not None:
        series = watcher.series(outputs, inputs, rows, Series(1, len(rows[0])))
        return [tangents for (tangents,) in series]
    # Reverse mode twice: the gradient is linear in its cotangent, so its derivative by the
    # cotangent, applied to a direction, is the product with that direction.
    seeds = [torch.zeros_like(y).requires_grad_() for y in outputs]
    linear = gradients(outputs, inputs, seeds, goes_on=True)
    along = [gradients(linear, seeds, list(row), goes_on=True) for row in zip(*rows, strict=True)]
    return [torch.stack(tangents) for tangents in zip(*along, strict=True)]


@door
def hvp(func: Function, inputs: Any, v: Any, *, mode: ForwardMode = "auto") -> tuple[Tensor, Any]:
    """Returns a function's scalar result, and the product of its Hessian with a vector.

    The signature is that of ``torch.autograd.functional.hvp``. It runs at once; see :func:`vjp`.

    Args:
        func: a function or a module with a scalar result.
        inputs: its argument, or a tuple of several, trees of tensors.
        v: the vector, in the same structure.
        mode: ``"forward"`` computes the tangent of the gradient, ``"reverse"`` the gradient of the
            gradient; ``"auto"`` is forward, or reverse if forward mode is not supported.
            If the function runs eagerly, it is always reverse mode.

    Raises:
        PlanError: if ``func`` returns no scalar, or ``v`` differs in structure from ``inputs``.

    Example:
        >>> class Product(nn.Module):
        ...     def forward(self, x, v):
        ...         return lazyinline.func.hvp(model, x, v)[1]
        >>> product = lazyinline.compile(Product())
    """
    primals = inputs if isinstance(inputs, tuple) else (inputs,)
    directions = _matching(primals, v if isinstance(v, tuple) else (v,))
    goes_on = torch.is_grad_enabled()
    with torch.enable_grad():
        rows = [direction.unsqueeze(0) for direction in directions]  # before: see `tangents_of`
        given, names = renamed(primals)
        value = scalar(func(*given), "hvp")
        first = gradients([value], names, None, goes_on=True)
        along = _of(given, names, rows)
        products = [
            p.squeeze(0) for p in along_gradients(first, names, along, mode, goes_on=goes_on)
        ]
        found = in_place_of(given, names, [p if goes_on else p.detach() for p in products])
    shown = value if goes_on else value.detach()
    return shown, found if isinstance(inputs, tuple) else found[0]


def along_gradients(
    first: list[Tensor],
    inputs: list[Tensor],
    rows: list[Tensor],
    mode: ForwardMode,
    *,
    goes_on: bool,
) -> list[Tensor]:
    """Returns the derivative of gradients along K directions: products with a Hessian.

    Directions, made before the gradients (see :func:`tangents_of`), and products of each input are
    ``[K, *input.shape]``; ``goes_on`` says whether products can themselves be differentiated.
    """
    passes = {"passes": _PASSES_OF_PRODUCT, "passes_back": _PASSES_OF_PRODUCT}
    if mode_taken("product with a Hessian", mode, "forward", **passes) == "forward":
        return tangents_of(first, inputs, rows)
    along = [
        gradients(first, inputs, list(row), goes_on=goes_on) for row in zip(*rows, strict=True)
    ]
    return [torch.stack(products) for products in zip(*along, strict=True)]


def _matching(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> list[Tensor]:
    """Returns the tangents, flat; raises PlanError if shapes differ from those of the primals."""
    points, directions = tensors_in(primals, "primals"), tensors_in(tangents, "tangents")
    shapes, others = [tuple(p.shape) for p in points], [tuple(d.shape) for d in directions]
    if shapes != others:
        raise PlanError(f"There has to be a tangent for each primal: {shapes}, not {others}.")
    return directions


def _of(tree: Any, inputs: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
    """Returns the directions of the leaves to differentiate by."""
    leaves = tensors_in(tree, "primals")
    found = {id(x): d for x, d in zip(leaves, directions, strict=True)}
    return [found[id(x)] for x in inputs]

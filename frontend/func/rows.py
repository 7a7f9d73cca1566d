"""``jacobian`` and ``hessian``: rows that are computed where they are asked for, and remembered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...reuse.errors import PlanError
from .arguments import Function, chosen, renamed, with_chosen
from .transforms import Gradient, compiled, gradients, tangents_of

Index = int | slice


def jacobian(func: Function, argnums: int = 0) -> Callable[..., Jacobian]:
    """Returns a function that gives the Jacobian of one, lazily.

    The signature is that of ``torch.func.jacrev``. What comes back is no tensor but computes what
    it is asked for: see :class:`Jacobian`.

    Args:
        func: a function or a module that returns a tensor.
        argnums: with respect to which argument, a tensor.

    Example:
        >>> J = lazyinline.func.jacobian(model)(x)
        >>> J[0], J[0, 1], J @ v, J.dense()
    """
    rows = compiled(_Rows(func, argnums))
    along = compiled(_Along(func, argnums))

    def at(*args: Any, **kwargs: Any) -> Jacobian:
        (point,) = chosen(args, argnums)
        with torch.no_grad():
            shape = func(*args, **kwargs).shape
        return Jacobian(
            lambda cotangent: rows(cotangent, *args, **kwargs),
            lambda tangent: along(tangent, *args, **kwargs),
            tuple(shape),
            tuple(point.shape),
            like=point,
        )

    return at


def hessian(func: Function, argnums: int = 0) -> Callable[..., Jacobian]:
    """Returns a function that gives the Hessian of one with a scalar result, lazily.

    The signature is that of ``torch.func.hessian``; for what comes back see :class:`Jacobian`. A
    row, and the product with a vector, cost two derivatives, whatever the number of rows.

    Args:
        func: a function or a module that returns a scalar.
        argnums: with respect to which argument, a tensor.

    Example:
        >>> H = lazyinline.func.hessian(lambda x: (x**4).sum())(x)
        >>> H[3], H.diagonal(), H @ v
    """
    # Only the whole is compiled: the gradient inside becomes a part of it.
    rows = compiled(_Rows(Gradient(func, argnums, has_aux=False), argnums))

    def at(*args: Any, **kwargs: Any) -> Jacobian:
        (point,) = chosen(args, argnums)
        shape = tuple(point.shape)

        def product(vector: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = rows(vector, *args, **kwargs)
            return found

        return Jacobian(product, product, shape, shape, like=point)

    return at


class Jacobian:
    """The derivative of each result by each input, at one point; each row is computed once.

    ``J[i]`` is the row of result ``i``, ``J[i, j]`` an entry of it, and indices may be slices;
    ``J @ v`` is the product with a tensor of the input's shape, ``v @ J`` that with one of the
    result's, neither of which computes a row; ``J.diagonal()`` computes all rows once;
    ``J.dense()`` is the whole, of shape ``(*result, *input)``.

    Attributes:
        shape: of the whole.
    """

    def __init__(
        self,
        row: Callable[[torch.Tensor], torch.Tensor],
        along: Callable[[torch.Tensor], torch.Tensor],
        result_shape: tuple[int, ...],
        input_shape: tuple[int, ...],
        *,
        like: torch.Tensor,
    ) -> None:
        self._row = row
        self._along = along
        self._result_shape = result_shape
        self._input_shape = input_shape
        self._like = like
        self._rows: dict[int, torch.Tensor] = {}

    @property
    def shape(self) -> torch.Size:
        """The result's sizes, then the input's."""
        return torch.Size((*self._result_shape, *self._input_shape))

    @property
    def num_rows(self) -> int:
        """One for each number in the result."""
        return math.prod(self._result_shape)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Returns a part, of which only the rows are computed that it needs.

        Raises:
            IndexError: if there is no such row.
        """
        places = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(place, (int, slice)) for place in places):
            raise IndexError("A Jacobian is indexed by integers and slices; see J.dense().")
        if len(places) > len(self.shape):
            raise IndexError(f"{len(places)} indices for a Jacobian of shape {tuple(self.shape)}.")
        of_result = places[: len(self._result_shape)]
        of_input = places[len(self._result_shape) :]
        numbers = torch.arange(self.num_rows, device="cpu").reshape(self._result_shape)[of_result]
        rows = self._stacked(numbers.flatten().tolist())
        part = rows.reshape(*numbers.shape, *self._input_shape)
        return part[(*[slice(None)] * numbers.dim(), *of_input)]

    def __matmul__(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the product with a tensor of the input's shape: the derivative along it.

        Raises:
            PlanError: if the shape is another one.
        """
        self._check(vector, self._input_shape, "J @ v")
        return self._along(vector)

    def __rmatmul__(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the product of a tensor of the result's shape with this.

        Raises:
            PlanError: if the shape is another one.
        """
        self._check(vector, self._result_shape, "v @ J")
        return self._row(vector)

    def diagonal(self) -> torch.Tensor:
        """Returns the derivative of each result by the input at its place.

        Raises:
            PlanError: if result and input differ in shape.
        """
        if self._result_shape != self._input_shape:
            raise PlanError(
                f"Only a square Jacobian has a diagonal; this is {self._result_shape} by "
                f"{self._input_shape}."
            )
        entries = [self._at(i).flatten()[i] for i in range(self.num_rows)]
        return torch.stack(entries).reshape(self._result_shape)

    def dense(self) -> torch.Tensor:
        """Returns the whole as a tensor."""
        return self._stacked(range(self.num_rows)).reshape(self.shape)

    def _stacked(self, numbers: Sequence[int]) -> torch.Tensor:
        if not numbers:
            return self._like.new_empty((0, *self._input_shape))
        return torch.stack([self._at(number) for number in numbers])

    def _at(self, number: int) -> torch.Tensor:
        """Returns one row, computed at its first use."""
        if number not in self._rows:
            unit = self._like.new_zeros(self.num_rows)
            unit[number] = 1
            self._rows[number] = self._row(unit.reshape(self._result_shape))
        return self._rows[number]

    @staticmethod
    def _check(vector: torch.Tensor, shape: tuple[int, ...], what: str) -> None:
        if tuple(vector.shape) != shape:
            raise PlanError(f"{what} takes a vector of shape {shape}, not {tuple(vector.shape)}.")


class _Rows(nn.Module):
    """A cotangent times the Jacobian."""

    def __init__(self, func: Function, argnums: int) -> None:
        super().__init__()
        self.func = func
        self._argnums = argnums

    def forward(self, cotangent: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns it, in the input's shape."""
        goes_on = torch.is_grad_enabled()
        with torch.enable_grad():
            given, inputs = renamed(chosen(args, self._argnums))
            result = self.func(*with_chosen(args, self._argnums, given), **kwargs)
            (found,) = gradients([result], inputs, [cotangent], goes_on=goes_on)
        return found


class _Along(nn.Module):
    """The Jacobian times a tangent."""

    def __init__(self, func: Function, argnums: int) -> None:
        super().__init__()
        self.func = func
        self._argnums = argnums

    def forward(self, tangent: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns it, in the result's shape."""
        goes_on = torch.is_grad_enabled()
        with torch.enable_grad():
            row = tangent.unsqueeze(0)
            given, inputs = renamed(chosen(args, self._argnums))
            result = self.func(*with_chosen(args, self._argnums, given), **kwargs)
            (found,) = tangents_of([result], inputs, [row])
        return found if goes_on else found.detach()

"""``jacobian`` and ``hessian``: rows are computed on demand, and kept.

A Jacobian ``J`` at a point is computed by two kinds of products: a cotangent times ``J`` (a row, in
reverse mode), and ``J`` times several tangents at once (columns, in forward mode). A Hessian is a
symmetric Jacobian, so one of the two suffices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from ...reuse.errors import PlanError, door
from ..autograd.torch_engine import GeneratorStates
from ..tracing.gradients import Function, chosen, gradients, renamed, scalar, with_chosen
from ..tracing.torch_tracing import follower
from .transforms import ForwardMode, along_gradients, compiled, tangents_of

LinearMap = Callable[[torch.Tensor], torch.Tensor]
"""Takes directions to their product with a derivative."""


@dataclass(frozen=True)
class Computed:
    """The result of a function, with an autograd graph to its point.

    ``goes_on`` says whether derivatives can themselves be differentiated.
    """

    result: torch.Tensor
    point: torch.Tensor
    goes_on: bool

    def to(self, derive: Derive) -> LinearMap:
        """Returns a function that computes a product; differentiable if ``goes_on``."""

        def product(directions: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                found = derive(self, directions)
            return found if self.goes_on else found.detach()

        return product


Compute = Callable[[Function, int, Sequence[Any], Mapping[str, Any]], Computed]
"""Runs a function, to be differentiated by one of its arguments."""
Derive = Callable[[Computed, torch.Tensor], torch.Tensor]
"""Computes a product from a computed result and directions."""


def computed(
    func: Function, argnums: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Computed:
    """Runs a function, to be differentiated by one of its arguments."""
    goes_on = torch.is_grad_enabled()
    with torch.enable_grad():
        given, (point,) = renamed(chosen(args, argnums))
        return Computed(func(*with_chosen(args, argnums, given), **kwargs), point, goes_on)


def computed_gradient(
    func: Function, argnums: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Computed:
    """Runs a function with a scalar result and its backward, to differentiate the gradient."""
    one = computed(func, argnums, args, kwargs)
    with torch.enable_grad():
        value = scalar(one.result, "hessian")
        (gradient,) = gradients([value], [one.point], None, goes_on=True)
    return replace(one, result=gradient)


class Product(nn.Module):
    """Runs a function and computes a product with its Jacobian."""

    def __init__(self, func: Function, argnums: int, compute: Compute, derive: Derive) -> None:
        super().__init__()
        self.func = func
        self._argnums = argnums
        self._compute = compute
        self._derive = derive

    def forward(self, directions: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the product."""
        # Before the function runs: see `tangents_of`.
        given = directions.clone()
        return self._compute(self.func, self._argnums, args, kwargs).to(self._derive)(given)


def at_once(make: Callable[[], nn.Module]) -> Callable[..., torch.Tensor]:
    """Returns a function that uses one program for each number of directions."""
    # Otherwise the number of directions would become a symbolic size, which Taylor mode lacks.
    made = cache(lambda num: make())
    return lambda directions, *args, **kwargs: made(len(directions))(directions, *args, **kwargs)


def cotangent_product(at: Computed, cotangent: torch.Tensor) -> torch.Tensor:
    """Returns a cotangent times the Jacobian, in the input's shape."""
    (found,) = gradients([at.result], [at.point], [cotangent], goes_on=at.goes_on)
    return found


def tangent_products(at: Computed, tangents: torch.Tensor) -> torch.Tensor:
    """Returns the Jacobian times tangents: ``[K, *result]`` of ``[K, *input]``."""
    (found,) = tangents_of([at.result], [at.point], [tangents])
    return found


def hessian_products(at: Computed, tangents: torch.Tensor, *, mode: ForwardMode) -> torch.Tensor:
    """Returns the Hessian times tangents: ``[K, *input]`` of ``[K, *input]``."""
    (found,) = along_gradients([at.result], [at.point], [tangents], mode, goes_on=at.goes_on)
    return found


class SameDraws:
    """Makes all products at one point draw the same random numbers, as of one function."""

    def __init__(self, device: torch.device) -> None:
        self.devices = [device] if device.type == "cuda" else []
        self._start: GeneratorStates | None = None
        self._has_drawn = False

    def among(self, product: LinearMap) -> LinearMap:
        """Returns a product that draws the same numbers as the others."""
        return lambda directions: self._run(product, directions)

    def _run(self, product: LinearMap, directions: torch.Tensor) -> torch.Tensor:
        if self._start is None:
            before = GeneratorStates(self.devices)
            found = product(directions)
            # If nothing is drawn, later products need not restore the generators.
            self._has_drawn = before.differ_from(GeneratorStates(self.devices))
            self._start = before
            return found
        if not self._has_drawn:
            return product(directions)
        # Starts with the generators of the first product, and restores the present ones after.
        with self._start.again():
            return product(directions)


Index = int | slice

_MOST_AT_ONCE = 64
"""The most directions per run of a function, because each needs memory for its results."""

_WORTH = 4  # a group of columns costs about as much as a quarter of its rows one by one

_BACK = 3  # a row of a Jacobian costs about as much as three columns


@door
def jacobian(func: Function, argnums: int = 0) -> Callable[..., Jacobian]:
    """Returns a function that returns the Jacobian of another one, lazily.

    The signature is that of ``torch.func.jacrev``. The result is not a tensor, but a
    :class:`Jacobian`, which computes its parts on demand.

    Args:
        func: a function or a module that returns a tensor.
        argnums: the position of the argument to differentiate by, a tensor.

    Example:
        >>> J = lazyinline.func.jacobian(model)(x)
        >>> J[0], J[0, 1], J @ v, J.dense()
    """
    return _lazily(func, argnums, computed, cotangent_product, tangent_products)


@door
def hessian(
    func: Function, argnums: int = 0, *, mode: ForwardMode = "auto"
) -> Callable[..., Jacobian]:
    """Returns a function that returns the Hessian of one with a scalar result, lazily.

    The signature is that of ``torch.func.hessian``; the result is a :class:`Jacobian`. A row, or
    the product with a vector, costs two derivatives; many rows are computed at once.

    Args:
        func: a function or a module that returns a scalar.
        argnums: the position of the argument to differentiate by, a tensor.
        mode: the mode of a product, as for :func:`lazyinline.func.hvp`. In reverse mode rows and
            diagonal are computed one by one.

    Example:
        >>> H = lazyinline.func.hessian(lambda x: (x**4).sum())(x)
        >>> H[3], H.diagonal(), H @ v
    """
    # The products are compiled, with the gradient inside as part of them.
    if mode == "reverse":
        return _lazily(func, argnums, computed_gradient, cotangent_product, None)
    products = partial(hessian_products, mode=mode)
    return _lazily(func, argnums, computed_gradient, None, products)


def _lazily(
    func: Function, argnums: int, compute: Compute, row: Derive | None, columns: Derive | None
) -> Callable[..., Jacobian]:
    """Returns a function that returns a Jacobian, computed by one or two kinds of products."""

    def program(derive: Derive) -> nn.Module:
        return compiled(Product(func, argnums, compute, derive))

    programs: list[Callable[..., torch.Tensor] | None] = [
        None if row is None else program(row),
        None if columns is None else at_once(lambda: program(columns)),
    ]

    def at(*args: Any, **kwargs: Any) -> Jacobian:
        (point,) = chosen(args, argnums)
        if follower() is not None:
            one = compute(func, argnums, args, kwargs)
            maps = [None if derive is None else one.to(derive) for derive in (row, columns)]
            return Jacobian(maps, tuple(one.result.shape), like=point)
        same = SameDraws(point.device)
        # A gradient has the shape of its input. Any other result must be computed for its shape.
        if compute is computed_gradient:
            shape = point.shape
        else:
            with torch.no_grad(), torch.random.fork_rng(same.devices):
                shape = func(*args, **kwargs).shape

        def bound(run: Callable[..., torch.Tensor]) -> LinearMap:
            return same.among(lambda directions: run(directions, *args, **kwargs))

        maps = [None if run is None else bound(run) for run in programs]
        return Jacobian(maps, tuple(shape), like=point)

    return at


class Jacobian:
    """The derivative of each result by each input at one point; each row is computed once.

    ``J[i]`` is the row of result ``i``, ``J[i, j]`` an entry of it, and indices may be slices;
    ``J @ v`` is the product with a tensor of the input's shape, ``v @ J`` with one of the result's
    shape, and neither computes rows; ``J.diagonal()`` computes all rows, of which a Hessian keeps
    only the diagonal; ``J.dense()`` is the whole, of shape ``(*result, *input)``. Up to 64 rows are
    computed at once, which takes 64 times the memory of the function. If it draws random numbers,
    all rows use the same.

    Args:
        maps: two functions: a cotangent times ``J``; and ``J`` times several tangents,
            ``[K, *input]`` to ``[K, *result]``. One of them is None if ``J`` is symmetric.
        result_shape: the shape of the function's result.
        like: the tensor that it is differentiated by.
    """

    def __init__(
        self, maps: Sequence[LinearMap | None], result_shape: tuple[int, ...], *, like: torch.Tensor
    ) -> None:
        self._row, self._columns = maps
        self._result_shape = result_shape
        self._input_shape = tuple(like.shape)
        self._like = like
        self._rows: dict[int, torch.Tensor] = {}

    @property
    def shape(self) -> torch.Size:
        """The sizes of the result, then those of the input."""
        return torch.Size((*self._result_shape, *self._input_shape))

    @property
    def num_rows(self) -> int:
        """The number of rows: one for each number in the result."""
        return math.prod(self._result_shape)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Returns a part; computes only the rows that it needs.

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
        numbers, sizes = _picked(self._result_shape, of_result)
        part = self._stacked(numbers).reshape(*sizes, *self._input_shape)
        return part[(*[slice(None)] * len(sizes), *of_input)] if of_input else part

    def __matmul__(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the product with a tensor of the input's shape: the derivative along it.

        Raises:
            PlanError: if the shape is another one.
        """
        self._check(vector, self._input_shape, "J @ v")
        return self._times_tangent(vector)

    def __rmatmul__(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the product of a tensor of the result's shape with this.

        Raises:
            PlanError: if the shape is another one.
        """
        self._check(vector, self._result_shape, "v @ J")
        return self._times_cotangent(vector)

    def _times_cotangent(self, cotangent: torch.Tensor) -> torch.Tensor:
        return self._row(cotangent) if self._row else self._times_tangent(cotangent)

    def _times_tangent(self, tangent: torch.Tensor) -> torch.Tensor:
        if self._columns is None:
            return self._times_cotangent(tangent)
        return self._columns(tangent.unsqueeze(0)).squeeze(0)

    def diagonal(self) -> torch.Tensor:
        """Returns the derivative of each result by the input at the same position.

        Raises:
            PlanError: if result and input differ in shape.
        """
        if self._result_shape != self._input_shape:
            raise PlanError(
                f"Only a square Jacobian has a diagonal; this is {self._result_shape} by "
                f"{self._input_shape}."
            )
        everything, columns = range(self.num_rows), self._columns
        if self._row is None and columns is not None and len(self._rows) < self.num_rows:
            # Keeps one entry per row, because all rows would need quadratic memory.
            entries = self._by_units(lambda v: (columns(v) * v).flatten(1).sum(1), everything)
            return entries.reshape(self._result_shape)
        self._compute(everything)
        found = [self._rows[i].flatten()[i] for i in everything]
        return torch.stack(found).reshape(self._result_shape)

    def dense(self) -> torch.Tensor:
        """Returns the whole as a tensor."""
        return self._stacked(range(self.num_rows)).reshape(self.shape)

    def _stacked(self, numbers: Sequence[int]) -> torch.Tensor:
        if not numbers:
            return self._like.new_empty((0, *self._input_shape))
        self._compute(numbers)
        return torch.stack([self._rows[number] for number in numbers])

    def _compute(self, numbers: Sequence[int]) -> None:
        """Computes the missing rows: at once, by columns, or one by one."""
        missing = [number for number in dict.fromkeys(numbers) if number not in self._rows]
        num_columns, columns = math.prod(self._input_shape), self._columns
        is_symmetric = self._row is None
        is_worth_a_group = _WORTH * len(missing) >= _group_size(self.num_rows)
        found: Iterable[torch.Tensor]
        if columns is None or len(missing) < 2:
            found = self._one_by_one(missing)
        elif is_symmetric and is_worth_a_group:  # its columns are its rows
            found = self._by_units(columns, missing)
        elif not is_symmetric and num_columns <= _BACK * len(missing):
            whole = self._by_units(columns, range(num_columns))
            missing = list(range(self.num_rows))
            found = whole.reshape(num_columns, -1).t().reshape(-1, *self._input_shape)
        else:
            found = self._one_by_one(missing)
        self._rows.update(zip(missing, found, strict=True))

    def _one_by_one(self, numbers: Sequence[int]) -> Iterable[torch.Tensor]:
        return [self._times_cotangent(self._unit(number)) for number in numbers]

    def _by_units(self, function: LinearMap, places: Sequence[int]) -> torch.Tensor:
        """Applies a function of several tangents to unit vectors, in equal groups."""
        # The last group is padded with zeros, so that it needs no program of its own.
        size = _group_size(math.prod(self._input_shape))
        groups = [places[i : i + size] for i in range(0, len(places), size)]
        found = [function(self._units(group, size))[: len(group)] for group in groups]
        return torch.cat(found)

    def _unit(self, number: int) -> torch.Tensor:
        """Returns the cotangent of one row, not as a view."""
        unit = self._like.new_zeros(self._result_shape)
        unit.view(-1)[number] = 1
        return unit

    def _units(self, places: Sequence[int], num: int) -> torch.Tensor:
        """Returns ``num`` tensors: unit vectors for the places, the rest zero."""
        size = math.prod(self._input_shape)
        units = self._like.new_zeros(num, *self._input_shape)
        ones = [row * size + place for row, place in enumerate(places)]
        units.view(-1).index_fill_(0, torch.tensor(ones, device=units.device), 1)
        return units

    @staticmethod
    def _check(vector: torch.Tensor, shape: tuple[int, ...], what: str) -> None:
        if tuple(vector.shape) != shape:
            raise PlanError(f"{what} takes a vector of shape {shape}, not {tuple(vector.shape)}.")


def _picked(
    shape: tuple[int, ...], places: Sequence[Index]
) -> tuple[Sequence[int], tuple[int, ...]]:
    """Returns the flat numbers of the elements that an index picks, and their sizes."""
    numbers, sizes = [0], []
    for place, size in itertools.zip_longest(places, shape, fillvalue=slice(None)):
        assert isinstance(size, int)
        if isinstance(place, int) and not -size <= place < size:
            raise IndexError(f"row {place} of {size}")
        axis = range(size)[place]
        if isinstance(axis, range):
            sizes.append(len(axis))
        numbers = [
            n * size + i for n in numbers for i in (axis if isinstance(axis, range) else [axis])
        ]
    return numbers, tuple(sizes)


def _group_size(num: int) -> int:
    """Returns the size of groups into which directions are split evenly."""
    return math.ceil(num / math.ceil(num / _MOST_AT_ONCE))

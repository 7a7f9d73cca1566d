"""``laplacian`` and ``derivative``: derivatives by the coordinates of points.

Points are a tensor whose last dimension holds the coordinates. A derivative moves all points along
a coordinate together. If each result depends on its own point only, as in a network on a batch,
that is the partial derivative at each point.

``energy_and_forces``: an interatomic potential, with forces and virial, as a module.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from ...autodiff.forward_mode.jets import Series
from ...reuse.errors import PlanError, door
from ..tracing.gradients import Function, gradients, renamed
from ..tracing.torch_tracing import follower
from .transforms import TaylorMode, compiled, mode_taken, taylor


@door
def laplacian(func: Function, *, mode: TaylorMode = "auto") -> nn.Module:
    """Returns a function that computes the Laplacian of a function of points.

    Args:
        func: a function or a module; it takes points ``[..., d]`` and returns ``[..., m]``, or one
            number for each point, ``[...]``. A result may depend on its own point only.
        mode: ``"taylor"`` runs the function once, with the collapsed Taylor series along all
            coordinates (Dangel et al., arXiv 2505.13644); ``"reverse"`` differentiates twice.
            ``"auto"`` is the one with fewer passes through the function; the report says which.
            If the function runs eagerly, it is always reverse mode.

    Returns:
        A module that takes points and returns the sum of the second derivatives by each
        coordinate, in the shape of ``func``'s result. It is compiled at its first call; inside a
        model it becomes part of that.

    Example:
        >>> class Residual(nn.Module):
        ...     def forward(self, points):
        ...         return laplacian(self.net)(points).square().mean()
    """
    return compiled(_Laplacian(func, mode))


class _Laplacian(nn.Module):
    def __init__(self, func: Function, mode: TaylorMode) -> None:
        super().__init__()
        self.func = func
        self._mode: TaylorMode = mode

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the second derivatives."""
        terms = [(place, place) for place in range(points.shape[-1])]
        return _sum_of_partials("laplacian", terms, self.func, points, self._mode)


@door
def derivative(
    func: Function,
    points: torch.Tensor,
    by: str,
    *,
    coordinates: str = "xyzt",
    mode: TaylorMode = "auto",
) -> torch.Tensor:
    """Returns a partial derivative of a function of points, of any order.

    It runs at once; inside a compiled model it becomes part of that. In Taylor mode a mixed
    derivative is a weighted sum of derivatives along directions: ``"xy"`` of those along ``x + y``
    and ``x - y``.

    Args:
        func: as :func:`laplacian` takes it.
        points: ``[..., d]``.
        by: a letter for each derivative: ``"xxy"`` is the third, twice by x and once by y.
        coordinates: the names of the d coordinates, in their order.
        mode: as for :func:`laplacian`.

    Returns:
        The derivative, in the shape of ``func``'s result.

    Raises:
        PlanError: if a letter names no coordinate.

    Example:
        >>> class Beam(nn.Module):
        ...     def forward(self, x):
        ...         return derivative(self.net, x, "xxxx").square().mean()
    """
    places = _places(by, coordinates, points.shape[-1])
    return _sum_of_partials(f"derivative by {by!r}", [places], func, points, mode)


Term = tuple[int, ...]  # a partial derivative: the position of a coordinate for each order


def _sum_of_partials(
    what: str, terms: Sequence[Term], func: Function, points: torch.Tensor, mode: TaylorMode
) -> torch.Tensor:
    """Returns the sum of partial derivatives of one order, in the shape of a function's result."""
    goes_on, order = torch.is_grad_enabled(), len(terms[0])
    weights: dict[tuple[float, ...], float] = {}
    for term in terms:
        for along, weight in _polarized(term, points.shape[-1]).items():
            weights[along] = weights.get(along, 0.0) + weight / math.factorial(order)
    factors = [*weights.values()]
    # With equal weights, as for a Laplacian, only the sum over directions is propagated.
    is_sum = order > 1 and len(factors) > 1 and len({*factors}) == 1
    series = Series(order, len(factors), collapsed=is_sum)
    with torch.enable_grad():
        # Made before the function runs, so that a capture computes values and series together.
        is_captured = follower() is not None  # which a series needs
        lines = _everywhere([*weights], points) if is_captured and mode != "reverse" else points
        (given,), _ = renamed((points,))
        result = _result_of(func, given)
        num_columns = math.prod(result.shape[given.dim() - 1 :])
        passes, passes_back = 1 + series.num_coefficients, 1 + num_columns * _passes_back(terms)
        if mode_taken(what, mode, "taylor", passes=passes, passes_back=passes_back) == "taylor":
            highest = taylor(result, given, lines, series)
            if is_sum:
                found = highest if factors[0] == 1 else highest * factors[0]
            else:
                parts = [highest[k] * factor for k, factor in enumerate(factors)]
                found = torch.stack(parts).sum(0)
        else:
            columns = result.reshape(*given.shape[:-1], -1).unbind(-1)  # one number of each point
            parts = [_in_reverse(column, given, terms, goes_on=goes_on) for column in columns]
            found = torch.stack(parts, -1).reshape(result.shape)
    return found if goes_on else found.detach()


def _by_first(terms: Sequence[Term]) -> Mapping[int, Sequence[Term]]:
    """Groups terms by their first coordinate; returns the rest of each term."""
    found: dict[int, list[Term]] = {}
    for first, *rest in terms:
        found.setdefault(first, []).append(tuple(rest))
    return found


def _passes_back(terms: Sequence[Term]) -> int:
    """Returns how often reverse mode runs the linear maps of the function.

    A gradient runs them once more; a gradient of a gradient also runs those of the first one.
    """
    return 1 + 2 * sum(_passes_back(rest) for rest in _by_first(terms).values() if rest[0])


def _in_reverse(
    column: torch.Tensor, points: torch.Tensor, terms: Sequence[Term], *, goes_on: bool
) -> torch.Tensor:
    """Returns the sum of partial derivatives of one number at each point."""
    is_last = len(terms[0]) == 1
    (slope,) = gradients([column.sum()], [points], None, goes_on=goes_on or not is_last)
    found = [
        slope[..., place]
        if is_last
        else _in_reverse(slope[..., place], points, rest, goes_on=goes_on)
        for place, rest in _by_first(terms).items()
    ]
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def _polarized(places: Sequence[int], num: int) -> Mapping[tuple[float, ...], float]:
    """Returns directions and their weights: a mixed derivative as a sum of those along lines.

    With ``n`` derivatives, ``a_i`` of them by coordinate i, it is the sum over all ``b <= a`` of
    ``(-1)^|b| prod C(a_i, b_i) / (2^n n!)`` times the n-th derivative along ``a - 2 b``: the
    polarization identity, centred. Directions on one line are one.
    """
    wanted = Counter(places)
    found: dict[tuple[float, ...], float] = {}
    for below in itertools.product(*(range(n + 1) for n in wanted.values())):
        steps = [n - 2 * b for n, b in zip(wanted.values(), below, strict=True)]
        longest = math.gcd(*steps)
        if not longest or next(step for step in steps if step) < 0:
            continue  # the opposite direction is counted instead
        weight = 2.0 * (-1) ** sum(below) * (longest / 2) ** len(places)
        for b, order in zip(below, wanted.values(), strict=True):
            weight *= math.comb(order, b)
        along = dict(zip(wanted, steps, strict=True))
        direction = tuple(float(along.get(i, 0) // longest) for i in range(num))
        found[direction] = found.get(direction, 0.0) + weight
    return found


def _everywhere(directions: Sequence[Sequence[float]], points: torch.Tensor) -> torch.Tensor:
    """Returns the same directions at every point, ``[K, *points.shape]``."""
    rows = torch.tensor(directions, dtype=points.dtype, device=points.device)
    num, size = rows.shape
    # Contiguous, as the types of Taylor coefficients require.
    whole = rows.reshape(num, *[1] * (points.dim() - 1), size)
    return whole.expand(num, *points.shape).contiguous()


def _places(by: str, coordinates: str, num: int) -> Term:
    known = coordinates[:num]
    unknown = [letter for letter in by if letter not in known]
    if unknown or not by:
        raise PlanError(
            f"derivative by {by!r}: the {num} coordinates of these points are named "
            f'{", ".join(known)}. Pass coordinates=, such as "xt", to name others.'
        )
    return tuple(known.index(letter) for letter in by)


def _result_of(func: Function, points: torch.Tensor) -> torch.Tensor:
    result = func(points)
    per_point = points.shape[:-1]
    if not isinstance(result, torch.Tensor) or result.shape[: len(per_point)] != per_point:
        shape = f"{tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result)
        raise PlanError(
            f"A function of points {tuple(points.shape)} has to return numbers for each of them, "
            f"[{', '.join(map(str, (*per_point, '...')))}], not {shape}."
        )
    return result


# ---- atoms: energy and forces --------------------------------------------------------------------


class EnergyAndForces(NamedTuple):
    """Energy, forces and virial of atoms, in the model's own units.

    Attributes:
        energy: as the model returns it: one number, or one for each structure.
        forces: minus the gradient of the energy by the positions, ``[atoms, 3]``.
        virial: minus the gradient by a symmetric strain, ``[3, 3]`` or ``[structures, 3, 3]``; the
            stress is minus that by the volume. None without ``strain=``.
    """

    energy: torch.Tensor
    forces: torch.Tensor
    virial: torch.Tensor | None


@door
def energy_and_forces(
    model: nn.Module,
    wrt: str = "pos",
    strain: str | Sequence[str] | None = None,
    *,
    batch: str | None = None,
    energy: Callable[[Any], torch.Tensor] | None = None,
) -> nn.Module:
    """Returns a module that computes the energy, forces and virial of a model of the energy.

    It has the parameters and arguments of the model. It is compiled at its first call; ``compile``,
    ``compile_step`` and ``measure`` accept it, and a loss may depend on its forces, which
    differentiates twice. Under ``torch.no_grad()`` (molecular dynamics) nothing is saved.

    Args:
        model: computes the energy. The energy of all structures is summed before it is
            differentiated, so no structure may depend on the atoms of another.
        wrt: the input with the positions: its name in the model's ``forward``, or ``"data.pos"``
            where ``data`` is a dictionary, which is not changed.
        strain: the inputs that a strain of space deforms together with the positions: the cell,
            ``[3, 3]`` with a lattice vector in each row, and shifts of edges if they are lengths
            rather than multiples of the cell. One that is left out makes the virial wrong.
        batch: the input that says to which structure each atom belongs; the cell is then
            ``[structures, 3, 3]`` and the virial has one matrix for each.
        energy: finds the energy in what the model returns, if that is more.

    Raises:
        PlanError: if the model's ``forward`` takes no such input; at a call, if the energy is no
            tensor, or does not depend on the positions or the strain.

    Example:
        >>> potential = lazyinline.func.energy_and_forces(SchNet(), wrt="pos")
        >>> energy, forces, _ = potential(numbers, pos, edges)
        >>> ((forces - truth) ** 2).mean().backward()
    """
    names = (strain,) if isinstance(strain, str) else tuple(strain or ())
    places = [_place(model, name) for name in (wrt, *names)]
    of_atoms = None if batch is None else _place(model, batch)
    return compiled(_Potential(model, places[0], places[1:], of_atoms, energy))


_Given: TypeAlias = Mapping[Any, Any]  # the arguments of a call, by position or name


@dataclass(frozen=True)
class _Place:
    """An input of a model: a parameter of its forward, or an entry of a dictionary."""

    name: str
    index: int | None
    key: str | None

    def get(self, given: _Given) -> torch.Tensor:
        """Returns the tensor that is passed."""
        whole: Any = given.get(self._argument(given))
        if self.key is not None and not isinstance(whole, Mapping):
            kind = type(whole).__name__
            raise PlanError(f"{self.name!r}: {self._parameter} is no dictionary, but a {kind}.")
        found = whole if self.key is None else whole.get(self.key)
        if not isinstance(found, torch.Tensor):
            raise PlanError(f"{self.name!r} has to be a tensor, not {type(found).__name__}.")
        return found

    def put(self, given: _Given, new: torch.Tensor) -> _Given:
        """Returns the arguments with another tensor there."""
        argument = self._argument(given)
        value = new if self.key is None else {**given[argument], self.key: new}
        return {**given, argument: value}

    @property
    def _parameter(self) -> str:
        return self.name.partition(".")[0]

    def _argument(self, given: _Given) -> int | str:
        return self.index if self.index is not None and self.index in given else self._parameter


def _place(model: nn.Module, name: str) -> _Place:
    """Finds an input in the signature of a model's forward."""
    parameter, _, key = name.partition(".")
    taken = inspect.signature(model.forward).parameters
    kinds = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    if parameter not in taken:
        raise PlanError(
            f"forward of {type(model).__name__} takes no {parameter!r}, but "
            f"{', '.join(taken) or 'nothing'}: name the input, or data.pos for an entry of a "
            "dictionary."
        )
    index = list(taken).index(parameter) if taken[parameter].kind in kinds else None
    return _Place(name, index, key or None)


class _Potential(nn.Module):
    """Computes energy, forces and virial; see :func:`energy_and_forces`."""

    def __init__(
        self,
        model: nn.Module,
        positions: _Place,
        strained: Sequence[_Place],
        batch: _Place | None,
        energy: Callable[[Any], torch.Tensor] | None,
    ) -> None:
        super().__init__()
        self.model = model
        self._positions = positions
        self._strained = tuple(strained)
        self._batch = batch
        self._energy = energy

    def forward(self, *args: Any, **kwargs: Any) -> EnergyAndForces:
        """Runs the model, and differentiates the sum of its energies."""
        goes_on = torch.is_grad_enabled()
        with torch.enable_grad():
            given: _Given = {**dict(enumerate(args)), **kwargs}
            (at,), inputs = renamed((self._positions.get(given),))
            if self._strained:
                strain = self._no_strain(given)
                given = self._deformed(given, at, strain)
                inputs = [at, strain]
            else:
                given = self._positions.put(given, at)
            named = {name: given[name] for name in given if isinstance(name, str)}
            value = self.model(*(given[i] for i in range(len(args))), **named)
            value = value if self._energy is None else self._energy(value)
            found = self._gradients(value, inputs, goes_on=goes_on)
        virial = -found[1] if self._strained else None
        return EnergyAndForces(value if goes_on else value.detach(), -found[0], virial)

    def _no_strain(self, given: _Given) -> torch.Tensor:
        """Returns a strain of zero, for all atoms or for each structure."""
        cell = self._strained[0].get(given)
        if self._batch is None and cell.dim() == 3 and cell.shape[0] != 1:
            raise PlanError(
                f"{self._strained[0].name!r} has {cell.shape[0]} cells: name the input that says "
                "to which structure an atom belongs, batch=."
            )
        shape = (3, 3) if self._batch is None else (cell.shape[0], 3, 3)
        return torch.zeros(shape, dtype=cell.dtype, device=cell.device).requires_grad_()

    def _deformed(self, given: _Given, positions: torch.Tensor, strain: torch.Tensor) -> _Given:
        """Returns the arguments with positions and strained inputs deformed."""
        symmetric = (strain + strain.mT) / 2
        if self._batch is None:
            moved = positions + positions @ symmetric
        else:
            of_atoms = symmetric[self._batch.get(given)]
            moved = positions + (positions.unsqueeze(-2) @ of_atoms).squeeze(-2)
        found = self._positions.put(given, moved)
        for place in self._strained:
            rows = place.get(given)
            if self._batch is not None and rows.dim() != 3:
                raise PlanError(f"{place.name!r} has to be [structures, 3, 3] where batch= is set.")
            found = place.put(found, rows + rows @ symmetric)
        return found

    def _gradients(
        self, value: Any, inputs: Sequence[torch.Tensor], *, goes_on: bool
    ) -> Sequence[torch.Tensor]:
        """Returns the gradients of a sum of energies."""
        if not isinstance(value, torch.Tensor):
            raise PlanError(
                f"The model returns a {type(value).__name__}, no tensor of energies: say where "
                'they are, energy=lambda out: out["energy"].'
            )
        names = (self._positions.name, "the strain of " + ", ".join(p.name for p in self._strained))
        # autograd.grad raises its own error for a constant energy, which has no graph.
        found = (
            torch.autograd.grad([value.sum()], inputs, create_graph=goes_on, allow_unused=True)
            if value.requires_grad
            else [None] * len(inputs)
        )
        for name, gradient in zip(names, found, strict=False):
            if gradient is None:  # a mistake more often than a force of zero
                raise PlanError(f"The energy does not depend on {name}.")
        return found  # type: ignore[return-value]  # none is None, as was looked at

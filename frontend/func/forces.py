"""``energy_and_forces(model)``: an interatomic potential, with forces and virial, as a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ...reuse.errors import PlanError, door
from ..tracing.gradients import renamed
from .transforms import compiled


class EnergyAndForces(NamedTuple):
    """Holds energy, forces and virial of some atoms, in the model's own units.

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

    Its parameters are the model's, and it takes what the model takes. It is compiled at its first
    call; ``compile``, ``compile_step`` and ``measure`` take it, and a loss of its forces trains:
    that differentiates twice. Under ``torch.no_grad()`` (molecular dynamics) nothing is kept.

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


@dataclass(frozen=True)
class _Place:
    """Names an input of a model: a parameter of its forward, or an entry of a dictionary."""

    name: str
    index: int | None
    key: str | None

    def get(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Returns the tensor that is passed.

        Raises:
            PlanError: if there is none.
        """
        whole = self._whole(args, kwargs)
        found = whole if self.key is None else whole.get(self.key)
        if not isinstance(found, torch.Tensor):
            raise PlanError(f"{self.name!r} has to be a tensor, not {type(found).__name__}.")
        return found

    def put(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], new: torch.Tensor
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Returns the arguments with another tensor there."""
        value = new if self.key is None else {**self._whole(args, kwargs), self.key: new}
        if self._is_positional(args):
            return [value if i == self.index else arg for i, arg in enumerate(args)], kwargs
        return args, {**kwargs, self._parameter: value}

    @property
    def _parameter(self) -> str:
        return self.name.partition(".")[0]

    def _is_positional(self, args: Sequence[Any]) -> bool:
        return self.index is not None and self.index < len(args)

    def _whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        by_position = self._is_positional(args)
        whole = args[self.index or 0] if by_position else kwargs.get(self._parameter)
        if self.key is not None and not isinstance(whole, Mapping):
            kind = type(whole).__name__
            raise PlanError(f"{self.name!r}: {self._parameter} is no dictionary, but a {kind}.")
        return whole


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
            (at,), inputs = renamed((self._positions.get(args, kwargs),))
            if self._strained:
                strain = self._no_strain(args, kwargs)
                given = self._deformed(args, kwargs, at, strain)
                inputs = [at, strain]
            else:
                given = self._positions.put(args, kwargs, at)
            value = self.model(*given[0], **given[1])
            value = value if self._energy is None else self._energy(value)
            found = self._gradients(value, inputs, goes_on=goes_on)
        virial = -found[1] if self._strained else None
        return EnergyAndForces(value if goes_on else value.detach(), -found[0], virial)

    def _no_strain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Returns a strain of zero, for all atoms or for each structure."""
        cell = self._strained[0].get(args, kwargs)
        if self._batch is None and cell.dim() == 3 and cell.shape[0] != 1:
            raise PlanError(
                f"{self._strained[0].name!r} has {cell.shape[0]} cells: name the input that says "
                "to which structure an atom belongs, batch=."
            )
        shape = (3, 3) if self._batch is None else (cell.shape[0], 3, 3)
        return torch.zeros(shape, dtype=cell.dtype, device=cell.device).requires_grad_()

    def _deformed(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        positions: torch.Tensor,
        strain: torch.Tensor,
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Returns the arguments, with all that a strain deforms deformed."""
        symmetric = (strain + strain.mT) / 2
        if self._batch is None:
            moved = positions + positions @ symmetric
        else:
            of_atoms = symmetric[self._batch.get(args, kwargs)]
            moved = positions + (positions.unsqueeze(-2) @ of_atoms).squeeze(-2)
        given = self._positions.put(args, kwargs, moved)
        for place in self._strained:
            rows = place.get(args, kwargs)
            if self._batch is not None and rows.dim() != 3:
                raise PlanError(f"{place.name!r} has to be [structures, 3, 3] where batch= is set.")
            given = place.put(*given, rows + rows @ symmetric)
        return given

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
        # A model whose energy is a constant has no graph, which autograd takes for an error.
        found = (
            torch.autograd.grad([value.sum()], inputs, create_graph=goes_on, allow_unused=True)
            if value.requires_grad
            else [None] * len(inputs)
        )
        for name, gradient in zip(names, found, strict=False):
            if gradient is None:  # a mistake more often than a force of zero
                raise PlanError(f"The energy does not depend on {name}.")
        return found  # type: ignore[return-value]  # none is None, as was looked at

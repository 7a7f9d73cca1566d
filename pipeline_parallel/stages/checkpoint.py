"""Loads the state that one pipeline's ranks saved into a model or another pipeline."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ...reuse.errors import PipelineError


def copy_state(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copies tensors of the same names.

    Raises:
        PipelineError: if one is missing or has another shape.
    """
    found = {t.data_ptr() for n, t in own.items() if n in state}
    missing = [n for n, t in own.items() if n not in state and t.data_ptr() not in found]
    if missing:
        raise PipelineError(f"The state has no {', '.join(missing[:5])} (of {len(missing)}).")
    own = {n: t for n, t in own.items() if n in state}
    for name, tensor in own.items():
        if state[name].shape != tensor.shape:
            raise PipelineError(
                f"{name} has the shape {tuple(tensor.shape)}, and in the state "
                f"{tuple(state[name].shape)}."
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


def read_parts(folder: str | pathlib.Path) -> dict[str, Tensor]:
    """Returns all that the ranks of a pipeline saved in a folder.

    Raises:
        PipelineError: if nothing was saved there.
    """
    files = sorted(pathlib.Path(folder).glob("stages-*.pt"))
    if not files:
        raise PipelineError(f"There is no stages-*.pt in {folder}.")
    state: dict[str, Tensor] = {}
    for path in files:
        state.update(torch.load(path, map_location="cpu", mmap=True))
    return state

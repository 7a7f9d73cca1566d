"""Modules and plain data in place of the user's classes, because a file refers to no code.

The model is modules that hold the tensors under their original names, without Python. Nested
arguments and results are plain data: the tree structure and a description of each leaf. An object
of a class is stored as class name and fields, and loaded as a :class:`Record`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from ...backend.cache import NotCacheableError, decode_value, encode_value
from ...reuse import torch_pytree
from ...reuse.errors import FileError, NoProgramError
from ...reuse.evidence.module_state import module_state, walk_modules
from ...reuse.ir.parser import parse_size
from ...reuse.ir.torch_symbols import SIZE_TYPES, ReadSizes, SizeLiteral, expression_of
from ..dispatch.dispatcher import Dispatcher
from ..guard import Guard, Inputs, shown


@dataclass(frozen=True)
class TensorNames:
    """The names of a model's tensors, the first one if a tensor has several."""

    parameters: list[str] = field(default_factory=list)  # the parameters, in the model's order
    buffers: list[str] = field(default_factory=list)  # the persistent buffers
    unsaved: list[str] = field(default_factory=list)  # the non-persistent buffers
    frozen: list[str] = field(default_factory=list)  # the parameters that do not require grad
    # Pairs of a further name and the first name of the same tensor.
    ties: list[list[str]] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> tuple[TensorNames, dict[str, torch.Tensor]]:
        """Returns the names of a model's tensors, and the tensors by them."""
        found, first, tensors = cls(), dict[int, str](), dict[str, torch.Tensor]()
        for path, module in walk_modules(model):
            state = module_state(module)
            for table in ("_parameters", "_buffers"):
                for own, tensor in state[table].items():
                    if tensor is None:
                        continue
                    name = f"{path}.{own}" if path else own
                    if first.setdefault(id(tensor), name) != name:
                        found.ties.append([name, first[id(tensor)]])
                        continue
                    tensors[name] = tensor
                    if table == "_parameters":
                        found.parameters.append(name)
                        found.frozen.extend([] if tensor.requires_grad else [name])
                    elif own in state["_non_persistent_buffers_set"]:
                        found.unsaved.append(name)
                    else:
                        found.buffers.append(name)
        return found, tensors

    @property
    def saved(self) -> list[str]:
        """The names in a ``state_dict``."""
        return [*self.parameters, *self.buffers]


class SavedModel(nn.Module):
    """A module tree with the tensors of a saved model, under arbitrary names."""

    def __init__(
        self, class_name: str, names: TensorNames, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self._lazyinline_class_name = class_name
        frozen = set(names.frozen)
        for name in names.parameters:
            _put(self, name, nn.Parameter(tensors[name], name not in frozen))
        for name in names.buffers:
            _put(self, name, tensors[name])
        for name in names.unsaved:
            _put(self, name, tensors[name], persistent=False)
        for name, first in names.ties:
            _put(self, name, tensor_of(self, first))

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises FileError, because there is no Python to run."""
        raise FileError(
            f"This {class_name_of(self)} was loaded from a file, which has programs and no Python: "
            "none of them is for a call like this (its sizes, dtypes, structure, train or eval "
            "mode, or grad mode). Call it as before it was saved, or save it after such a call."
        )


def _put(model: nn.Module, name: str, tensor: torch.Tensor, *, persistent: bool = True) -> None:
    *path, own = name.split(".")
    for part in path:
        if part not in model._modules:
            model.add_module(part, nn.Module())
        model = model._modules[part]  # type: ignore[assignment]
    # Not the model's own methods: its tensors may have their names.
    if isinstance(tensor, nn.Parameter):
        nn.Module.register_parameter(model, own, tensor)
    else:
        nn.Module.register_buffer(model, own, tensor, persistent)


def tensor_of(model: nn.Module, name: str) -> torch.Tensor:
    """Returns a tensor of a model by its name."""
    *path, own = name.split(".")
    for part in path:
        model = model._modules[part]  # type: ignore[assignment]
    state = module_state(model)
    tensors: dict[str, Any] = state["_parameters"]
    found: torch.Tensor = tensors[own] if own in tensors else state["_buffers"][own]
    return found


def set_modes(model: nn.Module, training: bool, others: Sequence[str]) -> None:
    """Sets the train or eval mode of all modules; those in ``others`` get the opposite."""
    other = set(others)
    for path, module in walk_modules(model):
        module.training = (training is True) is not (path in other)


def class_name_of(model: nn.Module) -> str:
    """Returns the name of a model's class, also of one that was saved."""
    is_saved = isinstance(model, SavedModel)
    return str(model._lazyinline_class_name) if is_saved else type(model).__name__


# ---- calls that no program fits ------------------------------------------------------------------


def refuse_call(calls: Dispatcher[Any], class_name: str, inputs: Inputs) -> NoReturn:
    """Raises a NoProgramError, which lists the programs, for a call that none of a file fits."""
    rows = [_row(guard, inputs, linker) for guard, linker in calls.symbolic_programs]
    numbers = [x for x in calls.entries if x.compiled.linker is None]
    rows += [_row(entry.guard, inputs) for entry in numbers]
    way = "training" if torch.is_grad_enabled() else "inference"
    raise NoProgramError(
        f"This {class_name} was loaded from a file, which has programs and no Python: "
        f"none of them is for a call like this, {way} with {shown(inputs.given)}. It has "
        f"{'; '.join(dict.fromkeys(rows)) or 'none for the model as it is now'}. Call it as "
        "before it was saved, or save it after such a call."
    )


def _row(guard: Guard, inputs: Inputs, linker: Any = None) -> str:
    """Describes the calls that a program fits, and why this call differs."""
    way = "training" if guard.modes.captured[0][0] else "inference"
    row = f"{way} with {shown(guard.layouts)}"
    if linker is None:
        return row
    is_resized = guard.resized(inputs.given) is not None
    why = linker.sizes.why_not(inputs.leaves) if is_resized else ""
    return f"{row} and of further sizes{f' (not of these: {why})' if why else ''}"


# ---- arguments and results as plain data ---------------------------------------------------------


class Record(dict[str, Any]):
    """An object loaded from a file: a dict of its fields, which are attributes as well.

    As attributes, they take precedence over methods of dict.
    """

    def __init__(self, class_name: str, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        vars(self).update(fields)
        self._class_name = class_name

    def __getitem__(self, key: Any) -> Any:
        """Returns a field by its name or its position."""
        return self.to_tuple()[key] if isinstance(key, (int, slice)) else super().__getitem__(key)

    def to_tuple(self) -> tuple[Any, ...]:
        """Returns the fields in order."""
        return tuple(dict.values(self))


torch_pytree.register(
    Record,
    lambda record: (list(dict.values(record)), (record._class_name, tuple(record))),
    lambda values, told: Record(told[0], dict(zip(told[1], values, strict=True))),
)


@dataclass(frozen=True)
class _Place:
    """A leaf of a tree, with its description."""

    said: Any


def tree_data(leaves: Sequence[Any], spec: torch_pytree.TreeSpec) -> Any:
    """Returns a tree as JSON data; NotCacheableError if a leaf's description is not plain."""
    return encode_value(torch_pytree.unflatten(list(map(_Place, leaves)), spec), _own)


def _own(value: Any) -> Any:
    if isinstance(value, _Place):
        return {"leaf": encode_value(value.said, _size)}
    fields = torch_pytree.named_fields(value)
    if fields is None:
        return None
    name = value._class_name if isinstance(value, Record) else type(value).__name__
    # A cache of transformers holds constants besides its tensors; classes are left out.
    kept = [[k, encode_value(_leaves_in(v), _own)] for k, v in fields if not isinstance(v, type)]
    return {"record": [name, kept]}


def _size(value: Any) -> Any:
    """Returns a symbolic size as JSON data; None for anything else."""
    size = value.size if isinstance(value, SizeLiteral) else value
    if not isinstance(value, (SizeLiteral, *SIZE_TYPES)):
        return None
    text = str(expression_of(size)).replace(" ", "")
    if parse_size(text, ReadSizes()) != expression_of(size):
        raise NotCacheableError(f"the size {text}")
    return {"size": text}


def _leaves_in(held: Any) -> Any:
    """Replaces each constant in an object's field by a leaf."""
    if type(held) is dict:
        return {key: _leaves_in(value) for key, value in held.items()}
    if type(held) in (list, tuple):
        return type(held)(map(_leaves_in, held))
    is_nested = isinstance(held, _Place) or torch_pytree.named_fields(held) is not None
    return held if is_nested else _Place(("constant", held))


def tree_of(
    data: Any, size_of: Callable[[str], Any] | None = None
) -> tuple[list[Any], torch_pytree.TreeSpec]:
    """Returns the leaves and the tree structure that :func:`tree_data` wrote.

    ``size_of`` parses a symbolic size, if leaves may be such.
    """
    places, spec = torch_pytree.flatten(decode_value(data, partial(_read, size_of)))
    if not all(isinstance(place, _Place) for place in places):
        raise FileError("a structure holds what is no leaf")
    return [place.said for place in places], spec


def _read(size_of: Callable[[str], Any] | None, kind: str, inner: Any) -> Any:
    own = partial(_read, size_of)
    if kind == "leaf":
        return _Place(decode_value(inner, own))
    if kind == "size" and size_of is not None:
        return SizeLiteral(size_of(inner))
    if kind == "record":
        name, fields = inner
        return Record(str(name), {str(key): decode_value(held, own) for key, held in fields})
    raise FileError(f"a structure holds {kind}")

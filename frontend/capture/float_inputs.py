"""Python floats that vary from call to call, and become inputs where they only enter arithmetic.

The model's Python runs four times for that, and has to go the same way each time, instruction by
instruction: with the values; with open numbers that show the same values, which has to give the
same program; and twice with open numbers that show probes. Places of probes are inputs, and what
else differs between the two was made from one. A program for any value is right if no code asked
for one.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.errors import CaptureError
from ...reuse.freeze import IMMUTABLE
from ...reuse.ir.printer import text_to_compare
from ...reuse.ir.program import Leaf, ModelTensor, Program, Source, UserInput, walk_closures
from ...reuse.open_numbers import Evaluate, Opening
from ...reuse.torch_names import OPERATOR_TYPES
from ..tracing.python_path import followed
from .blocks import Reuse
from .capture import capture_model
from .regions import CapturedModel

_BETWEEN_PROBES = float.fromhex("0x1.9e3779b97f4a7p-31")


def _first_probe(number: int) -> float:
    return float.fromhex("0x1.5bf0a8b145769p-2") + number * _BETWEEN_PROBES


def _other_probe(number: int) -> float:
    return -float.fromhex("0x1.921fb54442d18p+1") - number * _BETWEEN_PROBES


@dataclass(frozen=True)
class NumberInput:
    """An input of a program that is computed from the Python numbers of a call."""

    evaluate: Evaluate
    dtype: torch.dtype

    def tensor(self, leaves: Sequence[Any]) -> torch.Tensor:
        """Returns it for a call."""
        value = torch.full((), self.evaluate(leaves), dtype=torch.float64, device="cpu")
        return value.to(self.dtype)  # rounded as an operator rounds a Python number


@dataclass(frozen=True)
class OpenCapture:
    """A model captured with floats as inputs; without any, it is not captured yet.

    Attributes:
        captured: the model.
        numbers: the inputs of its program behind the tensors among the arguments.
        places: the floats among the flat arguments that may have any value.
    """

    captured: CapturedModel | None = None
    numbers: tuple[NumberInput, ...] = ()
    places: frozenset[int] = frozenset()


def capture_open(
    model: nn.Module,
    leaves: Sequence[Any],
    tree: torch_pytree.TreeSpec,
    places: frozenset[int],
    *,
    reuse: Reuse,
    train: bool,
) -> OpenCapture:
    """Captures a model with the floats at some places as inputs, behind the tensors among them.

    Raises:
        CaptureError: if they do more than to enter arithmetic that may be on an input.
    """

    def captured(opening: Opening | None) -> tuple[CapturedModel, int]:
        given = list(leaves)
        if opening is not None:
            given = [opening.number(i) if i in places else x for i, x in enumerate(leaves)]
        args, kwargs = torch_pytree.unflatten(given, tree)
        opened = () if opening is None else opening.probes
        try:
            with followed() as path:
                found = capture_model(model, args, kwargs, reuse=reuse, train=train, opened=opened)
        finally:
            if opening is not None:
                opening.has_ended = True
        if opening is not None and opening.was_asked:
            raise CaptureError("The model's Python asks for a number that varies.")
        if opening is not None and path.asks_identity():
            raise CaptureError("The model's Python asks which object or class something is.")
        if opening is not None and path.leaves_thread():
            raise CaptureError("The model's Python hands something to another thread.")
        _check_operators(found.program)
        return found, path.digest

    if sys.version_info >= (3, 12):
        captured(None)  # instructions are told from the second run of a function on
    plain, way = captured(None)
    values, opening = Opening(leaves, None), Opening(leaves, _first_probe)
    others = Opening(leaves, _other_probe)
    with_values, way_with_values = captured(values)
    found, way_with_probes = captured(opening)
    with_others, way_with_others = captured(others)
    # Probes differ where values do not, so blocks that share a closure may run another time there.
    if way != way_with_values or way_with_probes != way_with_others:
        raise CaptureError("The model's Python goes another way with a number that varies.")
    if not _alike(_Facts.of(plain.program), _Facts.of(with_values.program)):
        raise CaptureError("The model's Python tells an open number from a float.")
    facts = _Facts.of(found.program, opening.probes)
    if not _alike(facts, _Facts.of(with_others.program, others.probes)):
        raise CaptureError("A number that varies is no input of an operator here.")
    evaluate = {repr(p): e for p, e in opening.probes.items()}
    return OpenCapture(*_with_inputs(found, leaves, evaluate), places)


def _with_inputs(
    found: CapturedModel, leaves: Sequence[Any], evaluate: Mapping[str, Evaluate]
) -> tuple[CapturedModel, tuple[NumberInput, ...]]:
    """Makes arguments of the constants that stand for numbers."""
    num_tensors = sum(isinstance(x, torch.Tensor) for x in leaves)
    numbers: list[NumberInput] = []
    sources: list[Source] = []
    for source in found.program.sources:
        if isinstance(source, ModelTensor) and _is_probe(source, evaluate):
            sources.append(UserInput(num_tensors + len(numbers), f"number{len(numbers)}"))
            numbers.append(NumberInput(evaluate[source.name], source.tensor.dtype))
        else:
            sources.append(source)
    return replace(found, program=replace(found.program, sources=tuple(sources))), tuple(numbers)


def _is_probe(source: Source, names: Collection[str]) -> bool:
    return isinstance(source, ModelTensor) and source.kind == "constant" and source.name in names


@dataclass(frozen=True)
class _Facts:
    """All that programs of one model may differ in, but for the inputs that stand for probes."""

    texts: tuple[Any, ...]
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, program: Program, probes: Collection[float] = ()) -> _Facts:
        """Returns those of a program."""
        text = text_to_compare(program)
        names = {repr(probe): f"number {index}" for index, probe in enumerate(probes)}
        for name, known_as in names.items():
            text = text.replace(f"number_{name}", known_as)
        results = [(kind, type(value), repr(value)) for kind, value in program.output_tree.leaves]
        sources = [names.get(source.name, source.name) for source in program.sources]
        tensors = {
            f"{index} {source.name}": source.tensor
            for index, source in enumerate(program.sources)
            if isinstance(source, ModelTensor) and source.name not in names
        }
        spec = (program.output_tree.spec, program.output_tree.updates)
        return cls((text, sources, program.writes, results, spec), tensors)


def _alike(facts: _Facts, others: _Facts) -> bool:
    return (
        facts.texts == others.texts
        and facts.tensors.keys() == others.tensors.keys()
        and all(_same_bits(t, others.tensors[name]) for name, t in facts.tensors.items())
    )


def _same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are one, or two literals of the same numbers."""
    if tensor is other:
        return True
    if (tensor.dtype, tensor.shape, tensor.device) != (other.dtype, other.shape, other.device):
        return False
    first, second = (t.detach().reshape(-1).view(torch.uint8) for t in (tensor, other))
    return torch.equal(first, second)


def _check_operators(program: Program) -> None:
    """Refuses what may hold a number out of sight: functions, inner graphs, objects."""
    for closure in walk_closures(program):
        for node in closure.nodes if isinstance(closure, Leaf) else ():
            given, _ = torch_pytree.flatten((node.args, node.kwargs))
            if not (isinstance(node.target, OPERATOR_TYPES) or node.target is operator.getitem):
                raise CaptureError(f"{node.target} may be handed a number that varies.")
            if not all(isinstance(x, torch.fx.Node) or type(x) in IMMUTABLE for x in given):
                raise CaptureError(f"{node.target} is handed an object.")
    results = (x for _, x in program.output_tree.leaves)
    if not all(type(x) in IMMUTABLE or isinstance(x, torch.Tensor) for x in results):
        raise CaptureError("The forward returns a number that varies, or an object.")

"""Checks an exported file: compares onnxruntime with the model on the example inputs."""

from __future__ import annotations

import dataclasses
import logging
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...autodiff.traces.torch_user_rules import NO_DERIVATIVE
from ...reuse import torch_pytree
from ...reuse.errors import ExportError
from ...reuse.ir.leaf import interpret
from ...reuse.ir.program import ModelTensor, Program, UserInput, tensor_type
from ..dispatch.torch_slot import slots_empty

if TYPE_CHECKING:
    from onnxscript import ir

    from ..sizes.torch_input_sizes import DeclaredSizes


@dataclass(frozen=True)
class Subject:
    """A program to export, and its model if that is known."""

    program: Program
    model: nn.Module | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    gradients: tuple[int, ...] = ()  # program inputs that have a gradient among the outputs
    sizes: DeclaredSizes | None = None


@dataclass(frozen=True)
class Names:
    """The names of a file's inputs, outputs, and gradients of inputs.

    ``results`` has, for each leaf of the model's result that is a tensor, its position among the
    leaves and its name in the file.
    """

    inputs: list[str]
    outputs: list[str | None]
    results: list[tuple[int, str]]
    gradients: dict[int, str]


TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
_DEFAULT_TOLERANCE = 1e-4
_RANDOM_OPERATORS = ("Bernoulli", "Multinomial", "Random")  # as their names begin
_LOG = logging.getLogger("lazyinline")


def check(path: pathlib.Path, model: ir.Model, subject: Subject, names: Names) -> float:
    """Compares a file with the model; raises ExportError if they differ, or cannot be compared.

    Returns the largest difference, relative to the largest value of its output.
    """
    _refuse_randomness(model)
    worst = _check_once(path, subject, names, reference_outputs(subject, names))
    for sizes in [] if subject.sizes is None else subject.sizes.others():
        other = _resized(subject, sizes)
        try:
            expected = reference_outputs(other, names)
        except Exception as error:  # such as more positions than the model has
            _LOG.info("not checked at %s: the model fails there: %s", sizes, error)
            continue
        worst = max(worst, _check_once(path, other, names, expected))
    return worst


def _check_once(
    path: pathlib.Path, subject: Subject, names: Names, expected: Mapping[str, torch.Tensor]
) -> float:
    feeds = {
        source.name: tensor
        for source, tensor in zip(subject.program.sources, _inputs(subject), strict=True)
        if isinstance(source, UserInput)
    }
    return compare(expected, run_file(path, feeds, list(expected)))


def _resized(subject: Subject, sizes: Mapping[Any, int]) -> Subject:
    """Returns example inputs of other sizes, cut or repeated from the given ones."""
    shapes = {
        source.index: tensor_type(value).shape
        for source, value in zip(subject.program.sources, subject.program.inputs, strict=True)
        if isinstance(source, UserInput)
    }
    leaves, tree = torch_pytree.flatten((subject.args, dict(subject.kwargs)))
    index = 0
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[position] = _cut_or_repeated(leaf, shapes[index], sizes)
            index += 1
    args, kwargs = torch_pytree.unflatten(leaves, tree)
    return dataclasses.replace(subject, args=args, kwargs=kwargs)


def _cut_or_repeated(
    tensor: torch.Tensor, shape: Sequence[Any], sizes: Mapping[Any, int]
) -> torch.Tensor:
    for dim, size in enumerate(shape):
        if not isinstance(size, int):
            length = int(size.subs(dict(sizes)))
            places = torch.arange(length, device=tensor.device) % max(tensor.shape[dim], 1)
            tensor = tensor.index_select(dim, places)
    return tensor


def run_file(
    path: pathlib.Path, feeds: Mapping[str, torch.Tensor], outputs: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Runs a file in onnxruntime, on CPU."""
    try:
        import onnxruntime
    except ImportError:
        raise ExportError(
            "verify=True runs the file in onnxruntime, which is not installed: "
            "pip install 'lazyinline[onnx]', or pass verify=False."
        ) from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors alone
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        used = {i.name for i in session.get_inputs()}
        arrays = {k: v.detach().cpu().numpy() for k, v in feeds.items() if k in used}
        found = session.run(list(outputs), arrays)
    except Exception as error:
        raise ExportError(
            f"onnxruntime cannot run the exported model: {str(error).strip()[:500]}. "
            "verify=False writes it unchecked."
        ) from error
    return {name: torch.from_numpy(array) for name, array in zip(outputs, found, strict=True)}


def compare(expected: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]) -> float:
    """Returns the largest relative difference, if it is no more than the dtype allows."""
    worst = 0.0
    for name, value in expected.items():
        result = results[name]
        if result.shape != value.shape:
            raise ExportError(
                f"Output {name} is {list(result.shape)} in onnxruntime and {list(value.shape)} in "
                "eager. This is a bug of lazyinline or torch.onnx; verify=False writes it anyway."
            )
        # Relative to the whole output, because values near zero are inexact in eager, too.
        error = relative_difference(result, value)
        limit = TOLERANCE.get(value.dtype, _DEFAULT_TOLERANCE)
        _LOG.debug("%s: onnxruntime and eager differ by %.2e (relative)", name, error)
        if not error <= limit:
            raise ExportError(
                f"Output {name} differs between onnxruntime and eager by {error:.1e} of its "
                f"largest value, and {limit:.0e} is allowed. Nothing was written; verify=False "
                "writes it unchecked."
            )
        worst = max(worst, error)
    return worst


def relative_difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest finite value.

    It is infinite if one side is infinite or NaN where the other is not.
    """
    if not expected.is_floating_point():
        return 0.0 if torch.equal(result, expected) else math.inf
    expected = expected.detach().cpu()
    finite = expected[expected.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    error = float(gap(result, expected).abs().amax()) if expected.numel() else 0.0
    return math.inf if math.isnan(error) else error / max(largest, 1e-6)


def gap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the difference in double precision; zero where both are NaN or equal infinities."""
    # The difference of two large float16 values may overflow in their own type.
    a, b = (t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    return (a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)


def _inputs(subject: Subject) -> list[torch.Tensor]:
    """Returns the tensors of the program's inputs."""
    leaves, _ = torch_pytree.flatten((subject.args, dict(subject.kwargs)))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    found = []
    for source in subject.program.sources:
        if isinstance(source, ModelTensor):
            found.append(source.tensor)
        elif source.index < len(tensors):
            found.append(tensors[source.index])
        else:
            raise ExportError(
                f"verify=True needs example inputs, and {source.name} is missing from args. Pass "
                "them, or verify=False."
            )
    return found


def reference_outputs(subject: Subject, names: Names) -> dict[str, torch.Tensor]:
    """Runs the model eagerly, or interprets the program if there is no model."""
    with _undone(subject):
        if subject.model is None or subject.program.writes:
            return _interpreted(subject, names)
        args, kwargs = copied((subject.args, dict(subject.kwargs)))
        with slots_empty(subject.model), torch.set_grad_enabled(bool(names.gradients)):
            result = subject.model(*args, **kwargs)
            leaves, _ = torch_pytree.flatten(result)
            expected = {name: leaves[position] for position, name in names.results}
            if names.gradients:
                try:
                    expected.update(_gradients(subject, names, expected, (args, kwargs)))
                except RuntimeError as error:
                    if NO_DERIVATIVE not in str(error):
                        raise
                    return _interpreted(subject, names)  # only the rule has a derivative
    return expected


def _interpreted(subject: Subject, names: Names) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        results = interpret(subject.program, [t.detach() for t in _inputs(subject)])
    return {n: r for n, r in zip(names.outputs, results, strict=True) if n is not None}


def _gradients(
    subject: Subject, names: Names, expected: Mapping[str, torch.Tensor], arguments: Any
) -> dict[str, torch.Tensor]:
    users = [x for x in torch_pytree.flatten(arguments)[0] if isinstance(x, torch.Tensor)]
    wanted = []
    for index in names.gradients:
        source = subject.program.sources[index]
        wanted.append(source.tensor if isinstance(source, ModelTensor) else users[source.index])
    loss = expected.get("loss", next(iter(expected.values())))
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for name, tensor, gradient in zip(names.gradients.values(), wanted, found, strict=True)
    }


def copied(tree: Any) -> Any:
    """Returns a structure with a copy of each tensor; copies keep ``requires_grad``."""
    leaves, spec = torch_pytree.flatten(tree)
    copies = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in leaves
    ]
    return torch_pytree.unflatten(copies, spec)


@contextmanager
def _undone(subject: Subject) -> Iterator[None]:
    """Restores buffers and the random state, which running the model changes."""
    buffers = [] if subject.model is None else list(subject.model.buffers())
    before = [b.detach().clone() for b in buffers]
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


def _refuse_randomness(model: ir.Model) -> None:
    for graph in (model.graph, *model.functions.values()):
        for node in graph:
            draws = node.op_type.startswith(_RANDOM_OPERATORS)
            draws = draws or (node.op_type == "Dropout" and len(node.inputs) > 2)
            if draws:
                source = node.metadata_props.get("source", "")
                where = f"{node.op_type} at {source}" if source else node.op_type
                raise ExportError(
                    f"The model draws random numbers ({where}), and onnxruntime draws others than "
                    "PyTorch, so they cannot be compared. Call model.eval() or set dropout to 0, "
                    "or pass verify=False."
                )

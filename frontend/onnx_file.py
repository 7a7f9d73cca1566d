"""``export_onnx(model, args, path)``: a program as an ONNX file, compared with the model.

The file has one function per closure. onnxruntime runs it on the example inputs.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..autodiff.traces.torch_user_rules import NO_DERIVATIVE
from ..reuse import torch_pytree
from ..reuse.errors import CaptureError, ExportError, door
from ..reuse.ir.leaf import interpret
from ..reuse.ir.printer import folded
from ..reuse.ir.program import ModelTensor, Program, UserInput, tensor_type
from ..reuse.ir.verify import verify as verify_program
from .capture.assemble import OutputTree
from .capture.blocks import Reuse
from .capture.surroundings import one_at_a_time
from .compiler import PASSES
from .dispatch.dispatcher import dispatcher_of
from .dispatch.torch_slot import slots_empty
from .options import Options
from .passes.context import Context
from .passes.programs import PARTS
from .passes.state import Compilation, Goal, run
from .passes.state import Subject as ModelSubject

if TYPE_CHECKING:
    from onnxscript import ir

    from .sizes.torch_input_sizes import DeclaredSizes


MIN_OPSET, MAX_OPSET = 18, 24
_LOG = logging.getLogger("lazyinline")


@dataclass(frozen=True)
class ExportReport:
    """The report of an export.

    Attributes:
        path: the file.
        functions: the number of nodes of each local function.
        main_nodes: the number of nodes of the main graph: one per block instance, and the glue.
        graph_bytes: size of the file, without weights in a second file.
        weight_bytes: bytes of all initializers.
        inputs: names of the inputs.
        outputs: names of the outputs.
        max_relative_error: largest difference to eager, relative to the largest value of its
            output; None if it was not checked.
        conditions: conditions on the sizes, beyond their declared ranges.
    """

    path: pathlib.Path
    functions: Mapping[str, int]
    main_nodes: int
    graph_bytes: int
    weight_bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_relative_error: float | None = None
    conditions: tuple[str, ...] = ()

    def __str__(self) -> str:
        checked = "not compared with eager"
        if self.max_relative_error is not None:
            checked = f"onnxruntime and eager differ by {self.max_relative_error:.1e} (relative)"
        return folded(
            f"{self.path}: {self.main_nodes} nodes and {len(self.functions)} functions of "
            f"{sum(self.functions.values())} nodes; {self.graph_bytes / 1e3:.1f} kB file, "
            f"{self.weight_bytes / 1e6:.1f} MB weights; {checked}"
        )


@door
def export_onnx(
    model: nn.Module | Program,
    args: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    reuse: Reuse = "auto",
    functions: bool = True,
    dynamic_shapes: Any = None,
    opset: int = MIN_OPSET,
    train: bool = False,
    verify: bool = True,
    external_data: bool | None = None,
) -> ExportReport:
    """Writes a model as an ONNX file with one local function per different block.

    Each closure is translated once, by torch.onnx's own operator translations. Each block instance
    is one node that calls its function, named by its module path. Parameters are initializers with
    the model's own names.

    Args:
        model: a model, a compiled module, or a captured program (``lazyinline.capture``).
        args: example positional inputs; the file is also checked on them.
        path: the file to write.
        kwargs: example keyword inputs.
        reuse: ``"auto"``, ``"marked"`` or ``"off"``, as in :func:`lazyinline.compile`; not used
            for a compiled module or a program, which have theirs.
        functions: False writes a flat model, with every call replaced by its function's nodes.
        dynamic_shapes: which dimensions of the inputs may vary, as ``torch.export.export`` takes
            it; named ``Dim`` objects, or plain names, become the names of the file's dimensions.
        opset: version of the ONNX operators, 18 to 24.
        train: write forward and backward. The model returns a scalar loss, or an output with
            ``.loss``; each gradient is an output named ``grad.<parameter>``.
        verify: run onnxruntime on the example inputs and compare with the model (1e-4 relative);
            the file is written only if they agree.
        external_data: whether weights go into ``<path>.data``; None decides by size (2 GB).

    Returns:
        A report, which the logger ``lazyinline`` logs, too.

    Raises:
        CaptureError: if the model cannot be captured.
        ExportError: if it cannot be expressed in ONNX (operator, block and line are named), if
            onnxruntime disagrees with the model, or without the extra ``lazyinline[onnx]``.

    Example:
        >>> lazyinline.export_onnx(model.eval(), (ids,), "model.onnx")
    """
    with one_at_a_time():
        target = pathlib.Path(path)
        _check_call(target, opset)
        arguments = (args,) if isinstance(args, torch.Tensor) else tuple(args)
        if dynamic_shapes is not None and (train or not isinstance(model, nn.Module)):
            raise ExportError(
                "dynamic_shapes goes with a model and inference: leave train=False, and pass the "
                "model instead of a program."
            )
        goal = Goal("file", train=train, opset=opset)
        # Copied, so that a tensor passed as two arguments becomes two inputs of the file.
        arguments, keywords = copied((arguments, dict(kwargs or {})))
        subject = _subject(model, arguments, keywords, reuse, goal, dynamic_shapes)
        built, names = _build(subject, opset)
        if not functions:
            from ..backend.onnx.functions import inline_functions

            inline_functions(built)
        return _write(built, subject, names, target, verify=verify, external_data=external_data)


def _check_call(path: pathlib.Path, opset: int) -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(
            f"export_onnx needs {' and '.join(missing)}, not installed here: "
            "pip install 'lazyinline[onnx]'."
        )
    if not MIN_OPSET <= opset <= MAX_OPSET:
        raise ExportError(f"opset={opset}: from {MIN_OPSET} to {MAX_OPSET} can be written.")
    if not path.resolve().parent.is_dir() or path.is_dir():
        raise ExportError(f"{path} cannot be written: there is no such folder, or it is one.")


def _subject(
    model: nn.Module | Program,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    reuse: Reuse,
    goal: Goal,
    dynamic_shapes: Any,
) -> Subject:
    if isinstance(model, Program):
        if not model.sources:
            raise ExportError("This program has no sources: export one that was captured.")
        state = run(PASSES, replace(_started(reuse, goal), programs={PARTS[0]: model}))
        return _exported(state, None, args, kwargs)
    calls = dispatcher_of(model)
    if calls is not None:
        reuse, model = calls.options.reuse, calls.model
    if not isinstance(model, nn.Module):
        raise ExportError(f"A model or a program is exported, not a {type(model).__name__}.")
    subject = ModelSubject(model, args, kwargs, effects="undo")
    state = replace(_started(reuse, goal), subject=subject)
    state = run(PASSES, state) if dynamic_shapes is None else _sized(state, subject, dynamic_shapes)
    return _exported(state, model, args, kwargs)


def _exported(
    state: Compilation, model: nn.Module | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Subject:
    """Returns the program of finished passes, with the model to check it against."""
    program, derivative = verify_program(state.programs[PARTS[0]]), state.derivative
    gradients = () if derivative is None else derivative.gradient_inputs
    sizes = None if state.seen is None else state.seen.sizes
    return Subject(program, model, args, kwargs, gradients, sizes)


def _started(reuse: Reuse, goal: Goal) -> Compilation:
    context = Context(Options(reuse=reuse, backend="eager"))
    return Compilation(context=context, report=context.report(train=goal.train), goal=goal)


def _sized(state: Compilation, subject: ModelSubject, dynamic_shapes: Any) -> Compilation:
    """Runs the passes with symbols for the sizes that may vary."""
    from ..backend.onnx.torch_onnx import oblivious
    from .sizes.torch_input_sizes import DeclaredSizes

    given = (subject.model, subject.args, subject.kwargs, dynamic_shapes)
    sizes = partial(DeclaredSizes, *given)
    with oblivious():
        try:
            return _run_sized(state, subject, sizes)
        except (CaptureError, ExportError):
            # Undeclared relations between sizes may hold in the example only: its sizes as hints.
            if not sizes().moved:
                raise
            return _run_sized(state, subject, partial(sizes, hints="example"))


def _run_sized(
    state: Compilation, subject: ModelSubject, sizes: Callable[[], DeclaredSizes]
) -> Compilation:
    state = run(PASSES, replace(state, subject=replace(subject, sizes=sizes)))
    state.captured.sizes.conditions()
    return state


def _names(subject: Subject) -> Names:
    program, tree = subject.program, subject.program.output_tree
    assert isinstance(tree, OutputTree)
    taken: set[str] = set()
    # Inputs keep the names of the arguments; outputs and constants get free names.
    users = [s.name for s in program.sources if isinstance(s, UserInput)]
    taken.update(users)
    inputs = []
    for index, source in enumerate(program.sources):
        name = source.name
        if isinstance(source, ModelTensor):
            name = _free(
                f"constant_{index}" if source.kind == "constant" and "." not in name else name,
                taken,
            )
        inputs.append(name)
    outputs: list[str | None] = [None] * len(program.outputs)
    results = []
    for position, (name, (kind, index)) in enumerate(zip(tree.names, tree.leaves, strict=True)):
        if kind == "output":
            outputs[index] = outputs[index] or _free(name, taken)
            results.append((position, str(outputs[index])))
    for output, target in program.writes:
        outputs[output] = outputs[output] or _free(f"new.{program.sources[target].name}", taken)
    gradients = {}
    first = len(outputs) - len(subject.gradients)
    for offset, target in enumerate(subject.gradients):
        gradients[target] = outputs[first + offset] = _free(
            f"grad.{program.sources[target].name}", taken
        )
    return Names(inputs, outputs, results, gradients)


def _free(wish: str, taken: set[str]) -> str:
    name, number = wish, 1
    while name in taken:
        name, number = f"{wish}_out" if number == 1 else f"{wish}_out{number}", number + 1
    taken.add(name)
    return name


def _build(subject: Subject, opset: int) -> tuple[ir.Model, Names]:
    from lazyinline import __version__

    # Imported late, because it needs onnxscript, an optional dependency.
    from ..backend.onnx.functions import Naming, build_model

    names = _names(subject)
    graph = type(subject.model).__name__ if subject.model is not None else "main"
    sizes = {} if subject.sizes is None else subject.sizes.names
    naming = Naming(names.inputs, names.outputs, sizes, graph)
    model = build_model(subject.program, opset, naming)
    model.producer_name, model.producer_version = "lazyinline", __version__
    model.metadata_props["torch"] = torch.__version__
    return model, names


def _write(
    model: ir.Model,
    subject: Subject,
    names: Names,
    path: pathlib.Path,
    *,
    verify: bool,
    external_data: bool | None,
) -> ExportReport:
    """Writes and checks the file in a temporary folder next to it, then moves it into place."""
    from ..backend.onnx import functions

    error = None
    with tempfile.TemporaryDirectory(dir=path.resolve().parent, prefix=".lazyinline-") as folder:
        draft = pathlib.Path(folder) / path.name
        functions.save_model(model, draft, external_data=external_data)
        if verify:
            error = check(draft, model, subject, names)
        # Weights first, so that nobody reads the new graph with old weights.
        for file in sorted(pathlib.Path(folder).iterdir(), reverse=True):
            os.replace(file, path.resolve().parent / file.name)
    report = ExportReport(
        path,
        {f.name: len(f) for f in model.functions.values()},
        len(model.graph),
        path.stat().st_size,
        functions.weight_bytes(model),
        tuple(str(v.name) for v in model.graph.inputs),
        tuple(str(v.name) for v in model.graph.outputs),
        error,
        () if subject.sizes is None else subject.sizes.conditions(),
    )
    _LOG.info("%s", report)
    return report


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
    return replace(subject, args=args, kwargs=kwargs)


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

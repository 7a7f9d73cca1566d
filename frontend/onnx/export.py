"""``export_onnx(model, args, path)``: a program as an ONNX file, one function per closure."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...reuse.errors import CaptureError, ExportError, door
from ...reuse.ir.printer import folded
from ...reuse.ir.program import ModelTensor, Program, UserInput
from ...reuse.ir.verify import verify as verify_program
from ..capture.assemble import OutputTree
from ..capture.blocks import Reuse
from ..capture.surroundings import one_at_a_time
from ..compiler import PASSES
from ..dispatch.dispatcher import dispatcher_of
from ..options import Options
from ..passes.context import Context
from ..passes.programs import PARTS
from ..passes.state import Compilation, Goal, run
from ..passes.state import Subject as ModelSubject
from .check import Names, Subject, copied

if TYPE_CHECKING:
    from onnxscript import ir

    from ..sizes.torch_input_sizes import DeclaredSizes

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
        _check_installed()
        _check_options(target, opset)
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
            from ...backend.onnx.functions import inline_functions

            inline_functions(built)
        return _write(built, subject, names, target, verify=verify, external_data=external_data)


def _check_installed() -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(
            f"export_onnx needs {' and '.join(missing)}, not installed here: "
            "pip install 'lazyinline[onnx]'."
        )


def _check_options(path: pathlib.Path, opset: int) -> None:
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
    from ...backend.onnx.torch_onnx import oblivious
    from ..sizes.torch_input_sizes import DeclaredSizes

    given = (subject.model, subject.args, subject.kwargs, dynamic_shapes)
    sizes = functools.partial(DeclaredSizes, *given)
    with oblivious():
        try:
            return _run_sized(state, subject, sizes)
        except (CaptureError, ExportError):
            # Undeclared relations between sizes may hold in the example only: its sizes as hints.
            if not sizes().moved:
                raise
            return _run_sized(state, subject, functools.partial(sizes, hints="example"))


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
    from ...backend.onnx.functions import Naming, build_model

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
    from ...backend.onnx import functions

    error = None
    with tempfile.TemporaryDirectory(dir=path.resolve().parent, prefix=".lazyinline-") as folder:
        draft = pathlib.Path(folder) / path.name
        functions.save_model(model, draft, external_data=external_data)
        if verify:
            from .check import check

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

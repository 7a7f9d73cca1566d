"""``measure(model)`` compares late inlining with early inlining, eager and ``torch.compile``.

Copies of the model are compiled with late and with early inlining; both are compared with eager.
The report is a table, JSON and a page.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import nn

from ..backend.kernels import torch_inductor
from ..backend.kernels.lower import BackendName
from ..reuse import torch_pytree
from ..reuse.errors import PlanError, door
from ..reuse.ir.printer import folded
from .capture.blocks import Reuse
from .compiled_module import CompiledModule
from .compiler import Compiler
from .onnx_file import copied, gap
from .options import Batching, LossModel, Options, check_count, loss_of, split_batch
from .page.page import measured_page, write_page
from .page.sections import error_text
from .passes.state import Goal, step_goal
from .refusals import check_example, check_runnable
from .report import CompileReport, cpu_seconds
from .training_step import TrainingStep

if TYPE_CHECKING:
    from torch.utils.benchmark import Measurement

Step: TypeAlias = tuple[Mapping[str, torch.Tensor | None], Mapping[str, torch.Tensor | None]]
"""The outputs and the gradients of one step, each by name."""

Against: TypeAlias = Literal["torch.compile", "per-block"]
"""``torch.compile`` on the model, or on each block that late inlining shares."""

_SIZES = {
    "graph nodes held": "num_nodes",
    "graph nodes if inlined": "num_nodes_if_inlined",
    "closures": "num_closures",
    "block calls": "num_block_calls",
    "operators compiled": "num_operators",
    "launches in a step": "num_launches",
    "arena, bytes": "peak_bytes",
}


class Errors(NamedTuple):
    """The differences between a step and an eager step."""

    output: float  # the largest absolute difference of any output element
    # The largest relative difference of a gradient, by norms; None without training.
    gradient: float | None = None
    worst: str = ""  # the parameter or input whose gradient that is


@dataclass(frozen=True)
class Other:
    """The compile time of ``torch.compile`` for the same model."""

    cpu_s: float  # CPU seconds of the first step minus those of the second
    wall_s: float  # the same in wall-clock time
    refused: str = ""  # the first line of its error, if it failed; it then has no step


@dataclass(frozen=True)
class MeasureReport:
    """Late and early inlining of one model, both compared with eager.

    Attributes:
        late: the compile with blocks compiled once and inlined at link.
        early: the compile with everything inlined first (``reuse="off"``).
        steps: step times of eager, late, early and ``others``, by name; empty if nothing was run.
        errors: differences from eager, by name; empty if nothing was run.
        layers: the number of layers, if known.
        others: the compile times of ``torch.compile``, by :data:`Against`.
    """

    model: str
    train: bool
    backend: BackendName
    micro_batches: int
    threads: int
    late: CompileReport
    early: CompileReport
    steps: Mapping[str, Measurement] = field(default_factory=dict)
    errors: Mapping[str, Errors] = field(default_factory=dict)
    layers: int | None = None
    others: Mapping[str, Other] = field(default_factory=dict)

    @property
    def sides(self) -> dict[str, CompileReport]:
        """The reports of both compiles, by name."""
        return {"late": self.late, "early": self.early}

    @property
    def noise(self) -> str:
        """Why step times cannot be trusted; empty if they can."""
        if not any(step.has_warnings for step in self.steps.values()):
            return ""
        widest = max(step.iqr / step.median for step in self.steps.values())
        return f"busy machine, do not trust step times: the middle half varies by {widest:.0%}"

    def title(self) -> str:
        """Returns a line that names what was measured."""
        depth = "" if self.layers is None else f", {self.layers} layers"
        kind = "training" if self.train else "inference"
        if self.micro_batches > 1:
            kind += f" of {self.micro_batches} micro-batches"
        threads = f"{self.threads} thread" + ("" if self.threads == 1 else "s")
        return f"{self.model}{depth}: {kind}, backend {self.backend}, {threads}"

    def notes(self) -> list[str]:
        """Returns notes for the reader: noisy times, blocks that are not shared, and why."""
        notes = [self.noise] if self.noise else []
        notes += map(self.other_text, self.others)
        if not self.late.num_block_calls:
            notes.append("no block is shared, so late and early are the same")
        for one in (*self.late.not_shared(), *self.late.shared_with_constants()):
            why = one.shares or f"not shared, {one.reason}"
            notes.append(f"{one.path or one.class_name}: {why}")
        return notes

    def other_text(self, name: str) -> str:
        """Returns a line on the times of ``torch.compile``, with lazyinline's relative to them."""
        other, late = self.others[name], self.late
        if other.refused:
            return f"{name} refuses: {other.refused}"
        theirs, ours = (min(self.steps[n].times) for n in (name, "late"))
        off = self.errors[name]
        gradient = "" if off.gradient is None else f", of a gradient {error_text(off.gradient)}"
        return (
            f"{name}: {other.cpu_s:.2f} CPU s ({other.wall_s:.2f} s), of which late takes "
            f"{late.cpu_s / other.cpu_s:.2f}; a step {1e3 * theirs:.2f} ms, late "
            f"{ours / theirs:.2f} of it; error {error_text(off.output)}{gradient}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as plain values; those not measured are empty or None."""
        own = ("model", "layers", "micro_batches", "train", "backend", "threads")
        sides, steps = self.sides.items(), self.steps.items()
        return {name: getattr(self, name) for name in own} | {
            "nodes_held": self.late.num_nodes,
            "nodes_if_inlined": self.late.num_nodes_if_inlined,
            "peak_bytes": self.late.peak_bytes,
            "lower_bound_bytes": self.late.lower_bound_bytes,
            "compile_cpu_s": {name: side.cpu_s for name, side in sides},
            "compile_wall_s": {name: side.wall_s for name, side in sides},
            "passes": {name: [asdict(one) for one in side.passes] for name, side in sides},
            "operators": {name: side.num_operators for name, side in sides},
            "launches": {name: side.num_launches for name, side in sides},
            "step_ms": {name: 1e3 * step.median for name, step in steps},
            "step_min_ms": {name: 1e3 * min(step.times) for name, step in steps},
            "step_max_ms": {name: 1e3 * max(step.times) for name, step in steps},
            "rounds": {name: len(step.times) for name, step in steps},
            # JSON has no infinity, so an infinite error is a string.
            "max_abs_error": {n: _finite(e.output) for n, e in self.errors.items()},
            "max_rel_grad_error": {n: _finite(e.gradient) for n, e in self.errors.items()},
            "worst_gradient": {n: e.worst for n, e in self.errors.items()},
            "others": {name: asdict(other) for name, other in self.others.items()},
            "noise": self.noise,
            "notes": self.notes(),
        }

    def to_json(self) -> str:
        """Returns :meth:`to_dict` as JSON; an infinite error is the string ``"inf"``."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a self-contained page: verdict, program, passes, steps, the arena."""
        page = measured_page([(self.to_dict(), self.sides)], self.title())
        pathlib.Path(path).write_text(write_page(page), encoding="utf-8")

    def __str__(self) -> str:
        rows = [f"{name:<24}" + "".join(f"{x:>18}" for x in cells) for name, *cells in self._rows()]
        return folded("\n".join([self.title(), "", *map(str.rstrip, rows), "", *self.notes()]))

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yields the printed rows: sizes and seconds of late and early, and steps of all three."""
        both = [self.late, self.early]
        yield "", *self.sides
        for label, name in _SIZES.items():
            if getattr(self.late, name) is not None:
                yield label, *(str(getattr(side, name)) for side in both)
        yield from (("",), ("CPU s (wall s)", *self.sides))
        for ones in (*zip(*(side.passes for side in both), strict=True), both):
            name = getattr(ones[0], "name", "all")
            yield f"  {name}", *(f"{one.cpu_s:.2f} ({one.wall_s:>6.2f})" for one in ones)
        if not self.steps:
            return
        steps = [self.steps[name] for name in ("eager", *self.sides)]
        off = [self.errors[name] for name in self.sides]
        yield from (("",), ("one step", "eager", *self.sides))
        yield "  median, ms", *(f"{1e3 * step.median:.2f}" for step in steps)
        yield "  fastest, ms", *(f"{1e3 * min(step.times):.2f}" for step in steps)
        yield "  error of an output", "", *(error_text(e.output) for e in off)
        if self.train:
            yield "  of a gradient", "", *(error_text(e.gradient) for e in off)


def _finite(value: float | None) -> float | str | None:
    return "inf" if value == float("inf") else value


class Workload:
    """A copy of a model and of its inputs, so that a step does not change the user's.

    The first step compiles the copy with ``options``; without them it runs eagerly, but for the
    modules at the paths ``torch_compiled`` ("" is the model). The loss is the mean of the
    micro-batches', which run one after another.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        train: bool,
        micro_batches: int = 1,
        options: Options | None = None,
        torch_compiled: Sequence[str] = (),
    ) -> None:
        model, self._train = copy.deepcopy(model), train
        for path in torch_compiled:
            model.get_submodule(path).compile()
        self.run: Any = model
        if options is not None and micro_batches > 1:
            self.run = TrainingStep(model, None, options, Batching(micro_batches))
            micro_batches = 1  # it splits the batch itself
        elif options is not None:
            self.run = CompiledModule(model, options)
        args, kwargs = copied((tuple(args), dict(kwargs)))
        inputs = _tensors_in((args, kwargs))
        named = dict(model.named_parameters()) | {f"input {n}": t for n, t in inputs.items()}
        self._wanted = {name: t for name, t in named.items() if t.requires_grad and train}
        if train and not self._wanted:
            raise PlanError(
                f"Nothing in {type(model).__name__} requires grad, so there is no training step to "
                "measure. Pass train=False, or parameters that require grad."
            )
        self._parts = split_batch(args, kwargs, micro_batches)

    def step(self) -> Step:
        """Runs a forward, and in training a backward; returns outputs and gradients by name."""
        for tensor in self._wanted.values():
            tensor.grad = None
        with torch.set_grad_enabled(self._train):
            results = [self.run(*args, **kwargs) for args, kwargs in self._parts]
            if len(results) > 1:
                results = [torch.stack([*map(loss_of, results)]).mean()]
        outputs = _tensors_in(results[0])
        # A ``TrainingStep`` has run its backward already.
        if self._train and not isinstance(self.run, TrainingStep):
            torch.autograd.backward(*_objective(results[0], outputs))
        values = {name: tensor.detach() for name, tensor in outputs.items()}
        return values, {name: tensor.grad for name, tensor in self._wanted.items()}


def _tensors_in(value: Any) -> dict[str, torch.Tensor]:
    leaves = torch_pytree.flatten_with_names(value)
    return {name: leaf for name, leaf in leaves if isinstance(leaf, torch.Tensor)}


def _objective(result: Any, outputs: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """Returns the tensors to differentiate, the loss or all outputs, and their cotangents."""
    loss = loss_of(result)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss, None
    ends = [tensor for tensor in outputs.values() if tensor.requires_grad]
    # Not all ones: the sum of a normalized output has no gradient.
    ramps = [torch.linspace(-1, 1, t.numel(), device=t.device) for t in ends]
    return ends, [ramp.view_as(t).to(t.dtype) for ramp, t in zip(ramps, ends, strict=True)]


def generators_kept() -> AbstractContextManager[Any]:
    """Restores the random generators at the end."""
    # Only if CUDA is in use, because reading the state of a GPU's generator initializes CUDA.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return torch.random.fork_rng(gpus)


def errors(actual: Step, expected: Step) -> Errors:
    """Returns the largest differences of outputs and of gradients."""
    outputs, gradients = (
        {name: difference(found.get(name), b, relative=relative) for name, b in right.items()}
        for found, right, relative in zip(actual, expected, (False, True), strict=True)
    )
    output = max(outputs.values(), default=0.0)
    if not gradients:
        return Errors(output)
    worst = max(gradients, key=gradients.__getitem__)
    return Errors(output, gradients[worst], worst)


def difference(a: torch.Tensor | None, b: torch.Tensor | None, *, relative: bool) -> float:
    """Returns the largest absolute difference; or its norm, relative to that of ``b``."""
    given = b if a is None else a
    if given is None:
        return 0.0
    a, b = (torch.zeros_like(given) if t is None else t for t in (a, b))  # no gradient: zeros
    if a.shape != b.shape:
        return math.inf
    off = gap(a, b)
    if relative:
        error = off.norm().item() / max(
            b.to(off.dtype).norm().item(), torch.finfo(torch.float32).tiny
        )
    else:
        error = off.abs().max().item() if off.numel() else 0.0
    return math.inf if math.isnan(error) else error


ROUNDS, ROUND_S = 3, 0.5
"""All ways are timed in turn: the number of rounds, and seconds for each way in a round."""


@door
def measure(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = True,
    micro_batches: int = 1,
    execute: bool = True,
    backend: BackendName = "inductor",
    reuse: Reuse = "auto",
    against: Sequence[Against] = (),
) -> MeasureReport:
    """Compiles a model with late and with early inlining and compares both with eager.

    A tiny model is compiled first, so that neither side pays for imports. Inductor's cache of
    whole graphs is off, its cache of C++ objects is on. The late side runs first, so C++ objects
    that both need are charged to it. ``torch.utils.benchmark`` times the steps in turn.

    In training a step is a forward and the gradients of a scalar result or of its ``.loss``; if
    there is neither, all outputs are differentiated with fixed cotangents. The model keeps its
    train or eval mode. Copies are run: the model, its ``.grad`` and the inputs do not change.

    Args:
        model: an ``nn.Module`` that ``copy.deepcopy`` can copy.
        args: positional inputs of one step.
        kwargs: keyword inputs of one step.
        train: measure a training step; otherwise a forward without gradients.
        micro_batches: training only. Each tensor of the batch is split along dimension 0 into so
            many parts; both sides then use :func:`compile_step`, whose loss is the mean.
        execute: run the steps; otherwise only compile. The model may then be on the meta device.
        backend: ``"inductor"`` or ``"eager"``.
        reuse: what the late side shares, ``"auto"`` or ``"marked"``; early is always ``"off"``.
        against: also measure ``"torch.compile"`` on the model, or ``"per-block"``: on each block
            that the late side shares, with the rest eager. They run last and find the C++ objects
            of late and early in the cache. If one fails, the report has its error.

    Returns:
        The numbers; ``print(report)``, ``report.to_json()``, ``report.save_html(path)``.

    Raises:
        CaptureError: if the model cannot be captured.
        PlanError: if the arguments do not fit each other or the model.

    Example:
        >>> print(lazyinline.measure(model, (ids, targets)))
    """
    check_example("measure", model, args)
    check_count(micro_batches)
    if micro_batches > 1 and not train:
        raise PlanError(
            f"micro_batches={micro_batches} goes with training, where gradients are summed over "
            "them. For inference leave it 1."
        )
    unknown = [one for one in against if one not in get_args(Against)]
    if unknown or (against and not execute):
        why = f"{unknown[0]!r} is not known" if unknown else "execute=False runs nothing"
        raise PlanError(f"against={list(against)}: {why}. It takes {get_args(Against)}, executed.")
    late, early = (Options(reuse=one, backend=backend) for one in (reuse, "off"))
    if execute:
        check_runnable(model)
    warm_up_compiler(backend=backend, train=train)
    found = partial(
        MeasureReport, type(model).__name__, train, backend, micro_batches, torch.get_num_threads()
    )
    work = partial(Workload, model, args, kwargs or {}, train=train, micro_batches=micro_batches)
    with generators_kept(), graph_cache_off("inductor" if against else backend):
        if not execute:
            compiled = partial(_compiled, model, args, kwargs or {}, train, micro_batches)
            return found(compiled(late), compiled(early))
        sides = {"late": work(options=late), "early": work(options=early)}
        return found(**_compared(work, sides, against))


def _compared(
    work: Callable[..., Workload], sides: Mapping[str, Workload], against: Sequence[Against]
) -> dict[str, Any]:
    """Returns the reports of both sides, the step times, and the differences from eager."""
    for side in sides.values():
        gc.collect()  # so that no side pays for earlier garbage
        _seeded(side)  # compiles
    reports = {name: side.run.last_report for name, side in sides.items()}
    ways, others = {"eager": work(), **sides}, dict[str, Other]()
    if against:  # the first use imports Dynamo
        _first_step(Workload(_tiny(), (torch.ones(4, 8),), {}, train=True, torch_compiled=[""]))
    for name in against:
        paths = [""] if name == "torch.compile" else _outermost(reports["late"])
        way = work(torch_compiled=paths)
        others[name] = _first_step(way)
        if not others[name].refused:
            ways[name] = way
    _seeded(ways["eager"])  # a first step to warm up; the next one is compared
    results = {name: _seeded(way) for name, way in ways.items()}
    # Compared before more steps run, because they overwrite these gradients in place.
    off = {name: errors(results[name], results["eager"]) for name in ways if name != "eager"}
    steps = _timed({name: way.step for name, way in ways.items()})
    again = {name for name, side in sides.items() if side.run.last_report is not reports[name]}
    assert not again, f"{again}: compiled again for the same inputs, which is not a step"
    return {**reports, "steps": steps, "errors": off, "others": others}


def _outermost(report: CompileReport) -> list[str]:
    """Returns the paths of the outermost blocks."""
    paths = {one.path for one in report.decisions}
    # ``torch.compile`` of a block also compiles the blocks inside.
    inside = {path for path in paths if any(path.startswith(f"{other}.") for other in paths)}
    return sorted(paths - inside)


def _first_step(way: Workload) -> Other:
    """Returns the compile time of ``torch.compile``: the first step minus the second.

    If it fails, its error is part of the result.
    """
    gc.collect()
    torch.compiler.reset()  # drops what an earlier model left
    took = [(cpu_seconds(), time.perf_counter())]
    try:
        for _ in range(2):
            _seeded(way)
            took.append((cpu_seconds(), time.perf_counter()))
    except Exception as error:  # PyTorch's compiler may raise any
        lines = str(error).strip().splitlines() or [""]
        return Other(0.0, 0.0, f"{type(error).__name__}: {lines[0]}")
    # ``took`` has the time before both steps, between them, and after them.
    return Other(*(2 * second - first - third for first, second, third in zip(*took, strict=True)))


def warm_up_compiler(*, backend: BackendName, train: bool) -> None:
    """Compiles a tiny model, so that imports and initialization are done."""
    with generators_kept(), graph_cache_off(backend), torch.device("cpu"):
        _compiled(_tiny(), (torch.ones(4, 8),), {}, train, 1, Options(backend=backend))


def _tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Softmax(-1))


def _compiled(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    train: bool,
    micro_batches: int,
    options: Options,
) -> CompileReport:
    """Compiles without running; returns the report."""
    compiler = Compiler(options)
    with torch.set_grad_enabled(train):
        if micro_batches == 1:
            return compiler.compile(model, args, kwargs, Goal(train=train))[1]
        args, kwargs = split_batch(args, kwargs, micro_batches)[0]
        loss = LossModel(model, None)
        return compiler.compile(loss, args, kwargs, step_goal(Batching(micro_batches)))[1]


def _seeded(work: Workload) -> Step:
    torch.manual_seed(0)  # the same dropout everywhere
    return work.step()


def _timed(steps: Mapping[str, Callable[[], Any]]) -> dict[str, Measurement]:
    """Times the steps, in turn."""
    from torch.utils.benchmark import Measurement, Timer  # slow: imports cpp_extension

    threads = torch.get_num_threads()
    timers = [Timer("step()", globals={"step": s}, num_threads=threads) for s in steps.values()]
    rounds = [[t.blocked_autorange(min_run_time=ROUND_S) for t in timers] for _ in range(ROUNDS)]
    times = [Measurement.merge(of_one)[0] for of_one in zip(*rounds, strict=True)]
    return dict(zip(steps, times, strict=True))


def graph_cache_off(backend: BackendName) -> AbstractContextManager[Any]:
    """Turns off Inductor's cache of whole graphs."""
    return torch_inductor.graph_cache_off() if backend == "inductor" else nullcontext()

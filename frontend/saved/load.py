"""``load(path)``: opens a file of :func:`save`, without running code to read it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...backend.cache import decode_value
from ...backend.files.container import CallError, Parts, open_parts, read_tensors
from ...backend.files.torch_store import DiskCache, open_cache
from ...pipeline_parallel.cut import Colors, cut_program
from ...pipeline_parallel.process_groups import all_ranks
from ...pipeline_parallel.stage_derivative import check_draws
from ...recompute.planner import Budget
from ...reuse import torch_pytree
from ...reuse.errors import FileError, door
from ...reuse.evidence.reads import Reads
from ...reuse.evidence.root_evidence import RootEvidence
from ...reuse.ir.program import ModelTensor, Program, Source, UserInput, wants_gradient
from ...reuse.ir.types import TensorType
from ..capture.regions import CapturedModel
from ..capture.surroundings import garbage_collection_paused
from ..compiled_module import CompiledModule
from ..compiler import PASSES, Compiler, Linker, made_by
from ..dispatch.dispatcher import Dispatcher
from ..guard import Guard
from ..options import Batch, Batching, LossModel, Options, split
from ..parallel import ParallelPipeline, ParallelStep
from ..passes.context import Context
from ..passes.link import linked
from ..passes.programs import PARTS
from ..passes.rank import RankCompilation, Splitting
from ..passes.stages import of_rank
from ..passes.state import Compilation, Goal, Subject, between, run, step_goal
from ..pipeline import AskedPipeline, Pipeline
from ..report import CompileReport
from ..sizes.shapes import CompileResult
from ..sizes.torch_known_sizes import KnownSizes, ReadKnownSizes
from ..torch_optimizer import StepOptimizer, optimizer_of
from ..training_step import TrainingStep
from .parts import ReadProgram, model_inputs, read_program, take_made, used_parameters
from .ranks import (
    Arrivals,
    check_number,
    place_of,
    read_colors,
    read_ranks,
    read_stages,
    together,
)
from .save import CONSTANTS, MODEL, STATE, WEIGHTS, beside
from .saved_model import (
    SavedModel,
    TensorNames,
    class_name_of,
    refuse_call,
    set_modes,
    tensor_of,
    tree_of,
)

if TYPE_CHECKING:  # importing DTensor takes as long as importing all of lazyinline
    from .mesh import SavedMesh

_LOWER, _LOWER_AND_LINK = between(PASSES, "lower", "lower"), between(PASSES, "lower", "predict")


@door
def load(
    path: str | os.PathLike[str],
    *,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    trust: bool = False,
    mesh: Any = None,
) -> CompiledModule | TrainingStep | Pipeline | ParallelStep:
    """Opens a file that :func:`save` wrote. The model's source code is not needed.

    Every byte is checked before it is used: each part against its digest (weights beside the file
    have none), programs operator by operator, tensors against the types that programs take. Kernels
    and memory plans in the file are machine code and addresses. They are used if this machine's own
    cache has signed the file and it was saved by the same PyTorch and CPU; otherwise they are made
    again from the programs.

    Args:
        path: the file.
        state_dict: weights to use, without copying, in place of those in the file.
        trust: uses kernels and plans in the file even if another machine made them. They are code:
            set this only for a file that you would execute.
        mesh: for a result of :func:`parallelize`, an existing ``DeviceMesh`` with the same
            dimensions and its ranks in any order. By default one is made.

    Returns:
        A module that is used like the compiled model. For a step, a step with the ``model`` and
        ``optimizer`` of the file. For a pipeline or mesh, this rank's part, with its
        ``named_parameters()`` or ``model``: every rank opens the file.

    Raises:
        FileError: if the file is damaged, no such file, or for other ranks.

    Example:
        >>> model = lazyinline.load("model.lz")
        >>> with torch.no_grad():
        ...     logits = model(ids)
    """
    store = open_cache()
    with (
        Arrivals(path) as arrivals,
        garbage_collection_paused(),
        open_parts(path, store) as parts,
    ):
        opened = Opened(parts, store if trust or parts.is_signed else None, arrivals.meet)
        if opened.is_on_mesh and state_dict is not None:
            raise CallError("a state_dict has whole tensors: load it into the model afterwards")
        if mesh is not None and not opened.is_on_mesh:
            raise CallError("mesh= is for a step over a mesh, which it is not: leave it out")
        if opened.is_pipeline:
            return opened.pipeline(path, state_dict, mesh)
        if opened.is_on_mesh:
            return opened.on_mesh(path, mesh)
        model = opened.module(path, state_dict)
        return opened.adopted(model)


class Opened:
    """A file that is being read: first its programs, which have the layouts of tensors.

    ``store`` is the cache for its objects, if they are trusted; ``meet`` waits for all ranks.
    """

    def __init__(
        self, parts: Parts, store: DiskCache | None, meet: Callable[[], None] = lambda: None
    ) -> None:
        self._parts, self._store, self._meet = parts, store, meet
        self._told = told = parts.json(MODEL)
        self._batching = None if told["batching"] is None else Batching(*told["batching"])
        self.is_pipeline, self.is_on_mesh = "ranks" in told, "mesh" in told
        self._own = ""  # the folder of this rank's parts
        self._absent: set[str] = set()  # tensors of other ranks
        self._needed = set[str]()  # tensors that this rank must have, if there are several
        # Over a mesh, the parameters of which this rank has parts, and the types of the parts.
        self._parted: Container[str] = ()
        self._part_types: dict[str, TensorType] = {}
        self._parts_read: dict[str, torch.Tensor] = {}
        self._constants: dict[str, torch.Tensor] = {}

    @cached_property
    def _programs(self) -> list[ReadProgram]:
        """The programs; read on first use, within ``together``, so that errors reach all ranks."""
        settings = None
        if self._batching is not None:
            # With a stand-in for each tensor, because programs are read before tensors.
            update = self._optimizer(lambda name: nn.Parameter(torch.zeros(1, device="cpu")))
            settings = [] if update is None else [one.settings for one in update.groups()]
        return [
            read_program(self._parts, _place(i), one, settings, trusted=self._store is not None)
            for i, one in enumerate(self._told["programs"])
        ]

    @cached_property
    def _names(self) -> TensorNames:
        named = {each.name: self._told[each.name] for each in fields(TensorNames)}
        if named["parameters"] is None:
            named["parameters"] = used_parameters(one.captured for one in self._programs)
        return TensorNames(**named)

    @cached_property
    def _types(self) -> dict[str, TensorType]:
        # If programs take a tensor in two ways, it is refused where it is bound to the second one.
        taken = (one for program in self._programs for one in model_inputs(program.captured))
        return {source.name: type_ for _, source, type_ in taken}

    @property
    def options(self) -> Options:
        """The options that the programs were compiled with."""
        backend, reuse, recompute, target = self._told["options"]
        policy = Budget(**recompute) if isinstance(recompute, dict) else recompute
        return Options(reuse, backend, policy, cache="disk", fallback="error", target=target)

    def module(
        self, path: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor] | None
    ) -> SavedModel:
        """Returns the model, with its tensors; FileError if programs take others."""
        self._constants = found = self._read(CONSTANTS)
        where = self._told["weights"]
        if state_dict is not None:
            names = (n for n in self._names.saved if not self.is_pipeline or n in state_dict)
            found |= {name: self._given(name, state_dict) for name in names}
        elif where == "inside":
            found |= self._read(WEIGHTS)
        elif where == "beside":
            with open(beside(path), "rb") as file:
                found |= self._laid_out(file, os.fstat(file.fileno()).st_size, self._types)
        else:
            raise CallError("it has no weights: give load a state_dict")
        self._parts_read = {name: found.pop(name) for name in [*found] if name in self._parted}
        if self.is_pipeline or self.is_on_mesh:  # this rank has only some of the tensors
            every = {*self._names.saved, *self._names.unsaved, *self._types}
            self._absent = every - found.keys()
            if missing := self._needed & self._absent - self._parts_read.keys():
                raise FileError(f"its weights have no {min(missing)} for this rank")
            found |= {name: self._stand_in(name) for name in self._absent}
        return SavedModel(str(self._told["class"]), self._names, found)

    def _stand_in(self, name: str) -> torch.Tensor:
        """Returns a tensor in place of another rank's, without its memory: it is never used."""
        type_ = self._types.get(name, TensorType(torch.float32, (), (), torch.device("cpu")))
        nothing = math.nan if type_.dtype.is_floating_point else 0
        return torch.full((), nothing, dtype=type_.dtype, device="cpu").expand(type_.shape)

    def _read(self, name: str) -> dict[str, torch.Tensor]:
        name = self._own + name
        types = {**self._types, **self._part_types}  # first, because the stream must not be moved
        with self._parts.stream(name) as source:
            return self._laid_out(source, self._parts.size_of(name), types)

    def _laid_out(
        self, source: Any, size: int, types: Mapping[str, TensorType]
    ) -> dict[str, torch.Tensor]:
        def check(name: str, found: TensorType) -> None:
            if name in types and not _is_like(types[name], found):
                raise FileError(f"{name} is of another type than programs take ({types[name]})")

        return {n: _as(types.get(n), t) for n, t in read_tensors(source, size, check)}

    def _given(self, name: str, state_dict: Mapping[str, torch.Tensor]) -> torch.Tensor:
        same = [name, *(other for other, first in self._names.ties if first == name)]
        found = next((state_dict[one] for one in same if one in state_dict), None)
        if found is None:
            raise CallError(f"the state_dict has no {name}")
        own, type_ = found.detach(), self._types.get(name)
        if type_ and not _is_like(type_, own):
            what = f"{name} of the state_dict is of another type"
            raise CallError(f"{what} than programs take ({type_})")
        return _as(type_, own)

    # ---- programs ------------------------------------------------------------------------

    def adopted(self, model: SavedModel) -> CompiledModule | TrainingStep:
        """Returns a module or a step around the model, with each program linked."""
        compiler = Compiler(self.options)
        self._put_objects()
        loaded: CompiledModule | TrainingStep
        if self._batching is None:
            loaded = CompiledModule(model, self.options, dynamic=False)
            calls: Dispatcher[Any] = loaded._lazyinline_calls
        else:
            update = self._optimizer_of(model)
            loaded = calls = TrainingStep(model, None, self.options, self._batching, False, update)
        # Reversed, so that the program used last before saving is first.
        for number in reversed(range(len(self._programs))):
            told, program = self._told["programs"][number], self._programs[number]
            with _modes(told["modes"]):
                set_modes(model, *told["training"])
                calls.subject.training = model.training
                inputs = _inputs(told, program)
                # Symbols of two captures differ, so each has a compiler of its own.
                own = compiler if inputs.sizes is None else Compiler(self.options)
                self._adopt(calls, own, self._state(own, number, model, inputs), inputs)
        calls.refuse = partial(refuse_call, calls, self._told["class"])
        return loaded

    def _put_objects(self) -> None:
        for name in self._parts.names:
            if self._store is not None and name.startswith("objects/"):
                self._store.put_object(name.partition("/")[2], self._parts.read(name))

    def pipeline(
        self,
        path: str | os.PathLike[str],
        state_dict: Mapping[str, torch.Tensor] | None,
        given: Any,
    ) -> Pipeline:
        """Returns this rank's part of a pipeline, with the tensors of its stages; a collective."""
        told, said = self._told["programs"][0], self._told["ranks"]
        trusted, mesh = self._store is not None, self._mesh(given)
        ranks, table = read_ranks(said, self._meet, mesh and mesh.whole)
        program = together(ranks, lambda: self._programs[0])
        if mesh is None:
            self._own = place_of(ranks.rank)
        elif not mesh.plan.replicas:  # ranks have different parts, which are not compared
            ranks = replace(ranks, data_group=None)

        def own_tensors() -> tuple[SavedModel, Colors]:
            colors = read_colors(said[-1], table.num_stages)
            stages = cut_program(program.captured, colors, table.num_stages)
            own = (stages[i].model_tensors for i in table.stages_of(ranks.rank))
            self._needed = {source.name for sources in own for source in sources}
            if mesh is not None:
                self._in_parts(mesh, self._needed)
            return self.module(path, state_dict), colors

        model, colors = together(ranks, own_tensors)
        inputs = _inputs(told, program, table.num_micro_batches)

        def opened(state: RankCompilation) -> RankCompilation:
            seen = self._seen_with_loss(model, state.report)
            state = replace(state, seen=seen, colors=colors, programs={PARTS[0]: seen.program})
            state = run(between(PASSES, "split", "split"), state)
            local = mesh.stages(program.captured, ranks, table, trusted=trusted) if mesh else None
            stages = tuple(read_stages(state, self._parts, local, trusted=trusted))
            state = replace(state, plain=stages, derived=stages)
            if mesh is not None:
                state = replace(state, mesh_plan=mesh.plan)
                backwards = [p for one in state.own for p in one.backward]
                check_draws([one.forward for one in stages], backwards, "cpu")
            return of_rank(state, state.rank)

        with _modes(told["modes"]):
            set_modes(model, *told["training"])
            batch = Batch(
                torch_pytree.unflatten(inputs.leaves, inputs.tree), table.num_micro_batches
            )
            asked = AskedPipeline(
                LossModel(model, None),
                batch,
                Context(self.options),
                ranks,
                table,
                Splitting("auto"),
                None if mesh is None else mesh.on_mesh(self.options),
                opened=opened,
                together=partial(together, ranks),
                file=self._parts.digest,
            )
            if mesh is not None:
                held = partial(mesh.parameters, self._parts_read, self._types)
                return ParallelPipeline(asked, together(ranks, held))
            return Pipeline(asked, together(ranks, lambda: self._optimizer_of(model)))

    def _seen_with_loss(self, model: SavedModel, report: CompileReport) -> CapturedModel:
        """Returns the captured model of a rank, as capture of model and loss returns it."""
        self._put_objects()
        captured = self._programs[0].captured
        # With the names that tensors have in a ``LossModel``.
        named = (
            replace(s, name=f"model.{s.name}") if isinstance(s, ModelTensor) else s
            for s in self._bound(captured, model)
        )
        return _seen(replace(captured, sources=tuple(named)), model, report)

    def _mesh(self, given: Any) -> SavedMesh | None:
        """Returns the mesh of a file, if it has one; a collective."""
        if not self.is_on_mesh:
            return None
        from .mesh import SavedMesh

        said = self._told["mesh"]
        dimensions = re.sub(r"\W+", " ", str(said[0])[:80]).strip()  # not checked yet: any text
        check_number(len(said[1]), f"a step over a mesh ({dimensions})")
        self._meet()
        ranks = all_ranks(torch.device("cpu"))
        same = {"file (its digest)": self._parts.digest[:12], "mesh= is given": given is not None}
        ranks.check_same_program(None, same, "so their programs would not fit together")
        read = partial(SavedMesh.read, said, given, has_stages=self.is_pipeline)
        mesh = together(ranks, read)
        self._own = mesh.place_of(ranks.rank)
        return mesh if mesh.mesh else None  # the property makes the mesh, on all ranks

    def _in_parts(self, mesh: SavedMesh, needed: Container[str]) -> Program:
        """Prepares to read this rank's parts of parameters; returns the program in local types."""
        own = mesh.localized(self._programs[0].captured)
        self._part_types = {source.name: type_ for _, source, type_ in model_inputs(own)}
        self._parted = [name for name in self._names.parameters if name in needed]
        return own

    def on_mesh(self, path: str | os.PathLike[str], given: Any) -> ParallelStep:
        """Returns this rank's part of a step over a mesh, with its tensors; a collective."""
        from .mesh import MAX_MICRO_BATCHES, read_step

        told, mesh, batching = self._told["programs"][0], self._mesh(given), self._batching
        assert mesh is not None
        ranks = all_ranks(torch.device("cpu"))
        program = together(ranks, lambda: self._programs[0])
        if batching is None or batching.micro_batches not in range(1, MAX_MICRO_BATCHES):
            raise FileError("it is no training step with a number of micro-batches")
        inputs = _inputs(told, program, batching.micro_batches)
        batch = Batch(torch_pytree.unflatten(inputs.leaves, inputs.tree), batching.micro_batches)
        context = Context(self.options)
        report, trusted = context.report(train=True), self._store is not None

        def opened() -> tuple[SavedModel, Compilation, dict[str, torch.Tensor]]:
            self._needed = {*self._names.saved, *self._names.unsaved, *self._types}
            own = self._in_parts(mesh, self._needed)
            model = self.module(path, None)
            set_modes(model, *told["training"])
            place = self._own + _place(0)
            read = read_step(self._parts, place, own, mesh.plan, batching, trusted=trusted)
            goal = replace(step_goal(batching), on_mesh=mesh.on_mesh(self.options))
            state = Compilation(
                context=context,
                report=report,
                goal=goal,
                subject=Subject(LossModel(model, None), *batch.first_micro_batch()),
                seen=self._seen_with_loss(model, report),
                composed=read.step,
                programs=read.runs,
                mesh_plan=mesh.plan,
            )
            if trusted:
                state = take_made(state, self._parts, place, read)
            return model, state, mesh.parameters(self._parts_read, self._types)

        with _modes(told["modes"]):
            model, state, held = together(ranks, opened)
            return ParallelStep(model, batch, state, held, partial(together, ranks))

    def _adopt(
        self, calls: Dispatcher[Any], compiler: Compiler, state: Compilation, inputs: _Inputs
    ) -> None:
        """Links a program and adds it to the dispatcher; a symbolic one is linked at calls."""
        context, report = compiler.context, state.report
        is_symbolic = state.captured.sizes is not None
        with context.cached(report):
            state = run(_LOWER if is_symbolic else _LOWER_AND_LINK, state)
            if is_symbolic:
                state = linked(state)
                linker = Linker.of(compiler, replace(state, symbolic=state))
                guard = Guard(calls.subject, state.captured, inputs.leaves, inputs.tree)
                calls.adopt_symbolic(guard, linker, report)
                return
        report.made = made_by(state)  # for a page
        compiled = Linker.of(compiler, state).result(state)
        guard = Guard(calls.subject, state.captured, inputs.leaves, inputs.tree, compiled.hold)
        made = CompileResult(guard, compiled.without_tensors(), report)
        calls.adopt(made, inputs.leaves)

    def _optimizer(self, tensors: Callable[[str], torch.Tensor]) -> StepOptimizer | None:
        if self._told["optimizer"] is None:
            return None
        told, trusted = self._told["optimizer"], self._store is not None
        made = optimizer_of(told, tensors, self.options.target, trusted=trusted)
        made.groups()
        return made

    def _optimizer_of(self, model: SavedModel) -> StepOptimizer | None:
        update = self._optimizer(partial(tensor_of, model))
        if update is None:
            return None
        for name, tensor in self._read(STATE).items():
            kind, _, own = name.partition("/")
            parameter = tensor_of(model, own)
            if kind != "step" and tensor.shape != parameter.shape:
                raise FileError(f"{name} is of another shape than its parameter")
            like = None if kind == "step" else TensorType.of(parameter)
            update.optimizer.state[parameter][kind] = _as(like, tensor)
        return update

    def _state(
        self, compiler: Compiler, number: int, model: SavedModel, inputs: _Inputs
    ) -> Compilation:
        program, told = self._programs[number], self._told["programs"][number]
        context, goal = compiler.context, Goal(train=told["train"] is True)
        if self._batching is not None:
            goal = step_goal(self._batching)
        report = context.report(train=goal.train)
        captured = replace(program.captured, sources=self._bound(program.captured, model))
        state = Compilation(
            context=context,
            report=report,
            goal=goal,
            seen=_seen(captured, model, report, inputs.sizes),
            derivative=program.derivative,
            composed=program.step,
            programs=program.runs,
            backwards=[(one, ()) for one in program.backwards],
        )
        trusted = self._store is not None
        return take_made(state, self._parts, _place(number), program) if trusted else state

    def captured(self, model: SavedModel | None = None) -> list[tuple[str, Program]]:
        """Returns a description of each program, and the program with the tensors of a model."""
        found = []
        for told, read in zip(self._told["programs"], self._programs, strict=True):
            way, program = "training" if told["train"] else "inference", read.captured
            if model is not None:
                program = replace(program, sources=self._bound(program, model))
            way = way if self._batching is None else "a step"
            found.append((f"{self._told['class']}, {way}", program))
        return found

    def _bound(self, captured: Program, model: SavedModel) -> tuple[Source, ...]:
        """Returns the sources of inputs, with the tensors of the file."""
        found = list(captured.sources)
        for index, source, type_ in model_inputs(captured):
            name, is_constant = source.name, source.kind == "constant"
            tensor = self._constants[name] if is_constant else tensor_of(model, name)
            has = type_ if name in self._absent else TensorType.of(tensor)
            if (has, tensor.requires_grad) != (type_, wants_gradient(source)):
                raise FileError(f"{name} has another type or requires_grad than programs take")
            found[index] = replace(source, tensor=tensor)
        return tuple(found)


def _seen(
    captured: Program, model: SavedModel, report: CompileReport, sizes: KnownSizes | None = None
) -> CapturedModel:
    """Returns a program as a captured model, which the report describes."""
    seen = CapturedModel(captured, [], RootEvidence(Reads(), (), ()), [], {}, sizes=sizes)
    report.model, report.opened_from = class_name_of(model), "opened from a file"
    report.describe(seen)
    return seen


def _is_like(type_: TensorType, tensor: torch.Tensor | TensorType) -> bool:
    return (type_.dtype, type_.shape) == (tensor.dtype, tuple(tensor.shape))


def _as(type_: TensorType | None, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the layout of a type, a copy if its own differs."""
    is_so = type_ is None or TensorType.of(tensor) == type_
    return tensor if type_ is None or is_so else type_.empty().copy_(tensor)


def _place(number: int) -> str:
    return f"programs/{number}/"


@dataclass(frozen=True)
class _Inputs:
    """Example inputs for a program: flat, with their tree structure and symbolic sizes."""

    leaves: list[Any]
    tree: torch_pytree.TreeSpec
    sizes: KnownSizes | None


def _inputs(told: Mapping[str, Any], program: ReadProgram, count: int = 1) -> _Inputs:
    """Returns inputs with a program's layouts; FileError if it takes other types."""
    rows, tree = tree_of(told["inputs"])
    leaves: list[Any] = []
    for kind, *said in rows:
        if kind == "constant":
            leaves.append(said[0])
            continue
        type_, first, wants_grad = said
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        new = first == len(tensors)
        leaves.append(
            type_.empty("cpu").requires_grad_(wants_grad is True) if new else tensors[first]
        )
    count = count if program.step is None else len(program.step.batch)
    taken = [split(leaf, count)[0] for leaf in leaves]  # the first micro-batch of each
    sizes = None
    if program.sizes is not None:
        sizes = ReadKnownSizes(taken, told["sizes"][0], program.sizes)
    places = [i for i, leaf in enumerate(taken) if isinstance(leaf, torch.Tensor)]
    pairs = zip(program.captured.sources, program.captured.inputs, strict=True)
    for source, value in pairs:
        if isinstance(source, UserInput):
            index = places[source.index]
            leaf = taken[index]
            found = TensorType.of(leaf) if sizes is None else sizes.type_of(index, leaf)
            if found != value.type:
                what = f"the input {source.name} is of another type"
                raise FileError(f"{what} than programs take ({value.type})")
    return _Inputs(leaves, tree, sizes)


@contextmanager
def _modes(data: Any) -> Iterator[None]:
    """Switches to the modes that a program was compiled in."""
    grad, inference, autocast = data
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(inference is True))
        stack.enter_context(torch.set_grad_enabled(grad is True))
        for device, _, dtype in decode_value(autocast):
            stack.enter_context(torch.autocast(device, dtype))
        yield

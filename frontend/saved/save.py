"""``save(compiled, path)``: writes the programs compiled for a model's calls to one data file."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ...backend.cache import NotCacheableError, encode_value
from ...backend.files.container import Content, pieces_of, to_json, write_parts
from ...backend.files.torch_store import open_cache, whole_file
from ...recompute.planner import Budget
from ...reuse.errors import FileError, check_choice, door
from ...reuse.ir.program import ModelTensor
from ...reuse.ir.types import TensorType
from ..dispatch.dispatcher import dispatcher_of
from ..dispatch.model_dispatcher import ModelDispatcher
from ..guard import Constant, Guard
from ..options import Batching, Options
from ..parallel import ParallelStep
from ..passes.link import launches_for_all
from ..passes.programs import PARTS
from ..passes.state import Compilation
from ..pipeline import Elsewhere, KeptRank, Pipeline
from ..refusals import model_inside
from ..torch_optimizer import StepOptimizer, optimizer_data, optimizer_state
from ..training_step import TrainingStep
from .parts import (
    BOUNDARY,
    CAPTURED,
    KeptProgram,
    backward_texts,
    boundary_data,
    derivative_data,
    output_data,
    program_parts,
    step_data,
    used_parameters,
)
from .ranks import placed, ranks_data, save_together, stage_parts
from .saved_model import TensorNames, class_name_of, tree_data

Weights = Literal["inside", "beside", "none"]
WEIGHTS, CONSTANTS, MODEL = "weights.safetensors", "constants.safetensors", "model.json"
STATE = "optimizer.safetensors"


def beside(path: str | os.PathLike[str]) -> str:
    """Returns the path of the weights of a file that was saved with ``weights="beside"``."""
    return f"{os.fspath(path)}.safetensors"


@door
def save(compiled: Any, path: str | os.PathLike[str], *, weights: Weights = "inside") -> None:
    """Saves the programs compiled for a model's calls as one file, to be opened by :func:`load`.

    The file is data: programs as text, the memory plan and weights. It holds no Python and no
    pickle, and :func:`load` needs no source code of the model. The same model, compiled for the
    same calls, gives the same bytes.

    Args:
        compiled: the result of :func:`compile` or :func:`compile_step`, or the model that was
            compiled in place. Call it before in each way that the loaded model will be called; in
            training also run a backward for each set of results that losses will use. The file of
            a step includes its optimizer's state. For a pipeline, or a result of
            :func:`parallelize`, every rank calls this, and the first one writes the file; a single
            process may save what it compiled for ranks on other machines.
        path: the file, which is replaced if it exists.
        weights: ``"inside"``; ``"beside"`` writes them to ``<path>.safetensors``; ``"none"``: pass
            them to :func:`load`.

    Raises:
        FileError: if it cannot be saved: a model that runs eagerly, custom operators, tensors on a
            GPU, side effects. The message says which.
        OSError: if the file cannot be written.

    Example:
        >>> compiled = lazyinline.compile(model.eval())
        >>> with torch.no_grad():
        ...     compiled(ids)
        >>> lazyinline.save(compiled, "model.lz")
    """
    check_choice(FileError, Weights, weights=weights)
    if isinstance(compiled, Pipeline | ParallelStep | Elsewhere):
        kept = compiled.kept
        make = partial(_parts_of_ranks, kept, weights)
        if isinstance(compiled, Elsewhere):
            write_parts(path, make(), open_cache())
        else:
            save_together(path, kept[0].row, make)
        return
    if isinstance(compiled, TrainingStep):
        model, _, options, batching, _, optimizer = compiled.made_of
        saved = _Saved(model, options, _kept(compiled), optimizer, batching)
    elif isinstance(calls := dispatcher_of(compiled), ModelDispatcher):
        saved = _Saved(calls.model, calls.options, _kept(calls))
    else:
        raise FileError(
            "save takes what lazyinline.compile, compile_step, pipeline or parallelize returned, "
            f"and this is a {type(compiled).__name__}."
        )
    parts = dict(saved.parts(weights))
    if weights == "beside":
        with whole_file(beside(path)) as file:
            for piece in pieces_of(saved.weights()):
                file.write(piece)
    write_parts(path, parts, open_cache())


def _parts_of_ranks(kept: Sequence[KeptRank], weights: Weights) -> dict[str, Content]:
    """Returns the parts of ranks that are compiled in this process."""
    found, known = dict[str, Content](), dict[int, dict[str, Content]]()
    for one in kept:
        with one.as_captured():
            found |= placed(_parts_of_rank(one, weights, known), one.position)
    return found


def _parts_of_rank(
    one: KeptRank, weights: Weights, known: dict[int, dict[str, Content]]
) -> dict[str, Content]:
    """Returns the parts of a rank's step or stages: its programs and tensors.

    ``known`` caches the parts of steps, except weights, by the ``id`` of the compile.
    """
    if weights == "beside" or (weights == "none" and one.mesh is not None):
        which = "ranks" if one.mesh is None else "a mesh"
        raise FileError(
            f'weights="{weights}" is for a whole model; for {which} use weights="inside".'
        )
    if not one.guard.rebind():
        raise FileError("The model's tensors no longer fit what was compiled: make it anew.")
    lowered, own, told = one.lowered, frozenset[Any](), dict[str, Any]()
    if one.mesh is not None:
        from .mesh import OWN, mesh_data  # late: DTensor takes as long as all of lazyinline

        own, told["mesh"] = OWN, mesh_data(one)
    saved = partial(_Saved, one.model, lowered.context.options, part_of=one.part_of, told=told)
    if (asked := one.asked) is None:
        batching, programs = (
            lowered.goal.batching,
            [KeptProgram(one.guard, lowered, one.plans, own=own)],
        )
        step = saved(programs, batching=batching, count=batching.micro_batches)
        parts = dict(known.get(id(lowered)) or step.parts(weights))
        parts[WEIGHTS] = pieces_of(step.weights())
        parts[f"programs/0/{BOUNDARY}"] = [to_json(step_data(lowered.step))]
        known[id(lowered)] = parts
        return parts
    told["ranks"] = ranks_data(asked.table, asked.ranks, lowered.colors)
    program = KeptProgram(one.guard, replace(lowered, programs={}), own=own)
    ids, count = asked.ids_of(lowered, one.guard.tensors), asked.table.num_micro_batches
    parts = dict(saved([program], one.optimizer, ids=ids, count=count).parts(weights))
    for stage in lowered.own:
        parts |= stage_parts(program, lowered, stage)
    return parts


def _kept(calls: ModelDispatcher | TrainingStep) -> list[KeptProgram]:
    """Returns the programs that fit the model in its present state."""
    numbers = [
        KeptProgram.of(entry.guard, entry.compiled)
        for entry in calls.entries
        if entry.compiled.linker is None
    ]
    kept = [*numbers, *(KeptProgram.symbolic(*one) for one in calls.symbolic_programs)]
    kept = [one for one in kept if one.guard.rebind()]
    if not kept:
        report = calls.last_report
        eager = report.ran_eagerly if report is not None else ""
        raise FileError(
            f"There is no program of the whole model to save: it runs eagerly, {eager}"
            if eager
            else "There is no program yet: call the compiled model once, and then save it."
        )
    return kept


class _Saved:
    """Makes the parts of a file from a compiled model or step."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        kept: Sequence[KeptProgram],
        optimizer: StepOptimizer | None = None,
        batching: Batching | None = None,
        *,
        told: Mapping[str, Any] | None = None,
        ids: Container[int] | None = None,
        count: int = 1,
        part_of: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        if model_inside(model) is not None:
            raise FileError(
                f"A {type(model).__name__} spans several processes, which no file describes: save "
                "what was compiled for the model inside it."
            )
        self._model, self._options = model, options
        self._kept, self._batching, self._optimizer = kept, batching, optimizer
        self._told = told or {}
        self._ids, self._count, self._part_of = ids, count, part_of
        self._names, self._tensors = TensorNames.of(model)
        self._by_id = {id(tensor): name for name, tensor in self._tensors.items()}
        self._constants: dict[int, torch.Tensor] = {}

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of a ``state_dict``, each once."""
        return self._here({name: self._tensors[name] for name in self._names.saved})

    def _here(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors that this rank saves: those of its stages, or its parts of them."""
        ids = self._ids
        return {n: self._part_of(t) for n, t in tensors.items() if ids is None or id(t) in ids}

    def parts(self, weights: Weights) -> Iterator[tuple[str, Content]]:
        """Yields all parts."""
        found: dict[str, Content] = {}
        programs, captured = [], []
        for number, kept in enumerate(self._kept):
            program, parts, state = self._program(kept)
            programs.append(program)
            captured.append(state.captured.program)
            for name, content in parts:
                shared = name.startswith("objects/")
                found[name if shared else f"programs/{number}/{name}"] = content
        recompute = self._options.recompute
        told = {
            "class": class_name_of(self._model),
            "weights": weights,
            # A Budget is written as its bounds.
            "options": [
                self._options.backend,
                self._options.reuse,
                asdict(recompute) if isinstance(recompute, Budget) else recompute,
                self._options.target,
            ],
            "batching": None if self._batching is None else astuple(self._batching),
            "optimizer": optimizer_data(self._optimizer, self._by_id),
            **asdict(self._names),
            "programs": programs,
        }
        told |= self._told
        if self._names.parameters == used_parameters(captured):
            told["parameters"] = None  # load reads the names from the programs
        yield MODEL, [to_json(told)]
        yield from found.items()
        constants = {name: self._tensors[name] for name in self._names.unsaved}
        numbered = enumerate(self._constants.values())
        constants |= {f"constant.{number}": tensor for number, tensor in numbered}
        yield CONSTANTS, pieces_of(self._here(constants))
        if weights == "inside":
            yield WEIGHTS, pieces_of(self.weights())
        if self._optimizer is not None:
            yield STATE, pieces_of(optimizer_state(self._optimizer, self._by_id))

    def _program(self, kept: KeptProgram) -> tuple[Any, Iterator[tuple[str, Content]], Compilation]:
        guard, lowered = kept.guard, kept.lowered
        if guard.answers:
            raise FileError(
                "The forward reads numbers of its inputs (int(batch.max())), and a file holds "
                "no code that could read them again."
            )
        sizes = lowered.captured.sizes
        if sizes is not None and isinstance(self._options.recompute, Budget):
            raise FileError(
                "A Budget is planned for each size anew, which a file cannot do: compile with "
                "dynamic=False, and call it once for each shape that the file needs."
            )
        program = lowered.captured.program
        own = iter(guard.tensors)
        sources = tuple(
            self._bound(next(own)) if isinstance(s, ModelTensor) else s for s in program.sources
        )
        captured = replace(lowered.captured, program=replace(program, sources=sources))
        state = replace(lowered, seen=captured)
        launches: Any = state.context.recorded
        told_sizes, backwards = None, kept.backwards
        if sizes is not None:
            states, called = (lowered, *backwards), sizes.example
            asked = (launches_for_all(one, sizes.hints, called) for one in states)
            made = [one or (None, []) for one in asked]
            told_sizes = sizes.told([condition for _, found in made for condition in found])
            lists = [one for one, _ in made if one is not None]
            launches = dict(ChainMap(*lists)) if len(lists) == len(made) else None
        training, others = guard.training_of(self._model)
        (grad, autocast, *_), (inference, *_) = guard.modes.captured
        told = {
            "train": state.goal.train,
            "modes": [grad, inference, encode_value(autocast)],
            "training": [training, others],
            "inputs": _input_data(guard, self._count),
            "sizes": told_sizes,
            "output": output_data(program.output_tree),
            "boundary": boundary_data(state),
        }
        texts = {CAPTURED: state.captured.program, **state.programs}
        if backwards:
            told["backwards"] = [derivative_data(one.derivative)[2:] for one in backwards]
            texts |= backward_texts(one.programs[PARTS[1]] for one in backwards)
        return told, program_parts(kept, texts, launches, told_sizes), state

    def _bound(self, tensor: torch.Tensor) -> ModelTensor:
        """Returns the source of an input, under the tensor's name in the file."""
        if tensor.device.type != "cpu":
            raise FileError(f"A program on {tensor.device} cannot be saved: files are for the CPU.")
        name = self._by_id.get(id(tensor))
        if name is not None:
            is_parameter = name in self._names.parameters
            return ModelTensor(name, tensor, "parameter" if is_parameter else "buffer")
        self._constants.setdefault(id(tensor), tensor)
        return ModelTensor(f"constant.{[*self._constants].index(id(tensor))}", tensor, "constant")


def _input_data(guard: Guard, count: int) -> Any:
    """Returns the inputs of ``count`` micro-batches together, as JSON data, or raises FileError."""
    first = iter(guard.repeated or range(len(guard.layouts)))
    rows: list[Any] = []
    for layout in guard.layouts:
        if isinstance(layout, Constant):
            rows.append(("constant", layout.value))
            continue
        shape, stride, dtype, device, wants_grad, kind, is_lazy = layout
        if kind not in (torch.Tensor, torch.nn.Parameter) or is_lazy or device.type != "cpu":
            raise FileError(f"An input is a {kind.__name__} on {device}, which no file can say.")
        whole = (shape[0] * count, *shape[1:]) if count > 1 else tuple(shape)
        type_ = TensorType(dtype, whole, tuple(stride), device)
        rows.append(("tensor", type_, next(first), wants_grad))
    try:
        return tree_data(rows, guard.tree)
    except NotCacheableError as reason:
        raise FileError(f"An argument holds {reason}, which a file cannot say.") from reason

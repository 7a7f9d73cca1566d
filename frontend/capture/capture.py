"""Capture: one run of the model under fake tensors, each different block traced once.

The run leaves an outer graph whose nodes belong to regions. A region is one traced instance of a
marked block; a later instance that agrees with a region's evidence becomes a single call node,
and its Python does not run. :mod:`.assemble` turns regions, call nodes and the glue between them
into a program of closures.
"""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from ...autodiff.traces.torch_user_rules import DATA_DEPENDENT_ERRORS
from ...reuse import torch_pytree
from ...reuse.errors import CaptureError, FinalCaptureError, LazyInlineError
from ...reuse.evidence.module_state import walk_modules
from ...reuse.ir.program import UserInput
from ...reuse.torch_names import own_attributes
from ...reuse.torch_pytree import cache_classes, numbered
from .. import refusals
from ..effects.effects import (
    NOTHING_KEPT,
    EffectError,
    GivenContainers,
    Kept,
    OnContents,
    OnEffects,
    Place,
)
from ..effects.given_objects import watched
from ..effects.torch_allowed_calls import is_allowed
from ..marks import is_marked
from ..tracing.frames import frame_text, model_name, profiled_calls, user_frame
from ..tracing.torch_asked_classes import sizes_like_numbers
from ..tracing.torch_gpu_autocast import GpuCasts, autocast_as_on_a_gpu
from ..tracing.torch_patches import intercepted
from ..tracing.torch_state import settings_restored
from ..tracing.torch_tracing import LEAVES_PYTORCH
from . import surroundings
from .assemble import ResultTree, captured_model
from .block_calls import BlockCalls
from .blocks import Blocks, NoBlocks, RepeatedBlocks, Reuse
from .recording import Recording
from .regions import CapturedModel, CrossingError, SharingDecision, Sizes, argument_names
from .watcher import ModelWatcher

_NEEDS_A_VALUE = "value out of a tracing tensor"
_Take: TypeAlias = Callable[[Callable[[], Blocks]], CapturedModel]


@dataclasses.dataclass(frozen=True)
class Subject:
    """The model to compile, and example inputs of which only the layouts count.

    The inputs of a step or a rank are those of one micro-batch.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # ``"refuse"`` raises if the forward has side effects; ``"undo"`` undoes them, for a program
    # that does not replace the forward (such as a file).
    effects: OnEffects = "refuse"
    # Makes the symbolic sizes of each run; None if all sizes are numbers.
    sizes: Callable[[], Sizes] | None = None
    # Why derivatives without a chosen mode must use reverse mode; empty if they need not.
    only_reverse: str = ""
    # Whether the forward may read numbers from its inputs (``int(x.max())``). A guard then computes
    # them again at each call.
    may_ask: bool = False
    # What to do with values that the forward leaves in arguments and attributes.
    contents: OnContents = "refuse"


def capture_model(
    subject: Subject, *, reuse: Reuse = "auto", train: bool, for_gpu: bool = False
) -> CapturedModel:
    """Captures a model as a program of closures and calls.

    ``train`` captures with grad mode on, so that a derivative can be taken; ``for_gpu`` for a GPU
    that need not be here, whose autocast is emulated. It raises CaptureError if the model's Python
    cannot be traced, or kernels cannot read a tensor of the model.
    """
    with surroundings.one_at_a_time():
        places = walk_modules(subject.model)
        refusals.refuse_wrappers(places)
        refusals.refuse_compiled(places)
        refusals.refuse_scripted(places)
        if train:
            refusals.refuse_backward_hooks(subject.model)
        captured = _capture_blocks(subject.model, partial(_capture, subject, train, for_gpu), reuse)
        if train:
            refusals.check_gradients_stay_in_call(captured.program)
        refusals.check_memory(captured.program)
        refusals.check_operand_types(captured.program, model_name(subject.model))
        return captured


def _capture_blocks(model: nn.Module, take: _Take, reuse: Reuse) -> CapturedModel:
    """Captures with blocks, or without any if a closure cannot express one."""
    made: list[RepeatedBlocks] = []
    again: frozenset[int] = frozenset()

    def repeated() -> Blocks:
        made.append(RepeatedBlocks(model, again))
        return made[-1]

    try:
        if reuse != "auto":
            return take(Blocks if reuse == "marked" else NoBlocks)
        captured = take(repeated)
        # Only a run shows that the forward calls one module of the tree repeatedly.
        again = made[-1].run_again()
        return take(repeated) if again else captured
    except CrossingError as crossing:
        if reuse == "off":
            raise
        # A mark must not make a model fail that works without it.
        reason = f"nothing is shared in this model: {crossing}"
    captured = take(NoBlocks)
    decisions = [
        SharingDecision(path, type(module).__name__, shared=False, reason=reason)
        for path, module in walk_modules(model)
        if path and is_marked(type(module))
    ]
    return dataclasses.replace(captured, decisions=decisions)


def _capture(
    subject: Subject, train: bool, for_gpu: bool, blocks: Callable[[], Blocks]
) -> CapturedModel:
    """Captures in one run; tries again without proxies for caches if one of them made it fail.

    A run that has logged something once (``logger.warning_once``) is repeated, because in eager all
    later calls do not log it. The message itself is logged when the first run ends.
    """
    gives_objects, may_say = True, True
    while True:
        sizes = None if subject.sizes is None else subject.sizes()
        recording = Recording(subject.model, blocks(), sizes, subject.effects)
        recording.objects.is_open, recording.only_reverse = gives_objects, subject.only_reverse
        recording.may_say = may_say
        if for_gpu:
            recording.tracer.casts = GpuCasts(recording.tracer.fake_mode)
        try:
            with (
                _explained_errors(recording),
                torch.set_grad_enabled(train),
                surroundings.garbage_collection_paused(),
                surroundings.no_python_randomness(),
                surroundings.generator_kept(subject.effects),
                autocast_as_on_a_gpu() if for_gpu else nullcontext(),
            ):
                outcome = _record(recording, subject)
            if not recording.said:
                return captured_model(recording, *outcome)
            may_say = False
        except (EffectError, CrossingError, FinalCaptureError):
            raise
        except CaptureError:
            # C code may raise if it gets a proxy instead of a list: then no block gets an object.
            if not (gives_objects and recording.objects.was_used):
                raise
            gives_objects = False
        finally:
            for say in recording.said:  # its cache says that it was logged, however the run ended
                say()
            recording.release()


@contextmanager
def _explained_errors(recording: Recording) -> Iterator[None]:
    """Turns an exception of the model's Python into an error with the line, and what to do."""
    try:
        yield
    except CrossingError:
        raise
    except CaptureError as error:
        raise _also_differentiates(error, recording) from error.__cause__
    except Exception as error:
        made = _capture_error(recording.model, error, has_symbols=recording.sizes is not None)
        raise _also_differentiates(made, recording) from error


def _capture_error(model: nn.Module, error: Exception, *, has_symbols: bool) -> CaptureError:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    where = next((f" at {frame_text(f)}" for f in reversed(frames) if user_frame(f) is f), "")
    name, text = model_name(model), str(error)
    if isinstance(error, LazyInlineError):  # its message says what to do already
        return CaptureError(text)
    if isinstance(error, DATA_DEPENDENT_ERRORS) or _NEEDS_A_VALUE in text:
        return CaptureError(
            f"{name} cannot be captured: its Python needs the value of a tensor{where} (.item(), "
            "if, int() or print do), and a program has no values yet. Compute with the tensor "
            "itself; decide with torch.where or masking, or outside the model; print outside of it."
        )
    if LEAVES_PYTORCH in text:
        return CaptureError(
            f"{name} cannot be captured: its forward leaves PyTorch{where} (.numpy()), and what "
            "NumPy computes cannot be in a program. Use PyTorch's functions, or make it an "
            "operator with torch.library.custom_op."
        )
    if isinstance(error, RecursionError):
        return refusals.WrongCallError(
            f"{name} cannot be captured: its calls are nested so deep that a capture, which adds "
            f"frames to each, reaches Python's recursion limit ({sys.getrecursionlimit()})."
        )
    # The capture may be at fault: symbolic sizes, or an operator without a rule for fake tensors.
    is_ours = has_symbols or isinstance(error, NotImplementedError)
    kind = refusals.RaisedError if is_ours else refusals.WrongCallError
    return kind(f"{name} cannot be captured{where}: {type(error).__name__}: {text}")


def _also_differentiates(error: CaptureError, recording: Recording) -> CaptureError:
    """Adds to an error that the forward takes gradients: then its parts are not compiled either."""
    if not recording.differentiates or refusals.DIFFERENTIATES in str(error):
        return error
    error.args = (f"{error} It {refusals.DIFFERENTIATES}, too.",)
    return error


# ---- one run -----------------------------------------------------------------------------------


Outcome: TypeAlias = tuple[list[Any], ResultTree]
"""The flat results of a run (tensors as nodes), and their tree."""


def _record(recording: Recording, subject: Subject) -> Outcome:
    """Runs the model once under fake tensors, and undoes its changes."""
    args, kwargs = subject.args, subject.kwargs
    leaves, spec = torch_pytree.flatten((tuple(args), dict(kwargs)))
    names = argument_names(recording.model, args, kwargs)
    if subject.may_ask:
        recording.answered_from([x for x in leaves if isinstance(x, torch.Tensor)])
    # A tensor that is passed twice has one fake.
    distinct = {id(x): x for x in leaves if isinstance(x, torch.Tensor)}
    run = partial(_run_model, recording, subject, leaves, spec, names)
    try:
        fakes = [_input_fake(recording, x) for x in distinct.values()]
        outcome = recording.tracer.run(run, fakes)
    except BaseException:  # a failed capture must not leave changes in the model
        recording.find_changes()
        recording.undo()
        raise
    finally:
        recording.asked_classes.release()
    _refuse_changes(recording)
    return outcome


def _note_inputs(
    recording: Recording,
    leaves: Sequence[Any],
    names: Sequence[str],
    inputs: Sequence[torch.Tensor],
) -> dict[int, torch.Tensor]:
    """Notes the first argument that each input is passed as; returns its fake, by ``id``."""
    tracer, known = recording.tracer, recording.tensors
    tensors = [
        (x, name) for x, name in zip(leaves, names, strict=True) if isinstance(x, torch.Tensor)
    ]
    fakes = dict(zip(dict.fromkeys(id(x) for x, _ in tensors), inputs, strict=True))
    for index, (leaf, name) in enumerate(tensors):
        node = tracer.node_of(fakes[id(leaf)])
        assert node is not None
        if node not in known.sources:
            node.meta["val"] = fakes[id(leaf)]
            known.sources[node] = UserInput(index, name or f"input{index}", leaf.requires_grad)
            known.watch(fakes[id(leaf)], leaf)
    return fakes


def _run_model(
    recording: Recording,
    subject: Subject,
    leaves: Sequence[Any],
    spec: torch_pytree.TreeSpec,
    names: Sequence[str],
    inputs: Sequence[torch.Tensor],
) -> Outcome:
    """Calls the model with fake inputs; returns its result, flat."""
    fakes = _note_inputs(recording, leaves, names, inputs)
    watcher = ModelWatcher(recording, BlockCalls(recording))
    recording.tracer.set_follower(watcher)
    # Unflattening makes copies of containers. As the forward leaves them, they become part of the
    # result, so that a call of the program can update the caller's own.
    filled = [
        fakes[id(x)] if isinstance(x, torch.Tensor) else _given(recording, index, x)
        for index, x in enumerate(leaves)
    ]
    recording.refuse_unreadable()
    args, kwargs = torch_pytree.unflatten(filled, spec)
    before = torch_pytree.flatten_outer((args, kwargs))
    known = numbered(torch_pytree.containers((args, kwargs)))
    given = [leaf for leaf in before[0] if id(leaf) in known]
    given_containers = GivenContainers((args, kwargs)) if subject.contents != "refuse" else None
    calls = profiled_calls(
        recording.function_ran, recording.builtin_called, recording.asked, is_allowed
    )
    kept = settings_restored(recording.effects.leaves_set)
    objects = watched(cache_classes(), recording.objects)
    numbers = sizes_like_numbers() if recording.sizes else nullcontext()
    asked = recording.asked_classes
    with asked.answering(), kept, intercepted(watcher), objects, calls, numbers:
        output = recording.model(*args, **kwargs)
    asked.refuse()
    left, contents = NOTHING_KEPT, list[Any]()
    if given_containers is not None:
        pairs: list[tuple[Place, Any]] = [
            *given_containers.put_back(),
            *recording.inside.to_keep(recording.reads),
        ]
        returned = given_containers.place_of(output)
        if subject.contents == "drop":
            recording.left_out = tuple(dict.fromkeys(str(place) for place, _ in pairs))
            pairs, returned = [], None
        left = Kept(tuple(place for place, _ in pairs), returned)
        contents = [content for _, content in pairs]
        output = output if returned is None else None
    updates = bool(given) or bool(left)
    recording.effects.check_arguments(before, (args, kwargs))
    # What the forward keeps in an attribute is held there, of course; nothing else may hold it.
    own = set(map(id, torch_pytree.changeable_parts(contents)))
    recording.effects.check_result(
        (args, kwargs),
        (output, contents),
        lambda part: id(part) not in own and recording.holds(part),
    )
    result = (output, given, tuple(contents)) if updates else output
    flat, tree = torch_pytree.flatten(result, known)
    held = (read.value for read in recording.reads.attributes.values())
    recording.effects.check_containers(bool(given), held, flat)
    refusals.refuse_unlike_constants(flat)
    recording.tensors.refuse_lost_gradients(flat)
    num_left = len(torch_pytree.flatten(contents)[0])
    recording.tensors.refuse_changed(flat[: len(flat) - num_left], flat[len(flat) - num_left :])
    node_of = recording.tensors.node_of
    nodes = [node_of(x) if isinstance(x, torch.Tensor) else x for x in flat]
    given_tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    refusals.refuse_read_attributes(given_tensors, recording.reads.names())
    return nodes, (tree, updates, left)


def _given(recording: Recording, index: int, leaf: Any) -> Any:
    """Returns what the trace uses for a flat input that is not a tensor: itself, or a symbol."""
    sizes = recording.sizes
    recording.effects.changes.contents.look_into(leaf)  # the forward may write there
    recording.given.append(leaf)
    given = sizes.given(index, leaf) if sizes else leaf
    recording.tracer.track_size(given)
    return given


def _refuse_changes(recording: Recording) -> None:
    """Undoes what the run changed; raises if a program could not change it at each call."""
    recording.find_changes()
    recording.undo()
    inside, effects = recording.inside, recording.effects
    error = effects.refusal()
    if inside.what:
        error = EffectError(
            f"The model's forward changes {inside.what}, and a compiled program could not keep "
            "doing that at every call. Register it as a buffer and change it in place "
            "(add_, copy_), or return it."
        )
    if error is not None:
        if recording.ran_backwards and " changes " in str(error):
            error.args = (f"{error} It {refusals.SETS_FOR_BACKWARDS}.",)
        raise error


def _input_fake(recording: Recording, tensor: torch.Tensor) -> torch.Tensor:
    sizes, tracer = recording.sizes, recording.tracer
    recording.tensors.refuse_without_memory(tensor, "An input")
    fake = sizes.fake(tensor) if sizes else tracer.to_fake(tensor.detach())
    vars(fake).update(own_attributes(tensor))
    if isinstance(tensor, nn.Parameter):
        vars(fake)["_is_param"] = True
    return fake.requires_grad_(tensor.requires_grad)

"""Capture: one run of the model under fake tensors, each different block traced once.

The run leaves an outer graph whose nodes belong to regions. A region is one traced instance of a
marked block; a later instance that agrees with a region's evidence becomes a single call node,
and its Python does not run. :mod:`.assemble` turns regions, call nodes and the glue between them
into a program of closures.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ...reuse.errors import CaptureError, FinalCaptureError
from ...reuse.evidence.module_state import module_state, walk_modules
from ...reuse.evidence.root_evidence import RootEvidence
from ...reuse.ir.constants import Shared, share_constants
from ...reuse.ir.printer import text_to_compare
from ...reuse.ir.program import ModelTensor, Program
from ..checks.models import refuse_backward_hooks, refuse_uncapturable
from ..checks.refusals import (
    DIFFERENTIATES,
    SETS_FOR_BACKWARDS,
    RaisedError,
    check_memory,
    check_operand_types,
)
from ..effects.changes import find_fake
from ..effects.effects import EffectError, OnEffects
from ..marks import is_marked
from ..tracing.capture_errors import capture_error, model_name
from ..tracing.torch_gpu_autocast import GpuCasts, autocast_as_on_a_gpu
from .assemble import ResultTree, assemble
from .blocks import (
    Blocks,
    NearlyRepeatedBlocks,
    NoBlocks,
    RepeatedBlocks,
    Reuse,
    dissolve,
)
from .recorder import ChangedStateError, Recorder
from .recording import Recording
from .regions import CapturedModel, CrossingError, Region, SharingDecision, Sizes, regions_inside
from .surroundings import (
    garbage_collection_paused,
    generator_not_seeded,
    no_python_randomness,
    one_at_a_time,
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """The model to compile, and example inputs of which only the layouts count.

    The inputs of a step or a rank are those of one micro-batch.

    Attributes:
        model: any ``nn.Module``; parameters may be on the meta device.
        args: positional inputs.
        kwargs: keyword inputs.
        effects: ``"refuse"`` a forward that does more at each call than compute; ``"undo"`` what
            it did, where the program is not run in its place.
        sizes: makes the sizes that are symbols for each run; None means that all are numbers.
        only_reverse: why derivatives whose mode is open are taken in reverse; empty if they need
            not be.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    effects: OnEffects = "refuse"
    sizes: Callable[[], Sizes] | None = None
    only_reverse: str = ""


@dataclasses.dataclass(frozen=True)
class _Request:
    """Holds what is captured, and how."""

    subject: Subject
    train: bool
    for_gpu: bool = False


@one_at_a_time()
def capture_model(
    subject: Subject, *, reuse: Reuse = "auto", train: bool, for_gpu: bool = False
) -> CapturedModel:
    """Captures a model as a program of closures and calls.

    Args:
        subject: the model, and example inputs.
        reuse: ``"auto"`` shares the instances of classes marked with ``lazy_inline``, and modules
            that repeat; ``"marked"`` only the first; ``"off"`` nothing.
        train: capture with grad mode on, so that a derivative can be taken.
        for_gpu: capture for a GPU that need not be here: its autocast is made with operators.

    Raises:
        CaptureError: if the model's Python cannot be traced, naming the user's line; or if a tensor
            of the model is more or other than what its memory holds.
    """
    refuse_uncapturable(subject.model)
    if train:
        refuse_backward_hooks(subject.model)
    request = _Request(subject, train, for_gpu)
    if reuse == "auto":
        captured = _capture_repeated(request, RepeatedBlocks)
    else:
        captured = _capture_chosen(request, reuse)
    check_memory(captured.program)
    check_operand_types(captured.program, model_name(subject.model))
    return captured


@one_at_a_time()
def capture_candidates(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, *, train: bool
) -> CapturedModel:
    """Captures as ``reuse="auto"`` does, and keeps the blocks that nearly share as closures."""
    refuse_uncapturable(model)
    request = _Request(Subject(model, args, kwargs or {}, effects="undo"), train)
    return _capture_repeated(request, NearlyRepeatedBlocks)


def _capture_repeated(request: _Request, choice: type[RepeatedBlocks]) -> CapturedModel:
    """Captures with the blocks that repeat; what nobody marked never makes a capture fail."""
    made: list[RepeatedBlocks] = []
    again: frozenset[int] = frozenset()

    def blocks() -> Blocks:
        made.append(choice(request.subject.model, again))
        return made[-1]

    try:
        captured = _capture(request, blocks)
        # A module that the tree holds once and the forward calls repeatedly shows in a run only.
        again = made[-1].run_again()
        return _capture(request, blocks) if again else captured
    except EffectError:
        raise
    except CaptureError as error:
        if isinstance(error, RaisedError) and not error.after_sharing:
            raise
        # What nobody marked may be what stands in the way: a shared block did not run its Python.
        try:
            return _capture_chosen(request, "marked")
        except CaptureError:
            raise error from error.__cause__


def _capture_chosen(request: _Request, reuse: Reuse) -> CapturedModel:
    """Captures with the marked blocks, or without any where no closure can express one."""
    try:
        return _capture(request, Blocks if reuse == "marked" else NoBlocks)
    except CrossingError as crossing:
        if reuse == "off":
            raise
        # A mark never makes a model fail that works without it.
        reason = f"nothing is shared in this model: {crossing}"
    captured = _capture(request, NoBlocks)
    decisions = [
        SharingDecision(path, type(module).__name__, shared=False, reason=reason)
        for path, module in walk_modules(request.subject.model)
        if path and is_marked(type(module))
    ]
    return dataclasses.replace(captured, decisions=decisions)


def _capture(request: _Request, blocks: Callable[[], Blocks]) -> CapturedModel:
    try:
        return _capture_once(request, blocks)
    except ChangedStateError as unsettled:
        first = unsettled
    return _capture_settled(request, first, blocks)


def _capture_once(request: _Request, blocks: Callable[[], Blocks]) -> CapturedModel:
    """Captures in one run; where a look-alike of a part of a cache stands in the way, without."""
    recorder = _recorder(request, blocks())
    try:
        return _recorded(recorder, request)
    except (ChangedStateError, EffectError, CrossingError, FinalCaptureError):
        raise
    except CaptureError:
        if not recorder.recording.objects.was_used:
            raise
    # C code that takes a look-alike for a list raises: then no block is given an object.
    recorder = _recorder(request, blocks())
    recorder.recording.objects.is_open = False
    return _recorded(recorder, request)


def _recorder(request: _Request, blocks: Blocks) -> Recorder:
    subject = request.subject
    sizes = None if subject.sizes is None else subject.sizes()
    recorder = Recorder(subject.model, blocks, sizes, subject.effects)
    if request.for_gpu:
        recorder.recording.tracer.casts = GpuCasts(recorder.recording.tracer.fake_mode)
    recorder.recording.only_reverse = subject.only_reverse
    return recorder


def _recorded(recorder: Recorder, request: _Request) -> CapturedModel:
    is_settled = True
    try:
        results, tree = _run(recorder, request)
        return _assemble(recorder.recording, results, tree)
    except ChangedStateError:  # its program is compared with that of a second run
        is_settled = False
        raise
    finally:
        if is_settled:
            recorder.recording.release()


def _run(recorder: Recorder, request: _Request) -> tuple[list[Any], ResultTree]:
    try:
        with (
            torch.set_grad_enabled(request.train),
            garbage_collection_paused(),
            no_python_randomness(),
            generator_not_seeded(request.subject.effects),
            autocast_as_on_a_gpu() if request.for_gpu else nullcontext(),
        ):
            return recorder.run(request.subject.args, request.subject.kwargs)
    except (ChangedStateError, CrossingError):
        raise
    except CaptureError as error:
        raise _also_differentiates(error, recorder.recording) from error.__cause__
    except Exception as error:
        has_symbols = request.subject.sizes is not None
        made = capture_error(recorder.model, error, has_symbols=has_symbols)
        if isinstance(made, RaisedError):
            made.after_sharing = any(one.shared for one in recorder.recording.decisions)
        raise _also_differentiates(made, recorder.recording) from error


def _also_differentiates(error: CaptureError, recording: Recording) -> CaptureError:
    """Returns why the model runs eagerly; one that takes gradients keeps its parts uncompiled."""
    if not recording.differentiates or DIFFERENTIATES in str(error):
        return error
    error.args = (f"{error} It {DIFFERENTIATES}, too.",)
    return error


def _capture_settled(
    request: _Request, unsettled: ChangedStateError, blocks: Callable[[], Blocks]
) -> CapturedModel:
    """Captures again with what the first run changed left changed, as eager would leave it."""
    recording, text = unsettled.recording, str(unsettled)
    if recording.ran_backwards and " changes " in text:
        text += f" It {SETS_FOR_BACKWARDS}."
    try:
        if recording.ran_backwards:  # eager's would see what the last layer set
            raise EffectError(text)
        # Right only if nothing changes any more and the program is the same: a forward may note a
        # configuration at its first call. One that counts is refused.
        first = _assemble(recording, unsettled.results, unsettled.tree)
        second = _capture_once(request, blocks)
        if text_to_compare(first.program) != text_to_compare(second.program):
            raise EffectError(text)
    except ChangedStateError as again:
        again.recording.undo()
        recording.undo()
        recording.effects.emit(known=tuple(again.recording.effects.output))
        raise EffectError(text) from None
    except EffectError:
        recording.undo()
        raise EffectError(text) from None
    except BaseException:
        recording.undo()
        raise
    finally:
        recording.release()
    recording.effects.emit()
    return second


def _assemble(recording: Recording, results: list[Any], tree: ResultTree) -> CapturedModel:
    recording.caches_asked()
    recording.tensors.resolve_all(recording.root.nodes())
    if recording.sizes is not None:
        recording.sizes.settle(recording.root, recording.tensors.sources)
    _dissolve_idle(recording, results, tree)
    program, shared = _build(recording, results, tree)
    pairs = [
        (d, region)
        for d, region in zip(recording.decisions, recording.decided, strict=True)
        if d.shared or d.reason or region in shared
    ]
    decisions = [
        d if region not in shared else _with_constants(d, shared[region]) for d, region in pairs
    ]
    traced = sum(not d.shared for d in decisions)
    met = [m for m in recording.inside.met.values() if _can_be_watched(m)]
    evidence = _root_evidence(recording, program, met)
    return CapturedModel(
        program,
        decisions,
        traced,
        evidence,
        met,
        recording.readings,
        recording.sizes,
        tuple(recording.modes),
    )


def _can_be_watched(module: nn.Module) -> bool:
    """Whether a module outside the tree has its state in Python, and no trace made it."""
    state = module_state(module)
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    return not is_scripted and "training" in state and find_fake([state]) is None


def _root_evidence(recording: Recording, program: Program, met: list[nn.Module]) -> RootEvidence:
    """Returns the reads of the run, without those that the guard compares itself in each module."""
    attributes = recording.tensors.attributes_read(recording.reads.names())
    for held in (*attributes, *recording.given):
        recording.reads.contents.look_into(held)
    placed = {id(s.tensor) for s in program.sources if isinstance(s, ModelTensor)}
    evidence = RootEvidence(recording.reads, {*recording.paths, *map(id, met)}, placed)
    recording.refuse_unreadable()
    return evidence


def _build(
    recording: Recording, results: list[Any], tree: ResultTree
) -> tuple[Program, Mapping[Region | None, Shared]]:
    """Builds the program; returns what each traced region's closure became, too."""
    program, closures = assemble(recording.root, results, tree, recording.tensors.sources)
    if isinstance(recording.blocks, NoBlocks):
        return program, {}
    if recording.sizes is not None:
        return program, {region: Shared(closure) for region, closure in closures.items()}
    program, found = share_constants(program)
    return program, {region: found[closure] for region, closure in closures.items()}


def _dissolve_idle(recording: Recording, results: list[Any], tree: ResultTree) -> None:
    """Dissolves the blocks that nobody marked and whose closure nothing else calls."""
    root, blocks = recording.root, recording.blocks
    idle = {r for r in regions_inside(root) if r.num_calls == 1 and not blocks.keeps(r)}
    names = Counter(region.name for region in regions_inside(root))
    # A region that nothing else calls may still share its closure by constants: then it stays.
    if any(names[r.name] > 1 for r in idle):
        _, shared = _build(recording, results, tree)
        uses = Counter(s.closure for s in shared.values())
        idle -= {r for r in idle if uses[shared[r].closure] > 1}
    dissolve(root, idle)


def _with_constants(decision: SharingDecision, shared: Shared) -> SharingDecision:
    """Adds to a decision that the closure is shared with others, by constants that it takes."""
    if shared.num_members < 2 or not shared.numbers:
        return decision
    numbers = ", ".join(repr(n.value) for n in shared.numbers)
    noun = "constant" if len(shared.numbers) == 1 else "constants"
    be = "an input" if len(shared.numbers) == 1 else "inputs"
    text = f"shares @{shared.closure.name} with {noun} {numbers} as {be}"
    return dataclasses.replace(decision, shares=text)

"""Capture: one run of the model under fake tensors, each different block traced once.

The run leaves an outer graph whose nodes belong to regions. A region is one traced instance of a
marked block; a later instance that agrees with a region's evidence becomes a single call node,
and its Python does not run. :mod:`.assemble` turns regions, call nodes and the glue between them
into a program of closures.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ...autodiff.torch_autograd import plain_autograd
from ...reuse.errors import CaptureError
from ...reuse.evidence.module_state import has_hooks, walk_modules
from ...reuse.evidence.outside_values import OutsideValues
from ...reuse.evidence.snapshot import refuse_iterators
from ...reuse.ir.constants import Shared, share_constants
from ...reuse.ir.printer import format_program
from ...reuse.ir.program import Program
from ..checks.runnable import check_memory
from ..checks.wrappers import is_compiled_by_torch, refuse_wrappers
from ..marks import is_compiled, is_marked
from ..tracing.torch_fake_rules import kernels_own_rules
from ..tracing.torch_tracing import DATA_DEPENDENT_ERRORS, frame_text, user_frame
from .assemble import ResultTree, assemble
from .blocks import (
    Blocks,
    NearlyRepeatedBlocks,
    NoBlocks,
    RepeatedBlocks,
    Reuse,
    choose_blocks,
    dissolve,
)
from .effects import EffectError
from .recorder import Recorder, UnsettledError
from .regions import CapturedModel, CrossingError, Region, SharingDecision, Sizes, regions_inside

Function = TypeVar("Function", bound=Callable[..., Any])

OnEffects = Literal["refuse", "undo"]
"""What becomes of a forward that does more at each call than compute."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Example inputs, and what makes their dynamic dimensions anew for each run."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    sizes: Callable[[], Sizes] | None = None
    effects: OnEffects = "refuse"


_LOCK = threading.RLock()
# A fork waits for a compile of another thread: a child would inherit PyTorch as tracers and builds
# have changed it for their time, and a lock that nobody opens.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
    )


def one_at_a_time(function: Function) -> Function:
    """Makes threads wait for each other: PyTorch's tracers are one per process, not per thread.

    What the caller asked of autograd (anomaly checks, hooks on saved tensors) is not meant for
    tracing, and is off inside.
    """

    @wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with _LOCK, plain_autograd(), kernels_own_rules(), _garbage_collection_paused():
            return function(*args, **kwargs)

    return alone  # type: ignore[return-value]


@one_at_a_time
def capture_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    reuse: Reuse = "auto",
    train: bool,
    sizes: Callable[[], Sizes] | None = None,
    effects: OnEffects = "refuse",
) -> CapturedModel:
    """Captures a model as a program of closures and calls.

    Args:
        model: any ``nn.Module``; parameters may be on the meta device.
        args: example positional inputs; only their layout matters.
        kwargs: example keyword inputs.
        reuse: ``"auto"`` shares the instances of classes marked with ``lazy_inline``, and modules
            that repeat; ``"marked"`` only the first; ``"off"`` nothing.
        train: capture with grad mode on, so that a derivative can be taken.
        sizes: makes the dynamic dimensions; None means that every size is a number.
        effects: ``"refuse"`` a forward that does more at each call than compute; ``"undo"`` what
            it did, for who does not run the program in its place.

    Raises:
        CaptureError: if the model's Python cannot be traced; names the user's line.
        PlanError: if a tensor of the model is more or other than what its memory holds.
    """
    refuse_foreign(model)
    if train:
        _refuse_backward_hooks(model)
    arguments = Arguments(args, kwargs or {}, sizes, effects)
    if reuse == "auto":
        captured = _capture_repeated(model, arguments, RepeatedBlocks, train=train)
    else:
        captured = _capture_chosen(model, arguments, reuse, train=train)
    check_memory(captured.program)
    return captured


@one_at_a_time
def capture_candidates(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, *, train: bool
) -> CapturedModel:
    """Captures as ``reuse="auto"`` does, and keeps the blocks that nearly share as closures."""
    refuse_foreign(model)
    return _capture_repeated(
        model,
        Arguments(args, kwargs or {}, effects="undo"),
        NearlyRepeatedBlocks,
        train=train,
    )


def _capture_repeated(
    model: nn.Module,
    arguments: Arguments,
    choice: type[RepeatedBlocks],
    *,
    train: bool,
) -> CapturedModel:
    """Captures with the blocks that repeat; what nobody marked never makes a capture fail."""
    made: list[RepeatedBlocks] = []
    again: frozenset[int] = frozenset()

    def blocks() -> Blocks:
        made.append(choice(model, again))
        return made[-1]

    try:
        captured = _capture(model, arguments, blocks, train=train)
        again = made[-1].run_again()
        return _capture(model, arguments, blocks, train=train) if again else captured
    except EffectError:
        raise
    except CaptureError as error:
        try:
            return _capture_chosen(model, arguments, "marked", train=train)
        except CaptureError:
            raise error from error.__cause__


def _capture_chosen(
    model: nn.Module, arguments: Arguments, reuse: Reuse, *, train: bool
) -> CapturedModel:
    """Captures with the marked blocks, or without any where no closure can express one.

    A mark never makes a model fail that works without it.
    """
    try:
        return _capture(model, arguments, lambda: choose_blocks(reuse), train=train)
    except CrossingError as crossing:
        if reuse == "off":
            raise
        reason = f"nothing is shared in this model: {crossing}"
    captured = _capture(model, arguments, lambda: choose_blocks("off"), train=train)
    decisions = [
        SharingDecision(path, type(module).__name__, shared=False, reason=reason)
        for path, module in walk_modules(model)
        if path and is_marked(type(module))
    ]
    return dataclasses.replace(captured, decisions=decisions)


def _capture(
    model: nn.Module, arguments: Arguments, blocks: Callable[[], Blocks], *, train: bool
) -> CapturedModel:
    try:
        captured = _capture_once(model, arguments, blocks(), train=train)
    except UnsettledError as unsettled:
        first = _assemble(unsettled.recorder, unsettled.results, unsettled.tree)
        unsettled.recorder.let_go()
        captured = _capture_settled(model, arguments, unsettled, first, blocks(), train=train)
    iterators = captured.iterators()
    if iterators:  # each forward may make its own, and then it is no state
        again = _capture_once(model, arguments, blocks(), train=train)
        refuse_iterators(iterators, again.held_iterators())
    return captured


def _capture_once(
    model: nn.Module, arguments: Arguments, blocks: Blocks, *, train: bool
) -> CapturedModel:
    sizes = None if arguments.sizes is None else arguments.sizes()
    recorder = Recorder(model, blocks, sizes, arguments.effects)
    is_settled = True
    try:
        results, tree = _run(recorder, arguments, train=train)
        return _assemble(recorder, results, tree)
    except UnsettledError:
        is_settled = False
        raise
    finally:
        if is_settled:
            recorder.let_go()


def _run(recorder: Recorder, arguments: Arguments, *, train: bool) -> tuple[list[Any], ResultTree]:
    try:
        with torch.set_grad_enabled(train), _garbage_collection_paused(), _no_python_randomness():
            return recorder.run(arguments.args, arguments.kwargs)
    except CaptureError:
        raise
    except Exception as error:
        raise _capture_error(recorder.model, error) from error


def _capture_settled(
    model: nn.Module,
    arguments: Arguments,
    unsettled: UnsettledError,
    first: CapturedModel,
    blocks: Blocks,
    *,
    train: bool,
) -> CapturedModel:
    """Captures again with what the first run changed left changed, as eager would leave it.

    That is right only if nothing changes any more and the program is the same: a forward that
    notes a configuration the first time. A forward that counts is refused.
    """
    effects = unsettled.recorder.effects
    unsettled.redo()
    try:
        second = _capture_once(model, arguments, blocks, train=train)
        same = format_program(first.program) == format_program(second.program)
    except CrossingError:
        unsettled.undo()
        raise
    except (UnsettledError, EffectError) as again:
        unsettled.undo()
        if isinstance(again, UnsettledError):
            effects.emit(known=tuple(again.recorder.effects.output))
        raise EffectError(str(unsettled)) from None
    if not same:
        unsettled.undo()
        raise EffectError(str(unsettled)) from None
    effects.emit()
    return second


def _assemble(recorder: Recorder, results: list[Any], tree: ResultTree) -> CapturedModel:
    recorder.tensors.resolve_all(recorder.root.nodes())
    if recorder.sizes is not None:
        recorder.sizes.settle(recorder.root, recorder.tensors.sources)
    _dissolve_idle(recorder, results, tree)
    program, shared = _build(recorder, results, tree)
    pairs = [
        (d, region)
        for d, region in zip(recorder.decisions, recorder.decided, strict=True)
        if d.shared or d.reason or region in shared
    ]
    decisions = [
        d if region not in shared else _with_constants(d, shared[region]) for d, region in pairs
    ]
    traced = sum(not d.shared for d in decisions)
    log = recorder.attributes
    for held in recorder.tensors.attributes_read(recorder.outside.names()):
        log.contents.look_into(held)
    outside = OutsideValues(recorder.outside, log.contents)
    reads, whole = list(log.reads.values()), list(log.whole_reads.values())
    return CapturedModel(
        program, decisions, traced, reads, whole, log.contents, outside, recorder.sizes
    )


def _build(
    recorder: Recorder, results: list[Any], tree: ResultTree
) -> tuple[Program, Mapping[Region | None, Shared]]:
    """Builds the program; returns what each traced region's closure became, too."""
    program, closures = assemble(recorder.root, results, tree, recorder.tensors.sources)
    if isinstance(recorder.blocks, NoBlocks):
        return program, {}
    if recorder.sizes is not None:
        return program, {region: Shared(closure) for region, closure in closures.items()}
    program, found = share_constants(program)
    return program, {region: found[closure] for region, closure in closures.items()}


def _dissolve_idle(recorder: Recorder, results: list[Any], tree: ResultTree) -> None:
    """Dissolves the blocks that nobody marked and whose closure nothing else calls."""
    root, blocks = recorder.root, recorder.blocks
    idle = {r for r in regions_inside(root) if r.num_calls == 1 and not blocks.keeps(r)}
    names = Counter(region.name for region in regions_inside(root))
    if any(names[r.name] > 1 for r in idle):
        _, shared = _build(recorder, results, tree)
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


def refuse_foreign(model: nn.Module) -> None:
    """Raises CaptureError if a module is no Python that can be watched and run as a program."""
    refuse_wrappers(model)
    for path, module in walk_modules(model):
        if is_compiled(module):
            raise CaptureError(
                f"{path or 'The model'} is a compiled module already. Compile the outer model with "
                "the original module in it."
            )
        if is_compiled_by_torch(module):
            raise CaptureError(
                f"{path or 'The model'} is what torch.compile returned, which is compiled already. "
                "Compile the module itself: lazyinline.compile(m), where torch.compile(m) was."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or 'The model'} was scripted or traced by torch.jit, which hides its "
                "Python and its attributes. Put the original module in its place."
            )


def backward_hooked(model: nn.Module) -> str:
    """Names a module of the tree that has a backward hook, or returns an empty text."""
    for path, module in walk_modules(model):
        if has_hooks(module, "backward"):
            return f"{path or 'The model'} ({type(module).__name__})"
    return ""


def _refuse_backward_hooks(model: nn.Module) -> None:
    hooked = backward_hooked(model)
    if hooked:
        raise CaptureError(
            f"{hooked} has a backward hook, which a program could not call. Remove it, or put "
            "hooks on parameters or on the compiled model. (compile() runs such a model itself.)"
        )


@contextmanager
def _no_python_randomness() -> Iterator[None]:
    """Raises CaptureError if the forward draws random numbers that are not PyTorch's."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    array = None if numpy is None else numpy.random.get_state()
    yield
    drawn = ""
    if random.getstate() != python:
        drawn = "Python's random"
        random.setstate(python)
    if numpy is not None and array is not None:
        now = numpy.random.get_state()
        if now[2:] != array[2:] or now[1].tobytes() != array[1].tobytes():
            drawn = "numpy.random"
            numpy.random.set_state(array)
    if drawn:
        raise CaptureError(
            f"The model's forward (or another thread meanwhile) draws from {drawn}, and a "
            "compiled program would use the same numbers at every call. Draw them with torch "
            "(torch.rand), or outside the model."
        )


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Capture makes many long-lived objects; scanning them repeatedly costs more than it frees.

    Afterwards they count as old, or the next few collections would scan all of them as new.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # else this would thaw what somebody froze
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _capture_error(model: nn.Module, error: Exception) -> CaptureError:
    line = _user_line(error)
    where = f" at {line}" if line else ""
    name = type(model).__name__
    if isinstance(error, DATA_DEPENDENT_ERRORS) or "value out of a tracing tensor" in str(error):
        return CaptureError(
            f"{name} cannot be captured: its Python needs the value of a tensor{where} "
            f"({str(error).splitlines()[0]}). A program cannot branch on data: use torch.where or "
            "masking, or move the decision out of the model."
        )
    return CaptureError(f"{name} cannot be captured{where}: {type(error).__name__}: {error}")


def _user_line(error: Exception) -> str:
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        found = frame if user_frame(frame) is frame else None
        if found is not None:
            return frame_text(found)
    return ""

"""The record of one run of a model under the tracer: its graph, its reads, its changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch import nn

from ...reuse.errors import CaptureError
from ...reuse.evidence.evidence import Evidence
from ...reuse.evidence.functions import identity_leak_through, leaks_by_call
from ...reuse.evidence.module_state import walk_modules
from ...reuse.evidence.reads import Reads
from ...reuse.evidence.slots import FoundSlots, SlotEvidence, SlotReads, put_at
from ...reuse.ir.leaf import stamp_of
from ...reuse.ir.program import RecomputeMark
from ...reuse.kinds import ABSENT
from ..effects.effects import Effects, ModuleChanges, OnEffects, OuterChanges, is_cache
from ..effects.given_objects import LOOK_ALIKES, GivenObjects
from ..effects.torch_allowed_calls import reach_of
from ..tracing.frames import frame_text, is_user_frame, unprofiled, user_line, user_path
from ..tracing.torch_asked_classes import AskedClasses
from ..tracing.torch_patches import replaced
from ..tracing.torch_state import (
    CacheState,
    Reading,
    answer,
    asks_if_distributions_check,
    distributions_check,
    is_reading,
)
from ..tracing.torch_tracing import (
    Tracer,
    is_context,
    is_mode_switch,
    new_fake_mode,
    plain_tensor_access,
)
from .blocks import Blocks
from .outside_tensors import OutsideTensors, refuse_inside
from .regions import InitKey, ModeChoice, Question, Region, SharingDecision, Sizes

# Methods that release a lock: refusing them would leave it locked, and the next run would hang.
_LEAVES = frozenset({"__exit__", "__aexit__", "release", "release_lock"})
_CAUGHT = frozenset({"LinAlgError", "_LinAlgError"})  # raised for numbers, which a trace lacks


class Recording:
    """The outer graph with its regions, and what the model's Python read and changed."""

    def __init__(
        self, model: nn.Module, blocks: Blocks, sizes: Sizes | None, effects: OnEffects
    ) -> None:
        self.model = model
        self.blocks = blocks  # which module calls may share
        self.sizes = sizes
        places = walk_modules(model)
        # Reversed, so that a module with several paths gets its first.
        self.paths = {id(module): user_path(model, path) for path, module in reversed(places)}
        self.effects = Effects(OuterChanges(places), effects)
        self.inside = ModuleChanges(places, self.effects.changes.meets)
        self.reads = Reads(self.inside.contents, self.effects.changes.found, is_root=True)
        # The innermost region that is being traced; it gets new nodes and reads.
        self.root = self.current = Region(model, "", type(model).__name__, reads=self.reads)
        self.tracer = Tracer(sizes.mode if sizes else new_fake_mode(), self._add_node)
        self.tensors = OutsideTensors(self.tracer, places)
        # Whether each block's Python ran, in the order of calls.
        self.decisions: list[SharingDecision] = []
        self.decided: list[Region | None] = []  # for each decision the traced region, or None
        self.given: list[Any] = []  # the arguments that are no tensors
        # Handles code that compares classes or identities of fakes.
        self.asked_classes = AskedClasses(
            self.tensors.classes, LOOK_ALIKES, of_sizes=sizes is not None
        )
        self.num_nodes = 0  # the number of nodes of the outer graph so far
        self.num_apart = 0  # the nesting depth of control-flow bodies that are being traced
        self.has_bodies = False  # whether any control-flow body was traced
        self.differentiates = False  # whether the forward has taken a derivative
        # The chosen modes of derivatives whose mode the user left open.
        self.modes: dict[ModeChoice, None] = {}
        self.only_reverse = ""  # why these must use reverse mode; empty if they need not
        # Whether capture ran a custom function's backward, which eager runs later.
        self.ran_backwards = False
        self.objects = GivenObjects(places, self._readers, self.bookkeeping)
        # The settings that the forward read, with their values.
        self.readings: dict[Reading, Any] = {}
        # The numbers that the forward read from its inputs, by the computation's text.
        self.questions: dict[str, Question] = {}
        # Places that the forward writes to, and a run of the program does not.
        self.left_out: tuple[str, ...] = ()
        # Whether ``warning_once`` messages are collected, for the run to be repeated.
        self.may_say = False
        self.said: list[Callable[[], None]] = []  # functions that log the collected messages
        self._applies = False
        self._num_unreadable = 0
        self.quiet = False  # whether capture's own code runs now, not the model's
        self._ran: set[tuple[Any, type]] = set()

    def release(self) -> None:
        """Drops references to the model's tensors; the rest, being cyclic, awaits collection."""
        self.tracer.forget_tensors()
        self.tensors.release()
        self.reads.attributes.clear()
        self.given.clear()

    def holds(self, value: Any) -> bool:
        """Whether an object is held by the model, or by anything else that its Python read."""
        return self.inside.contents.has_met(value) or self.effects.changes.contents.has_met(value)

    def find_changes(self) -> None:
        """Finds what the finished run has changed, in the model and outside."""
        self.inside.find(self.reads)
        self.effects.find(self.reads)

    def undo(self) -> None:
        """Undoes the changes that were found; raises FinalCaptureError if one cannot be undone."""
        self.inside.undo()
        self.effects.changes.undo()
        for contents in (self.inside.contents, self.effects.changes.contents):
            contents.refuse_lasting()

    def path(self, module: nn.Module) -> str:
        """Returns the path of a module in the model; empty if it is not part of it."""
        return self.paths.get(id(module), "")

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Marks reads, writes and calls inside as capture's own: not evidence, and not refused."""
        before, self.quiet = self.quiet, True
        try:
            with plain_tensor_access(), unprofiled():
                yield
        finally:
            self.quiet = before

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the fake of a tensor of the model."""
        with self.bookkeeping():
            return self.tensors.fake_of(tensor)

    def _add_node(self, node: torch.fx.Node) -> None:
        if self.has_bodies:
            for operand in node.all_input_nodes:
                refuse_inside(operand, f"used outside of it at {stamp_of(node).source}")
        self.current.items.append(node)
        self.num_nodes += 1

    def applying(self) -> AbstractContextManager[None]:
        """Marks what runs inside as a ``torch.autograd.Function`` whose ``apply`` was seen."""
        return replaced(self, _applies=True)

    # ---- regions -------------------------------------------------------------------------

    @contextmanager
    def inside_block(self, region: Region) -> Iterator[None]:
        """Adds nodes and reads inside to a block's region."""
        parent = self.current
        parent.items.append(region)
        try:
            with replaced(self, current=region):
                yield
        finally:
            # A read is noted only in the innermost region; the region around gets it here.
            parent.reads.absorb(region.reads)

    def apart(self, region: Region) -> AbstractContextManager[Any]:
        """Adds nodes inside to a separate region: a body of control flow."""
        self.has_bodies = True
        return replaced(self, current=region, num_apart=self.num_apart + 1)

    @contextmanager
    def inside_part(self, name: str, path: str, mark: RecomputeMark) -> Iterator[None]:
        """Makes what runs inside a region that is marked for recompute."""
        parent = self.current
        region = Region(self.model, path, name, parent, reads=parent.reads, recompute=mark)
        try:
            with replaced(self, current=region):
                yield
        finally:
            parent.items.extend(_unwrapped(region))

    def _readers(self) -> Iterator[SlotReads]:
        """Yields the records of what the blocks being traced do to objects that they were given."""
        region: Region | None = None if self.quiet else self.current
        while region is not None:
            if region.reads.slots is not None:
                yield region.reads.slots
            region = region.parent

    def note_slots(self, slots: SlotEvidence, found: FoundSlots, values: Sequence[Any]) -> None:
        """Applies to the given objects the reads and writes of a block that became a call."""
        is_seen = self.objects.watches()
        for holder, step, value in slots.replay(found) if is_seen else ():
            self.objects.found(holder, step, value)
        for (way, step), value in zip(slots.written, values, strict=True):
            holder, own = found.at(way), found.step(step)
            if is_seen:
                self.objects.writes(holder, own, value)
            put_at(holder, own, value)

    def answered_from(self, inputs: Sequence[torch.Tensor]) -> None:
        """Lets the forward read numbers that are computed from these inputs."""

        def answer(node: torch.fx.Node) -> int | bool | None:
            with self.bookkeeping():
                resolved = self.tensors.resolve(node)
                question = Question.of(resolved, self.tensors.sources, inputs, user_line())
            if question is None:
                return None
            self.questions.setdefault(question.text, question)
            # In another instance, the same computation may give another number.
            self.stays_alone(f"it asks for a number of the model's inputs at {question.source}")
            return question.answer

        self.tracer.answer = answer

    def stays_alone(self, why: str) -> None:
        """Keeps other instances from calling the closures of the regions that are being traced."""
        region: Region | None = self.current
        while region is not None:
            region.alone, region = region.alone or why, region.parent

    # ---- what ran ------------------------------------------------------------------------

    def decide(
        self,
        module: nn.Module,
        key: InitKey,
        traced: Region | None,
        reason: str = "",
        compared: str = "",
    ) -> None:
        """Notes whether a block's Python ran, and why."""
        name, shared = type(module).__name__, traced is None
        decision = SharingDecision(self.path(module), name, shared, reason, compared, key=key)
        self.decisions.append(decision)
        self.decided.append(traced)

    def note_nested(self, module: nn.Module, evidence: Evidence) -> None:
        """Notes that a block was called inside the region that is being traced."""
        if self.current.reads is not self.reads:
            self.current.reads.nested.append((module, evidence))

    def function_ran(self, frame: Any) -> None:
        """Called when a function of the model begins: notes it as evidence."""
        code = frame.f_code
        if not self.quiet:
            self.asked_classes.began(frame)
        if asks_if_distributions_check(frame):
            self.asked(distributions_check)
        name = self.effects.changes.began(frame)
        if name:
            self.effects.refuse_captured(name, frame_text(frame))
        if not _CAUGHT.isdisjoint(code.co_names):
            self.effects.refuse("names LinAlgError", ": a program does not go on after one")
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if is_context(first) and not self._applies and not self.quiet and is_user_frame(frame):
            raise CaptureError(
                f"The model's forward applies {frame_text(frame).rpartition('.')[0]} in a way that "
                "is not seen: its apply was kept before (f = Function.apply), or is given "
                "keywords. Write Function.apply(...) where it is called, without keywords."
            )
        is_inside = self.current.reads is not self.reads
        if is_inside or (code, type(first)) not in self._ran:
            self.current.reads.function(frame)
            # Of the model once per class is enough: it reads the same.
            if not is_inside and isinstance(first, nn.Module):
                self._ran.add((code, type(first)))
        self.refuse_unreadable(user_line)

    def builtin_called(self, frame: Any, function: Any) -> None:
        """Called before a C function: refuses side effects, and notes PyTorch settings it reads."""
        if self.quiet:
            return
        told = "" if leaks_by_call(frame) else identity_leak_through(function)
        if told:
            self.inside.contents.refuse_use(told)
            self.refuse_unreadable(user_line)
        what = reach_of(function, frame)
        if what and function.__name__ in _LEAVES:
            self.effects.note(what)
        elif what:
            self.effects.refuse(what)
        elif is_reading(function):
            self.asked(function)

    def asked(self, getter: Reading) -> None:
        """Notes that a setting was read, with its value, so that the guard can compare it."""
        if not self.quiet and getter not in self.readings:
            with self.bookkeeping():
                found = answer(getter)
            if found is not ABSENT:
                self.readings[getter] = found

    def refuse_unreadable(self, line: Callable[[], str] | None = None) -> None:
        """Raises CaptureError if the forward has reached an object whose contents are unreadable.

        It is refused before the forward uses it: an iterator, once advanced, could not be reset
        for the eager run. ``line`` returns the forward's current line, for an object that was just
        reached; without it, those refused before count too: the model may have caught the error.
        """
        found = [*self.inside.contents.unreadable, *self.effects.changes.contents.unreadable]
        is_new, self._num_unreadable = len(found) > self._num_unreadable, len(found)
        if found and (is_new or line is None):
            where = "" if line is None else f" at {line()}"
            raise CaptureError(
                f"The model's forward {found[-1]}{where}. What that gives can be neither compared "
                "nor put back, so a compiled program would use the same at every call. Keep "
                "what the forward needs in an attribute, a list, an array or a buffer, or pass it "
                "in; draw random numbers with torch."
            )

    def caches_asked(self) -> None:
        """Notes the contents of function caches that were used, or that a module holds."""
        held = [read.value for read in self.reads.attributes.values()]
        for cache in (*self.effects.changes.caches_used(), *filter(is_cache, held)):
            self.asked(CacheState(cache))


def _unwrapped(region: Region) -> list[torch.fx.Node | Region]:
    """Returns a marked region, or the one block call that is all of it, with the mark."""
    items = [i for i in region.items if isinstance(i, Region) or not is_mode_switch(i)]
    first = items[0] if items else None
    if isinstance(first, Region) and len(items) == 1:
        first.parent, first.recompute = region.parent, first.recompute or region.recompute
        return items
    if isinstance(first, torch.fx.Node) and "call" in first.meta:
        site = first.meta["call"]
        if all(isinstance(i, torch.fx.Node) and i.args[0] is first for i in items[1:]):
            first.meta["call"] = replace(site, recompute=site.recompute or region.recompute)
            return items
    return [region] if items else []

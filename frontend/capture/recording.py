"""The record of a model that runs under the tracer: its graph, its reads, its changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch import nn

from ...reuse.errors import CaptureError
from ...reuse.evidence.evidence import Evidence
from ...reuse.evidence.functions import identity_leak_of_call
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
from ..tracing.torch_settings import CacheState, Reading, answer, is_reading
from ..tracing.torch_tracing import (
    Tracer,
    is_context,
    is_mode_switch,
    new_fake_mode,
    plain_tensor_access,
)
from .blocks import Blocks
from .outside_tensors import OutsideTensors, refuse_left
from .regions import InitKey, ModeChoice, Question, Region, SharingDecision, Sizes

# What lets go of what is held (``with lock``): it must happen, or the next run waits for ever.
_LEAVES = frozenset({"__exit__", "__aexit__", "release", "release_lock"})


class Recording:
    """The outer graph with its regions, and what the model's Python read and changed.

    Attributes:
        blocks: which module calls may share.
        current: the innermost region that is being traced; nodes and reads are its.
        decisions: whether each block's Python ran, in the order of calls.
        decided: for each decision the region, if one was traced.
        given: the arguments that are no tensors.
        asked_classes: where code asks which class or object something is.
        num_nodes: of the outer graph so far.
        num_apart: how many bodies of control flow, one in another, are being traced.
        has_bodies: whether one was.
        differentiates: whether the forward has taken a derivative.
        modes: of derivatives whose mode the user left open, each once.
        only_reverse: why these are taken in reverse; empty if they need not be.
        ran_backwards: whether a custom function was applied whose backward eager runs later.
        readings: what was asked for that a call can ask again, and the answers.
        may_say: whether what the forward says once is kept, for the run to be made again.
        said: what says it.
        left_out: where the forward left what no run leaves there.
        questions: numbers that were asked of the inputs, by what is computed.
        quiet: whether what runs is capture's own doing, not the model's.
    """

    def __init__(
        self, model: nn.Module, blocks: Blocks, sizes: Sizes | None, effects: OnEffects
    ) -> None:
        self.model = model
        self.blocks = blocks
        self.sizes = sizes
        places = walk_modules(model)
        # Reversed, so that a module with several places has the path of its first.
        self.paths = {id(module): user_path(model, path) for path, module in reversed(places)}
        self.effects = Effects(OuterChanges(places), effects)
        self.inside = ModuleChanges(places, self.effects.changes.meets)
        self.reads = Reads(self.inside.contents, self.effects.changes.found, is_root=True)
        self.root = self.current = Region(model, "", type(model).__name__, reads=self.reads)
        self.tracer = Tracer(sizes.mode if sizes else new_fake_mode(), self._add_node)
        self.tensors = OutsideTensors(self.tracer, places)
        self.decisions: list[SharingDecision] = []
        self.decided: list[Region | None] = []
        self.given: list[Any] = []
        self.asked_classes = AskedClasses(
            self.tensors.classes, LOOK_ALIKES, of_sizes=sizes is not None
        )
        self.num_nodes = 0
        self.num_apart = 0
        self.has_bodies = False
        self.differentiates = False
        self.modes: dict[ModeChoice, None] = {}
        self.only_reverse = ""
        self.ran_backwards = False
        self.objects = GivenObjects(places, self._readers, self.bookkeeping)
        self.readings: dict[Reading, Any] = {}
        self.questions: dict[str, Question] = {}
        self.left_out: tuple[str, ...] = ()
        self.may_say = False
        self.said: list[Callable[[], None]] = []
        self._applies = False
        self._num_unreadable = 0
        self.quiet = False
        self._ran: set[tuple[Any, type]] = set()

    def release(self) -> None:
        """Lets go of the model's tensors; what was recorded stays, in cycles, until collected."""
        self.tracer.forget_tensors()
        self.tensors.release()
        self.reads.attributes.clear()
        self.given.clear()

    def holds(self, value: Any) -> bool:
        """Whether the model, or what else its Python read, holds an object."""
        return self.inside.contents.has_met(value) or self.effects.changes.contents.has_met(value)

    def find_changes(self) -> None:
        """Finds what the finished run has changed, in the model and outside."""
        self.inside.find(self.reads)
        self.effects.find(self.reads)

    def undo(self) -> None:
        """Puts back what was found to be changed.

        Raises:
            FinalCaptureError: if something of it cannot be.
        """
        self.inside.undo()
        self.effects.changes.undo()
        for contents in (self.inside.contents, self.effects.changes.contents):
            contents.refuse_lasting()

    def path(self, module: nn.Module) -> str:
        """Returns where a module sits in the model; empty outside of it."""
        return self.paths.get(id(module), "")

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Marks reads, writes and calls inside as capture's own, not the model's."""
        # Our own reads must not become evidence, nor our own calls be refused.
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
                refuse_left(operand, f"used outside of it at {stamp_of(node).source}")
        self.current.items.append(node)
        self.num_nodes += 1

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Marks what runs inside as a ``torch.autograd.Function`` whose ``apply`` was seen."""
        before, self._applies = self._applies, True
        try:
            yield
        finally:
            self._applies = before

    # ---- regions -------------------------------------------------------------------------

    @contextmanager
    def inside_block(self, region: Region) -> Iterator[None]:
        """Adds nodes and reads inside to a block's region."""
        parent = self.current
        parent.items.append(region)
        self.current = region
        try:
            yield
        finally:
            self.current = parent
            # A read is noted once, where it happened; the regions around get it here.
            parent.reads.absorb(region.reads)

    @contextmanager
    def apart(self, region: Region) -> Iterator[None]:
        """Adds nodes inside to a region that is no part of the one around it."""
        around, self.current = self.current, region
        self.num_apart, self.has_bodies = self.num_apart + 1, True
        try:
            yield
        finally:
            self.current = around
            self.num_apart -= 1

    @contextmanager
    def inside_part(self, name: str, path: str, mark: RecomputeMark) -> Iterator[None]:
        """Makes a region of its own of what runs inside, marked for recompute."""
        parent = self.current
        region = Region(self.model, path, name, parent, reads=parent.reads, recompute=mark)
        self.current = region
        try:
            yield
        finally:
            self.current = parent
            parent.items.extend(_unwrapped(region))

    def _readers(self) -> Iterator[SlotReads]:
        """Yields what takes up what the blocks do to objects that they were given."""
        region: Region | None = None if self.quiet else self.current
        while region is not None:
            if region.reads.slots is not None:
                yield region.reads.slots
            region = region.parent

    def note_slots(self, slots: SlotEvidence, found: FoundSlots, values: Sequence[Any]) -> None:
        """Does to objects what a block would have done that has become a call."""
        is_seen = self.objects.watches()
        for holder, step, value in slots.replay(found) if is_seen else ():
            self.objects.found(holder, step, value)
        for (way, step), value in zip(slots.written, values, strict=True):
            holder, own = found.at(way), found.step(step)
            if is_seen:
                self.objects.writes(holder, own, value)
            put_at(holder, own, value)

    def answered_from(self, inputs: Sequence[torch.Tensor]) -> None:
        """Lets the forward ask for numbers of these inputs."""

        def answer(node: torch.fx.Node) -> int | bool | None:
            with self.bookkeeping():
                resolved = self.tensors.resolve(node)
                question = Question.of(resolved, self.tensors.sources, inputs, user_line())
            if question is None:
                return None
            self.questions.setdefault(question.text, question)
            # Another instance may be given other numbers.
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
        """Notes a function of the model that begins."""
        code = frame.f_code
        if not self.quiet:
            self.asked_classes.began(frame)
        name = self.effects.changes.began(frame)
        if name:
            self.effects.refuse_captured(name, frame_text(frame))
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if is_context(first) and not self._applies and not self.quiet and is_user_frame(frame):
            raise CaptureError(
                f"The model's forward applies {frame_text(frame).rpartition('.')[0]} in a way that "
                "is not seen: its apply was kept before (f = Function.apply), or is given "
                "keywords. Write Function.apply(...) where it is called, without keywords."
            )
        self._note_function(frame, first)
        self.refuse_unreadable(user_line)

    def _note_function(self, frame: Any, first: Any) -> None:
        code, reads = frame.f_code, self.current.reads
        if reads is not self.reads:
            reads.function(frame)
        elif (code, type(first)) not in self._ran:  # another layer's finds what this one found
            reads.function(frame)
            if isinstance(first, nn.Module):
                self._ran.add((code, type(first)))

    def builtin_called(self, frame: Any, function: Any) -> None:
        """Refuses what may act outside, before it does; notes what PyTorch is asked for."""
        if self.quiet:
            return
        if told := identity_leak_of_call(function, frame):  # however it was reached
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
        """Notes that something was asked for that a call can be asked again, and the answer."""
        if not self.quiet and getter not in self.readings:
            with self.bookkeeping():
                found = answer(getter)
            if found is not ABSENT:
                self.readings[getter] = found

    def refuse_unreadable(self, line: Callable[[], str] | None = None) -> None:
        """Raises CaptureError if the forward has found what nothing shows the contents of.

        Each is refused before the forward uses it: an iterator that had moved on could not be put
        back for eager.

        Args:
            line: says where the forward is, for what it has just found; without, all counts, also
                what was refused before, should the model's Python have caught the error.
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
        """Notes what the function caches keep that were used, or that a module holds."""
        held = [read.value for read in self.reads.attributes.values()]
        for cache in (*self.effects.changes.caches_used(), *filter(is_cache, held)):
            self.asked(CacheState(cache))


def _unwrapped(region: Region) -> list[torch.fx.Node | Region]:
    """Hands a region's mark on to the one block call in it, if there is nothing else in it."""
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

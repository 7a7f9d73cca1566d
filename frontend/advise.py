"""``advise(model)``: which classes to mark, and what keeps near-identical blocks apart."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..backend.kernels.lower import BackendName
from ..reuse.errors import door
from ..reuse.ir.printer import folded
from ..reuse.ir.program import count_calls, inlined_sizes
from .capture.regions import SharingDecision
from .compile_record import alike
from .compiler import Compiler
from .marks import is_marked
from .measure import generators_kept, warm_up_compiler
from .options import Options
from .passes.state import Goal
from .refusals import check_example
from .report import CompileReport

_REASONS_INDENT = 15
"""The column at which reasons begin, below a pair of blocks that were kept apart."""


@dataclass(frozen=True)
class ClassAdvice:
    """The savings of sharing one class."""

    name: str  # the name of the class
    place: str  # file and line of the class
    is_marked: bool  # whether it is marked already
    instances: tuple[str, ...]  # paths of its instances, in the order they run; one per call
    num_closures: int  # the number of different closures that its calls need
    num_nodes: int  # graph nodes of the largest of these, with calls inside expanded
    nodes_saved: int  # the graph nodes that sharing saves
    seconds_saved: float  # the estimated CPU-seconds of compile for these nodes

    def __str__(self) -> str:
        first, last = self.instances[0], self.instances[-1]
        places = first if first == last else f"{first} ... {last}"
        mark = "marked" if self.is_marked else f"lazy_inline({self.name})"
        return (
            f"  {self.name:<28}{len(self.instances):>6}{self.num_closures:>10}{self.num_nodes:>8}"
            f"{self.nodes_saved:>8}{self.seconds_saved:>10.2f}\n"
            f"      {mark}   {self.place}   {places}"
        )


@dataclass(frozen=True)
class KeptApart:
    """Two blocks of one class that could not share a trace, and why."""

    class_name: str  # the class of the blocks
    paths: tuple[str, str]  # the path of the block, and of the one that it was compared with
    num_more: int  # the number of further blocks of the class with the same cause
    cause: str  # the argument, attribute or other fact that differs, with both values
    change: str  # what would let them share

    def __str__(self) -> str:
        more = f" (and {self.num_more} more)" if self.num_more else ""
        other = f" and {self.paths[1]}" if self.paths[1] else ""
        lines = [f"  {self.class_name}: {self.paths[0]}{other}{more}"]
        rows = (("because", self.cause), ("change", self.change))
        reasons = [f"      {name:<8} {text}" for name, text in rows if text]
        return "\n".join([*lines, *(folded(x, indent=_REASONS_INDENT) for x in reasons)])


@dataclass(frozen=True)
class Advice:
    """The result of :func:`lazyinline.advise`; ``print(advice)`` shows it.

    Attributes:
        model: class of the model.
        train: whether it was captured for training.
        backend: the backend whose compile was measured.
        num_nodes: graph nodes with ``reuse="auto"``.
        num_nodes_if_inlined: graph nodes without sharing.
        seconds_per_node: CPU-seconds of compile per node, measured on this model.
        classes: what to mark; the most saving first.
        kept_apart: blocks that nearly share.
    """

    model: str
    train: bool
    backend: BackendName
    num_nodes: int
    num_nodes_if_inlined: int
    seconds_per_node: float
    classes: tuple[ClassAdvice, ...]
    kept_apart: tuple[KeptApart, ...]

    def __str__(self) -> str:
        kind = "training" if self.train else "inference"
        lines = [
            f"{self.model}, {kind}: {self.num_nodes_if_inlined} graph nodes if inlined, "
            f"{self.num_nodes} with what repeats shared"
        ]
        if self.classes:
            heads = ("calls", "closures", "nodes", "saved", "seconds")
            widths = (6, 10, 8, 8, 10)
            head = "".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True))
            lines += ["", f"  {'mark, or use reuse=auto':<28}{head}", *map(str, self.classes)]
            lines.append(
                f"  seconds: nodes saved x {1000 * self.seconds_per_node:.1f} ms, what a node of "
                f"this model costs backend {self.backend} here"
            )
        else:
            lines.append("  nothing repeats that would pay as a closure")
        if self.kept_apart:
            lines += ["", "kept apart", *map(str, self.kept_apart)]
        return folded("\n".join(lines))


_ATTRIBUTE = re.compile(r"(?:\S+: )*attribute (?P<path>[\w.]+)\S* is .*, not ")
_OF_ATTRIBUTE = (
    "give all of them the same {path}. Where Python branches by it, each branch has a graph, which "
    "compiles once; to have one, compute both ways and choose with torch.where. Where it is an "
    "option of an operator, pass a tensor in its place, if the operator takes one (indices for a "
    "shift)"
)
_CHANGES = (
    ("hooks of", "put the hook on all of them, or on none"),
    ("train/eval mode of", "put all of them in one mode"),
    ("requires_grad", "freeze all of them, or none"),
    ("parameters of", "give all of them parameters of the same layout and dtype"),
    ("called in another way", "call all of them in one way"),
    ("forward hooks", "hooks may keep what they see; use them on the model instead"),
)


@door
def advise(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = True,
    backend: BackendName = "inductor",
) -> Advice:
    """Says which classes to mark, what each saves, and what keeps near-identical blocks apart.

    The model is captured with ``reuse="auto"`` and compiled once with the backend, to measure the
    seconds per node. Nothing is run, and no mark is left behind.

    Args:
        model: any ``nn.Module``. On the meta device, use ``backend="eager"``.
        args: example positional inputs; only layouts matter.
        kwargs: example keyword inputs.
        train: look at a training step; otherwise at a forward without gradients.
        backend: whose seconds: ``"inductor"`` or ``"eager"``.

    Returns:
        The advice; ``print(advice)`` shows it.

    Raises:
        CaptureError: if the model's Python cannot be traced.
        PlanError: if ``model`` or ``args`` are something else.

    Example:
        >>> print(lazyinline.advise(model, (ids,)))
    """
    check_example("advise", model, args)
    options = Options(reuse="auto", backend=backend)
    warm_up_compiler(backend=backend, train=train)
    with generators_kept(), torch.set_grad_enabled(train):
        _, report = Compiler(options).compile(model, args, dict(kwargs or {}), Goal(train=train))
    seconds_per_node = report.cpu_s / max(report.num_nodes, 1)
    classes = _classes(model, report, seconds_per_node)
    return Advice(
        model=type(model).__name__,
        train=train,
        backend=backend,
        num_nodes=report.num_nodes,
        num_nodes_if_inlined=report.num_nodes_if_inlined,
        seconds_per_node=seconds_per_node,
        classes=tuple(sorted(classes, key=lambda c: (-c.nodes_saved, c.name))),
        kept_apart=tuple(_kept_apart(report.decisions)),
    )


def _classes(
    model: nn.Module, report: CompileReport, seconds_per_node: float
) -> Iterator[ClassAdvice]:
    assert report.made is not None
    program = report.made.captured
    sizes, sites = inlined_sizes(program), count_calls(program)
    for own in alike(report.decisions, lambda d: d.class_name):
        name, paths = own[0].class_name, tuple(d.path for d in own)
        closures = [c for c in sizes if c.name == name]
        saved = sum((sites[c] - 1) * sizes[c] for c in closures)
        if saved <= 0:
            continue
        cls = type(model.get_submodule(paths[0]))
        yield ClassAdvice(
            name=name,
            place=_class_place(cls),
            is_marked=is_marked(cls),
            instances=paths,
            num_closures=sum(not (d.shared or d.shares) for d in own) or 1,
            num_nodes=max(sizes[c] for c in closures),
            nodes_saved=saved,
            seconds_saved=saved * seconds_per_node,
        )


def _kept_apart(decisions: Sequence[SharingDecision]) -> Iterator[KeptApart]:
    apart = [d for d in decisions if not d.shared and d.reason]
    # By reasons without values, so that blocks that differ alike are one entry.
    for decision, *more in alike(apart, lambda d: (d.class_name, d.reason.partition(" is ")[0])):
        paths = (decision.path, decision.compared_with)
        change = _change(decision)
        yield KeptApart(decision.class_name, paths, len(more), decision.reason, change)


def _change(decision: SharingDecision) -> str:
    """Returns what would let a block share with the one that it was compared with."""
    if decision.shares:
        return f"nothing: it {decision.shares}; only a trace is lost"
    for words, change in _CHANGES:
        if words in decision.reason:
            return change
    attribute = _ATTRIBUTE.match(decision.reason)
    return "" if attribute is None else _OF_ATTRIBUTE.format(path=attribute["path"])


def _class_place(cls: type) -> str:
    """Returns ``file.py:31`` of a class statement, or an empty text."""
    try:
        _, line = inspect.getsourcelines(cls)
        return f"{os.path.basename(inspect.getsourcefile(cls) or '')}:{line}"
    except (OSError, TypeError):
        return ""

"""``advise(model)``: what is shared, and what keeps near-identical blocks apart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..reuse.errors import door
from ..reuse.ir.printer import folded
from .capture.regions import SharingDecision
from .checks.refusals import check_example
from .compiler import Compiler
from .options import Options
from .passes.programs import capture
from .passes.state import Goal, Subject, run
from .reuse_table import alike, shared_classes

_REASONS_INDENT = 15
"""Where the reasons begin, below a pair of blocks that were kept apart."""


@dataclass(frozen=True)
class KeptApart:
    """Holds two blocks of one class that could not share a trace, and why.

    Attributes:
        class_name: of the blocks.
        paths: the block in question first, then the one that it was compared with.
        num_more: further blocks of the class that are kept apart in the same way.
        cause: the argument, attribute or other fact that differs, with both values, as the report
            has it.
        change: what would let them share.
    """

    class_name: str
    paths: tuple[str, str]
    num_more: int
    cause: str
    change: str

    def __str__(self) -> str:
        more = f" (and {self.num_more} more)" if self.num_more else ""
        other = f" and {self.paths[1]}" if self.paths[1] else ""
        lines = [f"  {self.class_name}: {self.paths[0]}{other}{more}"]
        rows = (("because", self.cause), ("change", self.change))
        reasons = [f"      {name:<8} {text}" for name, text in rows if text]
        return "\n".join([*lines, *(folded(x, indent=_REASONS_INDENT) for x in reasons)])


@dataclass(frozen=True)
class Advice:
    """Holds the result of :func:`lazyinline.advise`; ``print(advice)`` shows it.

    Attributes:
        model: class of the model.
        train: whether it was captured for training.
        num_nodes: graph nodes held with ``reuse="auto"``.
        num_nodes_if_inlined: graph nodes without sharing.
        shared: the classes that share, as the report names them.
        kept_apart: blocks that nearly share.
    """

    model: str
    train: bool
    num_nodes: int
    num_nodes_if_inlined: int
    shared: tuple[str, ...]
    kept_apart: tuple[KeptApart, ...]

    def __str__(self) -> str:
        kind = "training" if self.train else "inference"
        shared = ", ".join(self.shared) or "nothing repeats that would pay as a closure"
        lines = [
            f"{self.model}, {kind}: {self.num_nodes_if_inlined} graph nodes if inlined, "
            f"{self.num_nodes} with what repeats shared: {shared}"
        ]
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
) -> Advice:
    """Says what is shared, what keeps near-identical blocks apart, and what to change.

    The model is captured with ``reuse="auto"``. Nothing is compiled or run, and no mark is left
    behind.

    Args:
        model: any ``nn.Module``; its parameters may be on the meta device.
        args: example positional inputs; only layouts matter.
        kwargs: example keyword inputs.
        train: look at a training step; otherwise at a forward without gradients.

    Returns:
        The advice; ``print(advice)`` shows it.

    Raises:
        CaptureError: if the model's Python cannot be traced.
        PlanError: if ``model`` or ``args`` are something else.

    Example:
        >>> print(lazyinline.advise(model, (ids,)))
    """
    check_example("advise", model, args)
    compiler = Compiler(Options(reuse="auto", backend="eager"))
    subject = Subject(model, args, dict(kwargs or {}), effects="undo")
    report = run((capture,), compiler.started(subject, Goal(train=train))).report
    return Advice(
        type(model).__name__,
        train,
        report.num_nodes,
        report.num_nodes_if_inlined,
        tuple(shared_classes(report.decisions)),
        tuple(_kept_apart(report.decisions)),
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

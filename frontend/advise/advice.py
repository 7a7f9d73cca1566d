"""What ``advise`` found: which classes to mark, and what keeps near-identical blocks apart."""

from __future__ import annotations

from dataclasses import dataclass

from ...backend.kernels.lower import BackendName
from ...reuse.ir.printer import folded

_TOLD = 15
"""The column where what is told of blocks that were kept apart begins."""


@dataclass(frozen=True)
class ClassAdvice:
    """One class whose instances repeat.

    Attributes:
        name: of the class.
        place: file and line of the class.
        is_marked: whether it is marked already.
        instances: paths of its instances, in the order they run; one per call.
        num_closures: different closures that its calls need.
        num_nodes: graph nodes of the largest of these, calls inside expanded.
        nodes_saved: graph nodes that sharing takes away.
        seconds_saved: CPU-seconds of compile that go with them, estimated.
    """

    name: str
    place: str
    is_marked: bool
    instances: tuple[str, ...]
    num_closures: int
    num_nodes: int
    nodes_saved: int
    seconds_saved: float

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
    """Blocks of one class that could not share a trace, and why.

    Attributes:
        class_name: of the blocks.
        paths: the block in question first, then the one that it was compared with.
        num_more: further blocks of the class that are kept apart in the same way.
        cause: the argument, attribute or other fact that differs, with both values.
        graphs: where the two graphs part, with the line of the first operator that differs.
        change: what would let them share.
    """

    class_name: str
    paths: tuple[str, str]
    num_more: int
    cause: str
    graphs: str
    change: str

    def __str__(self) -> str:
        more = f" (and {self.num_more} more)" if self.num_more else ""
        other = f" and {self.paths[1]}" if self.paths[1] else ""
        lines = [f"  {self.class_name}: {self.paths[0]}{other}{more}"]
        rows = (
            ("because", self.cause),
            ("graphs", self.graphs),
            ("change", self.change),
        )
        told = [f"      {name:<8} {text}" for name, text in rows if text]
        return "\n".join([*lines, *(folded(line, indent=_TOLD) for line in told)])


@dataclass(frozen=True)
class Advice:
    """What :func:`lazyinline.advise` returns; ``print(advice)`` shows it.

    Attributes:
        model: class of the model.
        train: whether it was captured for training.
        backend: whose compile the seconds are of.
        num_nodes: graph nodes held with ``reuse="auto"``.
        num_nodes_if_inlined: graph nodes without sharing.
        seconds_per_node: CPU-seconds of compile per node held, measured on this model.
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

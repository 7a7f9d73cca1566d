"""Draws the pictures of README and docs: `python docs/figures/draw.py`, with the extra `docs`.

The seconds are those of the first table in docs/performance.md, which names their command; the
picture says of the machine what that page says.
"""

from __future__ import annotations

import pathlib
import re
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parent / "performance.md"
WAYS = (  # of the table's columns: label, colour, marker, dashes; told apart without colour, too
    ("torch.compile", "orange", "o", "-"),
    ("nested regions (wrong gradients)", "grey", "s", ":"),
    ("torch.compile per part", "grey", "^", "--"),
    ("lazyinline", "blue", "D", "-"),
)


@dataclass(frozen=True)
class Look:
    """Colours of one picture."""

    name: str
    ink: str
    grey: str
    blue: str
    orange: str
    paper: str


LOOKS = (
    Look("light", ink="#1f2328", grey="#6e7781", blue="#0b5cad", orange="#c2570c", paper="#ffffff"),
    Look("dark", ink="#e6edf3", grey="#9198a1", blue="#6cb6ff", orange="#f0883e", paper="#0d1117"),
)


def box(axes: Axes, look: Look, x: float, y: float, width: float, text: str, colour: str) -> None:
    """Draws a box with a text in it; a filled one is a closure, an empty one a call."""
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y), width, 0.8, boxstyle=style, ec=colour, fc="none", lw=1.6))
    axes.text(x + width / 2, y + 0.4, text, color=look.ink, ha="center", va="center", fontsize=10)


def calls(axes: Axes, colour: str, x: float, y: float, width: float, number: int) -> None:
    """Draws a row of calls as thin bars between two places."""
    step = width / number
    for call in range(number):
        axes.add_patch(
            FancyBboxPatch(
                (x + call * step, y), step * 0.6, 0.8, boxstyle="square,pad=0", ec="none", fc=colour
            )
        )


def strip(axes: Axes, look: Look) -> None:
    """The idea in a picture: 32 layers as they run, and what the compiler holds of them."""
    axes.set_xlim(-0.1, 10.5)
    axes.set_ylim(-0.4, 7.2)
    axes.axis("off")
    say = {"color": look.ink, "fontsize": 10, "va": "center"}
    axes.text(0, 6.8, "A model of 32 layers, as it runs", weight="bold", **say)
    for y, name, arrow in ((5.5, "forward", "embed"), (4.4, "backward", "embed")):
        colour = look.blue if name == "forward" else look.orange
        box(axes, look, 0, y, 1.3, arrow, look.grey)
        calls(axes, colour, 1.55, y, 6.0, 32)
        box(axes, look, 7.6, y, 1.0, "loss", look.grey)
        axes.text(8.8, y + 0.4, name, color=look.ink, fontsize=10, va="center")
    axes.annotate(
        "", (5, 2.55), (5, 4.1), arrowprops={"arrowstyle": "->", "color": look.grey, "lw": 1.4}
    )
    axes.text(5.25, 3.3, "each different block once", **say)
    axes.text(0, 2.2, "What lazyinline differentiates and compiles", weight="bold", **say)
    box(axes, look, 0, 0.9, 1.3, "embed", look.grey)
    box(axes, look, 1.9, 0.9, 2.3, "Block", look.blue)
    box(axes, look, 4.5, 0.9, 2.3, "its derivative", look.orange)
    box(axes, look, 7.1, 0.9, 1.0, "loss", look.grey)
    axes.text(0, 0.2, "Calls are laid out when memory is planned: late inlining.", **say)


def measured() -> list[tuple[float, ...]]:
    """Returns the columns of the table: layers, and seconds of each way."""
    text = PAGE.read_text(encoding="utf-8")
    table = re.findall(r"^\| (\d+ \|.*)\|$", text.partition("## Late")[0], re.MULTILINE)
    rows = [[float(number) for number in re.findall(r"\d+(?:\.\d+)?", row)] for row in table]
    return list(zip(*rows, strict=True))


def machine() -> str:
    """Returns what the page says of the machine that the table is from."""
    text = PAGE.read_text(encoding="utf-8").partition("## Compile time")[2].partition("\n|")[0]
    found = re.search(r"`;\s+([^)]+)\)", text)
    assert found is not None, "the page names no machine"
    return " ".join(found[1].split())


def curves(axes: Axes, look: Look) -> None:
    """CPU-seconds of compile over layers, as measured."""
    layers, *ways = measured()
    for seconds, (label, colour, marker, dashes) in zip(ways, WAYS, strict=True):
        shown = getattr(look, colour)
        axes.plot(layers, seconds, color=shown, marker=marker, ls=dashes, lw=2, ms=5, label=label)
    title = "CPU-seconds to compile a training step"
    axes.set_title(title, color=look.ink, fontsize=10, loc="left")
    axes.set_xlabel(f"layers\n({machine()})", color=look.ink, fontsize=9)
    axes.set_xticks(layers)
    axes.set_ylim(bottom=0)
    axes.tick_params(colors=look.ink, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(look.grey)
    axes.legend(labelcolor=look.ink, frameon=False, fontsize=9, loc="upper left")


def program(axes: Axes, look: Look) -> None:
    """A program on its way through the passes."""
    axes.set_xlim(-0.1, 12)
    axes.set_ylim(-0.3, 6.2)
    axes.axis("off")

    def row(y: float, name: str, what: str) -> None:
        axes.text(0, y + 0.4, name, color=look.ink, fontsize=10, va="center", weight="bold")
        axes.text(8.4, y + 0.4, what, color=look.ink, fontsize=9.5, va="center")

    row(5.2, "model", "12 layers, each with its parameters")
    calls(axes, look.grey, 2, 5.2, 6, 12)
    row(3.95, "capture", "one closure, 12 calls of it")
    box(axes, look, 2, 3.95, 1.6, "Block", look.blue)
    axes.text(3.8, 4.35, "x 12", color=look.ink, fontsize=10, va="center")
    row(2.7, "autodiff, lower", "two closures with kernels")
    box(axes, look, 2, 2.7, 1.6, "Block", look.blue)
    box(axes, look, 4.6, 2.7, 2.0, "its derivative", look.orange)
    axes.text(3.8, 3.1, "x 12", color=look.ink, fontsize=10, va="center")
    axes.text(6.8, 3.1, "x 12", color=look.ink, fontsize=10, va="center")
    row(1.45, "link", "24 calls on one timeline")
    calls(axes, look.blue, 2, 1.45, 3, 12)
    calls(axes, look.orange, 5, 1.45, 3, 12)
    row(0.2, "memory", "each buffer has a place in one arena")
    box(axes, look, 2, 0.2, 5.9, "arena", look.grey)


def save(figure: Figure, look: Look, name: str) -> None:
    """Writes a picture, the same text each time."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        path = HERE / f"{name}-{look.name}.svg"
        figure.savefig(path, facecolor=look.paper, metadata={"Date": None, "Creator": None})
    text = "".join(f"{line.rstrip()}\n" for line in path.read_text(encoding="utf-8").splitlines())
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Draws each picture, light and dark."""
    for look in LOOKS:
        overview = Figure(figsize=(10, 3.5), layout="constrained")
        left, right = overview.subplots(1, 2, width_ratios=(1.25, 1))
        strip(left, look)
        curves(right, look)
        save(overview, look, "overview")
        passes = Figure(figsize=(9, 3.4), layout="constrained")
        program(passes.subplots(), look)
        save(passes, look, "program")


if __name__ == "__main__":
    main()

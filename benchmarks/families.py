"""Hugging Face families, unmodified, compiled and compared with eager; prints a table.

    python benchmarks/families.py                   # the table
    python benchmarks/families.py --only Llama T5   # some rows
    python benchmarks/families.py --docs            # writes the table into docs/families.md

A row is right where the outputs of an inference, and the loss and every gradient of a training
step with the configuration's own dropout, equal eager's under one seed, with ``reuse="auto"`` (no
class is marked anywhere) and then with the layer classes marked from outside. A family that
cannot be captured is shown with its reason.
"""

from __future__ import annotations

import argparse
import copy
import math
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo import ASKED, FURTHER, Family, scalar

import lazyinline
from lazyinline import CompileReport, LazyInlineError, lazy_inline

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"

WAYS = ("auto", "marked")
HEADINGS = ("closures, calls", "nodes held / if inlined")

# Kernels are PyTorch's own on both sides; what adds up in another order differs by 1e-6.
TOLERANCE = 1e-5
# Gradients that are zero but for rounding (biases of keys) are compared on the scale of the others.
NOISE = 1e-4


@dataclass(frozen=True)
class Side:
    """One family compiled in one way: the largest errors, or why there are none."""

    training: CompileReport | None = None
    inference_error: float = math.inf
    training_error: float = math.inf
    failure: str = ""

    @property
    def is_right(self) -> bool:
        """Whether inference and training equal eager."""
        return not self.failure and max(self.inference_error, self.training_error) <= TOLERANCE


def run_side(family: Family, reuse: str, backend: str) -> Side:
    """Compiles a family for inference and for training and compares with eager."""
    try:
        model, inputs = family.build()
        inference = inference_error(model, inputs, reuse, backend)
        training, report = training_error(model, inputs, reuse, backend)
    except LazyInlineError as error:
        return Side(failure=" ".join(str(error).split()))
    except Exception as error:  # a defect of ours: shown, and the other rows go on
        return Side(failure=f"{type(error).__name__}: {error}")
    return Side(report, inference, training)


def inference_error(model: nn.Module, inputs: Mapping[str, Any], reuse: str, backend: str) -> float:
    """Returns the largest relative error of an output."""
    model.eval()
    compiled = lazyinline.compile(model, reuse=reuse, backend=backend)
    with torch.no_grad():
        expected = tensors(model(**inputs))
        found = tensors(compiled(**inputs))
    return largest_error(found, expected)


def training_error(
    model: nn.Module, inputs: Mapping[str, Any], reuse: str, backend: str
) -> tuple[float, CompileReport]:
    """Returns the largest relative error of the loss, an output and a gradient in two steps."""
    model.train()
    expected = copy.deepcopy(model)
    compiled = lazyinline.compile(model, reuse=reuse, backend=backend)
    worst = 0.0
    for seed in (1, 2):
        results = []
        for run, owner in ((expected, expected), (compiled, model)):
            torch.manual_seed(seed)
            owner.zero_grad()
            output = run(**inputs)
            scalar(output).backward()
            grads = {n: p.grad for n, p in owner.named_parameters() if p.grad is not None}
            results.append((tensors(output), grads))
        (want, want_grads), (have, grads) = results
        if grads.keys() != want_grads.keys():
            return math.inf, compiled.last_report
        worst = max(worst, largest_error(have, want), gradient_error(grads, want_grads))
    return worst, compiled.last_report


def tensors(output: Any) -> list[Tensor]:
    """Returns the tensors of a nested output, in order."""
    return [x.detach() for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]


def largest_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the largest relative error of a tensor (norm over norm)."""
    if len(found) != len(expected):
        return math.inf
    return max(relative_error(a, b) for a, b in zip(found, expected, strict=True))


def gradient_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Returns the largest relative error of a gradient."""
    floor = NOISE * max(g.norm().item() / math.sqrt(g.numel()) for g in expected.values())
    return max(
        relative_error(found[n], g, floor * math.sqrt(g.numel())) for n, g in expected.items()
    )


def relative_error(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Returns ||a - b|| / ||b||; infinite where either is not finite and they are not the same."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if torch.equal(a, b):
        return 0.0
    error = (a.double() - b.double()).norm().item() / max(b.double().norm().item(), floor, 1e-300)
    return math.inf if math.isnan(error) else error


def layer_classes(model: nn.Module) -> set[type[nn.Module]]:
    """Returns the classes that transformers itself names as the layers of a model."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return {type(m) for m in model.modules() if type(m).__name__ in names}


def mark_layers(family: Family) -> str:
    """Marks a family's layer classes; returns their names."""
    try:
        model, _ = family.build()
    except LazyInlineError:
        return ""
    found = layer_classes(model)
    for cls in found:
        lazy_inline(cls)
    return ", ".join(sorted(cls.__name__ for cls in found))


def rows(families: Sequence[Family], ways: Sequence[str], backend: str) -> Iterator[str]:
    """Yields the table's lines; nothing is marked until the last automatic row is done."""
    sides: dict[Family, list[Side]] = {family: [] for family in families}
    for reuse in ways:
        for family in families:
            if reuse == "marked":
                mark_layers(family)
            sides[family].append(run_side(family, reuse, backend))
            text = summary(sides[family][-1])
            print(f"{reuse} {family.name}: {text}", file=sys.stderr, flush=True)
    columns = ["family", "inference", "training step"]
    columns += [f"{reuse}: {heading}" for reuse in ways for heading in HEADINGS]
    yield f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    for family in families:
        yield row(family, sides[family])


def summary(side: Side) -> str:
    """One line for the one who waits."""
    if side.failure:
        return side.failure
    return f"{side.inference_error:.1e} {side.training_error:.1e} {counts(side)}"


def row(family: Family, sides: Sequence[Side]) -> str:
    """Returns one line of the table."""
    failures = list(dict.fromkeys(side.failure for side in sides if side.failure))
    if failures:
        empty = " |" * (1 + len(HEADINGS) * len(sides))
        return f"| {family.name} | not captured: {'; '.join(failures)} |{empty}\n"
    verdicts = [
        verdict([getattr(side, name) for side in sides])
        for name in ("inference_error", "training_error")
    ]
    return f"| {' | '.join([family.name, *verdicts, *map(counts, sides)])} |\n"


def verdict(errors: Sequence[float]) -> str:
    """Says whether both ways equal eager."""
    worst = max(errors)
    return "equal" if worst <= TOLERANCE else f"**differs** ({worst:.0e})"


def counts(side: Side) -> str:
    """Closures and calls of blocks, and nodes."""
    report = side.training
    assert report is not None
    shared = sum(d.shared for d in report.decisions)
    return (
        f"{report.num_closures}, {report.num_block_calls} ({shared} shared) | "
        f"{report.num_nodes} / {report.num_nodes_if_inlined}"
    )


def write_page(table: str) -> None:
    """Replaces the table in docs/families.md."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + table + END + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="families by name")
    parser.add_argument("--reuse", nargs="+", choices=WAYS, default=WAYS, help="default both")
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/families.md")
    options = parser.parse_args()
    known = {family.name: family for family in (*ASKED, *FURTHER)}
    unknown = set(options.only or ()) - known.keys()
    if unknown:
        parser.error(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    families = [known[name] for name in options.only or known]
    table = "".join(rows(families, sorted(options.reuse), options.backend))
    print(table, end="")
    if options.docs:
        write_page(table)


if __name__ == "__main__":
    main()

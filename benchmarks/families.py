"""Hugging Face families, unmodified, compiled and compared with eager; prints a table.

    python benchmarks/families.py                   # the table
    python benchmarks/families.py --only Llama T5   # some rows
    python benchmarks/families.py --docs            # writes these rows into docs/families.md

Configurations are small and otherwise the default, so caches are made and returned. A row is right
where the outputs of an inference, the loss and every gradient of a training step with the
configuration's own dropout, and the tokens of ``generate`` where the family has it, equal eager's
under one seed, with nothing marked (``reuse="auto"``). A family that cannot be compiled is shown
with its reason, and so is one of which only some modules can.
"""

from __future__ import annotations

import argparse
import copy
import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo import ASKED, FURTHER, Family, add_families, chosen_families, scalar

import lazyinline
from lazyinline import CompileReport, LazyInlineError

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"

COLUMNS = (
    "family",
    "inference",
    "training step",
    "generate",
    "closures, calls",
    "nodes held / if inlined",
)

NEW_TOKENS = 8

# Kernels are PyTorch's own on both sides; what adds up in another order differs by 1e-6.
TOLERANCE = 1e-5
# Gradients that are zero but for rounding (biases of keys) are compared on the scale of the others.
NOISE = 1e-4


@dataclass(frozen=True)
class Result:
    """One family compiled: the largest errors, or why there are none."""

    training: CompileReport | None = None
    inference_error: float = math.inf
    training_error: float = math.inf
    generate: str = ""
    failure: str = ""


def result_of(family: Family, backend: str) -> Result:
    """Compiles a family for inference, for ``generate`` and for training; compares with eager."""
    try:
        model, inputs = family.build()
        inference = inference_error(model, inputs, backend)
        tokens = generated(model, inputs, backend)
        training, report = training_error(model, inputs, backend)
    except LazyInlineError as error:
        return Result(failure=" ".join(str(error).split()))
    except Exception as error:  # a defect of ours: shown, and the other rows go on
        return Result(failure=f"{type(error).__name__}: {error}")
    return Result(report, inference, training, tokens)


def inference_error(model: nn.Module, inputs: Mapping[str, Any], backend: str) -> float:
    """Returns the largest relative error of an output."""
    model.eval()
    compiled = lazyinline.compile(model, reuse="auto", backend=backend)
    with torch.no_grad():
        expected = tensors(model(**inputs))
        found = tensors(compiled(**inputs))
    check_compiled(compiled)
    return largest_error(found, expected)


def check_compiled(compiled: Any) -> None:
    """Raises LazyInlineError if a model ran eagerly, and nothing of it was compiled."""
    report = compiled.last_report
    if report.ran_eagerly and not compiled_parts(report):
        raise LazyInlineError(f"it runs eagerly: {report.ran_eagerly}")


def compiled_parts(report: CompileReport) -> list[str]:
    """Returns the compiled modules of a model that runs eagerly."""
    return [part.path for part in report.parts if part.num_programs]


def generated(model: nn.Module, inputs: Mapping[str, Any], backend: str) -> str:
    """Says whether ``generate`` gives eager's tokens, and from how many compiles."""
    if not getattr(model, "can_generate", lambda: False)():
        return "-"
    compiled = lazyinline.compile(model, reuse="auto", backend=backend)
    prompt = {name: value for name, value in inputs.items() if name != "labels"}
    more = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    expected, found = (module.eval().generate(**prompt, **more) for module in (model, compiled))
    if not torch.equal(found, expected):
        return "**differs**"
    check_compiled(compiled)
    report = compiled.last_report
    static = f" ({report.why_static})" if report.why_static else ""
    return f"equal, {report.num_compiles} compiles{static}"


def training_error(
    model: nn.Module, inputs: Mapping[str, Any], backend: str
) -> tuple[float, CompileReport]:
    """Returns the largest relative error of the loss, an output and a gradient in two steps."""
    model.train()
    expected = copy.deepcopy(model)
    compiled = lazyinline.compile(model, reuse="auto", backend=backend)
    worst = 0.0
    for seed in (1, 2):
        results = []
        for run, owner in ((expected, expected), (compiled, model)):
            transformers.set_seed(seed)  # numpy's too, with which Wav2Vec2 draws what it masks
            owner.zero_grad()
            output = run(**inputs)
            scalar(output).backward()
            grads = {n: p.grad for n, p in owner.named_parameters() if p.grad is not None}
            results.append((tensors(output), grads))
        (want, want_grads), (have, grads) = results
        if grads.keys() != want_grads.keys():
            return math.inf, compiled.last_report
        worst = max(worst, largest_error(have, want), gradient_error(grads, want_grads))
        check_compiled(compiled)
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
    filled = [g for g in expected.values() if g.numel()]
    floor = NOISE * max(g.norm().item() / math.sqrt(g.numel()) for g in filled)
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


def heading() -> str:
    """Returns the table's first two lines."""
    return f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


def row(family: Family, result: Result) -> str:
    """Returns one line of the table."""
    if result.failure:
        empty = " |" * (len(COLUMNS) - 2)
        return f"| {family.name} | not compiled: {result.failure} |{empty}\n"
    verdicts = map(verdict, (result.inference_error, result.training_error))
    return f"| {' | '.join([family.name, *verdicts, result.generate, counts(result)])} |\n"


def verdict(error: float) -> str:
    """Says whether a result equals eager's."""
    return "equal" if error <= TOLERANCE else f"**differs** ({error:.0e})"


def counts(result: Result) -> str:
    """Closures and calls of blocks, and nodes; or how much is compiled, and why not all."""
    report = result.training
    assert report is not None
    if report.ran_eagerly:
        reason = report.ran_eagerly.partition(". ")[0]
        return f"{len(compiled_parts(report))} modules compiled | {reason}"
    return (
        f"{report.num_closures}, {report.num_block_calls} | "
        f"{report.num_nodes} / {report.num_nodes_if_inlined}"
    )


def write_row(family: Family, line: str) -> None:
    """Writes a row into the table of docs/families.md; those of other families stay."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    known = {row.split("|")[1].strip(): f"{row}\n" for row in table.splitlines()}
    known[family.name] = line
    lines = (known[f.name] for f in (*ASKED, *FURTHER) if f.name in known)
    PAGE.write_text(before + BEGIN + heading() + "".join(lines) + END + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_families(parser)
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/families.md")
    options = parser.parse_args()
    families = chosen_families(parser, options)
    print(heading(), end="")
    for family in families:
        result = result_of(family, options.backend)
        print(row(family, result), end="", flush=True)
        if options.docs:
            write_row(family, row(family, result))


if __name__ == "__main__":
    main()

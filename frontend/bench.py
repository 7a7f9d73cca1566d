"""``lazyinline bench``: a row for each number of layers, as text, JSON and a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .measure import MeasureReport, measure
from .page.write import about, error_text

DEFAULT_LAYERS = (4, 8, 16)
HEAD = (
    f"{'':>6} {'graph nodes':>15} {'compile CPU s':>15} {'compile wall s':>15}"
    f" {'step ms (fastest)':>23} {'error, late':>19}\n"
    f"{'layers':>6} {'held':>7} {'inlined':>7} {'late':>7} {'early':>7} {'late':>7} {'early':>7}"
    f" {'eager':>7} {'late':>7} {'early':>7} {'output':>9} {'gradient':>9}"
)


class Decoder(nn.Module):
    """Puts PyTorch's own layers between an embedding and a head, as a GPT has them."""

    def __init__(self, layers: int, hidden: int = 256, vocab: int = 1000, seq: int = 64) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(
            *(hidden, 4, 4 * hidden, 0.0, "gelu"), batch_first=True, norm_first=True
        )
        self.embed, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        mask = nn.Transformer.generate_square_subsequent_mask(seq)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns the loss if targets are given, else the logits."""
        logits: Tensor = self.head(self.blocks(self.embed(ids), self.mask, is_causal=True))
        return logits if targets is None else F.cross_entropy(logits.mT, targets)


def decoder(
    layers: int, *, batch: int = 2, train: bool = True
) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """Makes the decoder that is measured unless another model is named, with a batch."""
    ids, targets = torch.randint(1000, (2, batch, 64)).unbind()
    return Decoder(layers).train(train), (ids, targets) if train else (ids,), {}


def bench(
    make: Callable[..., tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]],
    layers: Sequence[int],
    say: Callable[[str], None],
    **options: Any,
) -> list[MeasureReport]:
    """Measures all rows; says each as soon as it is there.

    Args:
        make: returns a model with its inputs; is given a number of layers, if there are some. The
            smallest is compiled twice before, both ways: that pays for the C++ kernels, which all
            depths share, and the rows then show what the compilers do.
        layers: numbers of layers, or none.
        say: takes a line.
        options: of :func:`lazyinline.measure`.
    """
    # C++ kernels are shared by all depths: without this the first row would pay for them alone.
    if layers:
        say(f"warm-up: {min(layers)} layers, all ways; imports, C++ kernels built ...")
        measure(*make(min(layers)), **options, execute=bool(options.get("against")))
    say(f"late: different blocks compiled once, inlined at link. early: all inlined first.\n{HEAD}")
    reports = []
    for given in [[depth] for depth in layers] or [[]]:
        report = measure(*make(*given), **options)
        reports.append(replace(report, layers=given[0] if given else None))
        say(_row(reports[-1]))
        for name in report.others:
            say(f"{'':>6} {report.other_text(name)}")
    others = {one.other_text(name) for one in reports for name in one.others}
    for note in dict.fromkeys(note for report in reports for note in report.notes()):
        if note not in others:  # said beside its row
            say(note)
    say("errors are against eager: largest absolute of the output, largest relative of a gradient")
    return reports


def _row(report: MeasureReport) -> str:
    late, early = report.late, report.early
    seconds = (late.cpu_s, early.cpu_s, late.wall_s, early.wall_s)
    return (
        f"{report.layers or '-':>6} {late.num_nodes:>7} {late.num_nodes_if_inlined:>7}"
        + "".join(f" {s:>7.2f}" for s in seconds)
        + "".join(f" {1e3 * min(report.steps[n].times):>7.1f}" for n in ("eager", *report.sides))
        + "".join(f" {error_text(error):>9}" for error in report.errors["late"][:2])
    )


def to_json(reports: Sequence[MeasureReport]) -> str:
    """Returns all rows, and where they were measured."""
    found = {"about": about(), "rows": [report.to_dict() for report in reports]}
    return json.dumps(found, indent=2, allow_nan=False) + "\n"

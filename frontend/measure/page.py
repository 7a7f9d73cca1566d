"""Measure reports as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from ..report import CompileReport
from .measurement import Measurement, Side, error_text
from .workload import Errors

STYLE = """
:root { --ink: #1c2430; --soft: #5d6b7d; --line: #dfe5ec; --page: #f5f7fa; --card: #fff;
  --late: #1b7f6b; --early: #c8553d; --eager: #6b7a90;
  --p0: #4c72b0; --p1: #dd8452; --p2: #8c6bb1; --p3: #3f9c6b; --p4: #b0894c; --p5: #7f7f7f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9f0; --soft: #9aa8b9; --line: #2f3947; --page: #141920; --card: #1c232c;
    --late: #4fc3a8; --early: #f08a70; --eager: #93a2b8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 0 0 .75rem; }
h3 { font-size: .95rem; margin: 1.5rem 0 .5rem; }
p { margin: .25rem 0; } .soft { color: var(--soft); }
section, details.card { background: var(--card); border: 1px solid var(--line);
  border-radius: .6rem; padding: 1.1rem 1.3rem; margin: 1.25rem 0; }
summary { cursor: pointer; font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
thead th { color: var(--soft); font-weight: 500; font-size: .85rem; }
tfoot td { font-weight: 600; border-bottom: 0; }
td code { white-space: nowrap; }
.late { color: var(--late); } .early { color: var(--early); } .eager { color: var(--eager); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr));
  gap: .75rem; margin: 1rem 0; }
.tile { border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.5rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 13px; }
svg .axis { fill: var(--soft); font-size: 12px; } svg line { stroke: var(--line); }
.legend span { margin-right: 1.1rem; white-space: nowrap; font-size: .85rem; }
.legend i { display: inline-block; width: .75rem; height: .75rem; border-radius: .15rem;
  margin-right: .35rem; vertical-align: -.05rem; }
.chips { display: flex; flex-wrap: wrap; gap: .3rem; }
.chips code { border: 1px solid var(--line); border-radius: .3rem; padding: 0 .4rem;
  font-size: .8rem; } .chips code.traced { border-color: var(--late); color: var(--late); }
"""
NUM_PASS_COLOURS = 6
CHART = (720, 260, 44)
"""Width, height and margin of the chart over layers."""
BAR_X, BAR_WIDTH, BAR_HEIGHT = 60, 580, 26


def page(reports: Sequence[Measurement], *, about: str = "") -> str:
    """Returns the text of a page.

    Args:
        reports: one report, or one for each number of layers.
        about: a line on what was measured, for below the heading.
    """
    body = ["<header><h1>Late against early inlining</h1>"]
    body += [f"<p>{html.escape(about)}</p>" if about else "", _explanation(), "</header>"]
    if len(reports) > 1:
        body += ["<section><h2>Over the layers</h2>", _chart(reports), _rows(reports), "</section>"]
    for report in reports:
        body.append(_card(report, folded=len(reports) > 1))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>lazyinline: late against early</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _explanation() -> str:
    return (
        '<p class="soft"><b class="late">Late</b>: each different block is compiled once and '
        'inlined at link. <b class="early">Early</b>: everything is inlined first. Both run the '
        'same operators; <b class="eager">eager</b> is PyTorch without a compiler.</p>'
    )


# ---- tables ----------------------------------------------------------------------------------


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, foot: Sequence[str] | None = None
) -> str:
    """A table of cells that are HTML already."""
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    body = "\n".join(_table_row(row) for row in rows)
    end = f"<tfoot>{_table_row(foot)}</tfoot>" if foot else ""
    return (
        f'<div class="wide"><table><thead><tr>{cells}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>{end}</table></div>"
    )


def _table_row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _rows(reports: Sequence[Measurement]) -> str:
    head = ["layers", "nodes held", "if inlined", "late CPU s", "early CPU s", "late wall s"]
    head += [
        "early wall s",
        "eager step ms",
        "late step ms",
        "early step ms",
        "output error",
        "gradient error",
    ]
    return _table(head, [_report_row(report) for report in reports])


def _report_row(report: Measurement) -> list[str]:
    late, early = report.late, report.early
    steps = (report.eager, late.step, early.step)
    errors = late.errors
    return [
        "-" if report.layers is None else str(report.layers),
        str(late.compiled.num_nodes),
        str(late.compiled.num_nodes_if_inlined),
        *(f"{side.compiled.cpu_s:.2f}" for side in (late, early)),
        *(f"{side.compiled.wall_s:.2f}" for side in (late, early)),
        *("-" if step is None else f"{step.minimum_ms:.2f}" for step in steps),
        error_text(errors.max_abs_error),
        error_text(errors.max_rel_grad_error),
    ]


def _card(report: Measurement, *, folded: bool) -> str:
    parts = [_tiles(report), "<h3>Seconds per pass</h3>", _bars(report), _pass_table(report)]
    parts += ["<h3>What was compiled</h3>", _size_table(report)]
    if report.eager is not None:
        parts += ["<h3>One step</h3>", _step_table(report)]
    parts += ["<h3>Closures</h3>", _closures(report.late.compiled), _blocks(report.late.compiled)]
    notes = "".join(f'<p class="soft">{html.escape(note)}</p>' for note in report.notes())
    title, inside = html.escape(report.title()), "\n".join(parts) + notes
    if folded:
        return f'<details class="card"><summary>{title}</summary>\n{inside}</details>'
    return f"<section><h2>{title}</h2>\n{inside}</section>"


def _tiles(report: Measurement) -> str:
    late, early = report.late, report.early
    tiles = [
        (f"{late.compiled.num_nodes:,}", f"nodes held of {late.compiled.num_nodes_if_inlined:,}"),
        (f"{late.compiled.cpu_s:.2f} s", f"compile CPU, late (early {early.compiled.cpu_s:.2f} s)"),
    ]
    if report.eager and late.step:
        step = f"fastest step, late (eager {report.eager.minimum_ms:.1f} ms)"
        tiles.append((f"{late.step.minimum_ms:.1f} ms", step))
        error = late.errors.max_rel_grad_error if report.train else late.errors.max_abs_error
        what = "largest relative gradient error" if report.train else "largest output error"
        tiles.append((error_text(error), what))
    inside = "".join(f'<div class="tile"><b>{b}</b><span>{s}</span></div>' for b, s in tiles)
    return f'<div class="tiles">{inside}</div>'


def _size_table(report: Measurement) -> str:
    rows = [(name, f"{late:,}", f"{early:,}") for name, late, early in report.size_rows()]
    return _table(["", "late", "early"], rows)


def _pass_table(report: Measurement) -> str:
    late, early = report.late.compiled, report.early.compiled
    rows = []
    for a, b in zip(late.passes, early.passes, strict=True):
        seconds = [f"{s:.2f}" for s in (a.cpu_s, b.cpu_s, a.wall_s, b.wall_s)]
        rows.append([html.escape(a.name), *seconds, f"{a.num_nodes:,}", f"{b.num_nodes:,}"])
    totals = (late.cpu_s, early.cpu_s, late.wall_s, early.wall_s)
    head = ["pass", "late CPU s", "early CPU s", "late wall s", "early wall s"]
    head += ["late nodes after", "early nodes after"]
    return _table(head, rows, foot=["all", *(f"{s:.2f}" for s in totals), "", ""])


def _step_table(report: Measurement) -> str:
    lines = [("eager", report.eager, Errors())]
    lines += [(name, side.step, side.errors) for name, side in report.sides.items()]
    rows = []
    for name, step, errors in lines:
        times = [f"{step.median_ms:.2f}", f"{step.minimum_ms:.2f}"] if step else ["-", "-"]
        found = [error_text(errors.max_abs_error), error_text(errors.max_rel_grad_error)]
        worst = f"<code>{html.escape(errors.worst_gradient)}</code>"
        rows.append([f'<b class="{name}">{name}</b>', *times, *found, worst])
    head = ["", "median ms", "minimum ms", "largest output error"]
    head += ["largest relative gradient error", "which is of"]
    return _table(head, rows)


def _closures(compiled: CompileReport) -> str:
    rows = []
    for closure in compiled.closures:
        nodes, calls = closure.num_nodes, closure.num_calls
        name = f"<code>@{html.escape(closure.name)}</code>"
        rows.append([name, f"{nodes:,}", f"{calls:,}", f"{nodes * calls:,}"])
    return _table(["closure", "nodes in its body", "calls", "nodes times calls"], rows)


def _blocks(compiled: CompileReport) -> str:
    if not compiled.decisions:
        return ""
    chips = "".join(
        f'<code class="{"call" if d.shared else "traced"}">'
        f"{html.escape(d.path or d.class_name)}</code>"
        for d in compiled.decisions
    )
    shared = sum(d.shared for d in compiled.decisions)
    text = f"{len(compiled.decisions) - shared} traced, {shared} shared as calls"
    parts = [f'<h3>Blocks: {text}</h3><div class="chips">{chips}</div>']
    apart = compiled.not_shared()
    if apart:
        rows = [[f"<code>{html.escape(d.path)}</code>", html.escape(d.reason)] for d in apart]
        parts.append("<h3>Not shared</h3>" + _table(["block", "why"], rows))
    return "".join(parts)


# ---- pictures --------------------------------------------------------------------------------


def _bars(report: Measurement) -> str:
    """CPU-seconds of each side as one bar, a piece for each pass."""
    sides = report.sides
    longest = max(side.compiled.cpu_s for side in sides.values()) or 1.0
    pieces = []
    for row, (name, side) in enumerate(sides.items()):
        pieces.append(_bar(name, side, y=8 + row * (BAR_HEIGHT + 12), scale=BAR_WIDTH / longest))
    names = [p.name for p in report.late.compiled.passes]
    legend = "".join(
        f'<span><i style="background: var(--p{i % NUM_PASS_COLOURS})"></i>{html.escape(n)}</span>'
        for i, n in enumerate(names)
    )
    height = 8 + 2 * (BAR_HEIGHT + 12)
    return (
        f'<svg viewBox="0 0 720 {height}" role="img" aria-label="CPU-seconds per pass">'
        f'{"".join(pieces)}</svg><p class="legend soft">{legend}</p>'
    )


def _bar(name: str, side: Side, *, y: int, scale: float) -> str:
    middle, x = y + BAR_HEIGHT * 0.68, float(BAR_X)
    pieces = [f'<text x="0" y="{middle:.1f}">{name}</text>']
    for index, record in enumerate(side.compiled.passes):
        width = record.cpu_s * scale
        pieces.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" '
            f'style="fill: var(--p{index % NUM_PASS_COLOURS})">'
            f"<title>{html.escape(record.name)}: {record.cpu_s:.2f} CPU s</title></rect>"
        )
        x += width
    label = f"{side.compiled.cpu_s:.2f} s"
    return "".join(pieces) + f'<text x="{x + 8:.1f}" y="{middle:.1f}">{label}</text>'


def _chart(reports: Sequence[Measurement]) -> str:
    """Compile CPU-seconds of both sides for each number of layers, as pairs of columns."""
    width, height, margin = CHART
    top = max(side.compiled.cpu_s for r in reports for side in r.sides.values()) or 1.0
    slot = (width - 2 * margin) / len(reports)
    column = min(48.0, slot / 3)
    base = height - margin
    parts = [f'<line x1="{margin}" y1="{base}" x2="{width - margin}" y2="{base}"></line>']
    for index, report in enumerate(reports):
        centre = margin + slot * (index + 0.5)
        for offset, (name, side) in zip((-column, 0.0), report.sides.items(), strict=True):
            tall = side.compiled.cpu_s / top * (base - margin)
            parts.append(
                f'<rect x="{centre + offset:.1f}" y="{base - tall:.1f}" width="{column - 3:.1f}" '
                f'height="{tall:.1f}" rx="2" style="fill: var(--{name})"></rect>'
                f'<text x="{centre + offset + column / 2:.1f}" y="{base - tall - 6:.1f}" '
                f'text-anchor="middle">{side.compiled.cpu_s:.1f}</text>'
            )
        label = "-" if report.layers is None else str(report.layers)
        parts.append(
            f'<text class="axis" x="{centre:.1f}" y="{base + 20}" text-anchor="middle">'
            f"{label} layers</text>"
        )
    legend = (
        '<p class="legend soft">compile, CPU-seconds: <span>'
        '<i style="background: var(--late)"></i>late</span>'
        '<span><i style="background: var(--early)"></i>early</span></p>'
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Compile time over layers">{"".join(parts)}</svg>{legend}'
    )

"""What a user saved, shown again: the numbers of measurements, and pages.

The JSON of a model that is compiled and not run holds its page: that has the arena and the program,
which no numbers give back. A measurement's JSON holds numbers, and its page is drawn of them.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...reuse.errors import LazyInlineError
from ...reuse.folding import folded
from ..compile_record import PassRecord
from ..page.write import PageData, page_data, write_page
from ..report import CompileReport
from .measure_page import measure_page
from .measurement import Seconds, Side
from .report import COMPILED, MeasureReport
from .target import FORM
from .timing import StepTime
from .workload import Errors

SAVED = "the JSON of `bench --json` or of `report.to_json()`, or a page of `--html` or `save_html`"
_PAGES = (".html", ".htm")
_PATH = re.compile(r"[/\\]|\.\w+$")
"""What a module's name has not: a separator, or the end of a file's name."""


@dataclass(frozen=True)
class SavedReport(MeasureReport):
    """A measurement read from its JSON: every number, and not the program.

    Attributes:
        said: what it said to its reader.
    """

    said: tuple[str, ...] = ()

    def notes(self) -> list[str]:
        """Says what it said when it was made."""
        return list(self.said)


@dataclass(frozen=True)
class Saved:
    """The measurements of a file.

    Attributes:
        reports: one, or one for each number of layers.
        title: what was measured; empty where the file does not say.
        about: machine, versions and command; None where the file does not say.
    """

    reports: Sequence[MeasureReport]
    title: str
    about: Mapping[str, Any] | None

    def __str__(self) -> str:
        where = [] if self.about is None else [_where(self.about)]
        return folded("\n\n".join([*map(str, self.reports), *where]))

    def page(self) -> str:
        """Returns a page of them, about the machine that measured."""
        return write_page(measure_page(self.reports, self.title) | {"about": self.about})


@dataclass(frozen=True)
class SavedPage:
    """A page, of its own file or of the JSON that holds it.

    Attributes:
        data: what it shows.
    """

    data: PageData

    def __str__(self) -> str:
        """What it says before its pictures: verdict, figures, notes, where it was made."""
        verdict = self.data["verdict"]
        tiles = [(t["label"], t["value"], t["note"]) for t in verdict["tiles"]]
        widths = [max((len(tile[i]) for tile in tiles), default=0) for i in range(2)]
        lines = [f"{self.data['title']}: {self.data['subtitle']}", "", verdict["sentence"], ""]
        lines += [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in tiles]
        lines += ["", *verdict["notes"]] if verdict["notes"] else []
        return folded("\n".join([*lines, "", _where(self.data["about"])]))

    def page(self) -> str:
        """Returns it, drawn again."""
        return write_page(self.data)


def is_file(target: str) -> bool:
    """Whether a target of the command line is a file rather than a function."""
    return ":" not in target and (pathlib.Path(target).is_file() or bool(_PATH.search(target)))


def is_page(path: pathlib.Path) -> bool:
    """Whether a file is named as a page is."""
    return path.suffix.lower() in _PAGES


def read_saved(path: pathlib.Path) -> Saved | SavedPage:
    """Reads measurements, or a page: the page itself, or the JSON that holds it.

    Raises:
        LazyInlineError: if the file holds neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise LazyInlineError(f"{path} cannot be read: {why}. {_told()}") from error
    try:
        data = page_data(text) if is_page(path) else None
        found = _found(json.loads(text) if data is None else {"page": data})
        str(found)  # where a number is missing, this is where it shows
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LazyInlineError(f"{path} holds no measurement of this version. {_told()}") from error
    return found


def _told() -> str:
    return f"TARGET may be {FORM}; or a file: {SAVED}."


def _where(about: Mapping[str, Any]) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in about["rows"])
    return f"{about['date']}, by {about['command']}\n{machine}"


def _found(found: Any) -> Saved | SavedPage:
    if "page" in found:
        return SavedPage(found["page"])
    if "rows" not in found:
        return Saved([_report(found)], "", None)
    about = found["about"]
    return Saved([_report(row) for row in found["rows"]], about["title"], about.get("machine"))


def _report(row: Mapping[str, Any]) -> SavedReport:
    late, early = (_side(row, name) for name in ("late", "early"))
    return SavedReport(
        model=row["model"],
        train=row["train"],
        backend=row["backend"],
        late=late,
        early=early,
        eager=_step(row, "eager"),
        warm_up=Seconds(**row["warm_up"]),
        micro_batches=row["micro_batches"],
        layers=row["layers"],
        threads=row["threads"],
        peak_bytes=row["peak_bytes"],
        lower_bound_bytes=row["lower_bound_bytes"],
        others_share=row["others_share"],
        eager_held_bytes=row["held_bytes"]["eager"],
        said=tuple(row["notes"]),
    )


def _side(row: Mapping[str, Any], name: str) -> Side:
    numbers = row["compiled"][name]
    compiled = CompileReport(
        train=row["train"],
        backend=row["backend"],
        model=row["model"],
        passes=[
            PassRecord(p["name"], p["cpu_s"], p["wall_s"], p["nodes"]) for p in row["passes"][name]
        ],
        num_operators=row["operators"][name],
        num_launches=row["launches"][name],
        **{field: numbers[field] for field in COMPILED},
    )
    errors = Errors(
        _number(row["max_abs_error"][name]),
        _number(row["max_rel_grad_error"][name]),
        row["worst_gradient"][name],
    )
    child_cpu_s, held = row["compile_child_cpu_s"][name], row["held_bytes"][name]
    return Side(compiled, child_cpu_s, _step(row, name), errors, held)


def _step(row: Mapping[str, Any], name: str) -> StepTime | None:
    if row["step_ms"][name] is None:
        return None
    keys = ("step_min_ms", "step_ms", "step_max_ms")
    fastest, median, slowest = (row[key][name] for key in keys)
    return StepTime(fastest, median, slowest, row["rounds"])


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)

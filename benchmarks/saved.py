"""Prints what was measured once: the JSON of `--json` or `to_json()`, or a page of `--html`.

python benchmarks/saved.py rows.json page.html
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def page_data(text: str) -> dict[str, Any]:
    """Returns what a page shows, as data."""
    found = _DATA.search(text)
    if found is None:
        raise SystemExit("This is no page of lazyinline's.")
    return dict(json.loads(found[1]))


def page_lines(page: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a page says before its pictures."""
    verdict = page["verdict"]
    yield from (f"{page['title']}: {page['subtitle']}", "", verdict["sentence"], "")
    yield from (f"  {t['label']:<30}{t['value']:<16}{t['note']}" for t in verdict["tiles"])
    yield from ("", *verdict["notes"], *machine_lines(page["about"]))


def row_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields the numbers of a measurement; those of several sides or steps in one line."""
    for name, value in row.items():
        if isinstance(value, (str, int, float)):
            yield f"{name:<24}{value}"
        elif isinstance(value, dict) and name != "passes" and name != "compiled":
            yield f"{name:<24}" + ", ".join(f"{key} {number}" for key, number in value.items())
    yield from row.get("notes", ())


def machine_lines(about: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", f"{about['date']}, by {about['command']}")
    yield ", ".join(f"{name} {value}" for name, value in about["rows"])


def lines_of(path: pathlib.Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        yield from page_lines(page_data(text))
        return
    found = json.loads(text)
    for row in found.get("rows", [found]):
        yield from (*row_lines(row), "")
    if "about" in found:
        yield from machine_lines(found["about"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    for path in parser.parse_args(arguments).files:
        print("\n".join(lines_of(path)))


if __name__ == "__main__":
    main()

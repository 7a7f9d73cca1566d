"""A page as one file: data, template, style, script and charts, with nothing to fetch."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any, TypeAlias

PageData: TypeAlias = dict[str, Any]
"""What a page shows: a title, and for each section what it draws. Plain values only."""

_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
_ASSETS = resources.files(__package__) / "assets"


def write_page(data: PageData) -> str:
    """Returns the text of a page.

    Args:
        data: the sections; one that is absent, or None, is not on the page.
    """
    present = {name: section for name, section in data.items() if section is not None}
    text = _asset("template.html")
    for mark, inserted in (
        ("/*style*/", _asset("page.css")),
        ("/*charts*/", _asset("echarts.min.js")),
        ("/*data*/", as_json(present)),
        ("/*script*/", _asset("page.js")),
    ):
        before, after = text.split(mark)
        text = before + inserted + after
    return text


def page_data(text: str) -> PageData | None:
    """Returns the data of a page that :func:`write_page` wrote; None of any other."""
    found = _DATA.search(text)
    return None if found is None else dict(json.loads(found[1]))


def as_json(data: PageData) -> str:
    """Returns data as JSON that no text in it can end, within a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")

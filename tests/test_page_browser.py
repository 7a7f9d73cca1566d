"""Pages in a real browser: nothing fails or is fetched, clicks and keys work, nothing overflows.

Needs Chromium (Debian: `apt install chromium`); skipped where there is none. The pictures that it
takes are left in `build/pages`, to be looked at.
"""

import itertools
import pathlib
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from browser import Browser, Tab, chromium
from decoders import DecoderBlock, llama
from large_models import compile_large
from link_tree import ROOT
from rank_bench import rank_page
from test_large_models import rank_report
from test_pipeline_plan import plan

import lazyinline
from lazyinline.frontend.measure import measure
from lazyinline.frontend.page.page import measured_page
from lazyinline.frontend.page.write import write_page
from lazyinline.frontend.pipeline import ShownPlan

BINARY = chromium()
pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium: apt install chromium")
PICTURES = ROOT / "build" / "pages"
LOOKS = [("light", 1400), ("dark", 1400), ("light", 500), ("dark", 500)]
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert BINARY is not None
    running = Browser(BINARY, tmp_path_factory.mktemp("profile"))
    try:
        yield running
    finally:
        running.close()


def decoder(path: pathlib.Path) -> None:
    """The project's own decoder, late against early, with a second depth."""
    lazyinline.lazy_inline(DecoderBlock)
    model, args = llama(6, hidden=32, num_heads=2, vocab=64, seq=16, batch=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "ROUND_S", 0.001)
        found = lazyinline.measure(model, args, backend="eager", micro_batches=2)
    rows = [(replace(found, layers=n).to_dict(), found.sides) for n in (3, 6)]
    path.write_text(write_page(measured_page(rows, found.title())), encoding="utf-8")


def t5(path: pathlib.Path) -> None:
    """An encoder and a decoder of Hugging Face, whose blocks are only partly alike."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
    config = T5Config(**sizes, num_layers=3, decoder_start_token_id=0, use_cache=False)
    model, ids = T5ForConditionalGeneration(config).train(), torch.randint(0, 64, (2, 10))
    step = lazyinline.compile_step(model, backend="eager", recompute="full")
    step(input_ids=ids, labels=ids)
    assert step.last_report is not None
    step.last_report.save_html(path)


def large(path: pathlib.Path) -> None:
    """13 billion parameters on the meta device."""
    compile_large("llama-13b").compiled.save_html(path)


def pipeline(path: pathlib.Path) -> None:
    """Six stages on three ranks, predicted beside made-up measurements."""
    found = plan("Interleaved1F1B", num_ranks=3, micro_batches=6)
    measured = {(s.index, kind): 0.001 for s in found.stages for kind in "FB"}
    ShownPlan.of(found).save_html(path, measured)


def rank(path: pathlib.Path) -> None:
    """One rank of a pipeline, with its own arena; compiled and not run."""
    reports = [rank_report("first", 4, recompute) for recompute in (None, "full")]
    path.write_text(write_page(rank_page(reports)), encoding="utf-8")


PAGES = {"decoder": decoder, "t5": t5, "pipeline": pipeline, "rank": rank, "large": large}


@pytest.mark.parametrize("name", [*list(PAGES)[:-1], pytest.param("large", marks=pytest.mark.slow)])
@pytest.mark.sweep(keep="pipeline")
def test_pages_are_drawn_without_errors(browser: Browser, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{name}.html"
    PAGES[name](path)
    assert path.stat().st_size < 5_000_000
    for scheme, width in LOOKS:
        tab = Tab(browser, path, width, scheme)
        tab.picture(PICTURES / f"{name}-{scheme}-{width}.png")
        assert not tab.problems()
        assert tab.evaluate(OVERFLOW) <= 0, f"{name} is wider than {width} pixels"
        assert tab.evaluate("document.documentElement.dataset.theme") == scheme
        if name != "pipeline":
            closures_open(tab, fewest=3 if name == "rank" else 4)  # a rank shows the forward
        charts_are_told(tab)
        if scheme == "light":  # colours are not read aloud
            page_is_read_aloud(tab)
        assert not tab.problems()
        assert tab.evaluate(OVERFLOW) <= 0, f"{name}, opened, is wider than {width} pixels"
        tab.close()


def closures_open(tab: Tab, fewest: int) -> None:
    """A click on any box opens its closure, and the keyboard does, too; another one closes it."""
    boxes = tab.evaluate("document.querySelectorAll('.lane .call').length")
    assert boxes >= fewest
    for number in range(min(boxes, 6)):
        box = f"document.querySelectorAll('#program > div > .lane .call')[{number}]"
        if not tab.evaluate(f"!!{box}"):
            break
        tab.evaluate(f"{box}.click()")
        assert tab.evaluate(f"{box}.getAttribute('aria-expanded')") == "true"
        assert tab.evaluate("!!document.querySelector('.closure .facts, .closure table')")
    tab.evaluate("document.querySelector('.lane .call').focus()")
    was = tab.evaluate("document.activeElement.getAttribute('aria-expanded')")
    tab.press("Enter")
    assert tab.evaluate("document.activeElement.getAttribute('aria-expanded')") != was


def charts_are_told(tab: Tab) -> None:
    """Each chart has a title, a unit, a label for those who do not see it, and a table."""
    found = tab.evaluate("""[...document.querySelectorAll('figure')].map(f => {
        const chart = f.querySelector('.chart'), button = f.querySelector('figcaption button');
        const told = [f.querySelector('h3').textContent, f.querySelector('.unit').textContent,
                      chart.getAttribute('aria-label')];
        button.click();
        const rows = f.querySelectorAll('tbody tr').length, hidden = chart.hidden;
        button.click();
        return {told, rows, hidden, back: !chart.hidden, role: chart.getAttribute('role')};
    })""")
    assert found
    for one in found:
        assert all(one["told"]) and one["role"] == "img", one
        assert one["rows"] and one["hidden"] and one["back"], one


LANDMARKS = ("banner", "navigation", "main", "contentinfo")
CONTROLS = ("button", "link", "checkbox", "combobox", "textbox", "slider")
HEADERS = ("columnheader", "rowheader")


def page_is_read_aloud(tab: Tab) -> None:
    """A screen reader gets a name for what it can stop at, and the numbers of each chart."""
    tab.evaluate("""[...document.querySelectorAll('.lane .call[aria-expanded=false]')]
        .slice(0, 1).forEach(box => box.click())""")
    for shown in ("charts", "tables"):
        said = tab.accessible()
        roles = [one["role"] for one in said]
        assert [roles.count(role) for role in LANDMARKS] == [1] * len(LANDMARKS)
        controls = [one for one in said if one["role"] in CONTROLS]
        assert [one for one in controls if not one["name"].strip()] == []
        unnamed = [one for one in said if one["focusable"] and not one["name"].strip()]
        assert [one["role"] for one in unnamed if one["role"] != "main"] == []
        names = [one["name"] for one in controls if one["name"].startswith(("Table", "Chart"))]
        assert len(names) == len(set(names)) and all(": " in name for name in names)

        levels = [one["level"] for one in said if one["role"] == "heading"]
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(below - above <= 1 for above, below in itertools.pairwise(levels)), levels

        tables = [one for one in said if one["role"] == "table"]
        assert all(one["name"] for one in tables)
        assert [one for one in said if one["role"] in HEADERS and not one["name"].strip()] == []

        charts = [one for one in said if one["role"] == "image"]
        if shown == "charts":
            assert charts
            for one in charts:
                assert re.search(r"\w+\. \w", one["name"]), one  # title and unit
                assert len(re.findall(r"\d", one["description"])) >= 3, one
        else:
            assert not charts
        tab.evaluate("document.querySelectorAll('figcaption button').forEach(b => b.click())")


def test_the_theme_is_switched_by_a_button(browser: Browser, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "page.html"
    pipeline(path)
    tab = Tab(browser, path, 900, "light")
    for expected in ("dark", "light"):
        tab.evaluate("document.getElementById('theme').click()")
        assert tab.evaluate("document.documentElement.dataset.theme") == expected
    assert not tab.problems()
    tab.close()


def test_hostile_names_are_text(browser: Browser, tmp_path: pathlib.Path) -> None:
    hostile = "</script><img src=x onerror='window.broken=1'>"
    path = tmp_path / "page.html"
    verdict = {"sentence": hostile, "tiles": [], "notes": [hostile]}
    keys = [{"key": hostile, "calls": 1, "note": hostile}]
    reuse = {"keys": keys, "instances": [], "nothing_shared": hostile}
    data = {"title": hostile, "subtitle": hostile, "verdict": verdict, "reuse": reuse}
    path.write_text(write_page(data), encoding="utf-8")
    tab = Tab(browser, path, 900, "light")
    assert tab.evaluate("document.querySelector('h1').textContent") == hostile
    assert tab.evaluate("window.broken") is None and not tab.problems()
    tab.close()

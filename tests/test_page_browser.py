"""Pages in a real browser: nothing fails or is fetched, clicks work, nothing overflows.

Needs Chromium (Debian: `apt install chromium`); skipped where there is none. A script that is put
into each page uses it and writes what it found into the page, which the browser prints. Pictures
are left in `build/pages`, to be looked at.
"""

import html
import itertools
import json
import pathlib
import re
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoders import DecoderBlock, llama
from large_models import compile_large
from link_tree import ROOT
from parallel_models import mesh_of, tiny, tokens
from rank_bench import rank_page
from rank_threads import one_of_many
from test_large_models import rank_report
from test_pipeline_plan import plan

import lazyinline
from lazyinline.frontend import measure
from lazyinline.frontend.page.page import ShownPlan, measured_page, write_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BINARY = next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium: apt install chromium")
PICTURES = ROOT / "build" / "pages"
LOOKS = [("light", 1400), ("dark", 1400), ("light", 500), ("dark", 500)]
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync")

# Runs before the page's own scripts: notes what fails, and says which colours the user prefers.
BEFORE = """
window.problems = [];
addEventListener("error", (e) => problems.push(String(e.message || e.target.src)), true);
for (const kind of ["error", "warn"]) console[kind] = (...words) => problems.push(words.join(" "));
const asked = window.matchMedia.bind(window);
window.matchMedia = (query) => query.includes("color-scheme")
  ? {matches: SCHEME === "dark", addEventListener() {}} : asked(query);
"""
# Uses the page: opens boxes, shows tables in place of charts, switches the theme and back.
USE = """
addEventListener("load", () => setTimeout(() => {
  const all = (where) => [...document.querySelectorAll(where)], root = document.documentElement;
  const text = (node) => node.textContent.trim(), name = (n) => n.getAttribute("aria-label") || "";
  const told = (node) => name(node) || text(node);
  const wide = () => root.scrollWidth - root.clientWidth;
  const found = {theme: root.dataset.theme, overflow: [wide()], title: document.title};
  found.landmarks = ["header", "nav", "main", "footer"].map((tag) => all(tag).length);
  found.levels = all("h1, h2, h3, h4").map((h) => Number(h.tagName[1]));
  found.opened = all("#program > div > .lane .call").slice(0, 6).map((box) => {
    box.click();
    return [box.tagName, box.getAttribute("aria-expanded"),
      Boolean(document.querySelector(".closure .facts, .closure table"))];
  });
  found.charts = all("figure").map((figure) => {
    const chart = figure.querySelector(".chart"), button = figure.querySelector("button");
    const said = document.getElementById(chart.getAttribute("aria-describedby"));
    const one = {unit: text(figure.querySelector(".unit")), role: chart.getAttribute("role"),
      drawn: Boolean(chart.querySelector("canvas")), name: name(chart), button: told(button),
      numbers: text(said)};
    button.click();
    one.rows = figure.querySelectorAll("tbody tr").length;
    one.hidden = chart.hidden;
    button.click();
    return {...one, back: !chart.hidden};
  });
  found.tables = all("table").map(name);
  found.headers = all("th").map(text);
  found.controls = all("a, button, input, [tabindex='0']").map((node) =>
    told(node) || told(node.closest("label") || node));
  all("#theme")[0].click();
  found.switched = root.dataset.theme;
  all("#theme")[0].click();
  found.overflow.push(wide());
  found.height = root.scrollHeight;
  found.fetched = performance.getEntriesByType("resource").map((one) => one.name);
  found.problems = problems;
  all("body")[0].append(Object.assign(document.createElement("pre"),
    {id: "found", textContent: JSON.stringify(found)}));
}, 500));
addEventListener("load", () => dispatchEvent(new Event("beforeprint")));  // draws every chart
"""


def chromium(page: pathlib.Path, *flags: str) -> str:
    """Opens a page, and returns what the browser prints."""
    assert BINARY is not None
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [BINARY, *FLAGS, *QUIET, profile, "--virtual-time-budget=5000", *flags]
    done = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=180, check=True
    )
    return done.stdout


def used(path: pathlib.Path, folder: pathlib.Path, scheme: str, width: int) -> dict[str, Any]:
    """Uses a page in a look, and returns what was found."""
    before = BEFORE.replace("SCHEME", json.dumps(scheme)) + USE
    text = path.read_text(encoding="utf-8")
    copy = folder / f"{path.stem}-{scheme}-{width}.html"
    copy.write_text(text.replace("<head>", f"<head><script>{before}</script>", 1))
    printed = chromium(copy, "--dump-dom", f"--window-size={width},900")
    (said,) = re.findall(r'<pre id="found">(.*?)</pre>', printed, re.DOTALL)
    found: dict[str, Any] = json.loads(html.unescape(said))
    return found


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


def mesh(path: pathlib.Path) -> None:
    """A step over four ranks, of which the others are not there."""
    ids, _ = tokens(0, rows=2)
    with one_of_many(4):
        axes = mesh_of(data=2, tensor=2)
        step = lazyinline.parallelize(tiny(), (ids, ids), mesh=axes, plan="auto", backend="eager")
    assert isinstance(step, lazyinline.ParallelStep)
    step.save_html(path)


PAGES = {
    "decoder": decoder,
    "t5": t5,
    "pipeline": pipeline,
    "rank": rank,
    "mesh": mesh,
    "large": large,
}


@pytest.mark.parametrize("name", [*list(PAGES)[:-1], pytest.param("large", marks=pytest.mark.slow)])
@pytest.mark.sweep(keep="pipeline")
def test_pages_are_drawn_without_errors(
    name: str, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{name}.html"
    PAGES[name](path)
    assert path.stat().st_size < 5_000_000
    looks = LOOKS if request.config.getoption("--sweep") else (LOOKS[0], LOOKS[-1])
    for scheme, width in looks:
        found = used(path, tmp_path, scheme, width)
        picture = PICTURES / f"{name}-{scheme}-{width}.png"
        shot = tmp_path / f"{name}-{scheme}-{width}.html"
        size = f"--window-size={width},{min(found['height'], 12_000)}"
        chromium(shot, f"--screenshot={picture}", size)
        assert found["problems"] == found["fetched"] == []
        assert max(found["overflow"]) <= 0, f"{name} is wider than {width} pixels"
        assert found["theme"] == scheme != found["switched"]
        if name not in ("pipeline", "mesh"):
            assert len(found["opened"]) >= (3 if name == "rank" else 4)  # a rank shows the forward
            assert all(one == ["BUTTON", "true", True] for one in found["opened"])
        charts_are_told(found["charts"])
        page_is_read_aloud(found)


def charts_are_told(charts: list[dict[str, Any]]) -> None:
    """Each chart has a title, a unit, numbers in words for those who do not see it, and a table."""
    assert charts
    for one in charts:
        assert one["drawn"] and one["unit"] and one["role"] == "img", one
        assert one["rows"] and one["hidden"] and one["back"], one
        assert re.search(r"\w+\. \w", one["name"]), one  # title and unit
        assert len(re.findall(r"\d", one["numbers"])) >= 3, one
    buttons = [one["button"] for one in charts]
    assert len(buttons) == len(set(buttons)) and all("Table: " in name for name in buttons)


def page_is_read_aloud(found: dict[str, Any]) -> None:
    """A screen reader gets a name for what it can stop at, and an outline without gaps."""
    assert found["landmarks"] == [1, 1, 1, 1]
    levels = found["levels"]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(below - above <= 1 for above, below in itertools.pairwise(levels)), levels
    assert all(found["controls"]) and all(found["tables"]) and all(found["headers"])


def test_hostile_names_are_text(tmp_path: pathlib.Path) -> None:
    hostile = "</script><img src=x onerror='problems.push(1)'>"
    path = tmp_path / "page.html"
    verdict = {"sentence": hostile, "tiles": [], "notes": [hostile]}
    keys = [{"key": hostile, "calls": 1, "note": hostile}]
    reuse = {"keys": keys, "instances": [], "nothing_shared": hostile}
    data = {"title": hostile, "subtitle": hostile, "verdict": verdict, "reuse": reuse}
    path.write_text(write_page(data), encoding="utf-8")
    found = used(path, tmp_path, "light", 900)
    assert found["title"].startswith(hostile) and found["problems"] == found["fetched"] == []

"""What a report's page shows, as data, and what is printed: it fits 100 columns, none is cut."""

import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from printed import too_long, unfolded
from saved import page_data
from torch import nn
from torch.utils.benchmark import Measurement

import lazyinline
from lazyinline.backend.cache import CacheUse
from lazyinline.frontend import measure
from lazyinline.frontend.capture.regions import InitKeys, SharingDecision
from lazyinline.frontend.compile_record import Memory, PartRecord, PassRecord, reuse_table
from lazyinline.frontend.measure import Errors
from lazyinline.frontend.page import page, sections
from lazyinline.frontend.page.page import (
    PageData,
    as_json,
    compile_page,
    measured_page,
    ratio_range,
    times_less,
    write_page,
)
from lazyinline.frontend.page.sections import arena_section, runs
from lazyinline.frontend.report import CompileReport
from lazyinline.reuse.ir.printer import WIDTH, bytes_text, flops_text, folded, seconds_text

ASSETS = pathlib.Path(page.__file__).parent / "assets"
SHOWN = ("lanes", "keys", "instances", "passes", "choices", "frontiers")


@lazyinline.lazy_inline
class Own(nn.Module):
    """A layer whose lines are the user's; its sign is read by the forward."""

    def __init__(self, sign: int) -> None:
        super().__init__()
        self.linear, self.sign = nn.Linear(8, 8), sign

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.linear(x).relu()
        return x + found if self.sign > 0 else x - found


class Stack(models.Stack):
    """Equal layers, but for the last."""

    def __init__(self, count: int = 4) -> None:
        torch.manual_seed(0)
        super().__init__(*(Own(1) for _ in range(count - 1)), Own(-1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def step() -> lazyinline.CompileReport:
    """A step of two micro-batches, with an arena."""
    compiled = lazyinline.compile_step(Stack(), micro_batches=2, backend="eager", recompute="full")
    compiled(torch.randn(4, 8))
    assert compiled.last_report is not None
    return compiled.last_report


@pytest.fixture(scope="module")
def measured() -> lazyinline.MeasureReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "ROUND_S", 0.001)
        return lazyinline.measure(Stack(), (torch.randn(4, 8),), backend="eager")


def memory_of(step: lazyinline.CompileReport) -> Memory:
    assert step.made is not None and step.made.memory is not None
    return step.made.memory


def test_a_page_is_one_file_with_nothing_to_fetch(
    step: lazyinline.CompileReport, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "report.html"
    step.save_html(path)
    text = path.read_text(encoding="utf-8")
    own = text.replace((ASSETS / "echarts.min.js").read_text(encoding="utf-8"), "")
    assert not re.search(r"<link|<img|@import|\bsrc=|url\(", own)
    assert not re.findall(r'href="(?!#)', own)
    assert len(text) < 3_000_000
    found, expected = page_data(text), json.loads(as_json(compile_page(step)))
    assert found is not None and found | {"about": None} == expected | {"about": None}
    assert all(value in text for _, value in found["about"]["rows"])  # read without a script


def test_no_text_of_the_model_is_markup() -> None:
    text = "</script><script>alert(1)</script>"
    verdict = {"sentence": text, "tiles": [{"label": text, "value": text}], "notes": [text]}
    hostile = {"title": text, "verdict": verdict, "about": {"rows": [[text, text]]}, "gone": None}
    assert "</script" not in as_json(hostile)
    assert json.loads(as_json(hostile)) == hostile
    page = write_page(hostile)
    assert "<script>alert" not in page and page.count("&lt;script&gt;alert(1)") == 8
    assert page_data(page) == {name: hostile[name] for name in ("title", "verdict", "about")}


def test_numbers_are_written_as_people_read_them() -> None:
    assert [
        *(times_less(*pair) for pair in ((1, 2.4), (3, 1), (1, 1.01), (0, 5))),
        *(ratio_range([1.02, 1.02]), ratio_range([1.1, 0.9])),
        *(flops_text(82_000), flops_text(2.5e12), bytes_text(512), bytes_text(32_640_448)),
        seconds_text(0.0121),
    ] == [
        *("2.4\u00d7 less", "3\u00d7 more", "equal", "-", "1.02\u00d7", "0.90\u20131.10\u00d7"),
        *("82 kFLOP", "2.5 TFLOP", "512 B", "31.1 MiB", "12.1 ms"),
    ]


def as_lines(data: PageData) -> Iterator[str]:
    """Yields what a page says of the model, but for what PyTorch's decompositions decide."""
    yield re.sub(r"\d[\d.,]*", "#", as_json(data["verdict"]))
    for closure in data["program"]["closures"]:
        named = {name: closure[name] for name in ("name", "calls", "is_block", "inputs")}
        if any(line for *_, line in closure["operators"]):
            named["operators"] = closure["operators"]
        yield re.sub(r"test_page.py:\d+", "test_page.py:*", as_json(named))
    for section, name in itertools.product(("program", "reuse", "passes", "recompute"), SHOWN):
        for entry in data[section].get(name, ()):
            yield f"{section}.{name} " + re.sub(r'("extra_s"):[-.e\d]+', r"\1:*", as_json(entry))
    yield from (f"arena.names {name}" for name in data["arena"]["names"])


def test_a_page_shows_each_call_closure_reason_and_buffer(
    step: lazyinline.CompileReport, golden: Callable[[str, str], None]
) -> None:
    data = compile_page(step)
    golden("page", "\n".join(as_lines(data)))
    (held, again) = data["predicted"]["rows"]  # nothing here was measured
    assert held == ("memory held by a step", "bytes", step.held_bytes, None)
    assert again[1] == "s" and again[2] > 0 and again[3] is None


def page_of(*reports: lazyinline.MeasureReport) -> PageData:
    return measured_page([(one.to_dict(), one.sides) for one in reports], "what was measured")


def test_a_measurement_shows_both_sides_and_each_depth(
    measured: lazyinline.MeasureReport, golden: Callable[[str, str], None]
) -> None:
    data = page_of(*(replace(measured, layers=n) for n in (4, 8)))
    late, early = data["passes"]["sides"]
    assert (late["cpu_s"], early["cpu_s"]) == (measured.late.cpu_s, measured.early.cpu_s)
    shown = {n: data[n] for n in ("title", "subtitle", "passes", "depth", "steps")}
    errors = [(row[0], len(row)) for row in data["steps"]["errors"]]
    shown["steps"] = data["steps"] | {"noise": "", "errors": errors}
    absent = [name for name, section in data.items() if section is None]  # eager plans no memory
    labels = [tile["label"] for tile in data["verdict"]["tiles"]]
    lines = [as_json(shown[name]) for name in shown]
    masked = re.sub(r"\d[\d.]*(e[-+]?\d+)?", "#", "\n".join(lines))
    golden("measured_page", "\n".join([*labels, masked, f"absent: {absent}"]))
    alone = page_of(replace(measured, steps={}, errors={}))
    assert alone["steps"] is None and alone["depth"] is None


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ("", []),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
        ("gbbbbh", [(0, 1, 1), (1, 1, 4), (5, 1, 1)]),
        ("gababab", [(0, 1, 1), (1, 2, 3)]),
        ("eeadadad", [(0, 1, 2), (2, 2, 3)]),
    ],
)
def test_equal_calls_in_a_row_are_one_box(keys: str, found: list[tuple[int, int, int]]) -> None:
    assert list(runs(list(keys))) == found


def test_a_page_grows_with_closures_not_with_calls_and_keeps_no_tensor() -> None:
    def size(layers: int) -> int:
        compiled = lazyinline.compile(Stack(layers), backend="eager")
        compiled(torch.randn(4, 8))
        made = compiled.last_report.made
        assert not made.captured.sources and not made.forward.sources
        return len(as_json(compile_page(compiled.last_report) | {"about": None}))

    assert size(12) < size(5) + 100


class Layer(nn.Module):
    def __init__(self, number: int, hidden: int, dropout: float, act: str, bias: bool) -> None:
        super().__init__()
        self.number, self.hidden, self.dropout = number, hidden, dropout
        self.act, self.bias = act, bias


def test_a_table_of_long_keys_fits_a_screen() -> None:
    settings = (4096, 0.125, "an activation with a long name", True)
    first, second = (InitKeys().key(Layer(number, *settings)) for number in range(2))
    decisions = [
        SharingDecision("layers.0", "Layer", False, key=first),
        SharingDecision("layers.1", "Layer", True, compared_with="layers.0", key=second),
    ]
    head, *lines, note = reuse_table(decisions)
    assert max(map(len, (head, *lines, note))) <= 98
    assert head.endswith("  calls") and lines[0].endswith("  2")
    assert "".join(lines).count("=") == 5
    assert note == "    one closure although number differs"


def test_every_buffer_of_a_plan_is_a_box_at_its_address(
    step: lazyinline.CompileReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_of(step)
    whole = arena_section(memory)
    assert whole is not None and not whole["left_out"]
    placed = [b for b in memory.layout.instances if b.kind == "arena" and b.num_bytes]
    assert len(whole["boxes"]) == whole["num_buffers"] == len(placed) > 40
    assert max(b[2] + b[3] for b in whole["boxes"]) == whole["peak_bytes"] == step.peak_bytes
    assert max(n for _, n in whole["live"]) == step.lower_bound_bytes

    # Of too many boxes the largest are drawn, and a curve of too many points keeps its peak.
    monkeypatch.setattr(sections, "MOST_POINTS", 10)
    fewer = arena_section(memory, 20)
    assert fewer is not None and len(fewer["boxes"]) == 20
    assert len(fewer["boxes"]) + fewer["left_out"] == whole["num_buffers"]
    areas = sorted((b[1] - b[0]) * b[3] for b in whole["boxes"])
    assert sorted((b[1] - b[0]) * b[3] for b in fewer["boxes"]) == areas[-20:]
    assert len(fewer["live"]) == 10 and max(n for _, n in fewer["live"]) == step.lower_bound_bytes


def test_a_noisy_step_is_not_praised(measured: lazyinline.MeasureReport) -> None:
    def tiles(late_s: list[float], **errors: object) -> dict[str, dict[str, str]]:
        task = measured.steps["late"].task_spec
        quiet, late = (Measurement(1, times, task) for times in ([0.01] * 9, late_s))
        found = replace(
            measured,
            steps={"eager": quiet, "late": late, "early": quiet},
            errors={"late": Errors(0.0, **{"gradient": 0.0} | errors), "early": Errors(0.0, 0.0)},
        )
        return {tile["label"]: tile for tile in page_of(found)["verdict"]["tiles"]}

    label = "Step time against eager's"
    quiet, loud = tiles([0.01] * 9)[label], tiles([0.01, 0.01, 0.03, 0.04, 0.09])[label]
    assert quiet["state"] == "good" and quiet["value"] == "1.00\u00d7"
    assert loud["state"] == "warn" and loud["note"].startswith("noisy")
    label = "Largest difference from eager"
    wrong = tiles([0.01], gradient=math.inf, worst="w")[label]
    assert (wrong["value"], wrong["state"]) == ("inf", "warn") and "gradient: w" in wrong["note"]


WORDS = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=30)
LINES = st.tuples(st.integers(0, 20), st.lists(WORDS, max_size=30))


@settings(max_examples=40)
@given(st.lists(LINES, max_size=4), st.sampled_from([None, 15]))
def test_a_folded_text_has_every_word_in_lines_that_fit(
    lines: list[tuple[int, list[str]]], indent: int | None
) -> None:
    text = "\n".join(" " * blanks + " ".join(words) for blanks, words in lines)
    shown = folded(text, indent=indent)
    assert shown.split() == text.split()
    assert max(map(len, shown.split("\n"))) <= WIDTH
    if max(map(len, text.split("\n"))) <= WIDTH:
        assert shown == text


def test_what_goes_on_below_stands_further_in_and_a_long_word_stays_whole() -> None:
    path = "/".join(["a folder".replace(" ", "_")] * 20)
    first, second, third = folded(f"  {'word ' * 18}{path} end").split("\n")
    assert first.startswith("  word") and second == f"      {path}" and third == "      end"


LONG = "attribute " + ", ".join(f"setting_{n} is {n}, not {n + 1}" for n in range(12))


@pytest.mark.parametrize("name", ["compiled", "in parts", "nothing shared"])
def test_a_report_of_any_numbers_and_reasons_fits(name: str) -> None:
    report = CompileReport(train=True, backend="inductor", reuse="marked")
    for number in ("nodes", "nodes_if_inlined", "closures", "block_calls", "kernels", "operators"):
        setattr(report, f"num_{number}", 123_456_789)
    report.num_launches, report.num_links, report.why_static = 10**9, 3, LONG
    report.cache = CacheUse("/home/somebody/.cache/lazyinline", 3, 4, [LONG])
    report.decisions = [SharingDecision(f"layers.{n}", "Layer", False, LONG) for n in range(3)]
    if name == "in parts":
        report.ran_eagerly = LONG
        report.parts = [PartRecord(f"layers.{n}", "Layer", 1, LONG) for n in range(3)]
    if name == "nothing shared":
        report.nothing_shared = LONG
    assert too_long(str(report)) == []
    assert unfolded(report).count(LONG) >= 2


def test_the_first_line_of_a_compiled_model_fits() -> None:
    compiled = lazyinline.compile(nn.Linear(2, 2))
    compiled._lazyinline_calls._eager = CompileReport(True, "eager", "auto", ran_eagerly=LONG)
    assert too_long(repr(compiled)) == []
    assert LONG in unfolded(repr(compiled))


@pytest.mark.parametrize(
    ("loaded", "made", "said"), [(0, 3, "; next time from cache"), (3, 0, ""), (0, 0, "")]
)
def test_the_first_line_says_which_blocks_share_and_whether_the_next_process_pays(
    loaded: int, made: int, said: str
) -> None:
    report = CompileReport(train=True, backend="inductor", reuse="auto")
    report.passes = [PassRecord("lower", 1.25, 2.5, 7)]
    report.cache = CacheUse("/cache", loaded, made)
    report.num_nodes, report.num_nodes_if_inlined = 40, 39
    assert str(report).splitlines()[0] == f"no block repeats: 1.2 CPU-s, 2.5 s{said}"
    assert "if inlined" not in str(report)  # fewer than are held: nothing is saved by sharing
    first = [SharingDecision("a.0", "Layer", shared=False)]
    again = [SharingDecision(f"a.{n}", "Layer", True, compared_with="a.0") for n in range(1, 4)]
    other = [SharingDecision(f"b.{n}", "Other", shared=False) for n in range(2)]
    folds = [SharingDecision(f"c.{n}", "Norm", n > 1, "x", "c.0", "up to 2") for n in range(3)]
    report.decisions = [*first, *again, *other, *folds]
    told = str(report).splitlines()[0]
    assert told.startswith("4 Layer share one graph, 3 Norm share one graph: ")

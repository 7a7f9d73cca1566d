"""What a report's page shows, as data: every number from the report, each closure once."""

import json
import pathlib
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import lazyinline
from lazyinline.frontend.capture.init_key import InitKeys
from lazyinline.frontend.capture.regions import SharingDecision
from lazyinline.frontend.measure import timing
from lazyinline.frontend.measure.large_models import compile_large
from lazyinline.frontend.measure.measure_page import large_page, measure_page
from lazyinline.frontend.measure.models import DecoderBlock, llama
from lazyinline.frontend.measure.timing import StepTime
from lazyinline.frontend.page import arena, write
from lazyinline.frontend.page.arena import arena_section
from lazyinline.frontend.page.compile_page import compile_page
from lazyinline.frontend.page.program import runs
from lazyinline.frontend.page.reuse import reuse_section
from lazyinline.frontend.page.texts import (
    bytes_text,
    flops_text,
    ratio_range,
    seconds_text,
    times_less,
)
from lazyinline.frontend.page.write import as_json, write_page
from lazyinline.frontend.records.made import Memory
from lazyinline.frontend.records.reuse_table import reuse_table

lazyinline.lazy_inline(DecoderBlock)
ASSETS = pathlib.Path(write.__file__).parent / "assets"
SIZES = {"hidden": 16, "num_heads": 2, "vocab": 40, "seq": 8, "batch": 4}


@pytest.fixture(scope="module")
def step() -> lazyinline.CompileReport:
    """A step of two micro-batches, with an arena."""
    torch.manual_seed(0)
    model, args = llama(5, **SIZES)
    compiled = lazyinline.compile_step(model, micro_batches=2, backend="eager", recompute="full")
    compiled(*args)
    assert compiled.last_report is not None
    return compiled.last_report


@pytest.fixture(scope="module")
def measured() -> lazyinline.MeasureReport:
    torch.manual_seed(0)
    model, args = llama(3, **SIZES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ROUNDS", timing.Rounds(fewest=3, most=3))
        return lazyinline.measure(model, args, backend="eager")


def memory_of(step: lazyinline.CompileReport) -> Memory:
    assert step.made is not None and step.made.memory is not None
    return step.made.memory


# ---- the file ----------------------------------------------------------------------------------


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
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    assert json.loads(found[1]) == json.loads(as_json(compile_page(step))) | {
        "about": json.loads(found[1])["about"]
    }


def test_no_text_of_the_model_ends_the_data() -> None:
    hostile = {"title": "</script><script>alert(1)</script>", "gone": None, "n": [1, 2.5]}
    assert "</script" not in as_json(hostile)
    assert json.loads(as_json(hostile)) == hostile
    assert write_page(hostile).count("<script>alert") == 0
    assert '"gone"' not in write_page(hostile)


def test_numbers_are_written_as_people_read_them() -> None:
    assert [times_less(1, 2.4), times_less(3, 1), times_less(1, 1.01), times_less(0, 5)] == [
        *("2.4\u00d7 less", "3\u00d7 more", "equal", "-"),
    ]
    assert [ratio_range([1.02, 1.02]), ratio_range([1.1, 0.9])] == [
        "1.02\u00d7",
        "0.90\u20131.10\u00d7",
    ]
    assert [flops_text(82_000), flops_text(2.5e12)] == ["82 kFLOP", "2.5 TFLOP"]
    assert [bytes_text(512), bytes_text(32_640_448), seconds_text(0.0121)] == [
        *("512 B", "31.1 MiB", "12.1 ms"),
    ]


# ---- the program -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ("", []),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
        ("gbbbbh", [(0, 1, 1), (1, 1, 4), (5, 1, 1)]),
        ("gababab", [(0, 1, 1), (1, 2, 3)]),
        ("aab", [(0, 1, 2), (2, 1, 1)]),
        ("eeadadad", [(0, 1, 2), (2, 2, 3)]),
    ],
)
def test_equal_calls_in_a_row_are_one_box(keys: str, found: list[tuple[int, int, int]]) -> None:
    assert list(runs(list(keys))) == found


def test_the_strip_has_every_call_and_each_closure_once(step: lazyinline.CompileReport) -> None:
    section = compile_page(step)["program"]
    assert [lane["name"] for lane in section["lanes"]] == ["forward", "backward"]
    assert section["micro_batches"] == 2
    for lane in section["lanes"]:
        repeated = [g for g in lane["items"] if g["times"] > 1]
        assert [g["times"] for g in repeated] == [5]
    names = [c["name"] for c in section["closures"]]
    assert names.count("DecoderBlock.forward") == 1
    block = section["closures"][names.index("DecoderBlock.forward")]
    assert (block["calls"], len(block["operators"])) == (5, block["num_operators"])
    assert block["kernels"]["launches"] == sum(n for _, n in block["kernels"]["rows"])


class Own(nn.Module):
    """A layer whose lines are the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


def test_operators_have_the_users_lines() -> None:
    lazyinline.lazy_inline(Own)
    compiled = lazyinline.compile(nn.Sequential(Own(), Own()), backend="eager")
    compiled(torch.randn(2, 8)).sum().backward()
    closures = compile_page(compiled.last_report)["program"]["closures"]
    lines = {c["name"]: [line for *_, line in c["operators"]] for c in closures}
    assert all("test_page.py" in line and "Own.forward" in line for line in lines["Own.forward"])


def test_what_a_page_is_made_of_grows_with_closures_not_with_calls() -> None:
    def size(layers: int) -> int:
        model, args = llama(layers, **SIZES)
        compiled = lazyinline.compile(model, backend="eager")
        compiled(*args)
        return len(as_json(compile_page(compiled.last_report) | {"about": None}))

    assert size(12) < size(4) + 100


def test_a_report_keeps_no_tensor_of_the_model(step: lazyinline.CompileReport) -> None:
    made = step.made
    assert made is not None
    assert not made.captured.sources and not made.forward.sources


# ---- who shares --------------------------------------------------------------------------------


def test_every_instance_is_in_the_table_with_its_reason() -> None:
    model, args = llama(4, **SIZES)
    model.blocks[2].attention.causal = False
    report = lazyinline.compile(model, backend="eager")
    report(*args)
    found = report.last_report
    section = reuse_section(found.decisions, "")
    assert section is not None
    assert sum(i["count"] for i in section["instances"]) == len(found.decisions)
    assert sum(k["calls"] for k in section["keys"]) == len(found.decisions)
    apart = [i for i in section["instances"] if i["state"] == "kept apart"]
    reasons = {d.path: d.reason for d in found.not_shared()}
    assert {i["paths"][0]: i["why"] for i in apart} == reasons
    assert reuse_section([], "") is None


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


def test_a_step_shows_the_users_own_paths(step: lazyinline.CompileReport) -> None:
    assert [d.path for d in step.decisions if d.class_name == "DecoderBlock"] == [
        f"blocks.{i}" for i in range(5)
    ]
    assert "model.blocks" not in as_json(compile_page(step))


# ---- memory ------------------------------------------------------------------------------------


def test_every_buffer_of_a_plan_is_a_box_at_its_address(step: lazyinline.CompileReport) -> None:
    memory = memory_of(step)
    section = arena_section(memory)
    assert section is not None and not section["step"] and not section["left_out"]
    placed = [b for b in memory.layout.instances if b.kind == "arena" and b.num_bytes]
    assert len(section["boxes"]) == section["num_buffers"] == len(placed)
    assert max(b[2] + b[3] for b in section["boxes"]) == section["peak_bytes"] == step.peak_bytes
    assert max(n for _, n in section["live"]) == step.lower_bound_bytes
    named = {section["names"][section["calls"][b[5]]] for b in section["boxes"]}
    assert any("blocks.4" in name for name in named)


@pytest.mark.parametrize("most_boxes", [300, 120])
def test_merged_boxes_cover_every_buffer(step: lazyinline.CompileReport, most_boxes: int) -> None:
    memory = memory_of(step)
    whole, merged = arena_section(memory), arena_section(memory, most_boxes)
    assert whole is not None and merged is not None and merged["step"]
    rows = np.array(merged["boxes"])
    assert len(rows) <= most_boxes
    assert rows[:, 7].sum() + merged["left_out"] == whole["num_buffers"]
    if not merged["left_out"]:
        for birth, death, offset, size, *_ in whole["boxes"]:
            inside = (rows[:, 0] <= birth) & (rows[:, 1] >= death)
            inside &= (rows[:, 2] <= offset) & (rows[:, 2] + rows[:, 3] >= offset + size)
            assert inside.any()


@pytest.mark.sweep
def test_memory_of_gradients_lies_behind_the_arena() -> None:
    model, args = llama(2, hidden=128, num_heads=2, vocab=64, seq=16)
    compiled = lazyinline.compile(model)
    compiled(*args).backward()
    found = compiled.last_report
    section = arena_section(memory_of(found))
    assert section is not None and found.arena_bytes < found.peak_bytes == section["peak_bytes"]
    behind = [b for b in section["boxes"] if b[2] >= found.arena_bytes]
    assert {section["kinds"][b[4]] for b in behind} >= {"gradients and results"}
    assert max(b[2] + b[3] for b in section["boxes"]) <= found.peak_bytes


def test_a_thinned_curve_keeps_its_peak(
    step: lazyinline.CompileReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "MOST_POINTS", 50)
    section = arena_section(memory_of(step))
    assert section is not None and len(section["live"]) == 50
    assert max(n for _, n in section["live"]) == step.lower_bound_bytes


def test_what_is_chosen_lies_on_the_frontier(step: lazyinline.CompileReport) -> None:
    section = compile_page(step)["recompute"]
    chosen = {c["closure"]: c for c in section["choices"]}
    (frontier,) = section["frontiers"]
    assert frontier["calls"] == 5
    smallest = frontier["points"][0]
    assert chosen[frontier["closure"]]["saved_bytes"] == smallest[0]
    assert [p[0] for p in frontier["points"]] == sorted(p[0] for p in frontier["points"])


# ---- measurements ------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_measurement_shows_both_sides(measured: lazyinline.MeasureReport) -> None:
    data = measure_page([measured])
    assert list(data) == [
        *("title", "subtitle", "verdict", "program", "reuse", "passes", "depth", "steps", "arena"),
        *("recompute", "predicted", "about"),
    ]
    late, early = data["passes"]["sides"]
    assert (late["cpu_s"], early["cpu_s"]) == (
        measured.late.compiled.cpu_s,
        measured.early.compiled.cpu_s,
    )
    assert late["operators"] < early["operators"]
    assert [row[0] for row in data["steps"]["rows"]] == ["eager", "late", "early"]
    assert data["depth"] is None and data["arena"] is None  # eager kernels are not planned
    assert any("Memory is not planned" in note for note in data["verdict"]["notes"])


def test_what_was_not_measured_is_said_to_be_not_measured(
    step: lazyinline.CompileReport, measured: lazyinline.MeasureReport
) -> None:
    what, unit, predicted, held = compile_page(step)["predicted"]["rows"][0]
    assert (what, unit, held) == ("memory held by a step", "bytes", None)
    assert predicted == step.held_bytes >= step.peak_bytes
    _, seconds_unit, again, timed = compile_page(step)["predicted"]["rows"][1]
    assert seconds_unit == "s" and again > 0 and timed is None

    rows = measure_page([measured])["predicted"]["rows"]
    assert [row[0].rpartition(" ")[2] for row in rows] == ["late", "early", "eager"]
    assert all(predicted is None for _, _, predicted, _ in rows)  # eager kernels are not planned
    assert all(row[3] > 0 for row in rows)
    quiet = replace(measured, eager_held_bytes=None)
    assert len(measure_page([quiet])["predicted"]["rows"]) == 2


def test_a_noisy_step_is_not_praised(measured: lazyinline.MeasureReport) -> None:
    loud, quiet = StepTime(10, 30, 90, 20), StepTime(10, 10.1, 11, 20)

    def step_tile(time: StepTime) -> dict[str, str]:
        side = replace(measured.late, step=quiet)
        report = replace(measured, eager=time, late=side, early=side, others_share=0.0)
        tiles = measure_page([report])["verdict"]["tiles"]
        return next(t for t in tiles if t["label"] == "Step time against eager's")

    assert step_tile(quiet)["state"] == "good" and step_tile(quiet)["value"] == "1.00\u00d7"
    assert step_tile(loud)["state"] == "warn"
    assert "a median is 3.00\u00d7 its minimum" in step_tile(loud)["note"]


def test_the_model_is_named_and_not_what_computes_its_loss(
    step: lazyinline.CompileReport, measured: lazyinline.MeasureReport
) -> None:
    assert compile_page(step)["title"] == measured.late.compiled.model == "Decoder"


@pytest.mark.sweep
def test_a_large_model_is_shown_with_and_without_recompute() -> None:
    sizes = {"layers": 2, "micro_batches": 2, "backend": "eager"}
    data = large_page([compile_large("llama-13b", recompute=r, **sizes) for r in (None, "full")])
    assert data["title"].startswith("llama-13b: ")
    assert [s["name"] for s in data["passes"]["sides"]] == [
        *("recompute nothing", "recompute each block"),
    ]
    assert data["program"]["micro_batches"] == 2


def test_depth_is_shown_where_several_were_measured(measured: lazyinline.MeasureReport) -> None:
    data = measure_page([replace(measured, layers=n) for n in (4, 8)], "two depths")
    assert data["depth"]["layers"] == [4, 8]
    assert data["subtitle"] == "two depths"


def test_a_measurement_without_execution_has_no_step(measured: lazyinline.MeasureReport) -> None:
    sides = [replace(side, step=None) for side in measured.sides.values()]
    assert (
        measure_page([replace(measured, eager=None, late=sides[0], early=sides[1])])["steps"]
        is None
    )

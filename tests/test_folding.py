"""What is printed fits 100 columns: long lines go on below, with every word, and none is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from printed import too_long, unfolded
from torch import nn

import lazyinline
from lazyinline.backend.cache.results import CacheUse
from lazyinline.frontend.capture.regions import SharingDecision
from lazyinline.frontend.compile_record import PartRecord, PassRecord
from lazyinline.frontend.report import CompileReport
from lazyinline.reuse.ir.printer import WIDTH, folded

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

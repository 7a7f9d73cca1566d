"""Models too large to hold are compiled whole, from their layouts alone."""

import functools
import json
import pathlib

import large_models
import pytest
import rank_bench
import saved
import torch
from large_models import LargeReport, compile_large
from rank_bench import RankReport, compile_rank, rank_number, rank_page
from torch import nn

from lazyinline import LazyInlineError
from lazyinline.frontend.compiler import PASSES, Compiler
from lazyinline.frontend.options import Options
from lazyinline.frontend.passes.programs import estimate, lower
from lazyinline.frontend.passes.state import Goal


def test_kernels_are_built_and_planned_for_a_model_without_data() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), torch.empty(4, 64)
    _, report = Compiler(Options()).compile(model, (x,), {}, Goal())
    assert (report.num_kernels, report.unplanned) == (1, "")
    assert report.num_launches == 3
    assert report.peak_bytes is not None and report.peak_bytes >= 4 * 64 * 4


@functools.cache
def llama_13b(layers: int) -> LargeReport:
    return compile_large(
        "llama-13b", backend="eager", layers=layers, order="one_by_one", micro_batches=4
    )


def test_13_billion_parameters_are_planned_without_data() -> None:
    report = llama_13b(4)
    weights_bytes = 4 * report.num_parameters
    assert report.num_parameters > 1.5e9
    assert report.peak_bytes > weights_bytes  # one gradient for each weight is in the arena
    assert report.peak_bytes <= 1.01 * report.lower_bound_bytes
    assert "parameters, training step of 4 micro-batches, one_by_one" in str(report)


def test_nodes_held_grow_by_two_calls_and_the_sums_of_a_layer() -> None:
    shallow, deeper = llama_13b(2), llama_13b(4)
    weights_per_layer = 7
    growth = (deeper.num_nodes - shallow.num_nodes) / 2
    assert growth <= 2 + weights_per_layer
    assert deeper.num_launches > 1.7 * shallow.num_launches


TINY = {"hidden": 32, "num_heads": 2, "vocab": 50, "seq": 32, "batch": 4}


ESTIMATED = tuple(estimate if one is lower else one for one in PASSES)


def rank_report(rank: str, micro_batches: int, recompute: str | None) -> RankReport:
    return compile_rank(
        "175b",
        options=Options(recompute=recompute),
        rank=rank,
        layers=4,
        num_stages=2,
        micro_batches=micro_batches,
        sizes=TINY,
        passes=ESTIMATED,
    )


def test_the_page_of_a_rank_has_its_arena_and_the_schedule_of_all(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [rank_report("last", 4, recompute) for recompute in (None, "full")]
    assert reports[1].arena_bytes < reports[0].arena_bytes
    page = rank_page(reports)
    assert page["title"].startswith("175b: ")
    names = [side["name"] for side in page["passes"]["sides"]]
    assert names == ["rank 1, recompute nothing", "rank 1, recompute each block"]
    assert page["arena"]["num_launches"] == reports[0].num_launches
    assert page["arena"]["peak_bytes"] <= reports[0].arena_bytes
    assert {slot[0] for slot in page["pipeline"]["slots"]} == {0, 1}
    monkeypatch.setattr(rank_bench, "bench_rank", lambda *_, **options: reports)
    written, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    large_models.main(["175b", "--html", str(written), "--json", str(numbers)])
    (row, _) = json.loads(numbers.read_text())["rows"]
    assert "plan" not in row and row["arena_bytes"] == reports[0].arena_bytes
    shown = saved.page_data(written.read_text(encoding="utf-8"))
    assert shown["title"] == page["title"] and shown["arena"] == json.loads(
        json.dumps(page["arena"])
    )


def test_what_was_saved_of_a_large_model_is_printed_again(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    command = ["llama-13b", "--layers", "1", "--micro-batches", "1", "--backend", "eager"]
    large_models.main([*command, "--html", str(page), "--json", str(numbers)])
    assert "nothing executed" in capsys.readouterr().out
    saved.main([str(numbers), str(page)])
    printed = capsys.readouterr().out
    assert printed.count("name                    llama-13b") == 2
    assert "llama-13b: " in printed and "Planned memory" in printed and "PyTorch" in printed


@pytest.mark.parametrize("rank", ["-1", "2", "best", 2])
def test_a_rank_that_does_not_exist_is_refused(rank: int | str) -> None:
    with pytest.raises(LazyInlineError, match="There is no rank"):
        rank_number(rank, 2)

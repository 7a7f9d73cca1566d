"""The command: rows, files, programs, and errors without a traceback."""

import argparse
import functools
import io
import json
import pathlib
import re
import subprocess
import sys
import textwrap
from typing import get_args

import pytest
import saved
import torch.utils.cpp_extension  # noqa: F401, warns of a CUDA_HOME without a GPU when first imported
from printed import too_long

import lazyinline
from lazyinline.backend.files import torch_store
from lazyinline.backend.kernels import lower
from lazyinline.frontend import commands, inspection, measure, onnx_file
from lazyinline.frontend.capture import blocks
from lazyinline.frontend.commands import COMMANDS, error_line
from lazyinline.recompute import planner as policy
from lazyinline_command.main import main, make_parser

MODELS = """
    import torch
    from torch import nn
    import lazyinline

    @lazyinline.lazy_inline
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
        def forward(self, x):
            return self.linear(x).relu()

    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    class Uneven(nn.Module):
        def __init__(self, heads, causal):
            super().__init__()
            self.heads, self.causal = heads, causal
            self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        def forward(self, x):
            parts = self.first(x).view(x.shape[0], self.heads, -1).softmax(-1)
            parts = parts.tril() if self.causal else parts.exp()
            return x + self.second(parts.flatten(1)).sin() * self.heads

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 4)
        def forward(self, x):
            return self.linear(x)

    def good():
        return nn.Sequential(Block(), Block()), (torch.ones(2, 4),)
    def of(layers):
        return nn.Sequential(*(Block() for _ in range(layers))), (torch.ones(2, 4),)
    def uneven():
        blocks = [Uneven(heads, heads != 3) for heads in (2, 2, 2, 3, 4, 6, 2)]
        return nn.Sequential(*blocks), (torch.ones(4, 12),)
    def with_kwargs():
        return nn.Sequential(Block(), Block()), (), {"input": torch.ones(2, 4)}
    def branching():
        return Branching(), (torch.ones(2),)
    def raises():
        raise ValueError("no weights today")
    def model_only():
        return nn.Linear(2, 2)
    def fails():
        return Failing(), (torch.ones(2, 4),)
    def only_one():
        return (nn.Linear(2, 2),)
    def not_a_model():
        return (1, 2)
    def bare_tensor():
        return nn.Linear(2, 2), torch.ones(2)
    constant = 3
"""
QUICK = ("--layers", "2", "3", "--backend", "eager")


@pytest.fixture(autouse=True)
def small_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROUND_S", 0.001)
    small = functools.partial(commands.Decoder, hidden=16, vocab=1000)
    monkeypatch.setattr(commands, "Decoder", small)


@pytest.fixture
def models(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of targets in the working directory; its name."""
    name = f"cli_models_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODELS))
    (tmp_path / "cli_broken.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    return name


def test_bench_prints_a_row_per_depth_and_writes_files(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file, page = tmp_path / "rows.json", tmp_path / "page.html"
    files = ["--json", str(json_file), "--html", str(page)]
    assert main(["bench", "--infer", *QUICK, *files]) == 0
    out = capsys.readouterr().out
    rows = [row for row in map(str.split, out.splitlines()) if row and row[0].isdigit()]
    assert [(row[0], len(row)) for row in rows] == [("2", 12), ("3", 12)]
    held, inlined = ([int(row[column]) for row in rows] for column in (1, 2))
    assert held[1] - held[0] == 1 and inlined[1] - inlined[0] > 10
    assert "warm-up" in out and too_long(out) == []
    content = json.loads(json_file.read_text())
    assert [(row["layers"], row["train"]) for row in content["rows"]] == [(2, False), (3, False)]
    assert any(name == "PyTorch" for name, _ in content["about"]["rows"])
    assert page.read_text().startswith("<!doctype html>")
    saved.main([str(json_file), str(page)])
    printed = capsys.readouterr().out
    assert "nodes_held" in printed and "Graph nodes held" in printed


def test_bench_of_a_target(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    for target, layers in (("good", []), ("of", ["--layers", "3"])):
        command = ["bench", "--model", f"{models}:{target}", "--backend", "eager", *layers]
        assert main(command) == 0
        start = f"     {layers[-1] if layers else '-'}"
        (row,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith(start)]
        assert len(row.split()) == 12


def test_report_prints_numbers_and_writes_a_page(
    models: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    command = ["report", f"{models}:good", "--backend", "eager", "--infer", "--html", str(page)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "operators compiled" in out and too_long(out) == []
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.sweep
def test_export_writes_a_file(
    models: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", f"{models}:good", "model.onnx"]) == 0
    assert "model.onnx: 2 nodes and 1 functions" in capsys.readouterr().out
    assert (tmp_path / "model.onnx").exists()
    assert main(["export", f"{models}:with_kwargs", "flat.onnx", "--flat", "--opset", "20"]) == 0
    assert "0 functions" in capsys.readouterr().out


def test_inspect_prints_the_program(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(target: str, *options: str) -> str:
        assert main(["inspect", f"{models}:{target}", *options]) == 0
        return capsys.readouterr().out

    assert re.search(r"closure @Block.*2 calls", printed("good"), re.DOTALL)
    assert "@Block" not in printed("good", "--reuse", "off")
    assert "2 calls" in printed("with_kwargs", "--train")
    assert f"{models}.py:" in printed("good", "--source")


def inspecting(target: str, text: str) -> tuple[tuple[str, ...], str]:
    return ("inspect", target), text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        inspecting("nocolon", "is not a target"),
        inspecting("some/models.py:good", "Write some.models:good."),
        inspecting("module:", "is not a target"),
        inspecting("no_such_module:f", "No module named 'no_such_module'"),
        inspecting("torch.no_such_part:f", "No module named 'torch.no_such_part'"),
        inspecting("cli_broken:f", "No module named 'no_such_module_anywhere'"),
        inspecting("MODELS:missing", "has no attribute 'missing'"),
        inspecting("MODELS:constant", "'int' object is not callable"),
        inspecting("MODELS:raises", "no weights today"),
        inspecting("MODELS:model_only", "has to return (model, args)"),
        inspecting("MODELS:only_one", "it returned a tuple"),
        inspecting("MODELS:not_a_model", "where an nn.Module belongs"),
        inspecting("MODELS:bare_tensor", "(x,) for one input"),
        inspecting("MODELS:branching", "needs the value of a tensor"),
        (("bench", "--micro-batches", "4", "--infer"), "goes with training"),
        (("bench", "--model", "mine"), "is not a target"),
        (("bench", "--json", "no/such/folder/x.json"), "there is no such folder"),
        (("report", "MODELS:good", "--html", "no/where.html"), "there is no such folder"),
        (("export", "MODELS:good", "model.onnx", "--opset", "3"), "opset=3: from 18 to 24"),
        (("export", "MODELS:good", "no/such/folder.onnx"), "no/such"),
    ],
)
def test_a_mistake_is_told_in_a_line(
    models: str, arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.replace("MODELS", models) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("lazyinline: ") and text in err and "Traceback" not in err
    assert arguments[0] != "inspect" or out == ""


@pytest.mark.parametrize("arguments", [(), ("export", "a:b"), ("bench", "--layers", "0")])
def test_usage_errors(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: lazyinline" in capsys.readouterr().err


def test_in_a_pipe_there_is_no_bar(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{models}:good", "--train", "--after", "link"]) == 0
    printed = capsys.readouterr()
    assert not printed.err and "\r" not in printed.out and "it/s" not in printed.out


AFTER = ("autodiff", "link")


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--model", "TARGET", "--infer", "--backend", "eager"),
        ("advise", "TARGET", "--backend", "eager"),
        ("report", "TARGET", "--backend", "eager"),
        ("inspect", "--passes"),
        ("inspect", "TARGET", "--source"),
        ("inspect", "TARGET", "--train", "--recompute", "full"),
        ("inspect", "TARGET", "--train", "--level", "primitive", "--source"),
        *(("inspect", "TARGET", "--train", "--after", name) for name in AFTER),
        *(("inspect", "TARGET", "--train", "--after", name, "--diff") for name in AFTER),
    ],
    ids=" ".join,
)
@pytest.mark.sweep(
    keep=["inspect --passes", "inspect TARGET --train --after autodiff --diff", "advise"]
)
def test_what_is_printed_fits_100_columns(
    arguments: tuple[str, ...], models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([x.replace("TARGET", f"{models}:uneven") for x in arguments]) == 0
    out, err = capsys.readouterr()
    assert out and too_long(out) == [] and too_long(err) == []


@pytest.mark.sweep
def test_reader_that_stops_early_is_no_error(models: str) -> None:
    command = f"{sys.executable} -m lazyinline inspect {models}:good | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("no_grad closure @Block")
    assert "Traceback" not in done.stderr and "Broken" not in done.stderr


WITHOUT_TORCH = """
import sys
from lazyinline_command.main import main
try:
    status = main(sys.argv[1:])
finally:
    assert 'torch' not in sys.modules
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--help"], 0, "advise"),
        (["bench", "--help"], 0, "--micro-batches"),
        (["--version"], 0, f"lazyinline {lazyinline.__version__}"),
        (["bnech"], 2, "invalid choice: 'bnech'"),
        (["bench", "--layer", "3"], 2, "unrecognized arguments: --layer 3"),
        (["inspect", "a:b", "--reuse", "atuo"], 2, "invalid choice: 'atuo'"),
        (["export"], 2, "TARGET|FILE, FILE.onnx"),
        (["completion", "bash"], 0, "--micro-batches"),
    ],
)
def test_help_and_mistakes_are_answered_before_pytorch_is_imported(
    arguments: list[str], status: int, text: str
) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert text in done.stdout + done.stderr and "Traceback" not in done.stderr


def actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in parser._actions}


def test_the_parser_offers_what_the_compiler_takes() -> None:
    parsers = actions_of(make_parser())["command"].choices
    assert isinstance(parsers, dict) and set(COMMANDS) | {"completion"} == set(parsers)
    taken = {
        "backend": get_args(lower.BackendName),
        "reuse": get_args(blocks.Reuse),
        "recompute": policy.POLICIES,
        "way": get_args(inspection.Way),
        "against": get_args(measure.Against),
    }
    for command in COMMANDS:
        for name, action in actions_of(parsers[command]).items():
            if name in taken:
                assert tuple(action.choices or ()) == tuple(taken[name])
                assert not action.default or action.default in taken[name]
    assert actions_of(parsers["export"])["opset"].default == onnx_file.MIN_OPSET
    said = parsers["cache"].description or ""
    for name in (
        torch_store.DIRECTORY_VARIABLE,
        torch_store.SIZE_VARIABLE,
        torch_store.SWITCH_VARIABLE,
    ):
        assert name in said
    bench_help = " ".join(parsers["bench"].format_help().split())
    assert f"default {' '.join(map(str, commands.DEFAULT_LAYERS))};" in bench_help
    assert inspection.FORM in " ".join(parsers["inspect"].format_help().split())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_which_pass_runs_and_how_far_it_is(
    models: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main(["inspect", f"{models}:good", "--after", "link", "--train"]) == 0
    shown = terminal.getvalue()
    assert all(f"lazyinline: {name} |" in shown for name in ("capture", "autodiff", "lower"))
    assert re.search(r"\d/\d+ passes", shown) and re.search(r"1/\d+ closures", shown)


def test_an_error_of_the_model_is_one_line_and_its_traceback_is_for_the_asking(
    models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "--model", f"{models}:fails", "--backend", "eager"]
    assert main(arguments) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "lazyinline: R" in x]
    assert f"{models}.py:" in line and "mat1 and mat2" in line and "--debug" in line
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        main([*arguments, "--debug"])


def test_an_error_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(Exception) as caught:
        lazyinline.reuse.ir.verify.verify(None, "shared")  # type: ignore[arg-type]
    assert error_line(caught.value) is None


def test_an_interrupt_ends_in_one_line(
    models: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.inspection, "load_target", interrupted)
    assert main(["inspect", f"{models}:good"]) == 130
    assert capsys.readouterr().err == "lazyinline: interrupted\n"
    with pytest.raises(KeyboardInterrupt):
        main(["inspect", f"{models}:good", "--debug"])


def test_what_the_cache_holds_can_be_read_by_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "info", "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["num_entries"] >= 0 and pathlib.Path(held["directory"]).is_absolute()

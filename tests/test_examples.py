"""Each example runs as it says, in a process, and prints what shows its point."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from conftest import ROOT, selected

EXAMPLES = ROOT / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "decoder.py")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all examples: most have the same block."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(autouse=True)
def of_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYINLINE_CACHE_DIR", str(cache))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def printed(name: str, *arguments: str, ranks: int = 0) -> str:
    """Runs an example; with ranks, as torchrun does. Returns what it printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(launcher if ranks else []), str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


GENERATING = {  # kernels, which takes the time
    "train_decoder.py": ["--steps=8", "--layers=2", "--html=report.html"],
    "recompute_budget.py": ["--layers=3"],
    "export_onnx.py": ["--layers=3"],
}
QUICK = {
    "varying_lengths.py": ["--lengths=4", "--layers=2", "--backend=eager"],
    "plan_13b.py": ["--capture-only"],
    "checkpoint_resume.py": ["--layers=2", "--steps=4", "--backend=eager"],
    "serve.py": ["--requests=8", "--backend=eager"],
    "pinn.py": ["--steps=60", "--width=8", "--depth=2", "--backend=eager"],
    "forces.py": ["--epochs=10", "--clusters=8", "--backend=eager"],
    "when_blocks_differ.py": [],
    "huggingface_llama.py": ["--layers=2", "--backend=eager", "--steps=2"],
}
ONE_BY_ONE = """
import contextlib, io, json, os, runpy, sys
said, folder, examples = {}, sys.argv[2], json.loads(sys.argv[3])
os.chdir(sys.argv[1])
sys.path.insert(0, folder)
for name, arguments in examples.items():
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(os.path.join(folder, name), run_name="__main__")
    said[name] = printed.getvalue()
print(json.dumps(said))
"""


def said_one_by_one(examples: dict[str, list[str]], folder: Path, cache: Path) -> dict[str, str]:
    """What examples print, run in one process: to import PyTorch costs more than they do."""
    arguments = (str(folder), str(EXAMPLES), json.dumps(examples))
    printed = forked.run(ONE_BY_ONE, *arguments, LAZYINLINE_CACHE_DIR=str(cache))
    said: dict[str, str] = json.loads(printed.splitlines()[-1])
    return said


@pytest.fixture(scope="module")
def said_by(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> dict[str, str]:
    wanted = {"pinn.py", "when_blocks_differ.py", *selected(request, "example")}
    examples = {name: arguments for name, arguments in QUICK.items() if name in wanted}
    return said_one_by_one(examples, tmp_path_factory.mktemp("quick"), cache)


@pytest.fixture(scope="module")
def said_with_kernels(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("generating")
    said = said_one_by_one(GENERATING, folder, cache)
    return said | {"page": (folder / "report.html").read_text(encoding="utf-8")}


@pytest.mark.sweep
def test_a_decoder_learns_the_text_as_in_eager(said_with_kernels: dict[str, str]) -> None:
    said = said_with_kernels["train_decoder.py"]
    rows = re.findall(r"^ +\d+  (\d+\.\d{4})  (\d+\.\d{4})  #+$", said, re.MULTILINE)
    assert len(rows) == 8
    losses = [(float(eager), float(compiled)) for eager, compiled in rows]
    assert all(compiled == pytest.approx(eager, abs=2e-3) for eager, compiled in losses)
    assert losses[-1][1] < losses[0][1]
    assert said_with_kernels["page"].startswith("<!doctype html>")


@pytest.mark.sweep
def test_a_budget_is_between_saving_and_computing_again(said_with_kernels: dict[str, str]) -> None:
    said = said_with_kernels["recompute_budget.py"]
    rows = [float(peak) for peak in re.findall(r"(\d+\.\d\d) +\d+\.\d  #+$", said, re.MULTILINE)]
    assert len(rows) == 5 and rows == sorted(rows, reverse=True)
    assert "all gradients equal eager's" in said


@pytest.mark.parametrize(
    ("example", "pattern"),
    [
        ("checkpoint_resume.py", r"(?s)new process.*equal to the last bit: True"),
        ("varying_lengths.py", "4 lengths, 2 compiles; each loss equals eager's"),
        ("serve.py", r"(?m)^ +8 .*(\d+)$[^$]*\n0 compiles; each answer is eager's"),
        ("plan_13b.py", r"(?m)^ +40 +12\.\d B +\d+ +\d{3} "),  # captured without its weights
        ("huggingface_llama.py", r"(?s)gradients equal.*gradients equal"),
        ("pinn.py", r"(?s)exact.*wrote pinn\.svg"),
        ("forces.py", r"(?s)3 Interaction share one graph; 1 compile\(s\).*wrote forces\.svg"),
    ],
)
@pytest.mark.sweep(keep=["varying_lengths", "pinn"])
def test_an_example_prints_its_point(example: str, pattern: str, said_by: dict[str, str]) -> None:
    assert re.search(pattern, said_by[example])


@pytest.mark.parametrize("name", NAMES)
def test_an_example_says_what_it_shows_and_what_it_prints(name: str) -> None:
    text = ast.get_docstring(ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))) or ""
    assert f"examples/{name}" in text
    assert re.search(r"What it\s+prints.*:\n\n {4,}\S", text)
    assert f"({name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.sweep
def test_a_file_has_one_function_for_all_blocks(said_with_kernels: dict[str, str]) -> None:
    said = said_with_kernels["export_onnx.py"]
    assert re.findall(r"^  Block +blocks\.(\d)$", said, re.MULTILINE) == ["0", "1", "2"]
    assert len(re.findall(r"^  Block +\d+ nodes:", said, re.MULTILINE)) == 1
    assert "5 x 33: onnxruntime gives the logits of PyTorch" in said


def test_a_network_comes_nearer_to_the_solution(said_by: dict[str, str]) -> None:
    said = said_by["pinn.py"]
    off = [float(percent) for percent in re.findall(r"off by (\d+\.\d\d) percent", said)]
    assert len(off) == 10 and off[-1] < off[0]


@pytest.mark.sweep
def test_a_large_step_is_planned_without_its_memory() -> None:
    said = printed("plan_13b.py", "--layers=2", "--micro-batches=2", "--backend=eager")
    assert "a step of 2 micro-batches" in said
    pattern = r"^  (\w.*): arena (\d+\.\d) GiB, 1\.\d{3} of the lower bound"
    rows = dict(re.findall(pattern, said, re.MULTILINE))
    assert float(rows["everything saved"]) > float(rows["each block again"]) > 0


def test_blocks_that_differ_are_mended(said_by: dict[str, str]) -> None:
    said = said_by["when_blocks_differ.py"]
    counts = re.findall(r"^(\w+): (\d+) nodes held, (\d+) if inlined", said, re.MULTILINE)
    assert [name for name, *_ in counts] == ["Layer", "ShiftAsTensor", "ChoiceAsTensor"]
    shares = [int(held) / int(inlined) for _, held, inlined in counts]
    assert shares[0] >= 1 > shares[1] > shares[2]
    assert said.count("are apart: attribute ") == 2


@pytest.mark.sweep
def test_a_second_job_finds_what_the_first_kept() -> None:
    said = printed("warm_cache.py", "--layers=2")
    found = re.findall(r"(\d+) of (\d+) results", said)
    assert [number for number, _ in found[:1]] == ["0"]
    assert all(number == of for number, of in found[1:2])
    assert int(found[2][0]) > 0


@pytest.mark.sweep
def test_two_processes_average_their_gradients() -> None:
    said = printed("ddp_train.py", "--layers=2", "--backend=eager", "--steps=2", ranks=2)
    steps = re.findall(r"^step (\d) rank (\d): loss (\S+), eager (\S+)$", said, re.MULTILINE)
    assert [step[:2] for step in steps] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert all(float(ours) == pytest.approx(float(eager), abs=1e-3) for *_, ours, eager in steps)
    assert said.count("weights equal rank 0's: True") == 2


@pytest.mark.sweep
def test_two_processes_are_a_pipeline(tmp_path: Path) -> None:
    page = tmp_path / "pipeline.html"
    said = printed(
        "pipeline_llama.py",
        *("--layers=2", "--micro-batches=2", "--backend=eager", "--steps=1", f"--html={page}"),
        ranks=2,
    )
    (loss,) = re.findall(r"^step 0 rank 1: loss (\S+)$", said, re.MULTILINE)
    assert f"eager's loss before the first step is {loss}" in said
    assert sorted(re.findall(r"^rank (\d) holds \d+ parameters$", said, re.MULTILINE)) == ["0", "1"]
    assert page.exists()

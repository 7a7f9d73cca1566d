"""The list of passes: what each way in runs, what the report says of it, what a pass changed."""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import nn

import lazyinline
from lazyinline import VerifyError, lazy_inline
from lazyinline.frontend.compiler import Compiler, passes_for
from lazyinline.frontend.options import Options
from lazyinline.frontend.passes.programs import decompose
from lazyinline.frontend.passes.state import Compilation, Goal, State, Subject, compile_pass, run
from lazyinline.frontend.report import CompileReport
from lazyinline_command.main import main

MODULE, STEP = passes_for("module"), passes_for("step")


@lazy_inline
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def without_versions(report: CompileReport) -> str:
    """The passes and what became of the program, but for what PyTorch's decompositions decide."""
    numbers = "num_closures num_block_calls num_kernels unplanned num_compiles num_links"
    lines = [f"  passes = {', '.join(row.name for row in report.passes)}"]
    lines += [f"  {name} = {getattr(report, name)!r}" for name in numbers.split()]
    lines += [f"  @{r.closure}, {r.num_calls} calls, {r.choice}" for r in report.recompute]
    return "\n".join(lines) + "\n"


def reports() -> dict[str, CompileReport]:
    """What the ways in report of one small model."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 4)
    full, budget = {"recompute": "full"}, {"recompute": lazyinline.Budget(fraction=0.5)}
    found, again, within = {}, "each block computed again", "under a budget"
    calls = {"a call": {}, f"a call, {again}": full, f"a call {within}": budget}
    for name, options in {**calls, "a call with sizes that vary": {"dynamic": True}}.items():
        compiled = lazyinline.compile(model, backend="eager", **options)
        compiled(x).backward()
        found[name] = compiled.last_report
    with torch.no_grad():
        compiled(torch.randn(7, 4))
        compiled(torch.randn(6, 4))
    found["a further size without gradients"] = compiled.last_report
    for name, options in calls.items():
        step = lazyinline.compile_step(model, micro_batches=2, backend="eager", **options)
        step(x)
        found[name.replace("call", "step")] = step.last_report
    return {name: report for name, report in found.items() if report is not None}


def test_each_way_in_reports_its_passes(golden: Callable[[str, str], None]) -> None:
    texts = [f"{name}\n{without_versions(report)}" for name, report in reports().items()]
    golden("reports", "\n".join(texts))


def inspected() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """A target of the command line."""
    return Net(), (torch.randn(4, 4),)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["inspect", *arguments]) == 0
    return capsys.readouterr().out


def test_the_command_prints_the_passes_of_every_way_in(
    golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    golden("passes", printed(capsys, "--passes"))


def test_the_command_prints_what_a_pass_changed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests")
    target = ("test_passes:inspected", "--train")
    diff = printed(capsys, *target, "--after", "autodiff", "--diff")
    forward, backward = diff.split("// backward, by autodiff\n")
    assert forward.startswith("// forward, by autodiff\n--- before\n+++ after\n")
    assert "\n-closure @Block(" in forward and "\n+aten closure @Block.forward(" in forward
    assert "\n+aten closure @Block.backward(" in backward and "\n-" not in backward[3:]
    assert "unchanged" in printed(capsys, *target, "--after", "lower", "--diff")
    step = ("--way", "step", "--micro-batches", "2", "--after", "repeat")
    assert printed(capsys, *target, *step).count("call @micro_batch.forward(") == 2
    launches = printed(capsys, *target, "--after", "link")
    assert "s0, s1" in launches and "return" in launches
    assert "nothing asks for it" in printed(capsys, *target, "--after", "recompute")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "needs a target, or --passes"),
        (("a:b", "--diff"), "name it with --after PASS"),
        (
            ("test_passes:inspected", "--after", "inline"),
            "no pass 'inline' here; there are capture",
        ),
    ],
)
def test_wrong_questions_say_what_to_do(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    text: str,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests")
    assert main(["inspect", *arguments]) == 2
    assert text in capsys.readouterr().err


def started() -> Compilation:
    compiler = Compiler(Options(backend="eager"))
    return compiler.started(Subject(Net(), (torch.randn(4, 4),), {}), Goal())


@compile_pass("spoil")
def spoil(state: State) -> State:
    """Takes the last call away, whose result is returned."""
    programs = {n: replace(p, calls=p.calls[:-1]) for n, p in state.programs.items()}
    return replace(state, programs=programs)


@compile_pass("spoil", "flat")
def spoil_launches(state: State) -> State:
    """The same once it is linked."""
    flats = {n: replace(f, launches=f.launches[:-1]) for n, f in state.flats.items()}
    return replace(state, flats=flats)


@compile_pass("look")
def look_around(state: State) -> State:
    """Refuses to run where Python would map memory for calls."""
    sizes = [frame.frame.f_code.co_stacksize for frame in inspect.stack(context=0)]
    assert max(sizes) > 60_000, "from Python 3.11 on a compile takes up to a tenth longer so"
    return state


def test_a_pass_runs_in_a_frame_with_room_for_its_calls() -> None:
    run((look_around,), started())


def test_a_program_is_verified_after_each_pass_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VerifyError, match="a value that no call defines"):
        run((*MODULE[:1], spoil), started())
    with pytest.raises(VerifyError, match="an output is a slot that is not written"):
        run((*MODULE, spoil_launches), started())
    monkeypatch.setenv("LAZYINLINE_VERIFY", "0")
    run((*MODULE[:1], spoil), started())
    with pytest.raises(VerifyError, match="a value that no call defines"):
        run((*MODULE[:1], spoil, decompose), started())


def test_a_pass_leaves_the_state_before_it_as_it_is() -> None:
    seen = []
    state = started()
    run(MODULE, state, watch=lambda one, before, after: seen.append((one.name, before, after)))
    assert not state.programs and state.runs is None
    others = ("masks", "derive", "rotate", "recompute", "defer", "predict")
    wanted = [p.name for p in MODULE if p.name not in others]
    assert [name for name, _, _ in seen] == wanted
    assert all(a is b for (_, _, a), (_, b, _) in itertools.pairwise(seen))


def test_only_graphs_that_run_are_written_as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """To write a graph as Python and compile that takes as long as to make it."""
    written: list[torch.fx.GraphModule] = []
    write = torch.fx.GraphModule.recompile

    def noted(self: torch.fx.GraphModule) -> Any:
        written.append(self)
        return write(self)

    monkeypatch.setattr(torch.fx.GraphModule, "recompile", noted)
    compiled = lazyinline.compile(Net(), backend="eager")
    compiled(torch.randn(2, 4)).backward()
    assert written
    assert len(written) <= compiled.last_report.num_kernels

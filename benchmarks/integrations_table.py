"""Writes docs/integrations.md: what people train with, whether it works, and whether it is eager's.

    python benchmarks/integrations_table.py [INTEGRATION ...]

Each row names the tests that show it, and they are run. A row works if all of them pass, and is
equal to eager by the tolerance that they ask for. What it costs is what was compiled in them. With
names of integrations only their rows are run; the others stay as they are on the page.
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "integrations.md"
HEAD = """# What people train with

After this page you know which tools were run with lazyinline, and how to put it under yours. The
table is written by `python benchmarks/integrations_table.py`, which runs the tests that each row
names. Those in `tests/integrations` need the extra `integrations`: `make integrations` installs it
and runs them. All models are tiny and on the CPU. What a row costs is how often something was
compiled in its tests, and the CPU seconds of that; what processes of their own compile is not
counted.

accelerate's list of backends is fixed, so `Accelerator(dynamo_backend="lazyinline")` and Trainer's
`torch_compile_backend="lazyinline"` are a ValueError of accelerate's. The one line that works is
`model.compile(backend="lazyinline")`, or `lazyinline.compile(model, in_place=True)`, before
`prepare` or `Trainer`. `generate()` of PEFT's model calls the base past it: the base is compiled
for that with the model, and `lazyinline.last_report(peft.get_base_model())` says what it cost.

| integration | what | works | equal to eager | what it costs | shown by |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """One integration, and the tests that show it.

    Attributes:
        integration: what people use.
        what: how it is used.
        equal: how equal to eager the tests ask it to be.
        tests: node identifiers; one without parameters stands for all of them.
    """

    integration: str
    what: str
    equal: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of one test."""

    passed: bool
    num_compiles: int
    cpu_s: float


def _trainer(setting: str, what: str, equal: str = "losses, 1e-5") -> Row:
    name = f"tests/integrations/test_trainer.py::test_twenty_steps_are_those_of_eager[{setting}]"
    return Row("Trainer, 20 steps", what, equal, (name,))


def _row(integration: str, what: str, equal: str, *tests: str) -> Row:
    return Row(integration, what, equal, tuple(f"tests/{test}" for test in tests))


ROWS = (
    _row(
        "in place",
        "the user's own object trains; tools see the model",
        "losses and gradients, 1e-5",
        "test_in_place.py::"
        "test_a_model_compiled_in_place_is_the_users_object_and_trains_as_before[eager]",
        "test_in_place.py::test_what_tools_look_at_is_the_models",
    ),
    _row(
        "without marks",
        'reuse="auto": repeated layers are found',
        "gradients, 1e-5",
        "test_auto.py::test_repeated_layers_are_found_without_a_mark_and_left_without_one",
    ),
    _row(
        "Hugging Face as it comes",
        "default configurations: training, and caches in and out",
        "gradients, 1e-5",
        "test_caches.py::test_training_with_the_default_config_equals_eager_through_the_cache_too",
        "test_caches.py::test_a_cache_is_filled_in_place_as_in_eager",
    ),
    _row(
        "generate",
        "greedy, sampling, beams, static cache",
        "tokens",
        "test_caches.py::test_generate_runs_the_program_and_gives_eagers_tokens",
    ),
    _trainer("plain", "as it comes"),
    _trainer("accumulation", "gradient accumulation"),
    _trainer("clipping", "clipping, cosine schedule, warm-up"),
    _trainer("bf16", "bf16", "losses, 5e-3 (bfloat16 has 4e-3)"),
    _trainer("label-smoothing", "label smoothing"),
    _trainer("neftune", "NEFTune"),
    _trainer("checkpointing", "gradient checkpointing"),
    _row(
        "Trainer, 20 steps",
        "evaluates, predicts, saves with its config, resumes, loads the best checkpoint",
        "losses, 1e-5",
        "integrations/test_trainer.py::"
        "test_it_evaluates_predicts_saves_resumes_and_finds_the_best_checkpoint",
    ),
    _row(
        "Trainer, 20 steps",
        '`model.compile(backend="lazyinline")`',
        "losses, 1e-5",
        "integrations/test_trainer.py::"
        "test_a_model_under_torch_compile_with_our_backend_trains_as_in_eager",
    ),
    _row(
        "accelerate",
        "accumulation, clipping, schedule, save_state and load_state; in place and torch.compile",
        "losses, 1e-5",
        "integrations/test_accelerate.py::test_a_loop_with_accumulation_and_clipping_is_eagers",
    ),
    _row(
        "accelerate",
        "bf16",
        "losses, 5e-3 (bfloat16 has 4e-3)",
        "integrations/test_accelerate.py::test_mixed_precision_is_eagers",
    ),
    _row(
        "Lightning",
        "20 steps with clipping, in place and wrapped; a checkpoint, and on from it",
        "losses, 1e-5",
        "integrations/test_lightning.py::test_twenty_steps_are_those_of_eager",
        "integrations/test_lightning.py::"
        "test_a_checkpoint_is_the_models_and_training_goes_on_from_it",
    ),
    _row(
        "TRL",
        "SFTTrainer, 5 steps of padded batches",
        "losses, 1e-5",
        "integrations/test_trl.py::test_five_steps_are_those_of_eager",
    ),
    _row(
        "torch.compile",
        'backend="lazyinline": layers shared, graph breaks Dynamo\'s',
        "gradients, 1e-5",
        "test_dynamo_backend.py::test_layers_share_a_closure_and_train_like_eager",
        "test_dynamo_backend.py::test_graph_breaks_are_dynamos",
        "test_dynamo_backend.py::test_the_name_is_registered_where_pytorch_looks_and_what_it_made_can_be_copied",
    ),
    _row(
        "DDP",
        "around the compiled, compiled around it, in place, compile_step; no_sync, static_graph",
        "parameters, 1e-5",
        "test_around.py::test_models_in_wrappers_train_and_are_saved_as_in_eager[data_parallel]",
    ),
    _row(
        "FSDP2",
        "whole or per block, before and after",
        "parameters, 1e-5",
        "test_around.py::test_models_in_wrappers_train_and_are_saved_as_in_eager[in_shards]",
    ),
    _row(
        "torch.distributed.checkpoint",
        "saved from one, loaded into another, names the model's",
        "outputs, 1e-5",
        "test_around.py::test_models_in_wrappers_train_and_are_saved_as_in_eager[checkpoints]",
    ),
    _row(
        "PEFT",
        "LoRA put in before and after compile; the frozen base stays",
        "losses and gradients, 1e-5",
        "integrations/test_peft.py::test_adapters_train_as_in_eager_and_the_frozen_base_stays",
    ),
    _row(
        "PEFT",
        "adapters switched: back to one costs no compile; switched off",
        "outputs, 1e-5",
        "integrations/test_peft.py::test_an_adapter_that_was_active_before_costs_no_compile",
        "integrations/test_peft.py::test_adapters_that_are_off_for_a_while_are_off",
    ),
    _row(
        "PEFT",
        "merged, taken out again, merged for good; saved and loaded",
        "outputs, 1e-5",
        "integrations/test_peft.py::test_merged_and_taken_out_again_and_merged_for_good",
        "integrations/test_peft.py::test_an_adapter_is_saved_and_loaded_into_a_compiled_base",
    ),
    _row(
        "PEFT",
        "generate, compiled in place or wrapped, or only the base; between steps of training",
        "tokens; losses, 1e-5",
        "integrations/test_peft.py::test_generate_gives_eagers_tokens",
        "integrations/test_peft.py::test_training_and_generating_take_turns",
        "integrations/test_peft.py::test_generate_with_a_learned_prompt_gives_eagers_tokens",
    ),
    _row(
        "lengths that vary",
        "an epoch of padded batches, the last one smaller: two compiles",
        "losses and gradients, 1e-5",
        "test_dynamic.py::test_an_epoch_of_real_batches_costs_two_compiles",
        "test_dynamic.py::test_an_epoch_of_steps_costs_two_compiles",
    ),
    _row(
        "what cannot be captured",
        "runs eagerly between compiled parts; packed sequences, LSTM",
        "gradients, 1e-5",
        "test_fallback.py::test_what_cannot_be_captured_is_eager_between_compiled_parts",
        "test_fallback.py::test_packed_sequences_run_between_compiled_parts",
    ),
    _row(
        "torch.profiler",
        "Chrome traces have a range for each call of a block",
        "no numbers",
        "test_overhead.py::test_a_chrome_trace_has_the_ranges",
    ),
    _row(
        "deepcopy, pickle, torch.save",
        "of a model in place, and of a step that ran",
        "outputs and gradients",
        "test_in_place.py::test_copies_of_it_are_plain_models",
        "test_letting_go.py::test_a_step_that_ran_can_be_copied_and_pickled",
    ),
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Notes how often the test compiles, and for how long: in each process that runs tests."""
    from lazyinline.frontend.compiler import Compiler

    spent: list[float] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Compiler, "compile", _timed(Compiler.compile, spent))
        yield
    item.user_properties.append(("compiles", (len(spent), sum(spent))))


def _timed(original: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        result = original(*args, **kwargs)
        spent.append(time.process_time() - begin)
        return result

    return timed


class Outcomes:
    """Collects what became of each test."""

    def __init__(self) -> None:
        self.by_test: dict[str, Outcome] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            compiles = dict(report.user_properties).get("compiles", (0, 0.0))
            self.by_test[report.nodeid] = Outcome(report.passed, *compiles)

    def of(self, row: Row) -> list[Outcome]:
        """Returns the outcomes of a row's tests; one that did not run did not pass."""
        found = []
        for test in row.tests:
            exact = [self.by_test[test]] if test in self.by_test else []
            cases = [o for name, o in self.by_test.items() if name.startswith(f"{test}[")]
            found += exact or cases or [Outcome(False, 0, 0.0)]
        return found


def line(row: Row, outcomes: Sequence[Outcome]) -> str:
    """Returns a row of the table."""
    works = all(outcome.passed for outcome in outcomes)
    count = sum(outcome.num_compiles for outcome in outcomes)
    seconds = sum(outcome.cpu_s for outcome in outcomes)
    cost = f"{count} compiled, {seconds:.1f} CPU-s" if count else "not counted"
    tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in row.tests)
    verdict = ("yes", row.equal) if works else ("**no**", "**no**")
    return f"| {row.integration} | {row.what} | {' | '.join(verdict)} | {cost} | {tests} |"


def known_lines() -> dict[str, str]:
    """Returns the rows of the page as it is, by what comes before the verdict."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    return {key(line): line for line in lines if line.startswith("| ")}


def key(line: str) -> str:
    return "|".join(line.split("|")[:3])


def main(*wanted: str) -> int:
    known = known_lines() if wanted else {}
    outcomes = Outcomes()
    rows = [row for row in ROWS if not wanted or row.integration in wanted]
    tests = dict.fromkeys(str(ROOT / test) for row in rows for test in row.tests)
    settings = ["-q", "-p", "integrations_table", "-n", "2", "--rootdir", str(ROOT)]
    status = pytest.main([*settings, *tests], plugins=[outcomes])
    known |= {key(new): new for new in (line(row, outcomes.of(row)) for row in rows)}
    lines = [known[key(line(row, []))] for row in ROWS]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Programs for a GPU that is not here: compiled, planned, and run on CPU memory by interpreters."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import decoders as models
import gpu_cases
import pytest
import torch
from conftest import ROOT, selected
from models import Around, Made
from torch import nn

import lazyinline
from lazyinline.backend.gpu.targets import TARGETS
from lazyinline.backend.gpu.torch_cuda import TritonKernel
from lazyinline.backend.kernels import lower, torch_recorder
from lazyinline.backend.kernels.torch_attention import as_on_a_gpu
from lazyinline.backend.launches.kernel_list import View
from lazyinline.backend.link.placement import check_tensors_aligned

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
SMALL = {"hidden": 32, "num_heads": 2, "vocab": 67, "seq": 16, "batch": 2}


@pytest.fixture(scope="module")
def cases(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Any]]:
    """The cases by one process: Triton is told to interpret before it is imported."""
    variables = {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "LAZYINLINE_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
    }
    asked = ["|".join(selected(request, name)) for name in ("case", "how")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu_cases.py"), *asked],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    yield {(one["case"], one["how"]): one for one in found}


# How far off eager, at least and at most (bfloat16 does round), and how large the arena may be.
EXACT, ROUNDED = (0.0, 1e-5, 1.01), (1e-4, 5e-2, 1.05)
CASES = dict.fromkeys(("own decoder", "llama", "gpt2 with dropout"), EXACT)
CASES["own decoder in autocast"] = ROUNDED
CASES["llama in autocast"] = (1e-5, *ROUNDED[1:])


@pytest.mark.parametrize("how", ["training", "inference"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sweep(keep="own decoder-training")
def test_a_gpu_program_on_cpu_memory_equals_eager(cases: Any, case: str, how: str) -> None:
    """Two steps with an update between: loss and gradients; with dropout, a GPU's masks."""
    found, (least, most, arena) = cases[case, how], CASES[case]
    assert least <= found["error"] < most
    assert found["arena"] <= arena
    if case == "llama in autocast":  # keys and values are not repeated for flash attention
        assert found["heads"] == [2, 4]


@pytest.mark.parametrize("how", ["updates"])
@pytest.mark.parametrize("case", ["own decoder"])
def test_gpu_programs_that_update_equal_fused_at_each_rate(cases: Any, case: str, how: str) -> None:
    found = cases[case, how]
    assert found["error"] < 1e-4
    assert "a number that a program for a GPU holds changes" in found["after"]


@pytest.mark.parametrize("how", ["on a GPU"])
@pytest.mark.parametrize("case", ["own decoder", "llama"])
@pytest.mark.sweep(keep="own decoder")
def test_a_model_on_a_gpu_launches_what_a_target_does(cases: Any, case: str, how: str) -> None:
    """The same kernels on the same memory, in the same order; the one loads them, too."""
    found = cases[case, how]
    assert found["same"]
    assert found["loads"]
    for_target, on_gpu = found["launches"]
    assert for_target == on_gpu > 25
    assert found["arenas"][0] == found["arenas"][1] > 0


def test_a_gpu_program_holds_less_with_its_updates_and_none_of_a_drop_ins_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lower, "is_interpreting", lambda: True)  # it takes no machine code
    lazyinline.lazy_inline(models.DecoderBlock)
    model, args = models.llama(1, hidden=128, num_heads=2, vocab=512, seq=16, batch=2)
    apart = compiled_for_nothing(lazyinline.compile_step(model, target="cuda:sm_90"), *args)
    with torch.device("meta"):  # what is larger than this machine has no data
        bare, _ = models.llama(1, hidden=128, num_heads=2, vocab=512, seq=16, batch=2)
    optimizer = torch.optim.AdamW(bare.parameters())
    step = lazyinline.compile_step(bare, target="cuda:sm_90", optimizer=optimizer)
    found = compiled_for_nothing(step, *args)
    assert found.gpu is not None and apart.gpu is not None and not found.update_after
    large = sum(p.numel() * 4 for p in model.parameters() if p.numel() >= 16384)
    assert found.gpu.arena_bytes < apart.gpu.arena_bytes - large / 4
    # The state is memory, too: two tensors for each parameter, and its number of steps.
    state = sum(8 * p.numel() + 4 for p in model.parameters())
    assert found.gpu.given_bytes - apart.gpu.given_bytes == state + 4
    assert found.gpu.prediction.num_launches > apart.gpu.prediction.num_launches

    # Gradients of a drop-in are the user's, beside the arena: no activation lies in their memory.
    report = compiled_for_nothing(lazyinline.compile(model, target="cuda:sm_90"), *args)
    said = f"{report.num_launches} launches come one by one from Python, in no CUDA graph"
    assert str(report).count(said) == 1 and "those of compile_step" in report.why_no_graph
    gpu, gradients = report.gpu, sum(4 * p.numel() for p in model.parameters())
    assert gpu is not None and report.held_bytes is not None
    assert gradients <= gpu.result_bytes <= gradients + 4, "and the loss"
    assert gpu.peak_bytes == report.held_bytes + gpu.given_bytes


def small_step(**options: Any) -> tuple[lazyinline.TrainingStep, tuple[Any, ...]]:
    lazyinline.lazy_inline(models.DecoderBlock)
    model, args = models.llama(1, **SMALL)
    return lazyinline.compile_step(model, **options), args


def compiled_for_nothing(step: Any, *args: Any, **kwargs: Any) -> lazyinline.CompileReport:
    with pytest.raises(lazyinline.PlanError, match="which is not here, so nothing was run"):
        step(*args, **kwargs)
    report = lazyinline.last_report(step)
    assert report is not None
    return report


@pytest.mark.parametrize("target", [target.name for target in TARGETS])
@pytest.mark.sweep(keep="sm_90")
def test_a_step_for_a_target_is_machine_code_whose_memory_is_known_and_is_kept(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, args = small_step(target=target)
    first = compiled_for_nothing(step, *args)
    assert_is_machine_code(first, target)
    assert_memory_is_told(first, args)
    assert not first.cache.not_kept

    def unexpected(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a warm start does not come here")

    for where in (
        "lazyinline.autodiff.derivative.JointTrace",
        "lazyinline.backend.gpu.torch_cuda._compiled",
        "lazyinline.backend.kernels.torch_inductor._compile",
        "lazyinline.backend.link.placement.plan",
    ):
        monkeypatch.setattr(where, unexpected)
    step, args = small_step(target=target)
    second = compiled_for_nothing(step, *args)
    assert second.cache.num_made == 0 < second.cache.num_loaded
    assert not second.cache.not_kept
    assert second.gpu == first.gpu
    assert second.peak_bytes == first.peak_bytes


def assert_is_machine_code(report: lazyinline.CompileReport, target: str) -> None:
    gpu = report.gpu
    assert gpu is not None
    assert gpu.num_built == gpu.num_kernels > 10
    assert gpu.code_bytes > 1000 * gpu.num_kernels
    assert gpu.fits
    assert gpu.target.usable_bytes < gpu.target.memory_bytes - 2**29, "CUDA's context and a margin"
    predicted = gpu.prediction
    assert predicted.cost.seconds <= predicted.expected_s < 10 * predicted.cost.seconds
    assert f"for {target}" in str(report)
    assert "ms as such kernels usually run" in str(report)


def assert_memory_is_told(report: lazyinline.CompileReport, args: tuple[Any, ...]) -> None:
    gpu, model = report.gpu, models.llama(1, **SMALL)[0]
    assert gpu is not None
    held = [*model.parameters(), *model.buffers(), *args]
    # The seed of the backward, and places of 256 bytes.
    given = sum(t.numel() * t.element_size() for t in held)
    assert given <= gpu.given_bytes <= given + 64
    assert gpu.arena_bytes == report.peak_bytes <= 1.01 * report.lower_bound_bytes
    assert gpu.workspace_bytes == gpu.target.workspace_bytes, "one stream has products"
    assert report.peak_bytes % 256 == 0
    planned = gpu.given_bytes + gpu.arena_bytes + gpu.outside_bytes
    assert gpu.peak_bytes == planned + gpu.workspace_bytes
    assert report.held_bytes == gpu.peak_bytes - gpu.given_bytes
    assert any("attention" in name for name in gpu.allocating)


def test_no_gradient_lies_where_a_launch_allocated_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor would write a weight's gradient over that of the keys, which is as large."""
    monkeypatch.setattr(lower, "is_interpreting", lambda: True)
    model, kwargs = gpu_cases.llama()
    model.config.use_cache = False
    step = lazyinline.compile_step(model.bfloat16(), target="cuda:sm_90")
    report = compiled_for_nothing(step, **kwargs)
    assert not report.why_no_graph and report.gpu is not None and not report.gpu.result_bytes
    assert report.gpu.prediction.num_launches == report.num_launches > 50


def attention(query: torch.Tensor, key: torch.Tensor, **options: Any) -> set[str]:
    """Returns the attention that a GPU's program has in place of PyTorch's, and the repeats."""
    attend = partial(nn.functional.scaled_dot_product_attention, is_causal=True, **options)
    model = Around(lambda layers, q, k: attend(q, k, k), nn.Identity())
    (leaf,) = lazyinline.capture(model, (query, key)).closures
    names = [str(node.target) for node in as_on_a_gpu(leaf.module).graph.nodes]
    return {
        n.removeprefix("aten.").removesuffix(".default") for n in names if "att" in n or "rep" in n
    }


def test_attention_on_a_gpu_is_named_in_the_program_and_not_chosen_as_it_runs() -> None:
    """cuDNN's is not there, also where PyTorch would prefer it."""
    query, half = torch.randn(2, 4, 32, 16), torch.bfloat16
    flash, efficient, plain = (
        {f"_scaled_dot_product_{kind}"}
        for kind in ("flash_attention", "efficient_attention", "attention_math")
    )
    assert attention(query.to(half), query[:, :2].to(half), enable_gqa=True) == flash
    assert attention(query, query) == efficient
    assert attention(query.double(), query.double()) == plain
    allowed = torch.backends.cuda
    try:
        allowed.enable_flash_sdp(False)
        assert attention(query.to(half), query.to(half)) == efficient
        repeated = attention(query.to(half), query[:, :2].to(half), enable_gqa=True)
        assert repeated == efficient | {"repeat_interleave.self_int"}
        allowed.enable_mem_efficient_sdp(False)
        assert attention(query.to(half), query.to(half)) == plain
    finally:
        allowed.enable_flash_sdp(True)
        allowed.enable_mem_efficient_sdp(True)


def test_a_kernel_that_is_handed_a_view_from_anywhere_is_compiled_for_that() -> None:
    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        return layers[1](layers[0](torch.tanh(x)[1:]))

    body = lambda self, x: torch.tanh(self.linear(x) * x.sigmoid()) + x.exp()  # noqa: E731
    for is_warm in (False, True):
        parts = (Made(body, linear=nn.Linear(6, 6)) for _ in range(2))
        compiled = lazyinline.compile(Around(forward, *parts), target="cuda:sm_90")
        report = compiled_for_nothing(compiled, torch.randn(3, 6))
        assert (report.cache.num_made == 0) == is_warm
        program = compiled.__dict__["_lazyinline_calls"].entries.first._compiled.runtime.program
        handed = [
            (position in placed.launch.function.aligned_arguments, placed.place(arg).offset_bytes)
            for part in program.layout.parts
            for placed in part.launches
            if isinstance(placed.launch.function, TritonKernel)
            for position, arg in enumerate(placed.launch.args)
            if isinstance(arg, View)
        ]
        assert (False, 24) in handed and (True, 0) in handed
        assert not any(aligned and offset % 16 for aligned, offset in handed)


def test_parameters_that_a_gpu_cannot_load_are_named() -> None:
    flat = torch.zeros(9)
    check_tensors_aligned([flat, flat[4:]], ["weight", "bias"])
    with pytest.raises(lazyinline.PlanError, match="bias begins at an address"):
        check_tensors_aligned([flat, flat[1:]], ["weight", "bias"])


def test_what_copies_misaligned_inputs_is_seen_through() -> None:
    from torch._inductor.utils import align_inputs_from_check_idxs

    def generated(inputs: list[Any]) -> list[Any]:
        return inputs

    aligned = align_inputs_from_check_idxs(generated, [0], set())
    assert aligned is not generated
    assert torch_recorder._function_of(aligned) == (None, generated)
    assert not torch_recorder.can_record(lambda inputs: generated(inputs))

"""Runs in a process of its own, with TRITON_INTERPRET=1: GPU programs on CPU memory, beside eager.

Is called with cases and ways, ``|`` between them, or with two empty texts for all. Prints a line of
JSON for each case: the largest relative errors, and the arena's ratio.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import decoders as models
import fake_gpu
import pytest
import torch
import triton_on_cpu
from arena_proof import check_no_overlap
from programs import move_to
from torch import nn

import lazyinline
from lazyinline import lazy_inline
from lazyinline.backend.gpu.torch_cuda import LoadedKernel, TritonKernel
from lazyinline.backend.launches.kernel_list import Launch, View
from lazyinline.backend.run.planned import PlannedProgram

TARGET = "cuda:sm_90"
VOCABULARY = 67
SMALL = {"hidden": 16, "num_heads": 2, "vocab": VOCABULARY, "seq": 8, "batch": 2}
Made = tuple[nn.Module, dict[str, torch.Tensor]]


def own_decoder() -> Made:
    model, (ids, targets) = models.llama(1, **SMALL)
    return model, {"ids_BT": ids, "targets_BT": targets}


def in_autocast() -> Made:
    model, kwargs = own_decoder()
    return models.InAutocast(model), kwargs


def llama_in_autocast() -> Made:
    """Of two heads that share keys and values, which flash attention takes as they are."""
    model, kwargs = llama()
    model.config.use_cache = False
    return models.InAutocast(model), kwargs


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM  # which takes seconds

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config), tokens()


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=32)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # or its first forward warns, which is printing
    return model, tokens()


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


CASES: dict[str, Callable[[], Made]] = {
    "own decoder": own_decoder,
    "own decoder in autocast": in_autocast,
    "llama": llama,
    "gpt2 with dropout": gpt2,
    "llama in autocast": llama_in_autocast,
}


def main() -> None:
    lazy_inline(models.DecoderBlock)
    library = triton_on_cpu.with_operators_of_a_gpu()
    names, hows = (text.split("|") if text else [] for text in sys.argv[1:])
    for name in names or CASES:
        torch.manual_seed(0)
        model, kwargs = CASES[name]()
        begin = time.process_time()
        ways = {"training": trained, "inference": inferred}
        ways |= {"updates": updated} if name == "own decoder" else {}
        ways |= {"on a GPU": as_on_a_gpu} if name in ("own decoder", "llama") else {}
        for how, run in ways.items():
            if not hows or how in hows:
                print(json.dumps({"case": name, "how": how, **run(model, kwargs)}), flush=True)
        print(f"{name}: {time.process_time() - begin:.1f} CPU-s", flush=True)
    del library


def as_on_a_gpu(model: nn.Module, kwargs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The launches of a step for a target, and of a model on such a GPU: kernels by their text."""
    if hasattr(model, "config"):
        model.config.use_cache = False  # an empty tensor on the GPU, which would be allocated
    _, for_target = step_on_cpu_memory(model, kwargs)
    runs = [lambda: lazyinline.compile_step(model)(**kwargs)] * 2
    (on_gpu, _), (warm, report) = (fake_gpu.program_on_a_gpu(run, TARGET) for run in runs)
    first, second, third = (
        [launched(placed.launch) for part in program.layout.parts for placed in part.launches]
        for program in (for_target, on_gpu, warm)
    )
    kept = report.cache
    assert first == third and not kept.num_made and kept.num_loaded and not kept.not_kept, kept
    place = on_gpu._tools.place
    loads = (place.load, place.graphs, place.first_launches) == (LoadedKernel, "captured", "apart")
    arenas = [program.arena_bytes for program in (for_target, on_gpu)]
    return {
        "launches": [len(first), len(second)],
        "same": first == second,
        "arenas": arenas,
        "loads": loads,
    }


def launched(launch: Launch) -> tuple[Any, ...]:
    function = launch.function
    text = function.content if isinstance(function, TritonKernel) else str(function)
    return text, [(v.dtype, v.shape, v.stride) for v in launch.views()]


def trained(model: nn.Module, kwargs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Two steps of both, with an update between."""
    model, reference = copy.deepcopy(model).train(), copy.deepcopy(model).train()
    step, program = step_on_cpu_memory(model, kwargs)
    errors = [
        step_error(lambda: step(**kwargs), model, reference, kwargs, seed) for seed in range(2)
    ]
    return {"error": max(errors), **memory(program)}


def step_on_cpu_memory(
    model: nn.Module, kwargs: dict[str, torch.Tensor], recompute: lazyinline.Budget | None = None
) -> tuple[lazyinline.TrainingStep, PlannedProgram]:
    step: Any = lazyinline.compile_step(model, target=TARGET, recompute=recompute)
    runner = lambda: step.entries.first._compiled.runner  # noqa: E731
    return step, compiled_for_nothing(lambda: step(**kwargs), runner)


def step_error(
    step: Callable[[], torch.Tensor],
    model: nn.Module,
    reference: nn.Module,
    kwargs: dict[str, torch.Tensor],
    seed: int,
) -> float:
    """Runs a step of both, then updates both."""
    triton_on_cpu.GENERATOR.manual_seed(seed)
    loss = step()
    triton_on_cpu.GENERATOR.manual_seed(seed)
    reference.zero_grad()
    with triton_on_cpu.AsOnAGpu():
        expected = loss_of(reference(**kwargs))
    expected.backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    errors = [error(loss, expected.detach())]
    errors += [error(p.grad, q.grad) for p, q in pairs]
    with torch.no_grad():
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter -= 0.1 * parameter.grad
    return max(errors)


def updated(model: nn.Module, kwargs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Three steps with the update in them, beside fused=True; the learning rate changes in each.

    From the second on a stand-in for a CUDA graph launches the update with what it was handed when
    it was captured.
    """
    model, reference = copy.deepcopy(model).train(), copy.deepcopy(model).train()
    ours = torch.optim.AdamW(model.parameters(), eps=1e-3)
    theirs = torch.optim.AdamW(reference.parameters(), eps=1e-3, fused=True)
    step = lazyinline.compile_step(model, target=TARGET, optimizer=ours)
    program = compiled_for_nothing(
        lambda: step(**kwargs), lambda: step.entries.first._compiled.runner
    )
    assert not ours.state, "a step that did not run made state"
    move_to(program, replace(triton_on_cpu.ON_CPU_MEMORY, graphs="captured"))
    program._capture = captured
    errors = []
    for number in range(3):
        for one in (ours, theirs):
            one.param_groups[0]["lr"] = 0.01 * (number + 1)
        loss = step(**kwargs)
        theirs.zero_grad()
        with triton_on_cpu.AsOnAGpu():
            expected = loss_of(reference(**kwargs))
        expected.backward()
        theirs.step()
        errors.append(error(loss, expected.detach()))
    assert program.why_no_graph == ""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    errors += [error(p, q) for p, q in pairs]
    ours.param_groups[0]["betas"] = (0.8, 0.99)  # which a graph would not see
    compiled_for_nothing(lambda: step(**kwargs), lambda: program)
    return {"error": max(errors), "after": step.last_report.update_after, **memory(program)}


def captured(run: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Keeps what updates are handed, and launches them with that."""
    fused, handed = torch._fused_adamw_, list[Any]()
    patch = pytest.MonkeyPatch()
    with patch.context() as meanwhile:  # capture launches nothing
        meanwhile.setattr(torch, "_foreach_add_", lambda *args: None)
        meanwhile.setattr(torch, "_fused_adamw_", lambda *a, **k: handed.append((a, k)))
        run()

    def replay() -> Any:
        calls = iter(handed)
        with patch.context() as meanwhile:
            kept = lambda *_, **__: (lambda a, k: fused(*a, **k))(*next(calls))  # noqa: E731
            meanwhile.setattr(torch, "_fused_adamw_", kept)
            return run()

    return replay


def inferred(model: nn.Module, kwargs: dict[str, torch.Tensor]) -> dict[str, float]:
    model.eval()
    compiled = lazyinline.compile(model, target=TARGET)
    with torch.no_grad():
        program = compiled_for_nothing(
            lambda: compiled(**kwargs),
            lambda: compiled.__dict__["_lazyinline_calls"].entries.first._compiled.runtime.program,
        )
        found, expected = loss_of(compiled(**kwargs)), loss_of(model(**kwargs))
    return {"error": error(found, expected), **memory(program)}


def compiled_for_nothing(
    call: Callable[[], Any], made: Callable[[], PlannedProgram]
) -> PlannedProgram:
    """Compiles, which ends in an error, for the GPU is not here; then has it run on CPU memory."""
    try:
        call()
    except lazyinline.PlanError as refused:
        assert TARGET in str(refused), refused
    else:
        raise AssertionError("a program for a GPU ran without one")
    program = made()
    move_to(program, triton_on_cpu.ON_CPU_MEMORY)
    return program


def memory(program: PlannedProgram) -> dict[str, Any]:
    rows = [
        (b.birth, b.death, program.offsets[i], b.num_bytes)
        for i, b in enumerate(program.layout.instances)
        if b.kind == "arena" and b.device is None
    ]
    check_no_overlap(*zip(*rows, strict=True))
    assert not any(offset % 256 for _, _, offset, _ in rows)
    for part in program.layout.parts:
        for launch in (one.launch for one in part.launches):
            if isinstance(launch.function, TritonKernel):  # Inductor's names say what is written
                names = zip(launch.function.argument_names, launch.args, strict=False)
                assert all("_ptr" in name for name, value in names if isinstance(value, View))
    flash = [x.launch for part in program.layout.parts for x in part.launches]
    flash = [x for x in flash if x.name.startswith("_scaled_dot_product_flash_attention")]
    heads = sorted({v.shape[1] for x in flash for v in x.args[:3] if isinstance(v, View)})
    return {"arena": program.plan.ratio, "launches": program.num_launches, "heads": heads}


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


if __name__ == "__main__":
    main()

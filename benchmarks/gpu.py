"""Everything that must hold on a GPU, in one command and under eight minutes.

    python benchmarks/gpu.py                        # on the first GPU
    python benchmarks/gpu.py --json build/gpu.json
    python benchmarks/gpu.py --device cpu --small   # tries the script itself, where there is none

Ten families beside eager under one seed; then two decoders: seconds to compile, time of a step in
turns, and the memory that the allocator counts beside the plan. What fails is said, and the rest
goes on; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from decoders import Decoder, DecoderBlock, llama
from torch import nn
from zoo import ASKED, Family, scalar

import lazyinline

TOLERANCE = 1e-4  # products in float32; what adds up in another order differs by less
NUM_FAMILIES = 10
PROBLEMS: dict[str, dict[str, int]] = {
    "24 layers, hidden 1024, seq 1024": {
        "num_layers": 24,
        "hidden": 1024,
        "num_heads": 16,
        "seq": 1024,
        "batch": 4,
        "vocab": 32000,
    },
    "overhead-bound": {"num_layers": 8, "hidden": 64, "num_heads": 2, "seq": 16, "vocab": 64},
}
SMALL: dict[str, dict[str, int]] = {
    "small": {"num_layers": 2, "hidden": 32, "num_heads": 2, "seq": 8, "vocab": 64}
}
Step = Callable[[], object]


@dataclass
class Findings:
    """All that was found.

    Attributes:
        machine: the device, and PyTorch.
        errors: largest relative error of each family, or what went wrong.
        rows: for each problem and way: first call, step, memory.
        failures: what does not hold.
    """

    machine: str
    errors: dict[str, float | str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def tried(self, what: str, function: Callable[[], None]) -> None:
        """Runs a part; if it fails, that is a finding, and the rest goes on."""
        try:
            function()
        except Exception as error:
            traceback.print_exc(limit=-4)
            self.failures.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}")


# ---- equal to eager --------------------------------------------------------------------------


def on(device: torch.device, value: Any) -> Any:
    """Moves a tensor, or the tensors in a mapping."""
    if isinstance(value, Mapping):
        return {name: on(device, inner) for name, inner in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


def family_error(family: Family, device: torch.device) -> float:
    """Returns the largest relative error of loss and gradients in two training steps."""
    model, inputs = family.build()
    model, inputs = model.to(device).train(), on(device, inputs)
    reference = copy.deepcopy(model)
    compiled = lazyinline.compile(model, fallback="error")
    worst = 0.0
    for seed in (1, 2):
        losses = []
        for run, owner in ((reference, reference), (compiled, model)):
            transformers.set_seed(seed)
            owner.zero_grad()
            loss = scalar(run(**inputs))
            loss.backward()
            losses.append(loss.detach())
        worst = max(worst, relative_error(losses[1], losses[0], losses[0].norm()))
        scale = max(p.grad.norm() for p in reference.parameters() if p.grad is not None)
        for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert (found.grad is None) == (expected.grad is None)
            if expected.grad is not None:
                worst = max(worst, relative_error(found.grad, expected.grad, scale))
    return worst


def relative_error(
    found: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor | float
) -> float:
    """Returns the distance of two tensors on a scale, or on their own if that is larger."""
    return float((found - expected).norm() / max(expected.norm(), 1e-3 * scale))


def check_families(findings: Findings, device: torch.device, count: int) -> None:
    """Compares the zoo's first families with eager."""
    for family in ASKED[:count]:

        def compare(family: Family = family) -> None:
            error = findings.errors[family.name] = family_error(family, device)
            print(f"  {family.name:<16}{error:.1e}", flush=True)
            if not error < TOLERANCE:
                findings.failures.append(f"{family.name} differs from eager by {error:.1e}")

        findings.tried(family.name, compare)


# ---- time and memory -------------------------------------------------------------------------


@dataclass
class Way:
    """One way to run a step; ``planned`` tells what it says that it holds."""

    step: Step
    planned: Callable[[], int | None] = lambda: None
    first_s: float = 0.0
    ms: list[float] = field(default_factory=list)


def eager_step(model: nn.Module, run: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> Step:
    """Returns a forward and a backward through autograd, into no gradients."""
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        run(*args).backward()

    return step


def per_block(model: Decoder) -> Decoder:
    """Compiles each block on its own."""
    for block in model.blocks:
        block.compile(fullgraph=True)
    return model


def ways(sizes: Mapping[str, int], device: torch.device) -> dict[str, Callable[[], Way]]:
    """Returns what makes each way, with a model of its own."""

    def made() -> tuple[Any, tuple[Any, ...]]:
        model, args = llama(**sizes)
        model = model.to(device, torch.bfloat16 if device.type == "cuda" else None)
        return model, tuple(on(device, arg) for arg in args)

    def through(compiled: Callable[[Any], Any]) -> Way:
        model, args = made()
        return Way(eager_step(model, compiled(model), args))

    def planned_step() -> Way:
        model, args = made()
        step = lazyinline.compile_step(model)

        def planned() -> int | None:
            stats = step.stats
            if step.last_report.unplanned or stats is None:
                return None
            given = [*model.parameters(), *model.buffers(), *args]
            # Ours is a copy of the batch, too.
            own = sum(t.numel() * t.element_size() for t in (*given, *args))
            return own + stats.peak_bytes + stats.outside_bytes

        return Way(lambda: step(*args), planned)

    return {
        "eager": functools.partial(through, lambda model: model),
        "torch.compile": functools.partial(through, lambda m: torch.compile(m, fullgraph=True)),
        "reduce-overhead": functools.partial(
            through, lambda m: torch.compile(m, fullgraph=True, mode="reduce-overhead")
        ),
        "per block": functools.partial(through, per_block),
        "lazyinline.compile": functools.partial(through, lazyinline.compile),
        "lazyinline.compile_step": planned_step,
    }


def timed_ms(step: Step, device: torch.device) -> float:
    """Runs a step; returns its time on the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(
    findings: Findings, problem: str, sizes: Mapping[str, int], device: torch.device, rounds: int
) -> None:
    """Compiles every way, times them in turns, then counts the memory of each."""
    torch.compiler.reset()
    found: dict[str, Way] = {}
    for name, make in ways(sizes, device).items():

        def start(name: str = name, make: Callable[[], Way] = make) -> None:
            way = make()
            begin = time.perf_counter()
            way.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            way.first_s = time.perf_counter() - begin
            for _ in range(3):
                way.step()
            found[name] = way

        findings.tried(f"{problem}, {name}", start)
    for _ in range(rounds):
        for way in found.values():
            way.ms.append(timed_ms(way.step, device))
    for name, way in found.items():
        row = {
            "problem": problem,
            "way": name,
            "first_s": way.first_s,
            "min_ms": min(way.ms),
            "median_ms": statistics.median(way.ms),
        }
        findings.rows.append(row)
        print(
            f"  {name:<26}first {way.first_s:>7.1f} s   step {row['min_ms']:>9.3f} min "
            f"{row['median_ms']:>9.3f} median ms",
            flush=True,
        )
    judge_times(findings, problem, found)
    if device.type == "cuda":
        findings.tried(f"{problem}, memory", lambda: check_memory(findings, problem, sizes, device))


def judge_times(findings: Findings, problem: str, found: Mapping[str, Way]) -> None:
    """Says if a step is slower than the best of the others."""
    others = [min(way.ms) for name, way in found.items() if not name.startswith("lazyinline")]
    ours = found.get("lazyinline.compile_step")
    if ours is not None and others and min(ours.ms) > 1.02 * min(others):
        findings.failures.append(
            f"{problem}: a step takes {min(ours.ms):.3f} ms, the best other {min(others):.3f}"
        )


def check_memory(
    findings: Findings, problem: str, sizes: Mapping[str, int], device: torch.device
) -> None:
    """Compares what the allocator counts at a step's peak with the plan; nothing else is there."""
    torch.compiler.reset()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    way = ways(sizes, device)["lazyinline.compile_step"]()
    for _ in range(2):
        way.step()
    torch.cuda.reset_peak_memory_stats(device)
    way.step()
    held, planned = torch.cuda.max_memory_allocated(device) - before, way.planned()
    if planned is None:
        findings.failures.append(f"{problem}: memory is not planned")
        return
    print(f"  memory: planned {planned / 2**20:.1f} MiB, counted {held / 2**20:.1f}", flush=True)
    findings.rows.append({"problem": problem, "planned_bytes": planned, "held_bytes": held})
    if abs(held - planned) > 0.02 * planned:
        findings.failures.append(f"{problem}: planned {planned} bytes, counted {held}")


def main() -> None:
    """Prints what was found; exits with 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="default: the first GPU")
    parser.add_argument("--small", action="store_true", help="to try the script itself")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            sys.exit("There is no GPU here. --device cpu --small tries the script itself.")
        device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    findings = Findings(f"{name}, PyTorch {torch.__version__}")
    print(findings.machine, flush=True)
    lazyinline.lazy_inline(DecoderBlock)
    start = time.perf_counter()
    check_families(findings, device, 2 if options.small else NUM_FAMILIES)
    for problem, sizes in (SMALL if options.small else PROBLEMS).items():
        print(problem, flush=True)
        measure(findings, problem, sizes, device, 2 if options.small else options.rounds)
    print(f"{time.perf_counter() - start:.0f} s")
    print("\n".join(["all holds"] if not findings.failures else findings.failures))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(asdict(findings), file, indent=2)
    sys.exit(bool(findings.failures))


if __name__ == "__main__":
    main()

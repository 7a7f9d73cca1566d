"""Everything that must hold on a GPU, in parts of under four minutes, each a process of its own.

    python benchmarks/gpu.py                             # all parts, one after the other
    python benchmarks/gpu.py --only facts hazards        # also: ceilings numbers memory times
    python benchmarks/gpu.py --json build/gpu.jsonl      # also into a file, line by line
    python benchmarks/gpu.py --device cpu --small        # tries the script itself, without a GPU

It needs no network and no installation: PyTorch 2.11 or later with Triton, numpy, tqdm, pytest, and
transformers for the families. One line of JSON per finding is printed as soon as it is there, so
that what is killed has told what it found: ``{"part": ..., "what": ..., "ok": true, ...}``. What
does not get its turn within a part's limit is told as skipped. The exit status is 1 if something
does not hold.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
if importlib.util.find_spec("lazyinline") is None:  # to install it would need a network
    from link_tree import make_link_tree

    sys.path.insert(0, str(make_link_tree()))

from decoders import Decoder, DecoderBlock, llama  # noqa: E402

import lazyinline  # noqa: E402
from lazyinline.backend.gpu.targets import CONTEXT_BYTES  # noqa: E402

TOLERANCE = 1e-4  # products in float32; what adds up in another order differs by less
NUM_FAMILIES = 10
LIMIT_S = 225.0
PARTS = ("facts", "ceilings", "hazards", "numbers", "memory", "times")
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
# Planned for an H100 at about 64 GiB of the 76.9 that are usable there.
LARGE = {"most of 80 GB": {**PROBLEMS["24 layers, hidden 1024, seq 1024"], "batch": 54}}
SMALL: dict[str, dict[str, int]] = {
    "small": {"num_layers": 2, "hidden": 32, "num_heads": 2, "seq": 8, "vocab": 64}
}
Step = Callable[[], object]


class Findings:
    """Tells what is found, a line of JSON each.

    Args:
        part: that runs now.
        limit_s: of its time; what comes later is skipped.
        file: where lines are added, too.

    Attributes:
        num_failed: of what was tried so far.
    """

    def __init__(self, part: str, limit_s: float, file: pathlib.Path | None) -> None:
        self._part, self.num_failed = part, 0
        self._end = time.monotonic() + limit_s
        self._file = file

    def say(self, what: str, *, ok: bool = True, **numbers: Any) -> None:
        """Tells one."""
        self.num_failed += not ok
        line = json.dumps({"part": self._part, "what": what, "ok": ok, **numbers}, default=str)
        print(line, flush=True)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def tried(self, what: str, function: Callable[[], Mapping[str, Any] | None]) -> None:
        """Runs one thing; an error is a finding, and the rest goes on."""
        if time.monotonic() > self._end:
            self.say(what, ok=False, skipped="the part's time is over")
            return
        start = time.monotonic()
        try:
            numbers = dict(function() or {})
        except Exception as error:
            traceback.print_exc(limit=-4)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            numbers = {"ok": False, "error": reason}
        self.say(what, seconds=round(time.monotonic() - start, 2), **numbers)


# ---- facts, and what this board reaches ------------------------------------------------------


def facts(findings: Findings, device: torch.device) -> None:
    """Tells what is here."""
    findings.say("versions", torch=torch.__version__, cuda=torch.version.cuda, python=sys.version)
    if device.type != "cuda":
        return
    told = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    findings.say(
        "device",
        name=told.name,
        capability=[told.major, told.minor],
        multiprocessors=told.multi_processor_count,
        total_bytes=told.total_memory,
        free_bytes_with_a_context=free,
        context_bytes=total - free,
        cudnn=torch.backends.cudnn.version(),
        devices=torch.cuda.device_count(),
    )
    if shutil.which("nvidia-smi"):
        findings.say("nvidia-smi", text=subprocess.getoutput("nvidia-smi -q -d CLOCK,POWER")[:2000])
    findings.tried("attention that PyTorch chooses", lambda: chosen_attention(device))
    x = torch.ones(4096, 4096, device=device, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated(device)
    y = x @ x
    grown = torch.cuda.memory_allocated(device) - before - y.numel() * y.element_size()
    findings.say("memory that cuBLAS works in", bytes=grown)


def chosen_attention(device: torch.device) -> dict[str, Any]:
    """Returns the operators that a profiler sees for causal attention, plain and grouped."""
    found = {}
    for name, num_keys in (("plain", 16), ("grouped", 4)):
        q = torch.randn(2, 16, 1024, 64, device=device, dtype=torch.bfloat16)
        k = torch.randn(2, num_keys, 1024, 64, device=device, dtype=torch.bfloat16)
        with torch.profiler.profile() as profile:
            nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        found[name] = [e.key for e in profile.key_averages() if "_attention" in e.key]
    return found


def ceilings(findings: Findings, device: torch.device) -> None:
    """Measures what this board copies and multiplies, for the shares of peaks in targets.py."""
    is_cuda = device.type == "cuda"
    x = torch.empty(2**28 if is_cuda else 2**20, device=device)
    y, size = torch.empty_like(x), 8192 if is_cuda else 256

    def copied() -> dict[str, float]:
        seconds = min(timed_ms(lambda: y.copy_(x), device) for _ in range(10)) / 1e3
        return {"bytes_per_s": 2 * x.numel() * 4 / seconds}

    findings.tried("copy", copied)
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(size, size, device=device).to(dtype)

        def multiplied(a: torch.Tensor = a) -> dict[str, float]:
            seconds = min(timed_ms(lambda: a @ a, device) for _ in range(10)) / 1e3
            return {"flops_per_s": 2 * size**3 / seconds}

        findings.tried(f"product in {dtype}", multiplied)


# ---- hazards, numbers, memory: the cases of pytest -m gpu ------------------------------------


def cases(findings: Findings, functions: tuple[Any, ...]) -> None:
    """Runs cases of the tests."""
    for case in functions:
        findings.tried(case.__name__.removeprefix("test_").replace("_", " "), case)


def hazards(findings: Findings, device: torch.device) -> None:
    """Runs what would go wrong first, then a small step under NVIDIA's sanitizer, if it is here."""
    import test_on_gpu

    if device.type != "cuda":
        cases(findings, test_on_gpu.HAZARDS[:1])
        return
    cases(findings, test_on_gpu.HAZARDS)
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        findings.say("compute-sanitizer", ok=False, skipped="it is not installed")
        return
    for check in ("memcheck", "initcheck"):
        findings.tried(f"compute-sanitizer {check}", functools.partial(sanitized, tool, check))


def sanitized(tool: str, check: str) -> dict[str, Any]:
    """Runs a small step under a tool of NVIDIA's."""
    command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, __file__]
    done = subprocess.run(
        [*command, "--only", "step"], capture_output=True, text=True, timeout=100, check=False
    )
    return {"ok": done.returncode == 0, "rc": done.returncode, "tail": done.stdout[-1500:]}


def small_step(findings: Findings, device: torch.device) -> None:
    """Runs three steps of two small layers: for a sanitizer."""

    def three() -> None:
        model, args = llama(**SMALL["small"])
        step = lazyinline.compile_step(model.to(device))
        for _ in range(3):
            step(*(on(device, arg) for arg in args))

    findings.tried("three steps", three)


def numbers(findings: Findings, device: torch.device, count: int) -> None:
    """Compares cases, then families of the zoo, with eager."""
    import test_on_gpu

    cases(findings, test_on_gpu.NUMBERS[: None if device.type == "cuda" else 2])
    from zoo import ASKED  # which needs transformers

    for family in ASKED[:count]:

        def compare(family: Any = family) -> dict[str, Any]:
            error = family_error(family, device)
            return {"ok": error < TOLERANCE, "error": error}

        findings.tried(family.name, compare)


def memory(findings: Findings, device: torch.device) -> None:
    """Compares what is held with what is planned, in a process that did nothing before."""
    import test_on_gpu

    if device.type != "cuda":
        return
    cases(findings, test_on_gpu.MEMORY)
    for problem, sizes in (*PROBLEMS.items(), *LARGE.items()):
        findings.tried(problem, functools.partial(held_memory, sizes, device))


def held_memory(sizes: Mapping[str, int], device: torch.device) -> dict[str, Any]:
    """Returns what the allocator and the driver count for a captured step, and what is planned."""
    torch.cuda.empty_cache()
    before, free_before = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
    way = ways(sizes, device)["lazyinline.compile_step"]()
    for _ in range(3):
        way.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated(device) - before
    taken = free_before - torch.cuda.mem_get_info(device)[0]
    segments = torch.cuda.memory_snapshot()
    private = sum(s["total_size"] for s in segments if s.get("segment_pool_id", (0, 0)) != (0, 0))
    planned = way.planned()
    assert planned is not None, "memory is not planned"
    # The graph's own pool holds what launches allocate and cuBLAS's memory, in pieces of 2 MiB.
    return {
        # Modules of kernels are loaded as they are first launched.
        "ok": held <= 1.02 * planned + 2**21 and taken <= 1.02 * planned + CONTEXT_BYTES,
        "planned_bytes": planned,
        "allocated_bytes": held,
        "private_pool_bytes": private,
        "taken_from_driver_bytes": taken,
    }


def on(device: torch.device, value: Any) -> Any:
    """Moves a tensor, or the tensors in a mapping."""
    if isinstance(value, Mapping):
        return {name: on(device, inner) for name, inner in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


def family_error(family: Any, device: torch.device) -> float:
    """Returns the largest relative error of loss and gradients in two training steps."""
    import transformers
    from zoo import scalar

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


# ---- times -----------------------------------------------------------------------------------


@dataclass
class Way:
    """One way to run a step; ``planned`` tells what it says that it holds."""

    step: Step
    planned: Callable[[], int | None] = lambda: None
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
        step(*args)

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
        # Last: it measures ways to multiply, which may take what is left of the part's time.
        "max-autotune": functools.partial(
            through, lambda m: torch.compile(m, fullgraph=True, mode="max-autotune")
        ),
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


def times(
    findings: Findings, problems: Mapping[str, Mapping[str, int]], device: torch.device
) -> None:
    """Times all ways in turns, then traces a step beside what is predicted for it."""
    for problem, sizes in problems.items():
        torch.compiler.reset()
        found: dict[str, Way] = {}
        for name, make in ways(sizes, device).items():

            def start(
                name: str = name, make: Callable[[], Way] = make, found: dict[str, Way] = found
            ) -> dict[str, Any]:
                begin = time.perf_counter()
                way = make()  # ours runs a step here
                way.step()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                first_s = time.perf_counter() - begin
                for _ in range(3):
                    way.step()
                found[name] = way
                return {"first_s": first_s}

            findings.tried(f"{problem}, {name}, first call", start)
        for _ in range(20 if device.type == "cuda" else 2):
            for way in found.values():
                way.ms.append(timed_ms(way.step, device))
        best = min((min(w.ms) for n, w in found.items() if "lazyinline" not in n), default=0.0)
        for name, way in found.items():
            row = {"min_ms": min(way.ms), "median_ms": statistics.median(way.ms)}
            # Two runs of one program differ by as much.
            is_slow = name == "lazyinline.compile_step" and min(way.ms) > 1.02 * best
            findings.say(f"{problem}, {name}", ok=not is_slow or device.type != "cuda", **row)
        if (ours := found.get("lazyinline.compile_step")) is not None:
            traced = functools.partial(kernels_of, ours.step, sizes, device)
            findings.tried(f"{problem}, kernels", traced)


def kernels_of(step: Step, sizes: Mapping[str, int], device: torch.device) -> dict[str, Any]:
    """Returns the time of each kernel of a step, and what is predicted for all of them."""
    with torch.profiler.profile() as profile:
        step()
    rows = {
        e.key: (e.count, getattr(e, "self_device_time_total", 0.0)) for e in profile.key_averages()
    }
    largest = dict(sorted(rows.items(), key=lambda row: -row[1][1])[:25])
    total = sum(us for _, us in rows.values())
    return {"us": total, **predicted(sizes, device), "count_and_us_by_kernel": largest}


def predicted(sizes: Mapping[str, int], device: torch.device) -> dict[str, Any]:
    """Returns what is predicted for the same step on the target that this GPU is."""
    if device.type != "cuda":
        return {}
    major, minor = torch.cuda.get_device_capability(device)
    model, args = llama(**sizes)
    step = lazyinline.compile_step(model.to(torch.bfloat16), target=f"cuda:sm_{major}{minor}")
    try:
        step(*args)
    except lazyinline.PlanError as error:
        if step.last_report is None or step.last_report.gpu is None:
            return {"not_predicted": str(error)}
    told = step.last_report.gpu.prediction
    return {"least_us": told.cost.seconds * 1e6, "expected_us": told.expected_s * 1e6}


def main() -> None:
    """Runs the parts that are asked for, each in a process of its own if there are several."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="default: the first GPU")
    parser.add_argument("--small", action="store_true", help="to try the script itself")
    parser.add_argument("--only", nargs="+", default=PARTS, choices=(*PARTS, "step"))
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a part")
    parser.add_argument("--json", type=pathlib.Path, help="a file that lines are added to")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            sys.exit("There is no GPU here. --device cpu --small tries the script itself.")
        device = torch.device("cuda", torch.cuda.current_device())
    if len(options.only) > 1:
        sys.exit(any([run_apart(part, options) for part in options.only]))
    (part,) = options.only
    findings = Findings(part, options.limit, options.json)
    lazyinline.lazy_inline(DecoderBlock)
    parts: dict[str, Callable[[], None]] = {
        "facts": lambda: facts(findings, device),
        "ceilings": lambda: ceilings(findings, device),
        "hazards": lambda: hazards(findings, device),
        "numbers": lambda: numbers(findings, device, 1 if options.small else NUM_FAMILIES),
        "memory": lambda: memory(findings, device),
        "times": lambda: times(findings, SMALL if options.small else PROBLEMS, device),
        "step": lambda: small_step(findings, device),
    }
    parts[part]()
    sys.exit(findings.num_failed > 0)


def run_apart(part: str, options: argparse.Namespace) -> int:
    """Runs one part; returns its status."""
    command = [sys.executable, __file__, "--only", part, "--limit", str(options.limit)]
    command += ["--device", options.device, *["--small"] * options.small]
    command += ["--json", str(options.json)] if options.json else []
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    main()

"""Recompute policies side by side: peak, saved bytes, extra FLOPs, time of a training step.

    python benchmarks/recompute.py                                    # own decoder, N=4, hidden 128
    python benchmarks/recompute.py --layers 24 --hidden 512 --seq 512 --batch 4      # slow
    python benchmarks/recompute.py --model hf-llama
    python benchmarks/recompute.py --model gpt --dropout 0.1          # gradients under dropout
    python benchmarks/recompute.py --sweep 8                          # budgets, measured peaks
    python benchmarks/recompute.py --solve 8 96                       # time to spread a budget

One process, one thread. Peaks are measured by the profiler: gradients are None before the step, and
lazyinline makes its arena inside it. Step times are CPU milliseconds, minima of interleaved rounds.
Gradients are compared with eager's under the same seed.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from memory_events import MemoryUse, memory_use
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazyinline
from lazyinline import Budget
from lazyinline.frontend.models import DecoderBlock, GptBlock, gpt, llama

SEED = 5
MIB = 2**20
MAX_ARENA_BYTES = 2**33


@dataclass
class Way:
    """One way to run a step; ``release`` gives back the memory it holds between steps."""

    name: str
    model: nn.Module
    step: Callable[[], object]
    release: Callable[[], object] = lambda: None
    reported_bytes: int = 0
    saved_bytes: int = 0
    extra_flops: int = 0
    peak_bytes: int = 0
    error: float = 0.0
    best_ms: float = float("inf")

    def before(self) -> None:
        """Makes the next step start without gradients."""
        self.model.zero_grad(set_to_none=True)


def build(options: argparse.Namespace) -> tuple[nn.Module, dict[str, Any], str]:
    """Returns a model that computes its loss, its arguments, and the name of its layer list."""
    sizes = {"num_layers": options.layers, "hidden": options.hidden, "seq": options.seq}
    sizes |= {"batch": options.batch, "num_heads": options.hidden // 64 or 1}
    if options.model == "hf-llama":
        return hf_llama(options)
    if options.model == "gpt":
        lazyinline.lazy_inline(GptBlock)
        model, args = gpt(**sizes, dropout=options.dropout)
    else:
        lazyinline.lazy_inline(DecoderBlock)
        model, args = llama(**sizes)
    return model, dict(zip(("ids_BT", "targets_BT"), args, strict=True)), "blocks"


def hf_llama(options: argparse.Namespace) -> tuple[nn.Module, dict[str, Any], str]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    lazyinline.lazy_inline(LlamaDecoderLayer)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64 or 1,
        num_key_value_heads=options.hidden // 64 or 1,
        vocab_size=1000,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, 1000, (options.batch, options.seq))
    return model, {"input_ids": ids, "labels": ids}, "model.layers"


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def twin(model: nn.Module) -> nn.Module:
    """Another model with the same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(t): t for t in tensors})


def eager_way(name: str, model: nn.Module, batch: dict[str, Any], run: Any = None) -> Way:
    call = model if run is None else run

    def step() -> None:
        loss_of(call(**batch)).backward()

    return Way(name, model, step)


def checkpointed(model: nn.Module, layers: str) -> nn.Module:
    """torch.utils.checkpoint around each layer."""
    model = twin(model)
    for layer in model.get_submodule(layers):
        plain = layer.forward

        def forward(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

        layer.forward = forward
    return model


def torch_way(name: str, model: nn.Module, batch: dict[str, Any], fraction: float = 1.0) -> Way:
    """The whole model under torch.compile, with torch's own budget.

    Each way has a backend of its own: Dynamo would give two ways with equal options one program.
    Inductor draws eager's random numbers where it can, so that gradients can be compared.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    def compiled(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        with (
            functorch_config.patch(activation_memory_budget=fraction),
            inductor_config.patch(fallback_random=True),
        ):
            return compile_fx(graph, inputs)

    way = eager_way(name, model, batch, torch.compile(model, backend=compiled))
    inner = way.step

    def step() -> None:
        with inductor_config.patch(fallback_random=True):  # the backward is compiled later
            inner()

    way.step = step
    return way


def our_way(model: nn.Module, batch: dict[str, Any], policy: Any, name: str) -> Way:
    step = lazyinline.compile_step(model, recompute=policy)
    way = Way(f"lazyinline, {name}", model, lambda: step(**batch))
    way.before()
    torch.manual_seed(SEED)
    step(**batch)
    stats = step.stats
    way.reported_bytes, way.saved_bytes = stats.peak_bytes + stats.outside_bytes, stats.saved_bytes
    way.extra_flops = step.last_report.recomputed_flops
    way.release = step._entries[0]._compiled.planned._pool.clear
    return way


def gradients(way: Way) -> list[torch.Tensor | None]:
    return [p.grad for p in way.model.parameters()]


def expected(eager: Way) -> list[torch.Tensor | None]:
    """Runs eager; returns its gradients."""
    eager.before()
    torch.manual_seed(SEED)
    eager.step()
    return [None if g is None else g.clone() for g in gradients(eager)]


def examine(way: Way, reference: list[torch.Tensor | None], plain_flops: int = 0) -> MemoryUse:
    """Compiles what is not compiled yet; fills in error, peak and, unless reported, extra FLOPs."""
    for _ in range(1 if way.reported_bytes else 2):
        way.before()
        torch.manual_seed(SEED)
        way.step()
    pairs = zip(gradients(way), reference, strict=True)
    way.error = max((relative_error(p, q) for p, q in pairs), default=0.0)
    way.before()
    way.release()  # the arena is made in the step, so that the profiler sees it
    use = memory_use(way.step)
    way.release()
    way.peak_bytes = use.peak_bytes
    if not way.reported_bytes:
        way.extra_flops = use.product_flops - plain_flops
    return use


def take_times(ways: list[Way], rounds: int) -> None:
    """Fills in step times. Arenas stay between steps if all of them together are small."""
    keep = sum(w.reported_bytes for w in ways) < MAX_ARENA_BYTES
    for way in ways * (rounds + keep):
        way.before()
        start = time.process_time()
        way.step()
        way.best_ms = min(way.best_ms, 1e3 * (time.process_time() - start))
        if not keep:
            way.release()
        way.before()


def relative_error(actual: Any, expected: Any) -> float:
    if actual is None or expected is None:
        return 0.0 if actual is expected else float("inf")
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-12))


def table(ways: list[Way]) -> str:
    lines = [
        f"{'':<46}{'peak MiB':>10}{'reported':>10}{'saved':>8}{'extra GFLOP':>13}"
        f"{'step ms':>9}{'grad error':>12}"
    ]
    for w in ways:
        reported = f"{w.reported_bytes / MIB:.1f}" if w.reported_bytes else "-"
        saved = f"{w.saved_bytes / MIB:.1f}" if w.reported_bytes else "-"
        lines.append(
            f"{w.name:<46}{w.peak_bytes / MIB:>10.1f}{reported:>10}{saved:>8}"
            f"{w.extra_flops / 1e9:>13.2f}{w.best_ms:>9.1f}{w.error:>12.1e}"
        )
    return "\n".join(lines)


def policies(options: argparse.Namespace) -> None:
    """Each policy; then, for each of PyTorch's ways, ours within the peak that it needs."""
    model, batch, layers = build(options)
    eager = eager_way("eager", model, batch)
    reference = expected(eager)
    plain_flops = examine(eager, reference).product_flops
    eager.extra_flops = 0

    marked = checkpointed(model, layers)
    theirs = [eager_way("eager, checkpoint per layer", marked, batch)]
    if not options.no_torch:
        theirs += [torch_way("torch.compile", model, batch)]
        theirs += [torch_way("torch.compile, checkpoint per layer", marked, batch)]
        for part in (0.5, 0.25):
            theirs.append(torch_way(f"torch.compile, budget {part}", model, batch, part))
    for way in theirs:
        examine(way, reference, plain_flops)
        print(f"{way.name}: {way.peak_bytes / MIB:.1f} MiB", flush=True)

    ours = [our_way(model, batch, p, str(p).lower()) for p in (None, "selective", "full")]
    for part in (0.5, 0.25):
        ours.append(our_way(model, batch, Budget(fraction=part), f"budget {part}"))
    matched = [within_peak(model, batch, way) for way in theirs]
    for way in [*ours, *(m for m in matched if m)]:
        examine(way, reference)
    take_times([eager, *theirs, *ours, *(m for m in matched if m)], options.rounds)
    print(table([eager, *ours]))
    print()
    for way, match in zip(theirs, matched, strict=True):
        print(table([way, *([match] if match else [])]))
        print(verdict(way, match))


def within_peak(model: nn.Module, batch: dict[str, Any], other: Way) -> Way | None:
    try:
        budget = Budget(saved_bytes=other.peak_bytes)
        return our_way(model, batch, budget, "in that peak")
    except lazyinline.LazyInlineError as error:
        print(f"within the peak of {other.name}: {error}")
        return None


def verdict(other: Way, match: Way | None) -> str:
    """At equal peak: time against time, and FLOPs against FLOPs (fewer mean less memory too)."""
    if match is None:
        return "  no choice of ours fits"
    flops = (match.extra_flops - other.extra_flops) / 1e9
    return (
        f"  at its peak: {match.best_ms / other.best_ms:.2f} of its time, {flops:+.2f} extra "
        f"GFLOP, {match.peak_bytes / other.peak_bytes:.2f} of its memory"
    )


def sweep(options: argparse.Namespace) -> None:
    """Budgets between the smallest and the plain peak; each reported peak is measured."""
    model, batch, _ = build(options)
    reference = expected(eager_way("eager", model, batch))
    low = our_way(model, batch, Budget(fraction=0.0), "fraction 0")
    high = our_way(model, batch, None, "none")
    print(
        f"{'budget MiB':>10}{'reported':>10}{'measured':>10}{'saved':>8}{'extra GFLOP':>13}"
        f"{'grad error':>12}  holds"
    )
    last, monotone = float("inf"), True
    for index in range(options.sweep):
        room = high.reported_bytes - low.reported_bytes
        limit = low.reported_bytes + room * index // max(options.sweep - 1, 1)
        way = our_way(model, batch, Budget(saved_bytes=limit), "")
        examine(way, reference)
        monotone &= way.extra_flops <= last
        last = way.extra_flops
        holds = way.reported_bytes <= limit and way.peak_bytes <= way.reported_bytes + 4096
        print(
            f"{limit / MIB:>10.2f}{way.reported_bytes / MIB:>10.2f}{way.peak_bytes / MIB:>10.2f}"
            f"{way.saved_bytes / MIB:>8.2f}{way.extra_flops / 1e9:>13.3f}"
            f"{way.error:>12.1e}  {holds}",
            flush=True,
        )
    print("extra FLOPs fall monotonically:", monotone)


def solve(options: argparse.Namespace) -> None:
    """The knapsack over N calls, once the frontier of the closure is there."""
    from lazyinline.autodiff.derivative import Request
    from lazyinline.frontend.compiler import Compiler, Options
    from lazyinline.recompute.costs import Roofline
    from lazyinline.recompute.group import Group
    from lazyinline.recompute.planner import Planner
    from lazyinline.recompute.solver import spread

    model, batch, _ = build(options)
    program = lazyinline.capture(model, tuple(batch.values()), train=True)
    leaf = next(c for c in program.closures if c.name.endswith(("Block", "Layer")))
    compiler = Compiler(Options())
    wanted = tuple(i for i, t in enumerate(leaf.input_types) if t.is_differentiable)
    planner = Planner(compiler.differentiator, Roofline())
    start = time.process_time()
    points = planner.frontier(Request(leaf, wanted, (0,)))
    print(
        f"frontier of @{leaf.name}: {len(points)} variants, {time.process_time() - start:.2f} CPU s"
    )
    sizes = tuple(p.num_bytes for p in points), tuple(p.extra_s for p in points)
    for fraction in (0.25, 0.5, 0.75):
        best = dict.fromkeys(options.solve, float("inf"))
        for _ in range(20):
            for calls in options.solve:
                budget = int(fraction * calls * sizes[0][-1])
                start = time.process_time()
                spread([Group(calls, *sizes, frozenset([0]))], budget)
                best[calls] = min(best[calls], 1e3 * (time.process_time() - start))
        shown = ", ".join(f"N={n}: {ms:.1f} CPU ms" for n, ms in best.items())
        print(f"budget {fraction} of what is saved: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=("llama", "gpt", "hf-llama"), default="llama")
    for name, default in (("layers", 4), ("hidden", 128), ("seq", 128), ("batch", 4)):
        add(f"--{name}", type=int, default=default)
    add("--dropout", type=float, default=0.0)
    add("--rounds", type=int, default=5)
    add("--no-torch", action="store_true", help="leave torch.compile out")
    add("--sweep", type=int, metavar="K", help="K budgets instead of the policies")
    add(
        "--solve", type=int, nargs="+", metavar="N", help="numbers of calls to spread a budget over"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    (sweep if options.sweep else solve if options.solve else policies)(options)


if __name__ == "__main__":
    main()

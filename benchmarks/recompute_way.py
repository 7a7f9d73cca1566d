"""One way to run a training step, in a process of its own; ``recompute.py`` starts it.

    python benchmarks/recompute_way.py '{"model": "llama", ...}' '{"kind": "eager"}'

Reads a command per line and answers each with a line of JSON: ``examine`` (peak, saved bytes,
FLOPs, gradient error), ``step`` (the time of one). A model, its gradients and its arena are then
gone with the process, and nothing of one compiler is in memory when another is measured.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from decoders import DecoderBlock, GptBlock, gpt, llama
from memory_events import FORWARD, memory_use, product_flops
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazyinline
from lazyinline import Budget
from lazyinline.backend.launches.kernel_list import View

SEED = 5
HEAD_SIZE = 64
VOCAB = 1000
LAYERS = {"llama": "blocks", "gpt": "blocks", "hf-llama": "model.layers"}


@dataclass(frozen=True)
class Sizes:
    """A model and its batch."""

    model: str = "llama"
    layers: int = 4
    hidden: int = 128
    seq: int = 128
    batch: int = 4
    dropout: float = 0.0

    @property
    def num_heads(self) -> int:
        return self.hidden // HEAD_SIZE or 1


@dataclass(frozen=True)
class WaySpec:
    """Which way.

    Attributes:
        kind: ``"eager"``, ``"checkpoint"`` (eager, around each layer), ``"compile"``,
            ``"compile-checkpoint"`` or ``"lazyinline"``.
        fraction: torch's ``activation_memory_budget``, or a :class:`Budget` of ours.
        saved_bytes: a :class:`Budget` of ours.
        policy: another policy of ours.
    """

    kind: str
    fraction: float | None = None
    saved_bytes: int | None = None
    policy: str | None = None

    @property
    def name(self) -> str:
        if self.kind != "lazyinline":
            budget = "" if self.fraction is None else f", budget {self.fraction}"
            return TORCH_NAMES[self.kind] + budget
        if self.saved_bytes is not None:
            return "lazyinline, in that peak"
        return f"lazyinline, {self.policy if self.fraction is None else f'budget {self.fraction}'}"

    @property
    def recompute(self) -> Any:
        """The policy of ours."""
        if self.fraction is None and self.saved_bytes is None:
            return self.policy
        return Budget(saved_bytes=self.saved_bytes, fraction=self.fraction)


TORCH_NAMES = {
    "eager": "eager",
    "checkpoint": "eager, checkpoint per layer",
    "compile": "torch.compile",
    "compile-checkpoint": "torch.compile, checkpoint per layer",
}


@dataclass(frozen=True)
class Examined:
    """What a step needs.

    Attributes:
        peak_bytes: measured by the profiler: everything allocated in a step that begins without
            gradients and, for lazyinline, without its arena.
        reported_bytes: the same as lazyinline reports it, before it has run; 0 for others.
        saved_bytes: what the forward keeps for the backward: reported by lazyinline, for others
            measured, live when the forward ends.
        flops: of the products and attentions that were launched.
        error: largest relative error of a gradient.
        process_bytes: most memory that the process has held so far, its compiler's included.
    """

    peak_bytes: int
    reported_bytes: int
    saved_bytes: int
    flops: int
    error: float
    process_bytes: int


@dataclass
class Way:
    """One way to run a step. ``release`` gives back the memory that it holds between steps."""

    model: nn.Module
    step: Callable[[], object]
    release: Callable[[], object] = lambda: None
    training_step: lazyinline.TrainingStep | None = None

    def before(self) -> None:
        """Makes the next step start without gradients."""
        self.model.zero_grad(set_to_none=True)

    def run_seeded(self) -> None:
        self.before()
        torch.manual_seed(SEED)
        self.step()


# ---- models ------------------------------------------------------------------------------


def build(sizes: Sizes) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a model that computes its loss, its blocks marked, and its arguments."""
    if sizes.model == "hf-llama":
        return hf_llama(sizes)
    shape = {"num_layers": sizes.layers, "hidden": sizes.hidden, "seq": sizes.seq}
    shape |= {"batch": sizes.batch, "num_heads": sizes.num_heads, "vocab": VOCAB}
    if sizes.model == "gpt":
        lazyinline.lazy_inline(GptBlock)
        model, args = gpt(**shape, dropout=sizes.dropout)
    else:
        lazyinline.lazy_inline(DecoderBlock)
        model, args = llama(**shape)
    return model, dict(zip(("ids_BT", "targets_BT"), args, strict=True))


def hf_llama(sizes: Sizes) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    lazyinline.lazy_inline(LlamaDecoderLayer)
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=4 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_heads,
        max_position_embeddings=sizes.seq,
        vocab_size=VOCAB,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, VOCAB, (sizes.batch, sizes.seq))
    return model, {"input_ids": ids, "labels": ids}


# ---- ways --------------------------------------------------------------------------------


def make_way(sizes: Sizes, spec: WaySpec) -> Way:
    """Builds the model and what runs a step of it."""
    model, batch = build(sizes)
    if spec.kind == "lazyinline":
        return our_way(model, batch, spec)
    if "checkpoint" in spec.kind:
        checkpoint_layers(model.get_submodule(LAYERS[sizes.model]))
    if "compile" in spec.kind:
        return torch_way(model, batch, 1.0 if spec.fraction is None else spec.fraction)
    return Way(model, autograd_step(model, batch))


def autograd_step(run: Callable[..., Any], batch: dict[str, Any]) -> Callable[[], None]:
    def step() -> None:
        with torch.profiler.record_function(FORWARD):
            output = run(**batch)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()

    return step


def checkpoint_layers(layers: Any) -> None:
    """Puts torch.utils.checkpoint around each layer."""
    for layer in layers:
        plain = layer.forward

        def forward(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

        layer.forward = forward


def torch_way(model: nn.Module, batch: dict[str, Any], fraction: float) -> Way:
    """The whole model under torch.compile, with torch's own budget.

    Inductor draws eager's random numbers where it can, so that gradients can be compared.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    inner = autograd_step(torch.compile(model), batch)

    def step() -> None:
        with (
            functorch_config.patch(activation_memory_budget=fraction),
            inductor_config.patch(fallback_random=True),
        ):
            inner()

    return Way(model, step)


def our_way(model: nn.Module, batch: dict[str, Any], spec: WaySpec) -> Way:
    step = lazyinline.compile_step(model, recompute=spec.recompute)

    def release() -> None:
        entry = step.entries[0]
        entry._lease = None
        entry._compiled.runner._arenas.idle.clear()

    return Way(model, lambda: step(**batch), release, step)


# ---- measuring ---------------------------------------------------------------------------


def examine(way: Way, spec: WaySpec, gradients_file: str) -> Examined:
    """Compiles what is not compiled yet, and measures a step. Eager's gradients go to a file."""
    way.run_seeded()
    error = 0.0
    if spec.kind == "eager":
        torch.save([p.grad for p in way.model.parameters()], gradients_file)
    else:
        error = gradient_error(way.model, torch.load(gradients_file, mmap=True))
    way.before()
    way.release()  # the arena is made in the step, so that the profiler sees it
    use = memory_use(way.step)
    way.before()
    reported_bytes, saved_bytes, flops = 0, use.saved_bytes, use.product_flops
    if way.training_step is not None:
        stats = way.training_step.stats
        reported_bytes, saved_bytes = stats.peak_bytes + stats.outside_bytes, stats.saved_bytes
        flops = launched_flops(way.training_step)
    else:  # lazyinline has its arena by now; the others fill their heap again, untimed
        give_back_free_memory()
        way.step()
        way.before()
    process_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Examined(use.peak_bytes, reported_bytes, saved_bytes, flops, error, process_bytes)


def give_back_free_memory() -> None:
    """What the compiler and the profiler left free in the heap goes back to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def gradient_error(model: nn.Module, expected: list[torch.Tensor | None]) -> float:
    """Returns the largest relative error of a gradient; infinity where one is missing."""
    worst = 0.0
    for parameter, reference in zip(model.parameters(), expected, strict=True):
        if parameter.grad is None or reference is None:
            worst = max(worst, 0.0 if parameter.grad is reference else float("inf"))
            continue
        error = (parameter.grad - reference).norm() / reference.norm().clamp_min(1e-12)
        worst = max(worst, float(error))
    return worst


def launched_flops(step: lazyinline.TrainingStep) -> int:
    """FLOPs of what the linked program launches, by the formula that the profiler's are counted by.

    The native loop calls BLAS without PyTorch's dispatcher, so the profiler sees no product.
    """
    layout = step.entries[0]._compiled.runner.layout
    launches = (placed.launch for part in layout.parts for placed in part.launches)
    total = 0
    for launch in launches:
        name = launch.name.partition(".")[0]
        shapes = [a.shape if isinstance(a, View) else () for a in launch.args]
        total += product_flops(name, shapes)
    return total


def timed(way: Way) -> dict[str, float]:
    way.before()
    wall, cpu = time.perf_counter(), time.process_time()
    way.step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    way.before()
    return {"cpu_ms": 1e3 * cpu, "wall_ms": 1e3 * wall}


def serve(way: Way, spec: WaySpec, answers: TextIO) -> None:
    """Answers commands until there are none."""
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        answer = vars(examine(way, spec, argument)) if command == "examine" else timed(way)
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the profiler prints
    torch.set_num_threads(1)
    sizes, spec = Sizes(**json.loads(sys.argv[1])), WaySpec(**json.loads(sys.argv[2]))
    try:
        serve(make_way(sizes, spec), spec, answers)
    except lazyinline.LazyInlineError as error:
        print(json.dumps({"failure": str(error)}), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""What a training forward keeps for its backward: eager, ours, and operators taken apart too early.

    python benchmarks/saved_bytes.py
    python benchmarks/saved_bytes.py --only layer_norm "Llama block"

Bytes beyond inputs, parameters and results. ``eager`` is what autograd saves, each memory once.
``ours`` is what the compiled derivative hands from forward to backward: operators stay whole until
they are differentiated. ``early`` takes them apart first (softmax, the norms, gelu, silu and the
losses into arithmetic), as a compiler does that lowers before it differentiates, and lets autograd
save what that needs. The gate operator is the silu gate as an operator of a user's, with a
derivative that saves nothing and a rule; early is its rule differentiated. Nothing is compiled.
Exits with 1 if ours is above eager's anywhere.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._decomp import decomposition_table

import lazyinline
from lazyinline.autodiff.traces.joint_trace import trace_forward
from lazyinline.backend.kernels.lower import BackendName
from lazyinline.frontend.compiler import Compiler
from lazyinline.frontend.options import Options
from lazyinline.frontend.passes.programs import capture, differentiate
from lazyinline.frontend.passes.state import Goal, Subject, run
from lazyinline.reuse.ir.leaf import flat_types, interpret
from lazyinline.reuse.ir.program import Leaf, ModelTensor, Program
from lazyinline.reuse.ir.rewrite import map_leaves

_MB = 1e6
_WHOLE = [
    "_log_softmax",
    "_softmax",
    "nll_loss_forward",
    "native_layer_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_batch_norm_with_update",
    "_fused_rms_norm",
    "gelu",
    "silu",
]
"""Operators with a derivative of their own that the early order takes apart."""


@dataclass(frozen=True)
class Case:
    """A model, made when it is measured, and what it is given.

    Attributes:
        model: makes it.
        inputs: makes its inputs.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Kept:
    """Bytes kept for the backward, beyond inputs, parameters and results."""

    eager: int
    ours: int
    early: int


# ---- an operator with a rule -------------------------------------------------------------------


@torch.library.custom_op("saved_bytes::gate", mutates_args=())
def gate(a: Tensor, b: Tensor) -> Tensor:
    """A gate whose own derivative computes its inner values again."""
    return F.silu(a) * b


@gate.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(a)


def _keep_operands(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gate_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    a, b = ctx.saved_tensors
    p = a.sigmoid()
    return gradient * b * p * (1 + a * (1 - p)), gradient * a * p


gate.register_autograd(_gate_backward, setup_context=_keep_operands)


@lazyinline.decomposition(gate)
def _gate_rule(a: Tensor, b: Tensor) -> Tensor:
    return a * a.sigmoid() * b


# ---- models ------------------------------------------------------------------------------------


class Applied(nn.Module):
    """A function with parameters."""

    def __init__(self, function: Callable[..., Tensor], *sizes: int) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.rand(size) for size in sizes)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.weights)


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.third = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (width, width, 4 * width))
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            conv = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norms[0](self.first(x)))
        y = self.relu(self.norms[1](self.second(y)))
        return self.relu(self.norms[2](self.third(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-50, or another with bottlenecks."""

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage and not index else 1
                blocks.append(Bottleneck(channels, width << stage, stride))
                channels = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class LlamaBlock(nn.Module):
    """RMS norm, attention, RMS norm, gated feed-forward."""

    def __init__(self, hidden: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.query, self.key, self.value, self.out = (
            nn.Linear(hidden, hidden, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        rows = [
            f(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*rows, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def cases(*, scale: int = 1) -> Mapping[str, Case]:
    """Returns what is measured; sizes are divided by ``scale``."""
    rows, wide, hidden = 512 // scale, 8192 // scale, 1024 // scale

    def of(function: Callable[..., Tensor], *shapes: tuple[int, ...], sizes: Any = ()) -> Case:
        return Case(
            lambda: Applied(function, *sizes),
            lambda: tuple(torch.randn(shape).requires_grad_() for shape in shapes),
        )

    def labelled() -> tuple[Tensor, ...]:
        return torch.randn(rows, wide).requires_grad_(), torch.randint(wide, (rows,))

    side = 64 // min(scale, 2)
    return {
        "log_softmax": of(lambda x: F.log_softmax(x, -1), (rows, wide)),
        "softmax": of(lambda x: F.softmax(x, -1), (rows, hidden)),
        "cross_entropy": Case(lambda: Applied(F.cross_entropy), labelled),
        "layer_norm": of(
            lambda x, w, b: F.layer_norm(x, (hidden,), w, b), (rows, hidden), sizes=(hidden,) * 2
        ),
        "batch_norm": Case(
            lambda: nn.BatchNorm1d(hidden), lambda: (torch.randn(rows, hidden).requires_grad_(),)
        ),
        "rms_norm": of(lambda x, w: F.rms_norm(x, (hidden,), w), (rows, hidden), sizes=(hidden,)),
        "gelu": of(F.gelu, (rows, hidden)),
        "silu gate": of(lambda a, b: F.silu(a) * b, *((rows, hidden),) * 2),
        "gate operator": of(gate, *((rows, hidden),) * 2),
        "ResNet-50": Case(
            lambda: ResNet((3, 4, 6, 3) if scale == 1 else (1, 1), 64 // scale),
            lambda: (torch.randn(4, 3, side, side),),
        ),
        "Llama block": Case(
            lambda: LlamaBlock(256 // scale),
            lambda: (torch.randn(4, 128 // scale, 256 // scale).requires_grad_(),),
        ),
    }


# ---- measuring ---------------------------------------------------------------------------------


def kept(case: Case, backend: BackendName = "inductor") -> Kept:
    """Returns what each way keeps for the backward."""
    torch.manual_seed(0)
    model, inputs = case.model(), case.inputs()
    compiler = Compiler(Options(reuse="auto", backend=backend))
    state = compiler.started(Subject(model, inputs, {}), Goal(train=True))
    state = run((capture, differentiate), state)
    assert state.derivative is not None
    ours = state.derivative.saved_type.num_bytes
    early = _taken_apart(state.captured.program)
    tensors = iter(inputs)
    sources = [
        source.tensor if isinstance(source, ModelTensor) else next(tensors)
        for source in early.sources
    ]
    apart = _saved_by_autograd(lambda: interpret(early, sources), sources)
    given = [*inputs, *model.parameters(), *model.buffers()]
    return Kept(_saved_by_autograd(lambda: model(*inputs), given), ours, apart)


def _taken_apart(program: Program) -> Program:
    """Returns a program with its operators taken apart, to be differentiated."""
    aten = torch.ops.aten
    packets = [getattr(aten, name) for name in _WHOLE if hasattr(aten, name)]
    operators = [getattr(p, overload) for p in packets for overload in p.overloads()]
    table = {o: decomposition_table[o] for o in operators if o in decomposition_table}

    def apart(leaf: Leaf) -> Leaf:
        types = flat_types(leaf.input_types)
        return replace(leaf, module=trace_forward(leaf.module, types, table), level="aten")

    return map_leaves(program, apart)


def _saved_by_autograd(forward: Callable[[], Any], given: Sequence[Tensor]) -> int:
    """Returns the bytes that autograd saves in a forward, beyond what is given and returned."""
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        made = forward()
    results = made if isinstance(made, (tuple, list)) else [made]
    known = {_memory(t) for t in (*given, *results)}
    return sum(
        {
            _memory(t): t.untyped_storage().nbytes() for t in saved if _memory(t) not in known
        }.values()
    )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def main() -> int:
    """Prints the table."""
    os.environ["LAZYINLINE_CACHE"] = "0"  # or a compile of an earlier run is taken from disk
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=list(cases()))
    only = parser.parse_args().only
    print(f"{'MB':<14}{'eager':>9}{'ours':>9}{'early':>9}{'ours/eager':>12}{'early/ours':>12}")
    above = []
    for name, case in cases().items():
        if only and name not in only:
            continue
        found = kept(case)
        sizes = "".join(f"{n / _MB:9.2f}" for n in (found.eager, found.ours, found.early))
        ratios = "".join(
            f"{_ratio(*pair):>12}"
            for pair in ((found.ours, found.eager), (found.early, found.ours))
        )
        print(f"{name:<14}{sizes}{ratios}", flush=True)
        if found.ours > found.eager:
            above.append(name)
    if above:
        print(f"above eager: {', '.join(above)}")
    return 1 if above else 0


def _ratio(a: int, b: int) -> str:
    return f"{a / b:.2f}" if b else "-"


if __name__ == "__main__":
    sys.exit(main())

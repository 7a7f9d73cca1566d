"""What torch.compile refuses or gets wrong, beside what lazyinline does with the same code.

``python benchmarks/refused.py`` prints a row for each issue of PyTorch's: what ``torch.compile`` of
the PyTorch that is installed does, and what lazyinline does. ``--only NAME`` runs one of them, and
``--ours`` leaves ``torch.compile`` out. Each row checks itself, so it says when upstream is mended.
"""

from __future__ import annotations

import argparse
import copy
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx
import torch
import torch._functorch.config as functorch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import lazyinline

Compile = Callable[[nn.Module], nn.Module]
EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def compile_afresh(module: nn.Module) -> nn.Module:
    """Compiles with torch.compile, as if nothing had been compiled before."""
    torch._dynamo.reset()
    return torch.compile(module)  # type: ignore[return-value]


# ---- a loss of forces ----------------------------------------------------------------------------


class Energy(nn.Module):
    """Computes the energy of some atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, pos: Tensor) -> Tensor:
        return self.layers(pos).sum()


def force_gradients(model: nn.Module, compiled: nn.Module) -> list[Tensor]:
    """Returns the gradients of a loss of forces, which differentiates twice."""
    pos = torch.linspace(0, 1, 24).reshape(8, 3).requires_grad_()
    (slope,) = torch.autograd.grad(compiled(pos), pos, create_graph=True)
    slope.square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def double_backward(compile: Compile) -> str:
    """Trains on forces: the gradient of a gradient."""
    model = Energy()
    expected = force_gradients(eager := copy.deepcopy(model), eager)
    found = force_gradients(model, compile(model))
    worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return f"gradients equal eager's within {worst:.0e}"


# ---- a memory budget, with dropout ---------------------------------------------------------------


class Dropping(nn.Module):
    """Ends in a linear layer without bias, so its result is sum(weight * weight.grad)."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.5))
        self.body = nn.Sequential(*(copy.deepcopy(m) for _ in range(3) for m in layers))
        self.head = nn.Linear(64, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).sum()


def dropped_alike(compile: Compile) -> str:
    """Says whether the backward dropped what the forward dropped: Euler's rule, no reference."""
    model = Dropping()
    loss = compile(model)(torch.ones(32, 64))
    loss.backward()
    weight = model.head.weight
    assert weight.grad is not None
    by_rule = float((weight.detach() * weight.grad).sum())
    same = abs(by_rule - loss.item()) < 1e-4 * max(1.0, abs(by_rule))
    verdict = "right" if same else "WRONG, the backward dropped something else"
    return f"loss {loss.item():.4f}, by its gradient {by_rule:.4f}: {verdict}"


def budget_of_torch(module: nn.Module) -> nn.Module:
    """Compiles with a budget of 0.3; it is read at the first call."""
    compiled = compile_afresh(module)

    class Within(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with functorch.patch(activation_memory_budget=0.3):
                return compiled(x)  # type: ignore[no-any-return]

    return Within()


def budget_of_ours(module: nn.Module) -> nn.Module:
    """Compiles with the smallest budget that there is."""
    return lazyinline.compile(module, recompute=lazyinline.Budget(fraction=0.0))


# ---- an update by indices ------------------------------------------------------------------------


class Swapped(nn.Module):
    """Writes the first two rows of a computed tensor in the other order."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        return x.index_put((torch.tensor([1, 0]),), x[:2].clone())


def swapped(compile: Compile) -> str:
    """Says whether two rows were swapped, or one of them written twice."""
    x = torch.arange(3.0).reshape(3, 1)
    found, expected = compile(Swapped())(x), Swapped()(x)
    verdict = "right" if torch.equal(found, expected) else "WRONG"
    return f"rows {found[:, 0].tolist()}, eager {expected[:, 0].tolist()}: {verdict}"


# ---- averages, a cast, bytes --------------------------------------------------------------------


class Averages(nn.Module):
    """Averages windows of three, of which ``ceil_mode`` leaves two elements of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool1d(x * self.weight, 3, 2, ceil_mode=True)


def averaged(compile: Compile) -> str:
    """Says whether the last element's gradient is a half, as the forward has it, or a third."""
    module = Averages()
    compiled = compile(module)
    for _ in range(2):  # the first call of a program may run on PyTorch's kernels
        module.zero_grad()
        compiled(torch.ones(1, 6)).sum().backward()
    assert module.weight.grad is not None
    last = module.weight.grad[0, -1].item()
    return f"gradient {last:.3f}, eager 0.500: {'right' if last == 0.5 else 'WRONG'}"


class Lost(nn.Module):
    """Computes what a cast to bfloat16 and back loses, as sums that are compensated do."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        return x - x.bfloat16().float()


def rounded(compile: Compile) -> str:
    """Says whether a cast rounds."""
    found, expected = compile(Lost())(torch.ones(8) / 7), Lost()(torch.ones(8) / 7)
    verdict = "right" if torch.equal(found, expected) else "WRONG"
    return f"lost {found[0].item():.1e}, eager {expected[0].item():.1e}: {verdict}"


class Least(nn.Module):
    """Finds the least of some bytes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x | x).amin(), x + 1


def least(compile: Compile) -> str:
    """Says whether what is found is one of the bytes."""
    found = compile(Least())(torch.arange(50, 150, dtype=torch.uint8))[0].item()
    return f"least {found}, eager 50: {'right' if found == 50 else 'WRONG'}"


# ---- more blocks than the limit ------------------------------------------------------------------


class Numbered(nn.Module):
    """Scales by its place in the model, as GPT-2's ``scale_attn_by_inverse_layer_idx`` does."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.linear = index, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh() / (self.index + 1)


def blocks_of_torch() -> str:
    """Compiles twelve different blocks, each by itself."""
    torch._dynamo.reset()
    counters.clear()
    blocks = [Numbered(n) for n in range(12)]
    x = torch.rand(2, 8)
    for block in blocks:
        block.compile()
        x = block(x)
    return f"{counters['stats']['unique_graphs']} of 12 blocks compiled, the others run eagerly"


def blocks_of_ours() -> str:
    """Compiles the same twelve."""
    compiled = lazyinline.compile(nn.Sequential(*(Numbered(n) for n in range(12))))
    compiled(torch.rand(2, 8))
    report = lazyinline.last_report(compiled)
    assert report is not None
    eager = f", but eagerly: {report.ran_eagerly}" if report.ran_eagerly else ""
    return f"12 of 12 blocks in one program of {report.num_launches} launches{eager}"


# ---- functions in ONNX ---------------------------------------------------------------------------


def decoder(num_layers: int = 12) -> nn.Module:
    """Returns a stack of equal layers."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False).eval()


def onnx_of(write: Callable[[nn.Module, tuple[Tensor], str], object]) -> str:
    """Writes 12 layers, and counts what is in the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.onnx"
        write(decoder(), (torch.rand(2, 5, 32),), path)
        model = onnx.load(path)
    own = [f for f in model.functions if not f.domain.startswith("pkg.onnxscript")]
    nodes = len(model.graph.node) + sum(len(f.node) for f in model.functions)
    return f"{len(own)} function(s), {nodes} nodes in all for 12 layers"


def write_by_torch(model: nn.Module, args: tuple[Tensor], path: str) -> None:
    """Writes with torch.onnx."""
    torch.onnx.export(model, args, path, dynamo=True, verbose=False)


# ---- zero bubble, compiled; will it fit ----------------------------------------------------------


def zero_bubble() -> str:
    """Trains a pipeline of two processes under a zero-bubble schedule."""
    script = [str(EXAMPLES / "pipeline_llama.py"), "--schedule", "ZBVZeroBubble"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *script], capture_output=True, text=True, check=True, env=environment
    )
    lines = done.stdout.splitlines()
    losses = [line for line in lines if "step 0" in line and "loss" in line]
    eager = next(line for line in lines if "eager" in line)
    return f"loss {losses[0].rpartition(' ')[2]} of the first compiled step; {eager}"


def will_it_fit() -> str:
    """Plans a step of 1.1B parameters for eight GPUs that are not here."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(2048, 16, 8192, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 22, enable_nested_tensor=False).bfloat16()
        x = torch.zeros(16, 1024, 2048, dtype=torch.bfloat16)
    fit = lazyinline.fit(
        model,
        (x,),
        mesh={"fsdp": 8},
        target="cuda:sm_90",
        loss_fn=lambda out: out.float().square().mean(),
    )
    return f"{fit.memory.num_bytes / 2**30:.1f} GiB a rank of {fit.limit_bytes / 2**30:.0f}"


@dataclass(frozen=True)
class Row:
    """Holds one thing to do, in both ways.

    Attributes:
        issues: of PyTorch's and of those who use it.
        theirs: what torch.compile does with it; None where there is no such thing.
        ours: what lazyinline does.
    """

    issues: str
    theirs: Callable[[], str] | None
    ours: Callable[[], str]


ROWS: Mapping[str, Row] = {
    "double backward": Row(
        "pytorch#91469, #183603",
        lambda: double_backward(compile_afresh),
        lambda: double_backward(lazyinline.compile),
    ),
    "budget with dropout": Row(
        "pytorch#190758, #190717",
        lambda: dropped_alike(budget_of_torch),
        lambda: dropped_alike(budget_of_ours),
    ),
    "rows swapped": Row(
        "no issue found", lambda: swapped(compile_afresh), lambda: swapped(lazyinline.compile)
    ),
    "averages": Row(
        "pytorch#198119", lambda: averaged(compile_afresh), lambda: averaged(lazyinline.compile)
    ),
    "cast": Row(
        "pytorch#176565, #179561",
        lambda: rounded(compile_afresh),
        lambda: rounded(lazyinline.compile),
    ),
    "bytes": Row(
        "pytorch#191499", lambda: least(compile_afresh), lambda: least(lazyinline.compile)
    ),
    "limit per block": Row("vllm#27178, torchtitan#3737", blocks_of_torch, blocks_of_ours),
    "functions in ONNX": Row(
        "pytorch#170545, #154319",
        lambda: onnx_of(write_by_torch),
        lambda: onnx_of(lazyinline.export_onnx),
    ),
    "zero bubble": Row("pytorch#161904, torchtitan#3584", None, zero_bubble),
    "will it fit": Row("pytorch/rfcs#108, pytorch#114934", None, will_it_fit),
}


def said(run: Callable[[], str] | None) -> str:
    """Returns what a run says, or the first line of its error."""
    if run is None:
        return "not tried here"
    torch.manual_seed(0)
    try:
        return run()
    except Exception as error:  # whatever it is, it is the answer
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=ROWS)
    parser.add_argument("--ours", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    print(f"PyTorch {torch.__version__}")
    for name, row in ROWS.items():
        if options.only not in (None, name):
            continue
        print(f"\n{name} ({row.issues})")
        if not options.ours:
            print(f"  torch       {said(row.theirs)}", flush=True)
        print(f"  lazyinline  {said(row.ours)}", flush=True)


if __name__ == "__main__":
    main()

"""Are random numbers drawn again where dropout is computed again? PyTorch's budget, and ours.

    python benchmarks/recompute_dropout.py

A small stack with dropout 0.1, one training step under one seed, each budget. The gradient is
compared with the one of the masks that the forward drew: eager's where masks are eager's, and else
(Inductor's own random numbers) that of the same compiler without a budget. ``generator`` says
whether the step leaves PyTorch's generator where eager leaves it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazyinline
from lazyinline import Budget, lazy_inline

FRACTIONS = (0.5, 0.25, 0.0)
SEED = 7
FALLBACK = "eager's"


@lazy_inline
class Block(nn.Module):
    """A feed-forward layer with two dropouts."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(x)), self.dropout, self.training)
        return x + F.dropout(self.down(hidden), self.dropout, self.training)


class Model(nn.Module):
    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Block(width, 0.1) for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@dataclass(frozen=True)
class Outcome:
    """What one training step left behind."""

    loss: Tensor
    gradients: list[Tensor]
    generator: Tensor

    def compared(self, other: Outcome) -> str:
        """Relative errors against another, and whether the generators agree."""
        pairs = zip(self.gradients, other.gradients, strict=True)
        error = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        loss = float((self.loss - other.loss).abs() / other.loss.abs())
        same = torch.equal(self.generator, other.generator)
        return f"{loss:>12.1e}{error:>16.1e}  {'as eager' if same else 'elsewhere'}"


def outcome(model: nn.Module, run: Callable[[], Tensor]) -> Outcome:
    """Runs a step twice, compiled by then; returns what the second left."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        loss = run()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return Outcome(loss.detach(), gradients, torch.get_rng_state())


def backward_of(module: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        loss = module(x)
        loss.backward()
        return loss

    return run


def torch_outcome(model: nn.Module, x: Tensor, fraction: float, masks: str) -> Outcome:
    """One step under torch.compile with its own budget, by a backend of its own."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    fallback = inductor_config.patch(fallback_random=masks == FALLBACK)

    def compiled(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=fraction), fallback:
            return compile_fx(graph, inputs)

    torch._dynamo.reset()
    with fallback:
        return outcome(model, backward_of(torch.compile(model, backend=compiled), x))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model(options.layers, options.width)
    x = torch.randn(16, options.width)
    eager = outcome(model, backward_of(model, x))
    print(f"torch {torch.__version__}")
    print(f"{'':<44}{'loss error':>12}{'gradient error':>16}  generator")
    for masks in (FALLBACK, "Inductor's"):
        plain = torch_outcome(model, x, 1.0, masks)
        for fraction in FRACTIONS:
            name = f"torch.compile, budget {fraction}, {masks} masks"
            found = torch_outcome(model, x, fraction, masks)
            print(f"{name:<44}{found.compared(eager if masks == FALLBACK else plain)}")
    for policy in ("selective", "full", *(Budget(fraction=f) for f in FRACTIONS)):
        step = lazyinline.compile_step(model, recompute=policy)
        found = outcome(model, lambda step=step: step(x))
        print(f"{'lazyinline, ' + str(policy):<44}{found.compared(eager)}")


if __name__ == "__main__":
    main()

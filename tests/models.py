"""Small models that tests compile, in place of one of its own in each file.

Those of the first part are float32, with and without a mark. Those of the second part are float64
and made around a forward that the test writes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lazyinline import lazy_inline

WIDTH = 4


def batch(rows: int = 3, width: int = WIDTH, *, seed: int = 0) -> Tensor:
    """A random float32 input; the same for the same arguments."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """A residual MLP: of a layer norm, and with dropout, if asked for."""

    def __init__(self, width: int = WIDTH, *, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = torch.tanh(self.up(self.norm(x)))
        return x + self.dropout(self.down(h))


@lazy_inline
class MarkedBlock(Block):
    """The same with a mark."""


class BatchNormBlock(nn.Module):
    """Keeps running statistics: a state that each call changes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        # No bias: its gradient would be rounding, since the normalization takes it out again.
        self.linear = nn.Linear(width, width, bias=False)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


@lazy_inline
class MarkedBatchNormBlock(BatchNormBlock):
    """The same with a mark."""


class Attention(nn.Module):
    """Self-attention over ``[batch, tokens, width]``, added to its input."""

    def __init__(self, width: int = 8, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3 * self.num_heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Blocks one after another, and a head; takes arguments by position and by name."""

    def __init__(
        self,
        block: Callable[[], nn.Module] = Block,
        num_blocks: int = 2,
        *,
        width: int = WIDTH,
        num_outputs: int = 2,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor, scale: float = 1.0, *, bias: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x) if bias is None else block(x) + bias
        return self.head(x) * scale


# ---- around a forward that the test writes, in float64 -----------------------------------------


def example(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    """A random float64 input; the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape or (3, WIDTH), dtype=torch.float64, generator=generator)
    return values.requires_grad_(grad)


def linear(size: int = WIDTH, bias: bool = True) -> nn.Linear:
    return nn.Linear(size, size, bias=bias, dtype=torch.float64)


def block(forward: Callable[..., Any], *, mark: bool = True) -> type[nn.Module]:
    """Makes a block class with this forward and ``self.linear``; keywords become attributes."""

    class Block(nn.Module):
        def __init__(self, **attributes: Any) -> None:
            super().__init__()
            self.linear = linear()
            for name, value in attributes.items():
                setattr(self, name, value)

    Block.forward = forward  # type: ignore[method-assign]
    return lazy_inline(Block) if mark else Block


class Stack(nn.Module):
    """Runs its layers one after another; further arguments go to each of them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x


class Around(nn.Module):
    """A model whose forward is a function of the stack and the input."""

    def __init__(self, forward: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.body = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self.layers, *args, **kwargs)


class Made(nn.Module):
    """A model whose forward is a function of it and its inputs; keywords become attributes."""

    def __init__(self, forward: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.body = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)

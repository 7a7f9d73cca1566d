"""Small blocks and a stack of them, for tests about sharing. Float64 throughout."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lazyinline import lazy_inline

WIDTH = 4


def example(*shape: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    """A random input; the same for the same arguments."""
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

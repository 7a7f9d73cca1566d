"""A model that shares no block: `advise` says why, and two changes mend it.

    python examples/when_blocks_differ.py

What it prints:

    Layer: 34 nodes held, 33 if inlined
      1 and 0 are apart: attribute number is 1, not 0
      give all of them the same number. Where Python branches by it, each branch has a graph, which
      compiles once; to have one, compute both ways and choose with torch.where. Where it is an
      option of an operator, pass a tensor in its place, if the operator takes one (indices for a
      shift)
    ShiftAsTensor: 17 nodes held, 33 if inlined
      1 and 0 are apart: attribute is_odd is True, not False
      give all of them the same is_odd. Where Python branches by it, each branch has a graph, which
      compiles once; to have one, compute both ways and choose with torch.where. Where it is an
      option of an operator, pass a tensor in its place, if the operator takes one (indices for a
      shift)
    ChoiceAsTensor: 13 nodes held, 42 if inlined
"""

from __future__ import annotations

import argparse
import textwrap

import torch
from torch import Tensor, nn

import lazyinline


class Layer(nn.Module):
    """Its number shifts and chooses, so that each layer is a graph of its own."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x))).roll(self.number, dims=-1)
        return x + (y.tanh() if self.number % 2 else y)


class ShiftAsTensor(Layer):
    """First change: where each column comes from is a buffer. Its values may differ."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.is_odd = number % 2 == 1  # of the number, forward needs no more than this
        self.register_buffer("columns", torch.arange(width).roll(number))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))[:, self.columns]
        return x + (y.tanh() if self.is_odd else y)


class ChoiceAsTensor(ShiftAsTensor):
    """Second change: both ways are computed, and a tensor chooses."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.register_buffer("odd", torch.tensor(self.is_odd))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))[:, self.columns]
        return x + torch.where(self.odd, y.tanh(), y)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()

    x = torch.randn(4, 16, requires_grad=True)
    outputs = []
    for layer in (Layer, ShiftAsTensor, ChoiceAsTensor):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer(16, number) for number in range(options.layers)))
        outputs.append(model(x))
        torch.testing.assert_close(outputs[0], outputs[-1])  # the same function each time

        program = lazyinline.capture(model, (x,), train=True)
        held, inlined = program.num_nodes(), program.num_nodes_if_inlined()
        print(f"{layer.__name__}: {held} nodes held, {inlined} if inlined")
        advice = lazyinline.advise(model, (x,), backend="eager")  # print(advice) shows all of it
        for apart in advice.kept_apart[:1]:
            print(f"  {' and '.join(apart.paths)} are apart: {apart.cause}")
            print(textwrap.fill(apart.change, 96, initial_indent="  ", subsequent_indent="  "))


if __name__ == "__main__":
    main()

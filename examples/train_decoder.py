"""Mark the layer, compile, train: the whole of what a user does.

python examples/train_decoder.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import lazyinline
from lazyinline import lazy_inline


@lazy_inline
class Block(nn.Module):
    """A pre-norm transformer block (b batch, t time, d hidden, h heads, v vocabulary)."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        batch, time, hidden = x_btd.shape
        heads = (batch, time, 3, self.num_heads, hidden // self.num_heads)
        q, k, v = self.qkv(self.norm_1(x_btd)).view(heads).permute(2, 0, 3, 1, 4)
        y_bhtd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_btd = x_btd + self.out(y_bhtd.transpose(1, 2).reshape(batch, time, hidden))
        return x_btd + self.down(F.gelu(self.up(self.norm_2(x_btd))))


class Model(nn.Module):
    """A small language model."""

    def __init__(self, num_layers: int, hidden: int = 64, vocab: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, 4) for _ in range(num_layers))
        self.head = nn.Linear(hidden, vocab)

    def forward(self, ids_bt: torch.Tensor) -> torch.Tensor:
        x_btd = self.embed(ids_bt)
        for block in self.blocks:
            x_btd = block(x_btd)
        logits_btv = self.head(x_btd[:, :-1])
        return F.cross_entropy(logits_btv.flatten(0, 1), ids_bt[:, 1:].flatten())


def main() -> None:
    """Trains on a repeating sequence and prints what the compiler held."""
    torch.manual_seed(0)
    model = Model(num_layers=12)
    compiled = lazyinline.compile(model)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=3e-3)
    ids_bt = (torch.arange(32) % 7).repeat(4, 1)
    for step in range(20):
        loss = compiled(ids_bt)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}")
    print(compiled.last_report)


if __name__ == "__main__":
    main()

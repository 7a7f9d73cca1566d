"""The model of these examples: a small GPT in plain PyTorch. Nothing in it knows of lazyinline."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, hidden = x.shape
        heads = (batch, time, 3, self.heads, hidden // self.heads)
        q, k, v = self.qkv(self.norm_1(x)).view(heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, hidden))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    """Returns logits; with targets, the loss."""

    def __init__(
        self, layers: int = 6, hidden: int = 64, heads: int = 4, vocab: int = 128, most: int = 64
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, hidden), nn.Embedding(most, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

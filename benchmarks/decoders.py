"""The project's own models: a Llama-like and a GPT-2-like decoder, small by default.

Plain PyTorch that knows nothing of lazyinline: whoever uses them marks the block class with
``lazy_inline``. A tensor's name ends in its shape, one letter per dimension:

    B  batch            H  attention heads          F  feed-forward width
    T  tokens           K  size of one head         V  vocabulary
    D  hidden, H * K    Z  three: query, key, value
"""

# Shape suffixes are capital letters.
# ruff: noqa: N803, N806, N815

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary position embedding, ``[T, K]`` each."""

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder and of its example batch.

    Attributes:
        num_layers: number of blocks.
        hidden: width of the residual stream.
        num_heads: attention heads; the size of one head is even, for the rotary embedding.
        ffn: width of the feed-forward layer; 0 means ``4 * hidden``.
        vocab: number of token ids.
        seq: tokens per sequence of the example batch, and the most the model takes.
        batch: sequences in the example batch.
        dropout: probability of dropping a value; used by :class:`GptDecoder` only.
        rope_base: base of the rotary frequencies; used by :class:`Decoder` only.

    Raises:
        ValueError: if ``hidden`` is not a multiple of ``2 * num_heads``.
    """

    num_layers: int
    hidden: int = 256
    num_heads: int = 4
    ffn: int = 0
    vocab: int = 1000
    seq: int = 64
    batch: int = 2
    dropout: float = 0.0
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.num_heads):
            raise ValueError(
                f"hidden={self.hidden} is not a multiple of 2 * num_heads={2 * self.num_heads}."
            )

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.hidden // self.num_heads

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn or 4 * self.hidden


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last dimension and scales per channel."""

    def __init__(self, size: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns the normalized values."""
        scale_BT1 = torch.rsqrt(x_BTD.square().mean(-1, keepdim=True) + self.eps)
        return x_BTD * scale_BT1 * self.weight


class SelfAttention(nn.Module):
    """Causal multi-head attention with one projection for query, key and value."""

    def __init__(self, config: DecoderConfig, *, bias: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=bias)
        self.out = nn.Linear(config.hidden, config.hidden, bias=bias)

    def forward(self, x_BTD: Tensor, rotary: Rotary | None = None) -> Tensor:
        """Mixes tokens with those before them, rotating queries and keys if asked to."""
        qkv_BTZHK = self.qkv(x_BTD).unflatten(-1, (3, self.num_heads, -1))
        q_BHTK, k_BHTK, v_BHTK = qkv_BTZHK.permute(2, 0, 3, 1, 4).unbind()
        if rotary is not None:
            q_BHTK, k_BHTK = rotate(q_BHTK, rotary), rotate(k_BHTK, rotary)
        mixed_BHTK = F.scaled_dot_product_attention(
            q_BHTK,
            k_BHTK,
            v_BHTK,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        y_BTD: Tensor = self.out(mixed_BHTK.transpose(1, 2).flatten(-2))
        return y_BTD


def rotate(x_BHTK: Tensor, rotary: Rotary) -> Tensor:
    """Applies the rotary position embedding to queries or keys."""
    cos_TK, sin_TK = rotary
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK


def rotary_tables(seq: int, head_size: int, base: float) -> Rotary:
    """Computes the cosines and sines of :func:`rotate` for the first ``seq`` positions."""
    frequencies = base ** (-torch.arange(0, head_size, 2) / head_size)
    angles = torch.outer(torch.arange(seq), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


class SwiGLU(nn.Module):
    """Feed-forward layer whose hidden values are gated by a SiLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn_width, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn_width, bias=False)
        self.down = nn.Linear(config.ffn_width, config.hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transforms each token on its own."""
        h_BTF = F.silu(self.gate(x_BTD)) * self.up(x_BTD)
        y_BTD: Tensor = self.down(h_BTF)
        return y_BTD


class DecoderBlock(nn.Module):
    """The repeated layer of :class:`Decoder`: attention and SwiGLU, each normalized before."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden)
        self.attention = SelfAttention(config)
        self.ffn_norm = RMSNorm(config.hidden)
        self.ffn = SwiGLU(config)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """Returns the residual stream after this layer."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), (cos_TK, sin_TK))
        x_BTD = x_BTD + self.ffn(self.ffn_norm(x_BTD))
        return x_BTD


class Head(nn.Module):
    """Final norm, projection to the vocabulary, and the loss."""

    def __init__(self, norm: nn.Module, config: DecoderConfig) -> None:
        super().__init__()
        self.norm = norm
        self.project = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Returns the mean cross entropy if targets are given, else the logits."""
        logits_BTV: Tensor = self.project(self.norm(x_BTD))
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class Decoder(nn.Module):
    """Llama-like decoder: RMSNorm, rotary positions, SwiGLU, no biases, no tied weights.

    Args:
        config: the sizes.

    Example:
        >>> logits = Decoder(DecoderConfig(num_layers=2))(ids)
        >>> loss = Decoder(DecoderConfig(num_layers=2))(ids, targets)
    """

    cos_TK: Tensor
    sin_TK: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.num_layers))
        self.head = Head(RMSNorm(config.hidden), config)
        cos_TK, sin_TK = rotary_tables(config.seq, config.head_size, config.rope_base)
        self.register_buffer("cos_TK", cos_TK, persistent=False)
        self.register_buffer("sin_TK", sin_TK, persistent=False)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Returns the loss if targets are given, else the logits."""
        tokens = ids_BT.shape[1]
        cos_TK, sin_TK = self.cos_TK[:tokens], self.sin_TK[:tokens]
        x_BTD = self.embedding(ids_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TK, sin_TK)
        result: Tensor = self.head(x_BTD, targets_BT)
        return result


class GptBlock(nn.Module):
    """The repeated layer of :class:`GptDecoder`: attention and a GELU layer, with dropout."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = SelfAttention(config, bias=True, dropout=config.dropout)
        self.ffn_norm = nn.LayerNorm(config.hidden)
        self.up = nn.Linear(config.hidden, config.ffn_width)
        self.down = nn.Linear(config.ffn_width, config.hidden)
        self.dropout = _dropout(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns the residual stream after this layer."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        h_BTF = F.gelu(self.up(self.ffn_norm(x_BTD)), approximate="tanh")
        x_BTD = x_BTD + self.dropout(self.down(h_BTF))
        return x_BTD


class GptDecoder(nn.Module):
    """GPT-2-like decoder: LayerNorm, learned positions, GELU, biases, optional dropout.

    Args:
        config: the sizes.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.seq, config.hidden)
        self.dropout = _dropout(config)
        self.blocks = nn.ModuleList(GptBlock(config) for _ in range(config.num_layers))
        self.head = Head(nn.LayerNorm(config.hidden), config)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Returns the loss if targets are given, else the logits."""
        positions_TD = self.positions.weight[: ids_BT.shape[1]]
        x_BTD = self.dropout(self.embedding(ids_BT) + positions_TD)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        result: Tensor = self.head(x_BTD, targets_BT)
        return result


def llama(num_layers: int, *, seed: int = 0, **sizes: Any) -> tuple[Decoder, tuple[Tensor, Tensor]]:
    """Builds a Llama-like decoder and an example batch, the same for the same arguments.

    Args:
        num_layers: number of blocks.
        seed: seed of weights and batch; the global generator is left alone.
        sizes: further fields of :class:`DecoderConfig`.

    Returns:
        The model, in training mode, and its arguments ``(ids, targets)``.

    Example:
        >>> model, args = llama(4)
        >>> model(*args).backward()
    """
    return _build(Decoder, DecoderConfig(num_layers, **sizes), seed)


def gpt(
    num_layers: int, *, seed: int = 0, **sizes: Any
) -> tuple[GptDecoder, tuple[Tensor, Tensor]]:
    """Builds a GPT-2-like decoder and an example batch; see :func:`llama`."""
    return _build(GptDecoder, DecoderConfig(num_layers, **sizes), seed)


def _build(
    make: Callable[[DecoderConfig], Model], config: DecoderConfig, seed: int
) -> tuple[Model, tuple[Tensor, Tensor]]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = make(config)
        ids_BT, targets_BT = torch.randint(config.vocab, (2, config.batch, config.seq)).unbind()
    return model, (ids_BT, targets_BT)


def _dropout(config: DecoderConfig) -> nn.Module:
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()


class InAutocast(nn.Module):
    """A model as mixed precision has it on a GPU: its parameters stay in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Tensor) -> Any:
        """Returns the model's output."""
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.model(**kwargs)

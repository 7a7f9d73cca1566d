"""GPT-2 of two small layers with its default configuration, token ids, and the model compiled."""

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import lazyinline

VOCABULARY = 67


def gpt2(**options: Any) -> GPT2LMHeadModel:
    """Returns the model, with the same weights at each call."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **(sizes | options)))


def in_place(model: Any, *, backend: str = "eager") -> Any:
    """Compiles a model in place, by what repeats in it."""
    return lazyinline.compile(model, backend=backend, reuse="auto", in_place=True)


def token_ids(count: int, length: int = 8, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count, length), generator=generator)

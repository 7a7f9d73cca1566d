"""A Hugging Face Llama, unmodified: the layer class is marked from outside.

python examples/huggingface_llama.py
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lazyinline


def main() -> None:
    """Compiles, takes a training step, and compares the loss with eager."""
    lazyinline.lazy_inline(LlamaDecoderLayer)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, config.vocab_size, (2, 32))

    compiled = lazyinline.compile(model)
    output = compiled(input_ids=ids, labels=ids)
    output.loss.backward()
    print(f"{type(output).__name__}: loss {output.loss.item():.6f}")
    print(f"eager loss {model(input_ids=ids, labels=ids).loss.item():.6f}")
    print(compiled.last_report)


if __name__ == "__main__":
    main()

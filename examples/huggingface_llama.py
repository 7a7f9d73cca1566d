"""A Hugging Face Llama as it comes: compiled, trained, and compared with eager.

    pip install transformers
    python examples/huggingface_llama.py

What it prints:

    step 0: CausalLMOutputWithPast, loss 6.24718, eager 6.24718, gradients equal
    step 1: CausalLMOutputWithPast, loss 5.92559, eager 5.92559, gradients equal
    step 2: CausalLMOutputWithPast, loss 5.68657, eager 5.68657, gradients equal
    122 nodes held, 497 if inlined
"""

from __future__ import annotations

import argparse
import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lazyinline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    plain = copy.deepcopy(model)
    compiled = lazyinline.compile(model, backend=options.backend)
    ours = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    ids = torch.randint(0, config.vocab_size, (2, 32))
    for step in range(options.steps):
        ours.zero_grad()
        theirs.zero_grad()
        output = compiled(input_ids=ids, labels=ids)
        output.loss.backward()
        expected = plain(input_ids=ids, labels=ids)
        expected.loss.backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-5)
        ours.step()
        theirs.step()
        losses = f"loss {output.loss.item():.5f}, eager {expected.loss.item():.5f}"
        print(f"step {step}: {type(output).__name__}, {losses}, gradients equal")
    report = compiled.last_report
    print(f"{report.num_nodes} nodes held, {report.num_nodes_if_inlined} if inlined")


if __name__ == "__main__":
    main()

"""What a further layer costs capture: seconds of a deep model over those of a shallow one.

A Hugging Face Llama from a small configuration, its decoder layer marked from outside. Both depths
are captured in turn in one warm process; the smallest of several CPU times counts, as other work on
the machine only ever adds to it. Garbage of earlier captures is collected in between, uncounted.

    python benchmarks/capture_time.py                      # 2 and 96 layers
    python benchmarks/capture_time.py --layers 2 48 --repeat 20
"""

from __future__ import annotations

import argparse
import gc
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lazyinline

GOAL = 1.2


def make(num_layers: int) -> LlamaForCausalLM:
    """Returns a small Llama; each of its layers holds its own ``layer_idx``."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def capture_s(model: LlamaForCausalLM, ids: torch.Tensor, mode: str) -> float:
    """Returns the CPU-seconds of one capture."""
    gc.collect()
    start = time.process_time()
    lazyinline.capture(model, (ids,), {"labels": ids}, train=mode == "training")
    return time.process_time() - start


def main() -> None:
    """Prints a row per mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs=2, default=[2, 96], metavar=("FEW", "MANY"))
    parser.add_argument("--repeat", type=int, default=12, help="captures of each, in turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lazyinline.lazy_inline(LlamaDecoderLayer)
    few, many = (make(n) for n in options.layers)
    ids = torch.randint(0, 128, (2, 16))
    head = [f"{n} layers, s" for n in options.layers]
    print(f"{'':<10}{head[0]:>14}{head[1]:>14}{'ratio':>8}{'ms per layer':>14}   goal {GOAL}")
    for mode in ("inference", "training"):
        for model in (few, many):
            capture_s(model, ids, mode)  # imports, and PyTorch's own caches
        times = [
            (capture_s(few, ids, mode), capture_s(many, ids, mode)) for _ in range(options.repeat)
        ]
        short, long = (min(column) for column in zip(*times, strict=True))
        further = (long - short) / (options.layers[1] - options.layers[0]) * 1e3
        print(f"{mode:<10}{short:>14.3f}{long:>14.3f}{long / short:>8.2f}{further:>14.2f}")


if __name__ == "__main__":
    main()

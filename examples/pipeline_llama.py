"""Trains a Hugging Face Llama as a pipeline. No download: the weights are random.

    torchrun --standalone --nproc-per-node 2 examples/pipeline_llama.py

Each rank builds the model, compiles its own stages and keeps its part of the checkpoint.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lazyinline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--html", help="write a picture of the schedule to this file")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights and batches on every rank
    lazyinline.lazy_inline(LlamaDecoderLayer)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, config.vocab_size, (2 * options.micro_batches, 32))

    pipe = lazyinline.pipeline(
        model,
        (),
        {"input_ids": ids, "labels": ids},
        num_stages=ranks if options.schedule in ("GPipe", "1F1B") else 2 * ranks,
        micro_batches=options.micro_batches,
        schedule=options.schedule,
        backend=options.backend,
    )
    if rank == 0:
        print(pipe.plan, flush=True)
        if options.html:
            pipe.plan.save_html(options.html)
    optimizer = torch.optim.AdamW((p for _, p in pipe.named_parameters()), lr=1e-3)
    for step in range(options.steps):
        loss = pipe.step(input_ids=ids, labels=ids)
        optimizer.step()
        if loss is not None:  # on the ranks that hold the last stage
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        print(f"rank {rank} wrote {pipe.save(folder).name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

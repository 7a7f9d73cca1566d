"""Trains a Hugging Face Llama as a pipeline. No download: the weights are random.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/pipeline_llama.py
    ... examples/pipeline_llama.py --schedule DualPipeV --html pipeline.html   # the schedule, drawn

Each rank builds the model, compiles its own stages and has its part of the checkpoint. What it
prints:

    1F1B: 2 stages on 2 rank(s), 4 micro-batches; predicted bubble 25.9%
    stage rank calls GFLOP forward backward  params   saved in flight  layers
        0    0     2  0.03 0.64 ms  1.41 ms 0.34 MB 0.46 MB         2  model.layers.0 ...
        1    1     2  0.03 0.78 ms  1.72 ms 0.34 MB 0.54 MB         1  model.layers.2 ...
    rank 0: peak 1.60 MB, of it in flight 0.91 MB
    rank 1: peak 1.25 MB, of it in flight 0.56 MB
    step 0 rank 0: has no last stage
    step 0 rank 1: loss 5.5686
    step 1 rank 0: has no last stage
    step 1 rank 1: loss 5.4120
    step 2 rank 0: has no last stage
    step 2 rank 1: loss 5.3104
    eager's loss before the first step is 5.5686
    rank 0 holds 90368 parameters
    rank 1 holds 90432 parameters
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM

import lazyinline


def print_in_order(line: str) -> None:
    """Prints a line of each rank, in the order of ranks; every rank calls it."""
    lines: list[str | None] | None = [None] * dist.get_world_size() if not dist.get_rank() else None
    dist.gather_object(line, lines)
    for text in lines or ():
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--html", help="write a picture of the schedule to this file")
    parser.add_argument("--save", help="write the ranks' parts to this folder")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights and batches on every rank
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
    eager = model(input_ids=ids, labels=ids).loss.item()

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
    optimizer = torch.optim.AdamW((p for _, p in pipe.named_parameters()), lr=1e-3)
    for step in range(options.steps):
        loss = pipe.step(input_ids=ids, labels=ids)
        optimizer.step()
        said = "has no last stage" if loss is None else f"loss {loss.item():.4f}"
        print_in_order(f"step {step} rank {rank}: {said}")
    if rank == 0:
        print(f"eager's loss before the first step is {eager:.4f}")
    if options.html:
        measured = pipe.measured_s()  # every rank calls it
        if rank == 0:
            pipe.plan.save_html(options.html, measured)
    if options.save:
        dcp.save(pipe.state_dict(), checkpoint_id=options.save)
    held = sum(p.numel() for _, p in pipe.named_parameters())
    print_in_order(f"rank {rank} holds {held} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

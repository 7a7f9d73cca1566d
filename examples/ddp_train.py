"""Trains under DistributedDataParallel: each process compiles its step, gradients are averaged.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/ddp_train.py

What it prints:

    step 0 rank 0: loss 4.9493, eager 4.9493
    step 0 rank 1: loss 5.0812, eager 5.0812
    step 1 rank 0: loss 4.9962, eager 4.9962
    step 1 rank 1: loss 5.0833, eager 5.0833
    step 2 rank 0: loss 4.9365, eager 4.9365
    step 2 rank 1: loss 4.9955, eager 4.9955
    step 3 rank 0: loss 5.0024, eager 5.0024
    step 3 rank 1: loss 5.0556, eager 5.0556
    step 4 rank 0: loss 4.9427, eager 4.9427
    step 4 rank 1: loss 4.9960, eager 4.9960
    rank 0: 32 nodes held, 80 if inlined
    rank 1: 32 nodes held, 80 if inlined
    rank 0: weights equal rank 0's: True
    rank 1: weights equal rank 0's: True
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
from decoder import Decoder
from torch.nn.parallel import DistributedDataParallel

import lazyinline


def print_in_order(line: str) -> None:
    """Prints a line of each rank, in the order of ranks; every rank calls it."""
    lines: list[str | None] | None = [None] * dist.get_world_size() if not dist.get_rank() else None
    dist.gather_object(line, lines)
    for text in lines or ():
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same weights everywhere
    model = Decoder(options.layers)
    plain = DistributedDataParallel(copy.deepcopy(model))
    step = lazyinline.compile_step(
        DistributedDataParallel(model), micro_batches=2, backend=options.backend
    )
    ours = torch.optim.AdamW(model.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    torch.manual_seed(1 + rank)  # other batches on each rank
    for number in range(options.steps):
        data = torch.randint(0, 128, (4, 33))
        ids, targets = data[:, :-1], data[:, 1:]
        loss = step(ids, targets)
        ours.step()
        expected = plain(ids, targets)
        theirs.zero_grad()
        expected.backward()
        theirs.step()
        losses = f"loss {loss.item():.4f}, eager {expected.item():.4f}"
        print_in_order(f"step {number} rank {rank}: {losses}")
    report = step.last_report
    print_in_order(
        f"rank {rank}: {report.num_nodes} nodes held, {report.num_nodes_if_inlined} if inlined"
    )
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    of_first = weights.clone()
    dist.broadcast(of_first, src=0)
    print_in_order(f"rank {rank}: weights equal rank 0's: {torch.equal(weights, of_first)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

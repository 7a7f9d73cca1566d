"""Stops a training run, goes on in a new process, and gets the losses of a run without a stop.

    python examples/checkpoint_resume.py

A checkpoint is the plain model's: the compiled module has its parameters under its names. What it
prints:

    step  no stop  resumed
       0   4.9956   4.9956
       1   4.9443   4.9443
       2   5.0839   5.0839
       3   5.0518   5.0518
       4   5.0861   5.0861
       5   5.1152   5.1152  new process
       6   5.0498   5.0498
       7   4.9199   4.9199
       8   5.0877   5.0877
       9   4.9234   4.9234
    equal to the last bit: True
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import tempfile

import torch
from decoder import Decoder

import lazyinline


def train(path: pathlib.Path, first: int, last: int, layers: int, backend: str) -> list[float]:
    """Trains from a step to another; takes up and leaves a checkpoint."""
    torch.manual_seed(0)
    model = Decoder(layers)
    compiled = lazyinline.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
    if first:
        checkpoint = torch.load(path)
        compiled.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    losses = []
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        data = torch.randint(0, 128, (4, 33), generator=generator)
        loss = compiled(data[:, :-1], data[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.save({"model": compiled.state_dict(), "optimizer": optimizer.state_dict()}, path)
    assert compiled.state_dict().keys() == model.state_dict().keys()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--resume", type=pathlib.Path, help="go on from this checkpoint")
    options = parser.parse_args()
    stop, how = options.steps // 2, (options.layers, options.backend)

    if options.resume:  # the new process
        print(*train(options.resume, stop, options.steps, *how))
        return
    with tempfile.TemporaryDirectory() as folder:
        whole = train(pathlib.Path(folder, "whole.pt"), 0, options.steps, *how)
        path = pathlib.Path(folder, "stopped.pt")
        losses = train(path, 0, stop, *how)
        command = [sys.executable, __file__, *sys.argv[1:], "--resume", str(path)]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    resumed = losses + [float(word) for word in said.split()]
    print(f"{'step':>4}  {'no stop':>7}  resumed")
    for number, (a, b) in enumerate(zip(whole, resumed, strict=True)):
        print(f"{number:>4}  {a:7.4f}  {b:7.4f}{'  new process' if number == stop else ''}")
    print(f"equal to the last bit: {whole == resumed}")


if __name__ == "__main__":
    main()

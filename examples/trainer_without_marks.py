"""Hugging Face's Trainer on a GPT-2 that one line compiles in place; nothing is marked.

    pip install 'lazyinline[integrations]'
    python examples/trainer_without_marks.py

What it prints:

    step   eager  compiled
       0  3.9124  3.9124  ###############################
       2  3.9067  3.9067  ###############################
       4  3.9318  3.9318  ###############################
       6  3.8994  3.8994  ###############################
       8  3.8041  3.8041  ##############################
      10  3.8752  3.8752  ###############################
      12  3.8245  3.8245  ###############################
      14  3.8172  3.8172  ###############################
      16  3.8297  3.8297  ###############################
      18  3.8371  3.8371  ###############################
    largest difference: 2e-07
    99 nodes held, 296 if inlined
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import lazyinline

try:
    import accelerate  # noqa: F401  the Trainer asks for it when it is made
except ImportError:
    raise SystemExit("Trainer needs more: pip install 'lazyinline[integrations]'") from None


class Rows(torch.utils.data.Dataset):
    """Token ids, each row its own labels."""

    def __init__(self, count: int) -> None:
        self.ids = torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def gpt2(layers: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": layers, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends))


def train(model: GPT2LMHeadModel, steps: int) -> list[float]:
    """Returns the losses that the Trainer logs."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Rows(32))
        trainer.remove_callback(PrinterCallback)  # it prints each log entry
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()

    model = gpt2(options.layers)
    lazyinline.compile(model, in_place=True, backend=options.backend)
    compiled = train(model, options.steps)
    eager = train(gpt2(options.layers), options.steps)  # the same weights, batches and dropout
    print(f"{'step':>4}  {'eager':>6}  compiled")
    for number in range(0, options.steps, max(1, options.steps // 10)):
        bar = "#" * round(8 * compiled[number])
        print(f"{number:>4}  {eager[number]:.4f}  {compiled[number]:.4f}  {bar}")
    print(
        f"largest difference: {max(abs(a - b) for a, b in zip(eager, compiled, strict=True)):.0e}"
    )
    report = lazyinline.last_report(model)
    print(f"{report.num_nodes} nodes held, {report.num_nodes_if_inlined} if inlined")


if __name__ == "__main__":
    main()

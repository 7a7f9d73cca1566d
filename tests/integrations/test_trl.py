"""TRL's SFTTrainer on a model that was compiled in place."""

import pathlib
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny_gpt2 import VOCABULARY, gpt2, in_place
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")),
        pad_token="w2",
        eos_token="w0",
        unk_token="w1",
    )


def rows() -> Dataset:
    """Token ids of several lengths, so that batches are padded."""
    generator = torch.Generator().manual_seed(0)
    lengths = [6 + index % 3 for index in range(24)]
    ids = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return Dataset.from_dict({"input_ids": ids})


def losses(model: Any, folder: pathlib.Path) -> list[float]:
    arguments = SFTConfig(
        output_dir=str(folder),
        max_steps=5,
        per_device_train_batch_size=4,
        logging_steps=1,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=rows(), processing_class=tokenizer()
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_five_steps_are_those_of_eager(tmp_path: pathlib.Path) -> None:
    ours, theirs = losses(in_place(gpt2()), tmp_path), losses(gpt2(), tmp_path)
    assert len(ours) == 5
    assert ours == pytest.approx(theirs, rel=1e-5)

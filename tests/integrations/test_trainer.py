"""Hugging Face's Trainer on a model that was compiled in place: equal to eager, loss by loss."""

import copy
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import lazyinline

STEPS = 20
VOCABULARY = 67

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"max_grad_norm": 0.05},
    "bf16": {"bf16": True},
    "label-smoothing": {"label_smoothing_factor": 0.1},
    "neftune": {"neftune_noise_alpha": 5.0},
    "checkpointing": {"gradient_checkpointing": True},
    "schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1},
}
# Two orders of the same bfloat16 operations differ by their rounding, 2**-8 at each, and AdamW
# makes a whole step of a gradient whose sign alone is sure: losses then differ in the third digit.
TOLERANCES = {"bf16": 5e-3}


class Rows(torch.utils.data.Dataset):
    """Token ids, each row the labels of its own."""

    def __init__(self, count: int, length: int = 8) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, VOCABULARY, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.values.append(logs["loss"])


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes)
    )


def trainer(folder: pathlib.Path, model: Any, **settings: Any) -> tuple[Trainer, Losses]:
    losses = Losses()
    defaults = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(**{**defaults, **settings})
    made = Trainer(
        model=model,
        args=arguments,
        train_dataset=Rows(240),
        eval_dataset=Rows(6),
        callbacks=[losses],
    )
    return made, losses


def compiled() -> GPT2LMHeadModel:
    return lazyinline.compile(gpt2(), backend="eager", reuse="auto", in_place=True)


@pytest.mark.parametrize("setting", SETTINGS)
def test_twenty_steps_are_those_of_eager(setting: str, tmp_path: pathlib.Path) -> None:
    curves, results = [], []
    model = compiled()
    for run in (model, gpt2()):
        made, losses = trainer(tmp_path, run, **copy.deepcopy(SETTINGS[setting]))
        made.train()
        curves.append(losses.values)
        results.append(made.evaluate()["eval_loss"])
        results.append(made.predict(Rows(6)).metrics["test_loss"])
    assert len(curves[0]) == STEPS
    tolerance = TOLERANCES.get(setting, 1e-5)
    assert curves[0] == pytest.approx(curves[1], rel=tolerance)
    assert results[:2] == pytest.approx(results[2:], rel=tolerance)
    report = lazyinline.last_report(model)
    assert report is not None
    assert not report.ran_eagerly


def test_what_was_saved_is_the_models_and_training_goes_on_from_it(tmp_path: pathlib.Path) -> None:
    saving = {
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": 10,
        "eval_steps": 10,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    }
    model = compiled()
    made, losses = trainer(tmp_path / "run", model, **saving)
    made.train()
    assert made.state.best_model_checkpoint
    made.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "config.json").exists()
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "saved").eval()
    ids = Rows(2).ids
    with torch.no_grad():
        ours = made.model.eval()(input_ids=ids.to(made.args.device)).logits
        torch.testing.assert_close(ours, again(input_ids=ids).logits, rtol=1e-5, atol=1e-6)
    resumed, rest = trainer(tmp_path / "run", compiled(), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-10"))
    assert rest.values == pytest.approx(losses.values[10:], rel=1e-5)

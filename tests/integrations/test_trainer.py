"""Hugging Face's Trainer on a model that was compiled in place: equal to eager, loss by loss."""

import copy
import pathlib
from typing import Any

import pytest
import torch
from comparing import assert_close
from tiny_gpt2 import gpt2, in_place, token_ids
from torch import Tensor
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

from lazyinline import CompileReport

STEPS = 20

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"max_grad_norm": 0.05, "lr_scheduler_type": "cosine", "warmup_steps": 3},
    "bf16": {"bf16": True},
    "label-smoothing": {"label_smoothing_factor": 0.1},
    "neftune": {"neftune_noise_alpha": 5.0},
    "checkpointing": {"gradient_checkpointing": True},
}
# Two orders of the same bfloat16 operations differ by their rounding, 2**-8 at each, and AdamW
# makes a whole step of a gradient whose sign alone is sure: losses then differ in the third digit.
TOLERANCES = {"bf16": 5e-3}
SAVING = {
    "save_strategy": "steps",
    "eval_strategy": "steps",
    "save_steps": STEPS // 2,
    "eval_steps": STEPS // 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
}


class Rows(torch.utils.data.Dataset):
    """Token ids, each row the labels of its own."""

    def __init__(self, count: int) -> None:
        self.ids = token_ids(count)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def trainer(folder: pathlib.Path, model: Any, **settings: Any) -> Trainer:
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
    arguments = TrainingArguments(**{**defaults, **copy.deepcopy(settings)})
    return Trainer(model=model, args=arguments, train_dataset=Rows(240), eval_dataset=Rows(6))


def logged(made: Trainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


def trained(folder: pathlib.Path, model: Any, **settings: Any) -> list[float]:
    made = trainer(folder, model, **settings)
    made.train()
    return logged(made)


@pytest.mark.parametrize("setting", SETTINGS)
def test_twenty_steps_are_those_of_eager(
    setting: str, tmp_path: pathlib.Path, compiles: list[CompileReport]
) -> None:
    ours = trained(tmp_path, in_place(gpt2()), **SETTINGS[setting])
    theirs = trained(tmp_path, gpt2(), **SETTINGS[setting])
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, rel=TOLERANCES.get(setting, 1e-5))
    assert len(compiles) == 1
    assert not compiles[0].ran_eagerly


def saved_and_evaluated(folder: pathlib.Path, model: Any) -> Trainer:
    made = trainer(folder, model, **SAVING)
    made.train()
    return made


def test_it_evaluates_predicts_saves_resumes_and_finds_the_best_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    made = saved_and_evaluated(tmp_path / "ours", in_place(gpt2()))
    plain = saved_and_evaluated(tmp_path / "eager", gpt2())
    for name in ("loss", "eval_loss"):
        assert logged(made, name) == pytest.approx(logged(plain, name), rel=1e-5)
    best, expected_best = made.state.best_model_checkpoint, plain.state.best_model_checkpoint
    assert pathlib.Path(best).name == pathlib.Path(expected_best).name
    predicted, expected = (run.predict(Rows(6)) for run in (made, plain))
    # What 20 steps of AdamW make of the rounding of sums.
    assert_close(torch.tensor(predicted.predictions), torch.tensor(expected.predictions), 1e-4)
    made.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "config.json").exists()
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "saved").eval()
    ids = token_ids(2)
    with torch.no_grad():
        assert_close(made.model.eval()(input_ids=ids).logits, again(input_ids=ids).logits)
    resumed = trainer(tmp_path / "ours", in_place(gpt2()), **SAVING)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / f"checkpoint-{STEPS // 2}"))
    assert logged(resumed) == pytest.approx(logged(plain), rel=1e-5)


def test_a_model_under_torch_compile_with_our_backend_trains_as_in_eager(
    tmp_path: pathlib.Path,
) -> None:
    model = gpt2()
    model.compile(backend="lazyinline", options={"backend": "eager"})
    assert trained(tmp_path, model) == pytest.approx(trained(tmp_path, gpt2()), rel=1e-5)


def test_its_own_list_of_backends_does_not_know_ours(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="LAZYINLINE"):
        trainer(tmp_path, gpt2(), torch_compile_backend="lazyinline")

"""Lightning: a module around a compiled model, compiled in place or wrapped."""

import pathlib
from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
from decoders import gpt
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lazyinline

STEPS = 20


class Lit(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.model(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def decoder() -> nn.Module:
    return gpt(2, hidden=32, num_heads=2, vocab=40, seq=8)[0]


def compiled(in_place: bool) -> nn.Module:
    return lazyinline.compile(decoder(), backend="eager", reuse="auto", in_place=in_place)


def loader() -> DataLoader[tuple[Tensor, ...]]:
    ids = torch.randint(0, 40, (STEPS, 8), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(ids, ids.roll(-1, 1)), batch_size=2)


def trained(
    model: nn.Module, folder: pathlib.Path, steps: int = STEPS, start: str | None = None
) -> tuple[list[float], lightning.Trainer]:
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        gradient_clip_val=0.5,
        default_root_dir=folder,
    )
    lit = Lit(model)
    trainer.fit(lit, loader(), ckpt_path=start)
    return lit.losses, trainer


@pytest.mark.parametrize("in_place", [True, False])
def test_twenty_steps_are_those_of_eager(in_place: bool, tmp_path: pathlib.Path) -> None:
    ours, _ = trained(compiled(in_place), tmp_path)
    theirs, _ = trained(decoder(), tmp_path)
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, rel=1e-5)


def resumed(make: Callable[[], nn.Module], folder: pathlib.Path) -> list[float]:
    """Trains to the half, saves, and goes on from the file with another model."""
    first, trainer = trained(make(), folder, STEPS // 2)
    trainer.save_checkpoint(folder / "half.ckpt", weights_only=False)
    rest, _ = trained(make(), folder, STEPS, str(folder / "half.ckpt"))
    return first + rest


def test_a_checkpoint_is_the_models_and_training_goes_on_from_it(tmp_path: pathlib.Path) -> None:
    ours = resumed(lambda: compiled(True), tmp_path)
    assert len(ours) == STEPS
    assert ours == pytest.approx(resumed(decoder, tmp_path), rel=1e-5)

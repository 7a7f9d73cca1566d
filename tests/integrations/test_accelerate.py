"""accelerate on a model that was compiled in place, and on one under ``torch.compile``."""

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from decoders import gpt
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lazyinline

STEPS = 12


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """accelerate keeps its settings for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch._dynamo.reset()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def decoder() -> nn.Module:
    return gpt(2, hidden=32, num_heads=2, vocab=40, seq=8)[0]


def in_place() -> nn.Module:
    return lazyinline.compile(decoder(), backend="eager", reuse="auto", in_place=True)


def under_dynamo() -> nn.Module:
    model = decoder()
    model.compile(backend="lazyinline", options={"backend": "eager"})
    return model


def loader() -> DataLoader[tuple[Tensor, ...]]:
    ids = torch.randint(0, 40, (STEPS * 2, 8), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(ids, ids.roll(-1, 1)), batch_size=2)


def losses(model: nn.Module, folder: pathlib.Path | None = None, **settings: Any) -> list[float]:
    """Trains with accumulation, clipping and a schedule; saves and restores half-way."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS)
    prepared = accelerator.prepare(model, optimizer, loader(), schedule)
    model, optimizer, batches, schedule = prepared
    found = []
    for index, (ids, targets) in enumerate(batches):
        with accelerator.accumulate(model):
            loss = model(ids, targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found.append(loss.item())
        if folder is not None and index == STEPS // 2:
            accelerator.save_state(str(folder))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            accelerator.load_state(str(folder))
    return found


@pytest.mark.parametrize("make", [in_place, under_dynamo])
def test_a_loop_with_accumulation_and_clipping_is_eagers(make: Any, tmp_path: pathlib.Path) -> None:
    assert losses(make(), tmp_path / "a") == pytest.approx(losses(decoder()), rel=1e-5)


def test_mixed_precision_is_eagers() -> None:
    ours = losses(in_place(), mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    theirs = losses(decoder(), mixed_precision="bf16")
    # Rounding to bfloat16 in two orders: 2**-8 at each operation, and AdamW steps by signs.
    assert ours == pytest.approx(theirs, rel=5e-3)


def test_its_list_of_backends_is_fixed() -> None:
    with pytest.raises(ValueError, match="LAZYINLINE"):
        Accelerator(cpu=True, dynamo_backend="lazyinline")

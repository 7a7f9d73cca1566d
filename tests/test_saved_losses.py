"""Losses of some results: a file has their backwards, and none is compiled where it is opened."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from models import Made, MarkedBlock, Net, batch
from test_hostile_files import OF_PARTS, opened, parts_in, refused, written
from test_saved import reloaded
from torch import Tensor, nn

import lazyinline


def run_pair(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results of parameters of their own and shared ones."""
    hidden = self.net(x)
    return torch.tanh(self.first(hidden)), self.second(hidden).exp()


def pair() -> nn.Module:
    held = {"net": Net(MarkedBlock, 2), "first": nn.Linear(2, 3), "second": nn.Linear(2, 4)}
    return Made(run_pair, **held)


def steps_of(model: Any, x: Tensor) -> list[Tensor]:
    """Trains by losses of one result, of the other and of both; returns all numbers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for used in ((0,), (1,), (0, 1), (1,), (0,)):
        optimizer.zero_grad(set_to_none=True)
        out = model(x)
        loss = torch.stack([out[i].square().sum() for i in used]).sum()
        loss.backward()
        # A gradient that is absent is one that the optimizer passes by.
        grads = [torch.full((1,), 7.0) if p.grad is None else p.grad for p in model.parameters()]
        found += [*out, *(grad.clone() for grad in grads)]
        optimizer.step()
    return [tensor.detach() for tensor in found]


KINDS: dict[str, tuple[bool, Any]] = {
    "plain": (False, None),
    "full": (False, "full"),
    "budget": (False, lazyinline.Budget(fraction=0.5)),
    "sizes": (True, None),
    "sizes-full": (True, "full"),
}


@pytest.mark.sweep(keep=["plain-signed-eager", "sizes-full-another-eager"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("machine", ["signed", "another"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_holds_the_backwards_for_losses_of_some_results(
    kind: str, machine: str, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dynamic, recompute = KINDS[kind]
    torch.manual_seed(0)
    compiled: Any = lazyinline.compile(
        pair(), dynamic=dynamic, recompute=recompute, backend=backend, fallback="error"
    )
    steps_of(compiled, batch(8))
    loaded = reloaded(compiled, tmp_path)
    if machine == "another":
        monkeypatch.setenv("LAZYINLINE_CACHE_DIR", str(tmp_path / "another machine"))
        loaded = lazyinline.load(tmp_path / "model.lz")
    with zipfile.ZipFile(tmp_path / "model.lz") as archive:
        names = [name for name in archive.namelist() if "backward." in name]
    wanted = ["backward.txt", "backward.1.txt", "backward.2.txt"]
    assert [name.rpartition("/")[2] for name in names] == wanted
    for size in (8, 5) if dynamic else (8,):
        found, expected = steps_of(loaded, batch(size)), steps_of(compiled, batch(size))
        assert all(map(torch.equal, found, expected)), size
    if (machine, backend) == ("signed", "inductor"):
        assert loaded.last_report.num_kernels == 0, "kernels that this machine signed are taken"


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of a model whose losses took one result, the other, and both."""
    compiled = lazyinline.compile(pair(), backend="eager")
    steps_of(compiled, batch())
    path = tmp_path_factory.mktemp("paired") / "model.lz"
    lazyinline.save(compiled, path)
    return path.read_bytes()


def test_a_backward_that_does_not_fit_the_whole_is_refused(paired: bytes, tmp_path: Path) -> None:
    path, parts = tmp_path / "model.lz", parts_in(paired)
    first, second = (f"programs/0/backward.{number}.txt" for number in (1, 2))
    assert opened(written(parts | {first: parts[second], second: parts[first]}), path)
    assert f"it has no part {second}" in opened(
        written({name: content for name, content in parts.items() if name != second}), path
    )
    told = json.loads(parts["model.json"])
    rows = told["programs"][0]["backwards"]
    whole = told["programs"][0]["boundary"][2:]
    results, takes = rows[0]
    of_takes = [[results, one] for one in (takes[:-1], [*takes, 99], takes[::-1])]
    firsts = [whole, *([one, takes] for one in ([], [-1], [True])), *of_takes]
    others = [[], [[]], [rows[0]], [rows[1], rows[0]], [*rows, rows[0]], 7, "ab"]
    for wrong in (*others, *([first, rows[1]] for first in firsts)):
        told["programs"][0]["backwards"] = wrong
        said = opened(written(parts | {"model.json": json.dumps(told).encode()}), path)
        assert said or wrong in ([], [rows[0]]), wrong  # which is a file without those


@pytest.mark.sweep(keep="few")
@pytest.mark.parametrize("count", [8, 3_000], ids=["few", "many"])
def test_files_with_such_backwards_that_are_damaged_are_refused_in_a_sentence(
    count: int, paired: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backward_changed(parts: dict[str, bytes], random: Random) -> None:
        own = {name: text for name, text in parts.items() if "backward." in name}
        random.choice(OF_PARTS[6:9])(own, random)
        parts |= own

    monkeypatch.setenv("LAZYINLINE_VERIFY", "0")
    assert len(refused(paired, tmp_path / "model.lz", range(count), backward_changed)) > count // 2


def test_a_file_without_such_backwards_compiles_them(paired: bytes, tmp_path: Path) -> None:
    parts = parts_in(paired)
    told = json.loads(parts["model.json"])
    del told["programs"][0]["backwards"]
    path, whole = tmp_path / "model.lz", tmp_path / "whole.lz"
    whole.write_bytes(paired)
    kept = {name: text for name, text in parts.items() if "backward." not in name[:-4]}
    path.write_bytes(written(kept | {"model.json": json.dumps(told).encode()}))
    found, expected = (steps_of(lazyinline.load(one), batch()) for one in (path, whole))
    assert all(map(torch.equal, found, expected))

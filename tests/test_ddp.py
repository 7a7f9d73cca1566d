"""DistributedDataParallel around a compiled module: two real processes, gloo, on the CPU."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import relative_error
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import lazyinline
from lazyinline import lazy_inline
from lazyinline.reuse.errors import CaptureError

WORLD = 2


@lazy_inline
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.norm(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 3)
        self.unused = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def model_and_batches() -> tuple[Net, list[list[Tensor]]]:
    """The model, and for each step the batch of each rank; the same in every process."""
    torch.manual_seed(0)
    model = Net()
    generator = torch.Generator().manual_seed(1)
    steps = [[torch.randn(5, 8, generator=generator) for _ in range(WORLD)] for _ in range(3)]
    return model, steps


def train(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    """Trains with gradients averaged over the ranks; returns what this rank ends with."""
    from torch.nn.parallel import DistributedDataParallel

    model, steps = model_and_batches()
    compiled = lazyinline.compile(model, backend="eager")
    parallel: Any = DistributedDataParallel(
        compiled, find_unused_parameters=True, bucket_cap_mb=1, broadcast_buffers=False
    )
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    first: dict[str, Tensor] = {}
    for index, step in enumerate(steps):
        optimizer.zero_grad()
        if index == 1:  # two micro-batches, averaged once
            with parallel.no_sync():
                parallel(step[rank]).square().mean().backward()
        parallel(step[rank]).square().mean().backward()
        if index == 0:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    names = [name.removeprefix("module.") for name in parallel.state_dict()]
    assert names == list(model.state_dict())
    parallel.load_state_dict(parallel.state_dict())
    return {
        "first": first,
        "state": model.state_dict(),
        "calls": compiled.last_report.num_block_calls,
        "closures": compiled.last_report.num_closures,
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes says to every task; they are started once."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), "test_ddp.everything", WORLD)


def everything(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    return {task.__name__: task(rank, folder) for task in (train, wrap)}


def test_gradients_equal_the_average_over_single_process_ranks(
    two_ranks: list[dict[str, Any]],
) -> None:
    ranks = [said["train"] for said in two_ranks]
    # The reference: each rank's model run by eager in this process, gradients averaged by hand.
    models = [model_and_batches()[0] for _ in range(WORLD)]
    _, steps = model_and_batches()
    for index, step in enumerate(steps):
        for model, x in zip(models, step, strict=True):
            model.zero_grad()
            for _ in range(2 if index == 1 else 1):
                model(x).square().mean().backward()
        for group in zip(*(model.parameters() for model in models), strict=True):
            if group[0].grad is None:
                continue
            mean = torch.stack([p.grad for p in group]).mean(0)
            for parameter in group:
                parameter.grad = mean.clone()
        if index == 0:
            named = models[0].named_parameters()
            first = {name: p.grad.clone() for name, p in named if p.grad is not None}
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    for rank, model in zip(ranks, models, strict=True):
        assert rank["calls"] == 3
        assert rank["closures"] == 2  # the block and the head
        # The bias before a batch norm has no gradient but rounding.
        real = [name for name in first if not name.endswith("up.bias")]
        assert set(first) <= set(rank["first"]) and len(real) > 10
        for name in real:
            assert relative_error(rank["first"][name], first[name]) <= 1e-5, name
        for name, value in model.state_dict().items():
            assert relative_error(rank["state"][name], value) <= 1e-5, name
    one, two = (rank["state"] for rank in ranks)
    for name, _ in models[0].named_parameters():
        assert torch.equal(one[name], two[name]), f"the ranks drifted apart in {name}"
    assert not torch.equal(one["blocks.0.norm.running_mean"], two["blocks.0.norm.running_mean"])


def refused(make: Callable[[nn.Module], Any]) -> str:
    """Returns why a model, wrapped and compiled, does not run; "" if it does."""
    torch.manual_seed(0)
    try:
        made = make(Net())
        for _ in range(2):
            made(torch.randn(5, 8)).square().mean()
    except CaptureError as error:
        return str(error)
    return ""


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def compiled(model: nn.Module) -> Any:
    return lazyinline.compile(model, backend="eager")


def called(module: Any) -> Any:
    module(torch.randn(5, 8))
    return module


def with_sharded_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    return model


def with_compiled_blocks(model: nn.Module, late: bool = False) -> nn.Module:
    model.blocks = nn.ModuleList(map(compiled, model.blocks))  # type: ignore[arg-type, union-attr]
    if late:
        called(model)
    return with_sharded_blocks(model)


def wrap(rank: int, folder: pathlib.Path) -> dict[str, str]:
    """Wraps models in every way; returns what each compile says."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    def sharded(module: Any) -> Any:
        fully_shard(module)
        return module

    def step(model: nn.Module) -> Any:
        return lazyinline.compile_step(model, loss_fn=loss_of, backend="eager")

    def full(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    return {
        "DistributedDataParallel inside": refused(
            lambda m: step(nn.Sequential(DistributedDataParallel(m), nn.ReLU()))
        ),
        "DataParallel": refused(lambda m: compiled(DataParallel(m))),
        "FullyShardedDataParallel": refused(lambda m: compiled(full(m))),
        "FSDPModule step": refused(lambda m: step(sharded(m))),
        "FSDPModule compiled blocks": refused(with_compiled_blocks),
        "FSDPModule blocks that ran": refused(lambda m: with_compiled_blocks(m, late=True)),
        "FSDPModule what ran": refused(lambda m: sharded(called(compiled(m)))),
        "DDP": refused(lambda m: compiled(replicate(m))),
        "": refused(lambda m: DistributedDataParallel(compiled(m))),
        "root": str(root_error()),
    }


def root_error() -> float:
    """Trains compiled blocks whose parameters a sharded root frees; how far from eager."""
    x, models = torch.randn(5, 8), []
    for block_of in (lambda b: b, lazyinline.compile):
        torch.manual_seed(0)
        model = nn.Sequential(*(block_of(nn.Linear(8, 8)) for _ in range(3)))
        fully_shard(model, reshard_after_forward=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
        models.append([p.to_local() for p in model.parameters()])  # type: ignore[attr-defined]
    return max(relative_error(a, b) for a, b in zip(*models, strict=True))


def test_wrappers_are_refused_by_name_and_what_frees_parameters_is_followed(
    two_ranks: list[dict[str, Any]],
) -> None:
    for said in two_ranks:
        error = float(said["wrap"]["root"])
        assert error <= 1e-5, error
        for name, message in said["wrap"].items():
            if name == "root":
                continue
            assert name.partition(" ")[0] in message if name else not message, (name, message)

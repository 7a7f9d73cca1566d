"""Wrappers for several devices around and inside compiled models: equal to eager, or refused.

Two real processes, gloo, on the CPU: they are started once and run every task.
"""

import contextlib
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import relative_error
from models import MarkedBatchNormBlock, Net
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lazyinline
from lazyinline import CaptureError, PlanError
from lazyinline.frontend.training_step import TrainingStep

Wrap = Callable[[Any], Any]
STEPS = 3


def net() -> Net:
    return Net(MarkedBatchNormBlock)


class HalfUsed(Net):
    """Has a layer that no loss reaches, as data parallelism has to be told."""

    def __init__(self) -> None:
        super().__init__(MarkedBatchNormBlock)
        self.unused = nn.Linear(4, 2)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def compiled(model: Any, **options: Any) -> Any:
    return lazyinline.compile(model, backend="eager", **options)


def step_of(model: Any, **options: Any) -> Any:
    return lazyinline.compile_step(model, loss_fn=loss_of, backend="eager", **options)


def trained(
    rank: int, wrap: Wrap, accumulate: int = 1, kind: Callable[[], Net] = net
) -> tuple[dict[str, Tensor], Any]:
    """Trains a model inside what wraps it; returns parameters, buffers, and that."""
    torch.manual_seed(0)
    model = kind()
    wrapped = wrap(model)
    is_step = isinstance(wrapped, TrainingStep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = torch.randn(4, 4, generator=generator).chunk(accumulate)
        if is_step:
            wrapped(torch.cat(parts))
        else:
            for number, part in enumerate(parts, 1):
                last = number == accumulate
                with contextlib.nullcontext() if last else wrapped.no_sync():
                    (loss_of(wrapped(part)) / accumulate).backward()
        optimizer.step()
    state = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in model.state_dict().items()}
    return {name: tensor.detach().clone().float() for name, tensor in state.items()}, wrapped


def report_of(module: Any) -> Any:
    try:
        return lazyinline.last_report(module)
    except PlanError:
        return None


def error(
    rank: int,
    wrap: Wrap,
    expected: dict[str, Tensor],
    accumulate: int = 1,
    kind: Callable[[], Net] = net,
) -> float:
    """Returns how far what was trained is from eager; nan if nothing was compiled."""
    state, wrapped = trained(rank, wrap, accumulate, kind)
    found = [wrapped, *wrapped.modules()] if isinstance(wrapped, nn.Module) else [wrapped]
    reports = [r for r in map(report_of, found) if r is not None]
    if not reports or any(r.ran_eagerly or r.num_compiles > 1 for r in reports):
        return float("nan")
    assert list(state) == list(expected)
    return max(relative_error(state[name], expected[name]) for name in state)


def data_parallel(rank: int, folder: pathlib.Path) -> dict[str, float]:
    parallel, far = DistributedDataParallel, functools.partial(error, rank)
    static: Wrap = functools.partial(parallel, static_graph=True)
    views: Wrap = functools.partial(
        parallel, gradient_as_bucket_view=True, find_unused_parameters=True
    )
    unused: Wrap = functools.partial(
        parallel, find_unused_parameters=True, broadcast_buffers=False, bucket_cap_mb=1
    )
    once, twice = trained(rank, parallel)[0], trained(rank, parallel, accumulate=2)[0]
    apart = trained(rank, unused, 2, HalfUsed)[0]
    return {
        "inside": far(lambda m: unused(compiled(m)), apart, 2, HalfUsed),
        "around": far(lambda m: compiled(views(m)), twice, accumulate=2),
        "in place": far(lambda m: compiled(static(m), in_place=True), once),
        "step of two": far(lambda m: step_of(views(m), micro_batches=2), twice, 2),
    }


def sharded(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def each_compiled(model: Any, backend: str = "eager") -> Any:
    for block in model.blocks:
        lazyinline.compile(block, backend=backend, in_place=True)
    return model


def in_shards(rank: int, folder: pathlib.Path) -> dict[str, float]:
    expected = trained(rank, sharded)[0]
    keeps: Wrap = lambda m: sharded(m, reshard_after_forward=False)  # noqa: E731
    return {
        "whole, before": error(rank, lambda m: compiled(sharded(m), in_place=True), expected),
        "whole, after": error(rank, lambda m: sharded(compiled(m, in_place=True)), expected),
        "around": error(rank, lambda m: compiled(keeps(m)), expected),
        "one shard": error(rank, lambda m: compiled(fully_shard(m), in_place=True), expected),
        "blocks, before": error(rank, lambda m: each_compiled(sharded(m)), expected),
        "blocks, after": error(rank, lambda m: sharded(each_compiled(m, "inductor")), expected),
    }


def checkpoints(rank: int, folder: pathlib.Path) -> dict[str, float]:
    """Saves what trained, loads it into another; how far the two and their names are apart."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    ways: dict[str, Wrap] = {
        "around": lambda m: DistributedDataParallel(compiled(m)),
        "in place": lambda m: compiled(DistributedDataParallel(m), in_place=True),
        "shards": lambda m: sharded(compiled(m, in_place=True)),
    }
    found = {}
    for name, wrap in ways.items():
        expected, wrapped = trained(rank, wrap)
        saved = get_model_state_dict(wrapped)
        assert sorted(saved) == sorted(expected), name
        dcp.save(saved, checkpoint_id=folder / name)
        torch.manual_seed(1)
        again = wrap(net())
        empty = get_model_state_dict(again)
        dcp.load(empty, checkpoint_id=folder / name)
        set_model_state_dict(again, empty)
        x = torch.randn(4, 4)
        with torch.no_grad():  # training: running statistics are each rank's own
            found[name] = relative_error(again(x), wrapped(x))
    return found


def refused(make: Callable[[nn.Module], Any]) -> str:
    """Returns why a model, wrapped and compiled, does not run; "" if it does."""
    torch.manual_seed(0)
    try:
        made = make(net())
        for _ in range(2):
            made(torch.randn(5, 4)).square().mean()
    except CaptureError as error:
        return str(error)
    return ""


def called(module: Any) -> Any:
    module(torch.randn(5, 4))
    return module


def with_compiled_blocks(model: nn.Module, late: bool = False) -> nn.Module:
    model.blocks = nn.ModuleList(map(compiled, model.blocks))  # type: ignore[arg-type, union-attr]
    if late:
        called(model)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    return model


def refusals(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    """Wraps models in ways that cannot be followed; returns what each compile says."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DataParallel

    def full(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    return {
        "DistributedDataParallel inside": refused(
            lambda m: step_of(nn.Sequential(DistributedDataParallel(m), nn.ReLU()))
        ),
        "DataParallel": refused(lambda m: compiled(DataParallel(m))),
        "FullyShardedDataParallel": refused(lambda m: compiled(full(m))),
        "FSDPModule step": refused(lambda m: step_of(fully_shard(m))),
        "FSDPModule compiled blocks": refused(with_compiled_blocks),
        "FSDPModule blocks that ran": refused(lambda m: with_compiled_blocks(m, late=True)),
        "FSDPModule what ran": refused(lambda m: fully_shard(called(compiled(m)))),
        "DDP": refused(lambda m: compiled(replicate(m))),
        "": refused(lambda m: DistributedDataParallel(compiled(m))),
        "root": root_error(),
    }


def root_error() -> float:
    """Trains compiled blocks whose parameters a sharded root frees; how far from eager."""
    x, models = torch.randn(5, 4), []
    for block_of in (lambda b: b, compiled):
        torch.manual_seed(0)
        model = nn.Sequential(*(block_of(nn.Linear(4, 4)) for _ in range(3)))
        fully_shard(model, reshard_after_forward=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
        models.append([p.to_local() for p in model.parameters()])  # type: ignore[attr-defined]
    return max(relative_error(a, b) for a, b in zip(*models, strict=True))


@pytest.mark.parametrize("task", ["data_parallel", "in_shards", "checkpoints"])
@pytest.mark.sweep(keep="data_parallel")
def test_models_in_wrappers_train_and_are_saved_as_in_eager(task: str, two_ranks: Any) -> None:
    for said in two_ranks:
        for way, far in said[task].items():
            assert far <= 1e-5, (way, far)


@pytest.mark.parametrize("task", ["refusals"])
def test_wrappers_are_refused_by_name_and_what_frees_parameters_is_followed(
    task: str, two_ranks: list[dict[str, Any]]
) -> None:
    for said in two_ranks:
        messages = dict(said[task])
        assert messages.pop("root") <= 1e-5
        for name, message in messages.items():
            assert name.partition(" ")[0] in message if name else not message, (name, message)


def test_a_model_with_a_call_of_its_own_is_refused_inside_a_wrapper(tmp_path: pathlib.Path) -> None:
    import torch.distributed as dist

    class Around(Net):  # type: ignore[misc]
        def __call__(self, x: Tensor) -> Tensor:
            return self.forward(x)

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        for way in (compiled, step_of):
            with pytest.raises(PlanError, match=r"Around overrides __call__"):
                way(DistributedDataParallel(Around()))
    finally:
        dist.destroy_process_group()

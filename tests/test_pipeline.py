"""Pipelines on real gloo processes, and on one process that holds every stage."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparing import relative_error
from memory_events import memory_use
from models import Around, Made
from rank_threads import same_excepthook
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lazyinline
from lazyinline import Budget, PipelineError, lazy_inline
from lazyinline.frontend.page.page import plan_page
from lazyinline.frontend.passes import link
from lazyinline.pipeline_parallel.actions import COMPUTE

MICRO_BATCHES = 4
BATCH = 8
OF_ONE_RANK = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]


@lazy_inline
class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.down(F.gelu(self.up(self.norm(x)))) * scale
        return y, scale


class Net(nn.Module):
    """Tied embedding and head; a table made at the start that every block uses and returns."""

    def __init__(self, layers: int = 4, width: int = 8, vocab: int = 13) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.scale = nn.Linear(1, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        scale = self.scale(ids.float().mean(1, keepdim=True))[:, None].transpose(0, 1)
        scale = scale.expand(ids.shape[1], -1, -1).transpose(0, 1)  # no contiguous layout
        for block in self.blocks:
            x, scale = block(x, scale)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def net_and_batch(**sizes: int) -> tuple[Net, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Net(**sizes)
    ids, targets = torch.randint(0, 13, (2, BATCH, 5))
    return model, (ids, targets)


def train(pipe: Any, model: nn.Module, args: tuple[Tensor, ...], steps: int = 3) -> list[str]:
    """Trains a pipeline beside an eager copy; returns what differs."""
    reference = copy.deepcopy(model)
    parameters, expected = dict(pipe.named_parameters()), dict(reference.named_parameters())
    ours = torch.optim.AdamW(parameters.values(), lr=1e-3)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    wrong = []
    for step in range(steps):
        theirs.zero_grad()
        parts = zip(*(a.chunk(MICRO_BATCHES) for a in args), strict=True)
        loss = torch.stack([reference(*part) for part in parts]).mean()
        loss.backward()
        found = pipe.step(*args)
        if found is not None and relative_error(found, loss.detach()) > 1e-6:
            wrong.append(f"step {step}: loss {found} and not {loss}")
        for name, parameter in parameters.items():
            want, have = expected[name].grad, parameter.grad
            if want is None or have is None:
                wrong += [] if want is have else [f"step {step}: {name} has one gradient only"]
            elif not relative_error(have, want) <= 1e-5:
                wrong.append(f"step {step}: {name} is off by {relative_error(have, want):.1e}")
        ours.step()
        theirs.step()
    return wrong


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    with same_excepthook():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


@pytest.fixture
def alone() -> Iterator[None]:
    """One process that holds every stage, for one test: the next may compile for absent ranks."""
    with one_rank():
        yield


def make(model: nn.Module, args: tuple[Any, ...], schedule: str = "ZBVZeroBubble", **options: Any):
    options = {"num_stages": 2, "micro_batches": MICRO_BATCHES, "backend": "eager", **options}
    return lazyinline.pipeline(model, args, schedule=schedule, **options)


def unplanned() -> Any:
    """Lets no memory be planned, as on a GPU: closures allocate."""
    why = link.Unplanned("not planned in this test")
    return mock.patch.object(link, "other_devices", lambda devices: why)


def unlike_planned(
    model: nn.Module, args: tuple[Tensor, ...], schedule: str, **options: Any
) -> list[str]:
    """Trains without a plan beside eager, and beside a planned rank; says what differs."""
    other = copy.deepcopy(model)
    planned = make(other, args, schedule, **options)
    with unplanned():
        pipe = make(model, args, schedule, **options)
    wrong = [] if pipe.last_report.unplanned and not planned.last_report.unplanned else ["planned"]
    for unit in pipe._runs.plan.units.values():  # closures may return views of what they take
        placed = (p for part in unit.layout.parts for p in part.launches if p.of is not None)
        kinds = {unit.layout.instances[base].kind for p in placed for base, _ in p.bases}
        wrong += ["a closure works in the arena"] if "arena" in kinds else []
    theirs = torch.optim.AdamW([p for _, p in planned.named_parameters()], lr=1e-3)
    expected = []
    for _ in range(3):
        expected.append(planned.step(*args))
        theirs.step()
    wrong += train(pipe, model, args)  # the same three steps
    wrong += differing(dict(planned.named_parameters()), dict(pipe.named_parameters()))
    wrong += differing(planned.state_dict(), pipe.state_dict())
    expected.append(planned.step(*args))
    found = pipe.step(*args)
    return wrong + ([] if found is None or near(found, expected[-1]) else ["the last loss"])


def near(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or relative_error(a, b) <= 1e-5


def differing(want: dict[str, Tensor], have: dict[str, Tensor]) -> list[str]:
    """Names tensors, and their gradients, that differ by more than rounding.

    A product rounds by where its operands lie, on some processors.
    """
    wrong = [] if want.keys() == have.keys() else [f"{want.keys()} and {have.keys()}"]
    for name in want.keys() & have.keys():
        pairs = [(want[name], have[name]), (want[name].grad, have[name].grad)]
        same = (a is b or (a is not None and b is not None and near(a, b)) for a, b in pairs)
        wrong += [] if all(same) else [name]
    return wrong


@lazy_inline
class Layouts(nn.Module):
    """Hands on tensors of any layout, a view of what it takes too, and changes a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(self.linear(x)) * self.seen.clone()[None] + sum(o.sum() for o in others) / 99
        y = y + (others[-1].square().sum() if others else 0)
        self.seen.add_(y.detach().mean(0))
        wide = torch.stack([y, y * y], 2)
        return y, y.t(), y[:, :1].expand(-1, 6), wide[..., 1], wide[::2, 1:, 0], y.sum(), x[:, 1:]


def test_a_stage_that_takes_its_batch_apart_keeps_the_right_part(alone: None) -> None:
    """Each block needs a part of it in its backward."""

    def unpacking(self: Any, both: Tensor) -> Tensor:
        _, x = both.unbind(1)
        y, row = x * self.scale, x
        for block in self.blocks:
            y, row = block(y, row)
        return y.square().mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(8) for _ in range(2))
    model = Made(unpacking, scale=nn.Parameter(torch.rand(8)), blocks=blocks)
    args = (torch.rand(BATCH, 2, 3, 8),)
    pipe = make(model, args, "1F1B", num_stages=1)
    assert not train(pipe, model, args, steps=2)


@pytest.mark.parametrize("schedule", OF_ONE_RANK)
@pytest.mark.sweep(keep="ZBV")  # interleaved: test_pipeline_processes.py
def test_stages_of_one_rank_give_what_the_model_gives(alone: None, schedule: str) -> None:
    model, args = net_and_batch()
    pipe = make(model, args, schedule)
    assert not train(pipe, model, args)
    for count in pipe.counts.values():
        number = {kind: count.get(kind, (0, 0.0))[0] for kind in COMPUTE}
        assert number["F"] == number["B"] + number["I"] == 3 * MICRO_BATCHES
        assert number["W"] == number["I"]


def run_chain(layers: Any, x: Tensor) -> Tensor:
    values: tuple[Tensor, ...] = (x,)
    for part in layers:
        values = part(*values)
    return torch.stack([value.square().mean() for value in values]).sum()


def chain_and_batch() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    chain = Around(run_chain, *(Layouts() for _ in range(4)))
    for number, layer in enumerate(chain.layers):
        lazyinline.stage(layer, number // 2)
    return chain, (torch.randn(BATCH, 4),)


@pytest.mark.parametrize("schedule", OF_ONE_RANK)
@pytest.mark.sweep(keep="ZBVZero")
def test_ranks_without_a_plan_give_what_planned_ones_give(alone: None, schedule: str) -> None:
    recompute = "full" if schedule == "LoopedBFS" else None
    assert not unlike_planned(*chain_and_batch(), schedule, recompute=recompute)
    if schedule == "LoopedBFS":
        assert not unlike_planned(*net_and_batch(width=32), schedule, backend="inductor")


def test_marks_decide_the_stage(alone: None) -> None:
    model, args = net_and_batch()
    for index, block in enumerate(model.blocks):
        lazyinline.stage(block, int(index > 0))
    pipe = make(model, args)
    assert not train(pipe, model, args, steps=1)
    assert [s.num_blocks for s in pipe.plan.stages] == [1, 3]
    measured = pipe.measured_s()
    assert set(measured) == {(s, k) for s in (0, 1) for k in "FIW"}
    assert pipe.plan.simulated(measured).step_s >= 4 * sum(measured.values()) * 0.99
    page = plan_page(pipe.plan, measured)
    rows = page["predicted"]["rows"]
    seconds = [row[3] for row in rows if row[0].startswith("stage ")]
    assert seconds == [measured[k] for k in sorted(measured)]
    assert {row[0] for row in rows} >= {"step", "bubble"}
    assert page["program"]["nodes"] == pipe.last_report.num_nodes
    assert sum(i["count"] for i in page["reuse"]["instances"]) == 4
    assert all(page[name] for name in ("passes", "pipeline", "about"))


@pytest.mark.parametrize("schedule", OF_ONE_RANK)
@pytest.mark.sweep(keep="LoopedBFS")
def test_a_step_holds_what_its_plan_says_and_no_more_than_its_budget(
    alone: None, schedule: str
) -> None:
    model, args = net_and_batch(width=32)
    plain = make(copy.deepcopy(model), args, schedule)
    assert not train(plain, model, args)
    assert_holds_its_plan(plain, args)
    if schedule != "LoopedBFS":
        return
    limit = int(0.8 * plain.step_peak_bytes)
    bounded = make(model, args, schedule, recompute=Budget(saved_bytes=limit))
    assert not train(bounded, model, args, steps=1)
    assert_holds_its_plan(bounded, args)
    assert bounded.step_peak_bytes <= limit
    assert bounded.last_report.recomputed_flops > 0


def assert_holds_its_plan(pipe: Any, args: tuple[Tensor, ...]) -> None:
    measured = memory_use(lambda: pipe.step(*args)).peak_bytes + pipe.arena_bytes
    assert abs(pipe.step_peak_bytes / measured - 1) <= 0.02, (pipe.step_peak_bytes, measured)


def test_wrong_options_modes_and_a_changed_model_are_told(alone: None) -> None:
    model, args = net_and_batch(layers=2)
    for schedule, options, said in (
        ("2F2B", {}, "unknown; there are"),
        ("ZBVZeroBubble", {"micro_batches": 3}, "cannot be split into 3"),
        ("ZBVZeroBubble", {"split": "best"}, "split='best'"),
    ):
        with pytest.raises(PipelineError, match=said):
            make(model, args, schedule, **options)
    pipe = make(model, args)
    with FlopCounterMode(display=False), pytest.raises(PipelineError, match="bypass it"):
        pipe.step(*args)  # a mode that sees each operator
    model.eval()
    with pytest.raises(PipelineError, match="no longer fits"):
        pipe.step(*args)
    lazyinline.stage(model.blocks[0], 5)
    with pytest.raises(PipelineError, match="marked for stage 5"):
        make(model, args)

"""What a compiled step allocates, counted by the profiler, and how much work link is given."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from decoders import DecoderBlock, llama
from memory_events import OUTSIDE, memory_use
from models import MarkedBlock, Stack
from saved_bytes import cases, kept
from torch import nn

import lazyinline
from lazyinline.backend.kernels import lower
from lazyinline.backend.kernels.torch_attention import scratch_bytes
from lazyinline.backend.launches.kernel_list import Launch, View
from lazyinline.backend.run.leases import Lease
from lazyinline.frontend.passes import context
from lazyinline.frontend.training_step import compile_step
from lazyinline.reuse.ir.program import Leaf, walk_closures


def blocks_step(model: nn.Module, micro_batches: int, backend: str) -> lazyinline.TrainingStep:
    loss: Any = {"loss_fn": lambda y: y.square().mean(), "micro_batches": micro_batches}
    return compile_step(model, backend=backend, **loss)


SAVING = (
    *("log_softmax", "softmax", "cross_entropy", "layer_norm", "batch_norm", "rms_norm", "gelu"),
    *("silu gate", "gate operator", "ResNet-50", "Llama block"),
)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("case", SAVING)
@pytest.mark.sweep(keep=[*(f"{n}-eager" for n in SAVING if n != "ResNet-50"), "layer_norm-ind"])
def test_no_more_is_saved_than_eager_saves(case: str, backend: str) -> None:
    found = kept(cases(scale=16)[case], backend)
    assert found.ours <= found.eager
    if case != "rms_norm":  # which PyTorch takes apart itself on a CPU
        assert found.early > found.ours


@pytest.fixture
def without_onednn() -> Iterator[None]:
    """What oneDNN takes for itself depends on the CPU, its version and the number of threads."""
    before, *_ = torch.backends.mkldnn.set_flags(False)
    yield
    torch.backends.mkldnn.set_flags(before)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(
    ("micro_batches", "dtype"), [(1, torch.bfloat16), (2, torch.float32)], ids=str
)
@pytest.mark.sweep(keep="eager-2-torch.float32")
def test_reported_peak_is_what_the_profiler_measures(
    micro_batches: int, dtype: torch.dtype, backend: str
) -> None:
    """The fused attention allocates scratch in each launch; the report counts that too."""
    lazyinline.lazy_inline(DecoderBlock)
    sizes = {"hidden": 32, "num_heads": 2, "vocab": 61, "seq": 80}
    model, args = llama(num_layers=2, batch=2 * micro_batches, **sizes)
    step = compile_step(model.to(dtype), micro_batches=micro_batches, backend=backend)
    step(*args)
    entry = next(iter(step.entries))
    entry._lease = None
    entry._compiled.runner._arenas.idle.clear()
    for parameter in step._model.parameters():
        parameter.grad = None
    use = memory_use(lambda: step(*args))
    reported = step.stats.peak_bytes + step.stats.outside_bytes
    assert reported - 4096 <= use.peak_bytes <= reported


ATTENTION = [  # batch, heads, queries, keys, width
    (2, 4, 128, 128, 32),
    (1, 2, 200, 600, 48),
    (1, 1, 800, 33, 16),
    (1, 2, 8, 8, 8),
    (1, 4, 800, 600, 64),  # keys and values are packed, on some CPUs
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
@pytest.mark.sweep(keep=["tokens first-3-torch.float32", "heads first-1-torch.bfloat16"])
def test_scratch_of_attention_is_bounded(dtype: torch.dtype, num_threads: int, layout: str) -> None:
    def tensor(batch: int, heads: int, tokens: int, width: int) -> torch.Tensor:
        if layout == "heads first":
            return torch.randn(batch, heads, tokens, width).to(dtype)
        return torch.randn(batch, tokens, heads, width).to(dtype).transpose(1, 2)

    def checked(name: str, *args: Any, packs: bool = False) -> tuple[torch.Tensor, ...]:
        function = getattr(torch.ops.aten, name).default
        results: list[torch.Tensor] = []
        use = memory_use(lambda: results.extend(function(*args)))
        measured = use.peak_bytes - sum(t.untyped_storage().nbytes() for t in results)
        views = [a if not isinstance(a, torch.Tensor) else view_of(a) for a in args]
        bound = scratch_bytes(Launch(name, function, tuple(views), ()))
        assert 0 < measured <= bound, (measured, bound)
        assert packs or bound <= measured + 2048 * num_threads
        return tuple(results)

    num_threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for batch, heads, queries, keys, width in ATTENTION:
            q = tensor(batch, heads, queries, width)
            k, v = (tensor(batch, heads, keys, width) for _ in range(2))
            name = "_scaled_dot_product_flash_attention_for_cpu"
            packs = width == 64 and dtype.itemsize == 2
            out, logsumexp = checked(name, q, k, v, 0.0, False, packs=packs)
            gradient = tensor(batch, heads, queries, width)
            checked(f"{name}_backward", gradient, q, k, v, out, logsumexp, 0.0, False)
    finally:
        torch.set_num_threads(num_threads_before)


def view_of(tensor: torch.Tensor) -> View:
    return View(0, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)


def test_step_of_placed_launches_allocates_its_loss_only() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4))
    x = torch.randn(6, 4)
    step = compile_step(model, loss_fn=lambda y: (y * y).mean(), backend="inductor")
    step(x)
    assert step.stats.unplaced_launches == ()
    assert step.stats.allocations_per_step == 0
    use = memory_use(lambda: step(x))
    assert use.allocations == {OUTSIDE: 1}
    assert use.peak_bytes == 4


def test_gradients_are_added_as_they_are_made() -> None:
    """What a second micro-batch adds is a block's gradients, not another set of all."""
    peaks = {}
    for micro_batches in (1, 2):
        model = Stack(*(MarkedBlock(32) for _ in range(4)))
        step = blocks_step(model, micro_batches, "eager")
        step(torch.randn(micro_batches, 32))
        peaks[micro_batches] = step.stats.peak_bytes
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert peaks[2] - peaks[1] < num_bytes / 2


def test_an_arena_is_gone_before_another_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(6, 4)
    step = compile_step(model, loss_fn=lambda y: (y * y).mean(), backend="inductor")
    step(x)
    entry = next(iter(step.entries))
    planned, arena = entry._compiled.runner, weakref.ref(entry._lease.arena)
    bind, was_there = planned._bind, []

    def watched(*args: Any) -> Lease:
        was_there.append(arena() is not None)
        return bind(*args)

    monkeypatch.setattr(planned, "_bind", watched)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    step(x)
    assert was_there == [False]


def test_counter_counts_blocks_and_what_lives_at_once() -> None:
    early = torch.empty(1000)

    def step() -> torch.Tensor:
        nonlocal early
        early = torch.empty(10)  # what was there before and is freed does not count
        first = torch.empty(100)
        second = first.clone()
        del first
        return second.clone()

    use = memory_use(step)
    assert use.allocations == {"aten::empty": 2, "aten::clone": 2}
    assert use.num_allocations == 4
    assert use.peak_bytes == 40 + 400 + 400  # early, and two at a time


class Work:
    """Counts what is made per closure: kernels, kernel lists with their scratch analysis."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lowered: list[Leaf] = []
        self.recorded: list[Leaf] = []
        lower_leaves = context.lower_leaves

        def lowering(leaves: Iterable[Leaf], *rest: Any) -> Any:
            leaves = list(leaves)
            self.lowered += leaves
            return lower_leaves(leaves, *rest)

        patch.setattr(context, "lower_leaves", lowering)
        for name in ("record_graph", "record_wrapper"):
            self._watch(patch, name)

    def _watch(self, patch: pytest.MonkeyPatch, name: str) -> None:
        original = getattr(lower, name)

        def recording(leaf: Leaf, *rest: Any) -> Any:
            self.recorded.append(leaf)
            return original(leaf, *rest)

        patch.setattr(lower, name, recording)


@pytest.mark.sweep(keep="eager")
def test_artifacts_are_built_once_per_closure_whatever_layers_and_micro_batches(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: dict[tuple[int, int], int] = {}
    adders: dict[tuple[int, int], int] = {}
    monkeypatch.setenv("LAZYINLINE_CACHE", "0")  # or the later sizes find what the first one made
    for size in ((2, 1), (2, 3), (3, 3)):
        with monkeypatch.context() as patch:
            work = Work(patch)
            num_layers, micro_batches = size
            model = Stack(*(MarkedBlock(8, norm=True) for _ in range(num_layers)))
            step = blocks_step(model, micro_batches, backend)
            step(torch.randn(2 * micro_batches, 8))
        program = next(iter(step.entries))._compiled.step.program
        variants = [c for c in walk_closures(program) if isinstance(c, Leaf)]
        assert len(work.lowered) == len(set(work.lowered)) == len(variants)
        assert Counter(work.recorded) == Counter(work.lowered), "each exactly once"
        assert step.last_report.num_kernels == len(variants)
        counts[size] = len(variants)
        # From the second micro-batch on gradients are added: one closure per layout.
        adders[size] = sum(c.num_nodes == 1 and len(c.input_types) == 2 for c in variants)
    assert counts[2, 3] == counts[3, 3]
    if backend == "eager":
        assert counts[2, 3] - adders[2, 3] == counts[2, 1] - adders[2, 1]

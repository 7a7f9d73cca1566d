"""Kernels under more threads, wrong indices and divisions by zero: eager's numbers, or an error."""

import ctypes
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from apart import in_threads, run_apart
from comparing import assert_close, assert_same_gradients, twin
from models import Made
from torch import Tensor, nn

import lazyinline
from lazyinline import lazy_inline
from lazyinline.backend.kernels import torch_inductor
from lazyinline.backend.kernels.bundles import guarded

SHAPE = (64, 64)  # as much as is given to several threads


def assert_right(model: nn.Module, run: Callable[..., Tensor], *args: Tensor) -> None:
    expected = twin(model)
    model.zero_grad()
    loss = expected(*args)
    loss.backward()
    found = run(*args)
    if found.requires_grad:
        found.backward()
    assert_close(found.detach(), loss.detach())
    assert_same_gradients(model, expected)


# ---- threads ---------------------------------------------------------------------------------


@lazy_inline
class Sums(nn.Module):
    """Sums over all elements: an array in the kernel, with an element for each thread."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(SHAPE))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).exp().sum() / (x + self.scale).square().sum()


def with_more_threads(num_threads: str) -> None:
    """Inductor's own limit is taken out, so that ours is the only one."""
    compiled_for, limited = int(num_threads), []

    def unlimited(source: str, number: int) -> str:
        limited.append(f"num_threads({number})" in source)
        return guarded(source.replace(f"num_threads({number})", ""), number)

    torch.set_num_threads(compiled_for)
    model, x = Sums(), torch.rand(SHAPE)
    run = lazyinline.compile(model)
    with mock.patch.object(torch_inductor, "guarded", unlimited):
        assert_right(model, run, x)
    assert any(limited) == (compiled_for != os.cpu_count())
    for number in (1, compiled_for + 1, 16):
        torch.set_num_threads(number)
        assert_right(model, run, x)

    def elsewhere(_: int) -> None:
        ctypes.CDLL(loaded_openmp()).omp_set_num_threads(24)  # a number of this thread's own
        assert_right(model, run, x)

    in_threads(elsewhere, 1)
    entries = run.__dict__["_lazyinline_calls"].entries
    assert len(entries) == 1, "kernels fit any number of threads"


def loaded_openmp() -> str:
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in lines if "libgomp" in line or "libiomp" in line)


# Inductor writes other text where there are as many threads as processors.
@pytest.mark.sweep(keep="limited")
@pytest.mark.parametrize("more", [pytest.param(0, id="processors"), pytest.param(2, id="limited")])
def test_kernels_are_right_with_more_threads_than_they_were_compiled_for(more: int) -> None:
    run_apart(with_more_threads, str((os.cpu_count() or 1) + more))


# ---- indices ---------------------------------------------------------------------------------


def picking(self: Any, *indices: Tensor) -> Tensor:
    """Picks in several ways out of one weight, each by an index of its own."""
    sine = self.weight.sin()
    picked = [pick(sine, index) for pick, index in zip(self.picks, indices, strict=True)]
    return torch.stack([one.exp().sum() for one in picked]).sum()


def rows(index: Tensor) -> Tensor:
    return index[:, 0]


PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda w, i: w[i],
    "two indices": lambda w, i: w[i, i.flip(0)],
    "gather": lambda w, i: w.gather(1, i),
    "take_along_dim": lambda w, i: w.take_along_dim(i, 1),
    "index_select": lambda w, i: w.index_select(0, rows(i)),
    "embedding": lambda w, i: F.embedding(i, w),
    "cross_entropy": lambda w, i: F.cross_entropy(w, rows(i)),
    "nll_loss": lambda w, i: F.nll_loss(w, rows(i), reduction="none"),
    "scatter": lambda w, i: torch.zeros(SHAPE).scatter(1, i, w),
    "scatter a number": lambda w, i: torch.zeros(SHAPE).scatter(1, i[:, :3], 2.0) * w,
    "scatter_": lambda w, i: torch.zeros(SHAPE).scatter_(1, i[:, :3], 2.0) * w,
    "scatter_add": lambda w, i: torch.zeros(SHAPE).scatter_add(1, i, w),
    "index_add": lambda w, i: torch.zeros(SHAPE).index_add(0, rows(i), w),
    "index_reduce": lambda w, i: w.index_reduce(0, rows(i), w, "amax").detach() + w,
    "scatter_reduce": lambda w, i: w.scatter_reduce(1, i, w, "amax").detach() + w,
    "take": lambda w, i: w.take(i),
    "embedding_bag": lambda w, i: F.embedding_bag(i, w, mode="sum"),
    "one_hot": lambda w, i: F.one_hot(rows(i), SHAPE[0]) * w,
    "index_fill": lambda w, i: w.index_fill(0, rows(i)[:5], 2.0),
    "index_copy": lambda w, i: torch.zeros(SHAPE).index_copy(0, rows(i), w),
    "index_put": lambda w, i: torch.zeros(SHAPE).index_put((rows(i),), w, accumulate=True),
}


TOGETHER = 7  # ways to pick in one model: one compile for all
GROUPS = dict.fromkeys(("pair", "pair in a step"), ("index", "cross_entropy"))
GROUPS |= {
    f"from {list(PICKS)[first]}": tuple(PICKS)[first : first + TOGETHER]
    for first in range(0, len(PICKS), TOGETHER)
}


def wrong_indices(group: str) -> None:
    torch.manual_seed(0)
    compiled = lazyinline.compile_step if "step" in group else lazyinline.compile
    wrong = wrongly_taken(GROUPS[group], compiled)
    assert not wrong, wrong


def wrongly_taken(ways: Sequence[str], compiled: Callable[..., Any]) -> list[tuple[Any, ...]]:
    """Returns what is neither eager's number nor an error, with one index wrong at a time."""
    model = Made(
        picking, weight=nn.Parameter(torch.rand(SHAPE)), picks=[PICKS[way] for way in ways]
    )
    run = compiled(model)
    index = torch.stack([torch.randperm(SHAPE[0]) for _ in range(SHAPE[1])], 1)
    right = [index.clone() for _ in ways]
    assert_right(model, run, *right)
    wrong = []
    for place, way in enumerate(ways):
        for value in (-1, SHAPE[0], 2**40):
            bad = index.clone()
            bad[-2, 0] = value
            args = [*right[:place], bad, *right[place + 1 :]]
            expected, found = outcome(model, *args), outcome(run, *args)
            same = type(found) is type(expected)
            if same and isinstance(found, Tensor):
                same = torch.allclose(found, expected)
            if not same and not isinstance(found, IndexError):
                wrong.append((way, value, found, expected))
        assert_right(model, run, *right)
    return wrong


def outcome(run: Callable[..., Tensor], *args: Tensor) -> Any:
    try:
        return run(*args).detach()
    except (IndexError, RuntimeError) as error:
        return error


# ---- divisions -------------------------------------------------------------------------------

DIVISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "floor": lambda a, b: a // b,
    "truncate": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": lambda a, b: a % b,
    "fmod": torch.fmod,
}
# What ends a process before torch 2.13 has not been mended there.
NOTICED = [*DIVISIONS] if torch.__version__ >= "2.13" else ["truncate"]


def divided(self: Any, a: Tensor, *divisors: Tensor) -> Tensor:
    """Divides in several ways, each by numbers of its own."""
    pairs = zip(self.divisions, divisors, strict=True)
    return torch.stack([divide(a * 3, b * 1).double().sin() + 1 for divide, b in pairs])


DIVIDED = {"pair": "int64", "pair in a step": "uint8"}


def wrong_indices_and_divisors(group: str) -> None:
    torch.set_num_threads(4)
    wrong_indices(group)
    if group in DIVIDED:
        zero_divisors(DIVIDED[group])


def zero_divisors(dtype: str) -> None:
    ways = NOTICED if dtype == "int64" else ["truncate"]
    model = Made(divided, divisions=[DIVISIONS[way] for way in ways])
    compiled = lazyinline.compile(model)
    a = torch.arange(64 * 67).reshape(64, 67).to(getattr(torch, dtype))
    divisors = [a % 7 + 1 for _ in ways]
    assert_close(compiled(a, *divisors), model(a, *divisors))
    for b in divisors:
        b[-2, 3] = 0
        for run in (model, compiled):
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                run(a, *divisors)
        b[-2, 3] = 2
        assert_close(compiled(a, *divisors), model(a, *divisors))


@pytest.mark.sweep(keep="[pair]")
@pytest.mark.parametrize("group", GROUPS)
def test_a_wrong_index_or_divisor_is_an_error_and_leaves_all_usable(group: str) -> None:
    run_apart(wrong_indices_and_divisors, group)


# ---- the text --------------------------------------------------------------------------------

LOOPS = """
#pragma omp parallel num_threads(4)
{
    int tid = omp_get_thread_num();
    #pragma omp for collapse(2)
    for(int64_t i=0; i<n; i+=1)
    {
        for(int64_t j=0; j<(n); j+=1)
        {
            TORCH_CHECK(i < 3, "out of bounds } {");
        }
    }
    #pragma omp single
    { x[0] = 1; }
}
"""


def test_a_region_is_held_to_its_threads_and_keeps_what_its_loops_throw() -> None:
    text = guarded(LOOPS, 4)
    assert "num_threads(std::min<int>(4, omp_get_max_threads()))" in text
    assert text.count("try {") == 2
    assert text.count("{") - 1 == text.count("}") - 1  # one of each is in a text
    assert "num_threads(std::min<int>(8," in guarded(LOOPS.replace(" num_threads(4)", ""), 8)


@pytest.mark.parametrize(
    "change",
    [
        ("int tid", 'TORCH_CHECK(n, "?"); int tid'),
        ("for(int64_t i=0; i<n; i+=1)\n", "while (more())\n"),
        ("{ x[0] = 1; }", "x[0] = 1;"),
        ("{ x[0] = 1; }", "{\n#pragma omp parallel\n{ x[0] = 1; } }"),
    ],
)
def test_a_region_that_is_not_understood_runs_on_one_thread(change: tuple[str, str]) -> None:
    text = LOOPS.replace(*change)
    assert text != LOOPS
    assert "pragma" not in guarded(text, 4)
    assert "#pragma omp simd" in guarded(f"{text}\n#pragma omp simd simdlen(8)\n", 4)

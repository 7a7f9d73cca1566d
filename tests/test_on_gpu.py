"""What decides on a GPU: hazards first, then numbers, then memory. ``pytest -m gpu`` runs it.

Each case is a plain function, which ``benchmarks/gpu.py`` calls, too. None has ever run on a GPU;
where there is none the logic of most can be tried on the CPU, by calling them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import Decoder, DecoderBlock, DecoderConfig
from models import Around
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lazyinline
from lazyinline.backend.gpu.torch_cuda import capture_graph

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES: dict[str, Any] = {"hidden": 64, "num_heads": 4, "vocab": 128, "seq": 32, "batch": 4}
Args = tuple[Tensor, Tensor]


def decoder(dtype: torch.dtype = torch.float32, **sizes: Any) -> tuple[Decoder, Args]:
    lazyinline.lazy_inline(DecoderBlock)
    torch.manual_seed(0)
    config = DecoderConfig(2, **{**SIZES, **sizes})
    return Decoder(config).to(GPU, dtype), batch(config.vocab)


def batch(vocab: int, rows: int = 4, tokens: int = 33) -> Args:
    whole = torch.randint(vocab, (rows, tokens), device=GPU)
    return whole[:, :-1].clone(), whole[:, 1:].clone()


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    """Returns the loss of a forward and a backward, and each gradient."""
    model.zero_grad()
    loss = run()
    if loss.requires_grad:
        loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]


def assert_same(found: list[Tensor], expected: list[Tensor], most: float = 1e-4) -> None:
    scale = max(t.norm() for t in expected)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= most * max(other.norm(), 1e-3 * scale)


def assert_steps(step: Any, model: nn.Module, batches: list[Args], most: float = 1e-4) -> None:
    """Compares steps with eager, each after an update of all parameters."""
    for args in batches:
        expected = gradients(model, lambda args=args: model(*args))  # type: ignore[misc]
        assert_same(gradients(model, lambda args=args: step(*args)), expected, most)  # type: ignore[misc]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]


def test_inputs_at_any_address_are_copied() -> None:
    model, _ = decoder()
    whole = torch.randint(128, (1, 33), device=GPU)
    args = whole[:, :-1], whole[:, 1:]
    assert args[1].data_ptr() % 16
    compiled = lazyinline.compile(copy.deepcopy(model), fallback="error")
    assert_same(
        gradients(compiled, lambda: compiled(*args)), gradients(model, lambda: model(*args))
    )


def test_a_loader_that_pins_memory_goes_on_while_a_step_is_captured() -> None:
    model, (ids, targets) = decoder()
    rows = TensorDataset(ids.cpu().repeat(16, 1), targets.cpu().repeat(16, 1))
    step = lazyinline.compile_step(model)
    loader = DataLoader(rows, batch_size=4, pin_memory=GPU.type == "cuda", num_workers=2)
    batches = [tuple(t.to(GPU, non_blocking=True) for t in one) for one in loader]
    assert_steps(step, model, batches)  # type: ignore[arg-type]
    assert step.stats is not None and not step.stats.why_no_graph


def test_a_capture_that_fails_leaves_all_as_it_was() -> None:
    model, args = decoder()
    step = lazyinline.compile_step(model)
    step(*args)
    program = step.entries.first._compiled.runner

    def capture(run: Callable[[], Any], device: torch.device) -> Any:
        return capture_graph(lambda: [*run(), torch.ones(1, device=device).cpu()], device)

    program._capture = capture
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="not one CUDA graph"):
        step(*args)
    assert torch.cuda.current_stream() == stream
    nn.functional.dropout(torch.ones(8, device=GPU)).sum().item()
    assert_steps(step, model, [args] * 2)


def test_inductors_graphs_and_ours_share_no_memory_of_cublas() -> None:
    model, args = decoder()
    other = copy.deepcopy(model)
    step, theirs = lazyinline.compile_step(model), torch.compile(other, mode="reduce-overhead")
    for _ in range(4):
        step(*args)
        gradients(other, lambda: theirs(*args))
    expected = gradients(model, lambda: model(*args))
    assert_same(gradients(model, lambda: step(*args)), expected)
    assert_same(gradients(other, lambda: theirs(*args)), expected)


def test_a_step_does_not_read_what_its_arena_held_before() -> None:
    model, args = decoder()
    step = lazyinline.compile_step(model)
    for _ in range(3):
        expected = gradients(model, lambda: step(*args))
    step.entries.first._lease.arena.fill_(255)  # not a number, in any precision
    assert_same(gradients(model, lambda: step(*args)), expected, 0.0)


def test_a_step_follows_parameters_whose_memory_is_another() -> None:
    model, args = decoder()
    step = lazyinline.compile_step(model)
    assert_steps(step, model, [args] * 2)
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone()
    assert_steps(step, model, [args] * 3)


def test_memory_that_is_short_is_an_error_and_the_next_step_runs() -> None:
    model, args = decoder(hidden=512, num_heads=8, vocab=4096)
    step = lazyinline.compile_step(model)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-4)
    with pytest.raises(torch.OutOfMemoryError):
        step(*args)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert_steps(step, model, [args] * 3)


def test_a_program_over_the_host_and_a_gpu_equals_eager() -> None:
    model, args = decoder()
    lazyinline.place(model.embedding, "cpu")
    given = args[0].cpu(), args[1]
    assert_steps(lazyinline.compile_step(model), model, [given] * 2)  # type: ignore[list-item]


def test_dropout_in_a_replay_draws_what_eager_draws_under_one_seed() -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 1)).to(GPU)
    model = Around(lambda layers, x: layers[0](x).square().mean(), layers)
    x = torch.randn(16, 64, device=GPU)
    step = lazyinline.compile_step(model)
    losses = []
    for seed in (0, 1, 2, 1):
        torch.manual_seed(seed)
        losses.append(step(x).item())
        torch.manual_seed(seed)
        assert losses[-1] == pytest.approx(model(x).item(), rel=1e-4)
    assert losses[1] == losses[3] != losses[2]


def test_a_second_derivative_draws_what_its_forward_drew() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)).to(GPU)
    compiled = lazyinline.compile(copy.deepcopy(model))
    x = torch.randn(4, 8, device=GPU, requires_grad=True)

    def penalty(run: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        torch.manual_seed(4)  # what follows draws on
        return [slope.detach(), *torch.autograd.grad(slope.square().sum(), x)]

    assert_same(penalty(compiled), penalty(model))


def test_training_by_calls_equals_eager() -> None:
    model, args = decoder()
    compiled = lazyinline.compile(copy.deepcopy(model), fallback="error")
    for _ in range(2):
        expected = gradients(model, lambda: model(*args))
        assert_same(gradients(compiled, lambda: compiled(*args)), expected)


def test_inference_equals_eager() -> None:
    model, args = decoder()
    compiled = lazyinline.compile(model.eval(), fallback="error")
    with torch.no_grad():
        assert_same([compiled(*args)], [model(*args)])


def test_accumulated_micro_batches_equal_eager() -> None:
    model, args = decoder()
    assert_steps(lazyinline.compile_step(model, micro_batches=4), model, [args] * 3)


def test_what_is_computed_again_equals_eager() -> None:
    model, args = decoder()
    assert_steps(lazyinline.compile_step(model, recompute="full"), model, [args] * 3)


def test_a_step_with_its_update_equals_fused_adamw() -> None:
    model, args = decoder()
    other = copy.deepcopy(model)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=GPU.type == "cuda")
    step = lazyinline.compile_step(model, optimizer=ours)
    for number in range(4):
        for one in (ours, theirs):
            one.param_groups[0]["lr"] = 1e-2 / (number + 1)
        theirs.zero_grad()
        other(*args).backward()
        theirs.step()
        step(*args)
    assert_same(list(model.parameters()), list(other.parameters()), 1e-3)


def test_bfloat16_is_no_further_from_float64_than_eager() -> None:
    assert_as_near_as_eager(lambda model, args: model(*args), torch.bfloat16)


def test_autocast_is_no_further_from_float64_than_eager() -> None:
    def run(model: Any, args: Args) -> Tensor:
        with torch.autocast(GPU.type, dtype=torch.bfloat16):
            return model(*args)  # type: ignore[no-any-return]

    assert_as_near_as_eager(run, torch.float32)


def assert_as_near_as_eager(run: Callable[[Any, Args], Tensor], dtype: torch.dtype) -> None:
    model, args = decoder(dtype)
    exact = copy.deepcopy(model).double()
    compiled = lazyinline.compile(copy.deepcopy(model), fallback="error")
    expected = gradients(exact, lambda: exact(*args))
    errors = []
    for one in (compiled, model):
        found = gradients(one, lambda one=one: run(one, args))  # type: ignore[misc]
        pairs = zip(found, expected, strict=True)
        errors.append(sum(((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in pairs))
    assert errors[0] <= 1.5 * errors[1] + 1e-6


def test_a_step_holds_what_is_planned() -> None:
    """Parameters, batch and arena, to the pieces of the allocator; the rest is the graph's."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, args = decoder(hidden=512, num_heads=8, vocab=4096)
    given = sum(
        t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), *args)
    )
    step = lazyinline.compile_step(model)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(*args)
    copies = sum(t.numel() * t.element_size() for t in args)
    held = torch.cuda.memory_allocated() - before
    assert step.stats is not None
    planned = given + copies + step.stats.peak_bytes + step.stats.outside_bytes
    assert step.stats.peak_bytes < held <= 1.02 * planned + 2**21


HAZARDS = (
    test_inputs_at_any_address_are_copied,
    test_a_loader_that_pins_memory_goes_on_while_a_step_is_captured,
    test_a_capture_that_fails_leaves_all_as_it_was,
    test_inductors_graphs_and_ours_share_no_memory_of_cublas,
    test_a_step_does_not_read_what_its_arena_held_before,
    test_a_step_follows_parameters_whose_memory_is_another,
    test_memory_that_is_short_is_an_error_and_the_next_step_runs,
    test_a_program_over_the_host_and_a_gpu_equals_eager,
    test_dropout_in_a_replay_draws_what_eager_draws_under_one_seed,
    test_a_second_derivative_draws_what_its_forward_drew,
)
NUMBERS = (
    test_training_by_calls_equals_eager,
    test_inference_equals_eager,
    test_accumulated_micro_batches_equal_eager,
    test_what_is_computed_again_equals_eager,
    test_a_step_with_its_update_equals_fused_adamw,
    test_bfloat16_is_no_further_from_float64_than_eager,
    test_autocast_is_no_further_from_float64_than_eager,
)
MEMORY = (test_a_step_holds_what_is_planned,)

"""Autocast in models that are compiled for a GPU that is not here: PyTorch's own rules for CUDA."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Around
from torch import Tensor, nn

from lazyinline import lazy_inline
from lazyinline.frontend.capture.capture import Subject, capture_model
from lazyinline.reuse.ir.program import Program
from lazyinline.reuse.ir.types import TensorType


def does(what: Callable[..., Any], region: Callable[[], Any]) -> nn.Module:
    def forward(_: nn.Module, *args: Tensor) -> Any:
        with region():
            return what(*args)

    return Around(forward)


@lazy_inline
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float().sin()


def on_gpu(enabled: bool = True) -> Any:
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled)


def captured(model: nn.Module, *args: Tensor) -> Program:
    return capture_model(Subject(model, args), train=True, for_gpu=True).program


def result_dtype(what: Callable[..., Any], *args: Tensor, region: Any = on_gpu) -> torch.dtype:
    (result,) = captured(does(what, region), *args).outputs
    assert isinstance(result.type, TensorType)
    return result.type.dtype


IDS = torch.arange(4)
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
X, LOW, DOUBLE = torch.ones(4, 4), torch.ones(4, 4, dtype=BF16), torch.ones(4, 4, dtype=F64)
# https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float16
RULES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], torch.dtype]] = {
    "products are low": (torch.mm, (X, X), BF16),
    "of layers too": (F.linear, (X, X), BF16),
    "of what is composed too": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (X, X), BF16),
    "inside of what has no rule too": (lambda x: F.cross_entropy(x, IDS), (LOW,), F32),
    "norms are wide": (lambda x: F.layer_norm(x, (4,)), (LOW,), F32),
    "exponentials are wide": (torch.exp, (LOW,), F32),
    "a softmax is wide": (lambda x: x.softmax(-1), (LOW,), F32),
    "a sum is wide": (torch.sum, (LOW,), F32),
    "a sum that is told is as told": (lambda x: x.sum(dtype=BF16), (LOW,), BF16),
    "a norm of a matrix is wide": (torch.norm, (LOW,), F32),
    "the widest wins": (torch.addcmul, (X, LOW, LOW), F32),
    "double stays": (torch.mm, (DOUBLE, DOUBLE), F64),
    "others stay": (torch.sin, (LOW,), BF16),
    "what is low stays": (torch.mm, (LOW, LOW), BF16),
}


@pytest.mark.parametrize("rule", RULES)
def test_operators_get_what_pytorch_gives_them_on_a_gpu(rule: str) -> None:
    what, args, dtype = RULES[rule]
    assert result_dtype(what, *args) == dtype


def test_a_program_names_its_casts_and_has_no_regions() -> None:
    program = captured(does(F.linear, on_gpu), X, X)
    assert str(program).count("to.dtype") == 2
    assert "autocast" not in str(program)


def test_attention_is_cast_where_its_operands_are_not_low() -> None:
    low = torch.ones(1, 2, 4, 8, dtype=BF16)
    for num_wide in range(3):
        wide = [low.float()] * num_wide
        operands = *wide, *[low] * (3 - num_wide)
        program = captured(does(F.scaled_dot_product_attention, on_gpu), *operands)
        assert str(program).count("to.dtype") == num_wide


@pytest.mark.parametrize("device", ["cuda", "cpu"])  # a model asks its tensors for theirs
def test_a_region_that_is_off_is_off(device: str) -> None:
    def inside(a: Tensor) -> Tensor:
        with torch.autocast(device, enabled=False):
            return a @ a

    assert result_dtype(inside, X) == F32
    assert result_dtype(torch.mm, X, X, region=lambda: on_gpu(False)) == F32


def test_a_region_around_the_call_counts_and_is_left_as_it_was() -> None:
    init, dtype = torch.autocast.__init__, torch.get_autocast_dtype("cuda")
    with torch.autocast("cpu", dtype=BF16):
        assert result_dtype(torch.mm, X, X, region=torch.no_grad) == BF16
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
    assert torch.autocast.__init__ is init
    assert torch.get_autocast_dtype("cuda") == dtype
    assert result_dtype(torch.mm, X, X, region=torch.no_grad) == F32


def test_blocks_in_and_out_of_a_region_share_nothing() -> None:
    def forward(layers: Any, x: Tensor) -> Tensor:
        with on_gpu():
            x = layers[1](layers[0](x))
        return layers[3](layers[2](x))

    text = str(captured(Around(forward, *(Block() for _ in range(4))), X))
    assert text.count("closure @Block") == 2
    assert text.count("bf16[4,4] = linear") == 1 and text.count("f32[4,4] = linear") == 1


def test_what_is_unsafe_in_a_region_is_refused_with_the_line_as_on_a_gpu() -> None:
    with pytest.raises(Exception, match="unsafe to autocast"):
        captured(does(F.binary_cross_entropy, on_gpu), X, X)

"""Operators on operands in every layout; ``benchmarks/operators.py`` has all operators."""

import importlib
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import TOLERANCE, assert_same_gradients, relative_error, twin
from torch import Tensor, nn

import lazyinline
from lazyinline.frontend.tracing import torch_tracing

BENCHMARKS = pathlib.Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def operators() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("operators")


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.sweep(keep="real")
def test_operators_in_all_layouts_in_turn(kind: str, operators: Any) -> None:
    chosen = {name: operators.ANY[name] for name in operators.CORE}
    chosen |= operators.COMPLEX if kind == "complex" else {}
    layouts = list(operators.layouts_of(kind).values())
    assert not operators.wrong_operators(chosen, layouts, kind, "eager")


@pytest.mark.sweep
def test_generated_kernels_on_conjugates(operators: Any) -> None:
    chosen = {name: operators.ANY[name] for name in operators.CORE[:10]} | operators.COMPLEX
    layouts = [operators.LAYOUTS["conjugate"]]
    assert not operators.wrong_operators(chosen, layouts, "complex", "inductor")


def test_generated_kernels_put_elements_into_a_copy_of_what_is_expanded(operators: Any) -> None:
    chosen = {name: operators.ANY[name] for name in ("index_put", "index_add")}
    layouts = [operators.LAYOUTS["expanded"]]
    assert not operators.wrong_operators(chosen, layouts, "real", "inductor")


def test_generated_kernels_read_a_complex_tensor_after_a_part_of_it_is_written(
    operators: Any,
) -> None:
    def written(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def operator(x: Tensor, y: Tensor) -> Tensor:
            z = (x * y).contiguous()
            view(z).copy_(y[0, :3])
            return x @ z

        return operator

    chosen = {
        "diagonal": written(lambda z: z.diagonal(1, -1, 0)),
        "column": written(lambda z: z.select(-1, -2)[1:]),
        "row": written(lambda z: z[1, :3]),
        "strides": written(lambda z: z.as_strided((3,), (5,), 1)),
        "qr": operators.operators_of("complex")["qr"],
    }
    layouts = [operators.LAYOUTS["plain"]]
    assert not operators.wrong_operators(chosen, layouts, "complex", "inductor")


def test_generated_kernels_of_several_threads_add_where_they_are_told_to(operators: Any) -> None:
    names = ("index", "index_select", "contiguous", "in place", "in place through a view", "copy_")
    chosen, layouts = {n: operators.ANY[n] for n in names}, [operators.LAYOUTS["unaligned"]]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert not operators.wrong_operators(chosen, layouts, "real", "inductor")
    finally:
        torch.set_num_threads(num_threads)


# ---- results that lie otherwise than fake tensors' rules say -----------------------------------


CHANNELS = 8
ONES, WEIGHT = torch.ones(CHANNELS), torch.randn(CHANNELS, CHANNELS, 3, 3)

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "channels last": lambda: torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last),
    "contiguous": lambda: torch.randn(2, 8, 6, 6),
    "swapped": lambda: torch.randn(2, 6, 8, 6).transpose(1, 2),
    "backwards": lambda: torch.randn(6, 6, 8, 2).permute(3, 2, 1, 0),
}
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "group_norm, silu, conv2d": lambda x: F.conv2d(
        F.silu(F.group_norm(x, 4, ONES, ONES)), WEIGHT, padding=1
    ),
    "group_norm": lambda x: F.group_norm(x, 4, ONES, ONES),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "roll": lambda x: x.roll(1, 1),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "glu": lambda x: F.glu(torch.cat([x, x], 1), 1),
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "mse_loss": lambda x: F.mse_loss(x, x.flip(1).contiguous(), reduction="none"),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "conv2d": lambda x: F.conv2d(x, WEIGHT, padding=1),
}
CASES = list(itertools.product(OPERATORS, LAYOUTS))


class Net(nn.Module):
    """Reads what an operator made in two ways, one of them a view's."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operator = operator
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.operator(x * 1.5) * self.scale
        y = torch.sin(h) + self.scale.cos() * h
        return y.flip(0) * self.scale + y


def check(operator: str, layout: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = Net(OPERATORS[operator])
    expected, x = twin(model), LAYOUTS[layout]()
    with torch.no_grad():
        inferred = lazyinline.compile(model)(x)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, wanted = lazyinline.compile(model)(one), expected(other)
    for result in (found, wanted):
        result.square().mean().backward()
    assert one.grad is not None and other.grad is not None
    for made, right in ((found, wanted), (inferred, wanted), (one.grad, other.grad)):
        assert relative_error(made.detach(), right.detach()) < TOLERANCE
    assert_same_gradients(model, expected)
    return found, wanted


@pytest.mark.sweep(keep="group_norm, silu, conv2d-channels last")
@pytest.mark.parametrize("operator, layout", CASES, ids=map("-".join, CASES))
def test_results_are_eagers_and_lie_as_eagers_do(operator: str, layout: str) -> None:
    found, expected = check(operator, layout)
    assert found.stride() == expected.stride()


@pytest.mark.sweep(keep="group_norm")
@pytest.mark.parametrize("operator", ["group_norm", "roll", "batch_norm"])
def test_a_layout_that_no_rule_knows_is_copied_into_the_promised_one(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_tracing, "LAID_OUT_AS_SUGGESTED", frozenset())
    check(operator, "swapped" if operator == "batch_norm" else "channels last")

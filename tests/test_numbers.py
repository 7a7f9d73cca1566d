"""A number as an input gives the very bits that it gives as a Python number, and its gradients."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx

from lazyinline.reuse.ir.constants import Number, number_of, with_input

aten = torch.ops.aten
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.uint8, torch.bool)
NUMBERS = (0.1, -1 / 3, 1e-3, 7, 0, 3e-40, math.inf)
ELEMENTWISE = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.rsub.Scalar)
IN_PLACE = (aten.mul_.Tensor, aten.add_.Tensor, aten.sub_.Tensor, aten.div_.Tensor)


def operands(dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors in several layouts, long enough for vectorized loops and their tails."""
    wide = torch.randn(37, 8, generator=torch.Generator().manual_seed(0)) * 3
    dense = (wide.abs() * 5).to(dtype) if not dtype.is_floating_point else wide.to(dtype)
    return [dense, dense[::2, 1:5].t(), dense[0].expand(5, 8), dense[3, 4]]


def node_of(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """Builds a graph of one operator, as capture would leave it."""
    graph = torch.fx.Graph()

    def entry(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = value
        return node

    copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
    target(*copies, **kwargs)  # what eager refuses is refused here
    return graph.call_function(target, tuple(map(entry, args)), kwargs)


def as_function(node: torch.fx.Node) -> Callable[..., Any]:
    """Returns the operator with the number as its last operand."""
    graph = node.graph
    with graph.inserting_before(node):
        with_input(node, graph.placeholder("number"))
    graph.output(node)
    return torch.fx.Interpreter(torch.nn.Module(), graph=graph).run


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert found.dtype == expected.dtype, what
    assert (found.shape, found.stride()) == (expected.shape, expected.stride()), what
    assert torch.equal(found.nan_to_num(), expected.nan_to_num()), what
    assert torch.equal(found.isnan(), expected.isnan()), what


def run(function: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the result on a copy of x and, where there is one, the gradient."""
    x = x.detach().clone()
    if not x.is_floating_point():
        return function(x), None
    x.requires_grad_()
    result = function(x)
    if not result.requires_grad:
        return result, None
    weights = torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(result.dtype)
    return result, torch.autograd.grad(result, x, weights)[0]


@pytest.mark.parametrize("target", ELEMENTWISE, ids=str)
def test_elementwise_operator_gives_the_same_bits_and_gradients(target: Any) -> None:
    lifted = set()
    for dtype, number in itertools.product(DTYPES, NUMBERS):
        for x in operands(dtype):
            try:
                node = node_of(target, x, number)
            except RuntimeError:  # eager refuses it too
                continue
            lifts = number_of(node)
            if lifts is None:
                continue
            lifted.add(dtype)
            module, entry = as_function(node), lifts.tensor()
            found = run(lambda x, m=module, e=entry: m(x, e), x)
            expected = run(lambda x, n=number: target(x, n), x)
            what = (target, dtype, number, x.shape, x.stride())
            assert_same_bits(found[0], expected[0], what)
            assert (found[1] is None) == (expected[1] is None), what
            if expected[1] is not None:
                assert_same_bits(found[1], expected[1], what)  # type: ignore[arg-type]
    assert lifted >= {torch.float64, torch.float32, torch.int64}
    assert lifted.isdisjoint(FLOATS[2:])  # in half precision they stay in their closures


@pytest.mark.parametrize("target", IN_PLACE, ids=str)
def test_in_place_operator_gives_the_same_bits(target: Any) -> None:
    lifted = set()
    for dtype, number in itertools.product(FLOATS, NUMBERS):
        for x in operands(dtype):
            if 0 in x.stride():
                continue
            node = node_of(target, x, number)
            lifts = number_of(node)
            if lifts is not None:
                lifted.add(dtype)
                found, expected = x.clone(), x.clone()
                as_function(node)(found, lifts.tensor())
                target(expected, number)
                assert_same_bits(found, expected, (target, dtype, number))
    assert lifted == {torch.float64, torch.float32}


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (aten.pow.Tensor_Scalar, (torch.ones(3), 2.0), {}),
        (aten.mul.Tensor, (torch.ones(3), True), {}),
        (aten.mul.Tensor, (torch.ones(3), 1j), {}),
        (aten.mul.Tensor, (torch.ones(3, dtype=torch.complex64), 2.0), {}),
        (aten.mul.Tensor, (torch.ones(3), torch.ones(3)), {}),
        (aten.add.Tensor, (torch.ones(3), 2.0), {"alpha": 3}),
        (aten.add.Tensor, (torch.ones(3, dtype=torch.int32), 2**31), {}),
        (aten.mul.Tensor, (torch.ones(3), 2**53 + 1), {}),
        (aten.lt.Scalar, (torch.ones(3), 0.1), {}),
        (aten.masked_fill.Scalar, (torch.ones(3), torch.ones(3) > 1, 0.1), {}),
        (aten.add.Tensor, (torch.ones(3, dtype=torch.bfloat16), 0.1), {}),
        (aten.softmax.int, (torch.ones(3), 0), {}),
        (aten.full.default, ([3], 0.1), {}),
    ],
    ids=str,
)
def test_numbers_that_are_no_plain_operand_stay(target: Any, args: Any, kwargs: Any) -> None:
    assert number_of(node_of(target, *args, **kwargs)) is None


def test_number_keeps_its_kind_sign_and_every_bit() -> None:
    values = [0.1, 1, 1.0, -0.0, 0.0, math.inf, -math.inf, math.nan]
    numbers = [Number.of(v, torch.float64) for v in values]
    assert len(set(numbers)) == len(values)
    for value, number in zip(values, numbers, strict=True):
        assert type(number.value) is type(value)
        assert number.value == value or math.isnan(value)
        assert math.copysign(1, number.value) == math.copysign(1, value)
        assert Number.of(value, torch.float64) == number

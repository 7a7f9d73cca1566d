"""Blocks that differ only in constants share one closure, with the constants as inputs."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx
from comparing import assert_equals_eager
from models import Stack, block, example
from printed import unfolded
from programs import CPU, tensor_type
from torch import nn

import lazyinline
from lazyinline.frontend.capture.capture import Subject, capture_model
from lazyinline.reuse.ir.constants import Number, number_of, share_constants, with_input
from lazyinline.reuse.ir.leaf import cut_leaf, frozen_operands, interpret
from lazyinline.reuse.ir.program import (
    Call,
    Closure,
    Composite,
    Leaf,
    ModelTensor,
    Program,
    UserInput,
    Value,
)
from lazyinline.reuse.ir.verify import verify

aten = torch.ops.aten


def closures_of(model: nn.Module, *args: Any, train: bool = True) -> list[str]:
    """Names of the closures of a captured model, callees first."""
    return [c.name for c in lazyinline.capture(model, args, train=train).closures]


def constants_of(model: nn.Module, *args: Any) -> list[str]:
    """The numbers that the captured program passes, in order."""
    program = lazyinline.capture(model, args, train=True)
    tensors = [s for s in program.sources if isinstance(s, ModelTensor) and s.kind == "constant"]
    return [s.name for s in tensors]


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "scale": lambda self, x: x + self.linear(x) * self.value,
    "quotient": lambda self, x: self.linear(x) / self.value,
    "offset": lambda self, x: self.linear(x) + self.value,
    "from number": lambda self, x: self.value - self.linear(x),
    "in place": lambda self, x: self.linear(x).mul_(self.value),
    "computed in Python": lambda self, x: x * (2.0**-self.value) + self.linear(x),
    "several places": lambda self, x: self.linear(x * self.value) / (self.value + 1) - self.value,
}


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.sweep(keep=["offset", "from number", "in place", "several places"])
def test_constant_that_only_feeds_arithmetic_is_an_input(name: str) -> None:
    mixed = {"offset": (1, 2, 3), "in place": (1, 2, 3), "quotient": (1.0, 1, 2.5)}
    values: Sequence[float] = mixed.get(name, (0.5, 0.1, 0.7))
    make = block(ARITHMETIC[name])
    model = Stack(*(make(value=v) for v in values))
    outcome = assert_equals_eager(model, [example()], tolerance=0)
    assert closures_of(model, example()) == ["Block"]
    again = [d for d in outcome.compiled.last_report.decisions if d.shares]
    assert [d.path for d in again] == ["layers.0", "layers.1", "layers.2"]
    assert all("shares @Block with constant" in d.shares for d in again)
    assert not outcome.compiled.last_report.not_shared()


def test_report_names_the_constants() -> None:
    make = block(ARITHMETIC["scale"])
    model = Stack(make(value=0.1), make(value=0.2), make(value=0.2))
    report = assert_equals_eager(model, [example()]).compiled.last_report
    assert [d.shared for d in report.decisions] == [False, False, True]
    line = (
        "layers.1: shares @Block with constant 0.2 as an input "
        "(traced because attribute value is 0.2, not 0.1)"
    )
    assert line in unfolded(report)


def test_constant_that_does_not_differ_stays_in_the_graph() -> None:
    make = block(lambda self, x: (self.linear(x) * self.value + 0.75) * 2)
    assert constants_of(Stack(make(value=0.5), make(value=0.25)), example()) == ["0.5", "0.25"]
    assert constants_of(Stack(make(value=0.5), make(value=0.5)), example()) == []


def test_unused_layer_idx_costs_no_second_trace() -> None:
    make = block(lambda self, x: x + self.linear(x))
    model = Stack(*(make(layer_idx=i) for i in range(6)))
    captured = capture_model(Subject(model, (example(),)), train=True)
    assert sum(not d.shared for d in captured.decisions) == 1
    assert constants_of(model, example()) == []


def test_layer_idx_in_arithmetic_is_traced_once_per_value_and_compiled_once() -> None:
    make = block(lambda self, x: x + self.linear(x) / (self.layer_idx + 1))
    model = Stack(*(make(layer_idx=i % 3) for i in range(9)))
    captured = capture_model(Subject(model, (example(),)), train=True)
    assert sum(not d.shared for d in captured.decisions) == 3
    assert [c.name for c in captured.program.closures] == ["Block"]
    compiled = assert_equals_eager(model, [example()], tolerance=0).compiled
    assert compiled.last_report.num_kernels == 2  # forward and backward


APART: dict[str, tuple[Callable[[Any, Any], Any], tuple[Any, Any]]] = {
    "exponent": (lambda self, x: self.linear(x).abs() ** self.value, (1.5, 2.5)),
    "dimension": (lambda self, x: self.linear(x).softmax(self.value), (0, 1)),
    "epsilon": (lambda self, x: nn.functional.layer_norm(x, (4,), eps=self.value), (1e-5, 1e-3)),
    "int and float of an int": (lambda self, x: self.linear(x) * (x.long() * self.value), (2, 2.0)),
    "flag": (lambda self, x: self.linear(x) * self.value + x, (True, False)),
    "branch": (lambda self, x: x * 2.0 if self.value > 1 else x + 2.0, (0.5, 1.5)),
    "bias": (lambda self, x: self.linear(x) + torch.full((4,), self.value), (0.5, 0.25)),
    "too large for a float": (lambda self, x: self.linear(x) * self.value, (2**53 + 1, 2**53 + 3)),
    "clipped by where": (
        lambda self, x: torch.where(x > 0, self.linear(x), self.value),
        (0.5, 0.2),
    ),
}


@pytest.mark.parametrize("name", APART)
def test_constant_that_decides_more_than_a_value_keeps_closures_apart(name: str) -> None:
    forward, values = APART[name]
    make = block(forward)
    model = Stack(*(make(value=v) for v in values))
    outcome = assert_equals_eager(model, [example()])
    assert len(closures_of(model, example())) == 2
    assert any("attribute value" in reason for reason in outcome.reasons)
    assert not any(d.shares for d in outcome.compiled.last_report.decisions)


ATTENTION = block(
    lambda self, x: (x @ x.transpose(-1, -2) * self.scale).softmax(-1) @ self.linear(x)
)
LAYER = block(lambda self, x: x + self.linear(self.attention(x)) * self.weight)


def layer(scale: float, weight: float) -> nn.Module:
    return LAYER(attention=ATTENTION(scale=scale), weight=weight)


def test_constants_go_out_to_whoever_knows_them() -> None:
    model = Stack(layer(0.1, 1.0), layer(0.2, 1.0), layer(0.3, 0.5), layer(0.3, 0.5))
    outcome = assert_equals_eager(model, [example()])
    assert closures_of(model, example()).count("Block") == 2  # an attention and a layer
    assert set(constants_of(model, example())) == {"0.1", "0.2", "0.3", "1.0", "0.5"}
    by_path = {d.path: d for d in outcome.compiled.last_report.decisions}
    assert "0.2, 1.0 as inputs" in by_path["layers.1"].shares
    assert "0.2 as an input" in by_path["layers.1.attention"].shares
    assert by_path["layers.3"].shared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_stay_in_closures_of_half_precision(dtype: torch.dtype) -> None:
    make = block(lambda self, x: (self.linear(x) * self.value + x) / (1 + self.value))
    model = Stack(*(make(value=v) for v in (0.1, 0.3, 0.3))).to(dtype)
    assert_equals_eager(model, [example().to(dtype)], tolerance=0)
    assert closures_of(model, example(grad=True).to(dtype)) == ["Block", "Block"]


def test_constant_changed_after_compile_is_noticed_and_compiles_nothing_new() -> None:
    make = block(ARITHMETIC["scale"])
    model = Stack(*(make(value=v) for v in (0.1, 0.2, 0.3)))
    compiled = lazyinline.compile(model, backend="eager")
    compiled(example())
    for index, value in ((1, 0.9), (2, 0.9), (0, -0.5)):
        model.layers[index].value = value
        assert torch.equal(compiled(example()), model(example()))
        assert compiled.last_report.num_kernels == 0


def test_random_bits_and_constants_are_the_same() -> None:
    make = block(lambda self, x: x + nn.functional.dropout(self.linear(x), 0.5) * self.value)
    model = Stack(*(make(value=v) for v in (0.1, 0.2, 0.3)))
    assert_equals_eager(model, [example()], tolerance=0)
    assert closures_of(model, example()) == ["Block"]


MATRIX = tensor_type(3, 4)
OPERATORS = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar)
UNARY = (aten.tanh.default, aten.sin.default)


class _Family:
    """Closures of one shape, each with numbers of its own."""

    def __init__(self, rng: random.Random, below: Sequence["_Family"]) -> None:
        self._rng = rng
        self._below = [rng.choice(below) for _ in range(rng.randint(1, 3))] if below else []
        self._operators = [rng.choice(OPERATORS + UNARY) for _ in range(rng.randint(1, 4))]
        self._places = [rng.random() for _ in range(8)]

    def member(self) -> Closure:
        if self._below:
            x, y = Value(MATRIX, "x"), Value(MATRIX, "y")
            values, calls = [x, y], []
            for index, family in enumerate(self._below):
                result = Value(MATRIX)
                args = (values[int(self._places[index] * len(values))], values[-1])
                calls.append(Call(family.member(), args, (result,)))
                values.append(result)
            return Composite("composite", Program((x, y), tuple(calls), (values[-1],)), ("x", "y"))
        return self._leaf()

    def _leaf(self) -> Leaf:
        graph = torch.fx.Graph()
        x, y = (graph.placeholder(name) for name in "xy")
        nodes = [x, y, graph.call_function(aten.add.Tensor, (x, y))]
        for operator in self._operators:
            number = () if operator in UNARY else (self._rng.choice([0.5, -1.25, 3.0, 3]),)
            nodes.append(graph.call_function(operator, (nodes[-1], *number)))
        for node in nodes:
            node.meta["val"] = torch.empty(3, 4, dtype=torch.float64, device=CPU)
        return cut_leaf("leaf", nodes[2:], [x, y], [nodes[-1]])


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sweep(keep=["0]", "5]"])
def test_random_program_gives_the_same_bits_with_constants_as_inputs(seed: int) -> None:
    rng = random.Random(seed)
    families = [_Family(rng, []) for _ in range(2)]
    for _ in range(2):
        families.append(_Family(rng, families[-2:]))
    main = _Family(rng, families)
    while not isinstance(closure := main.member(), Composite) or len(closure.program.calls) < 2:
        main = _Family(rng, families)
    body = closure.program
    sources = (UserInput(0, "x"), UserInput(1, "y"))
    program = Program(body.inputs, body.calls, body.outputs, sources)
    shared, found = share_constants(verify(program))
    verify(shared)
    assert set(found) == set(program.closures)
    assert len(shared.closures) <= len(program.closures)
    args = [example(seed=seed, grad=False), example(seed=seed + 1, grad=False)]
    constants = [s.tensor for s in shared.sources if isinstance(s, ModelTensor)]
    (expected,) = interpret(program, args)
    (result,) = interpret(shared, [*args, *constants])
    assert torch.equal(result, expected)
    assert share_constants(shared)[0] is shared


def test_operands_are_equal_only_if_an_operator_is_given_the_same() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    told_apart = [
        *((x, y), (x, 0), (x, ("node", 0)), ([x, y], [y, x]), ((x, (y,)), ((x,), y))),
        *((1, True), (1, 1.0), (0.0, -0.0), ((1, 2), [1, 2]), (slice(0, 1), slice(0, 2))),
        *((slice(0, x), slice(x, 0)), ({"a": x}, {"b": x}), ({"a": x}, {"a": y})),
        *(({"a": 1}, (("a", 1),)), (torch.float32, torch.float64)),
    ]
    nodes = {x: 0, y: 1}
    for one, other in told_apart:
        assert frozen_operands(one, nodes) == frozen_operands(one, nodes)
        assert frozen_operands(one, nodes) != frozen_operands(other, nodes), (one, other)


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.uint8, torch.bool)
NUMBERS = (0.1, -1 / 3, 1e-3, 7, 0, 3e-40, math.inf)
ELEMENTWISE = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.rsub.Scalar)


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


def test_number_keeps_its_kind_sign_and_every_bit() -> None:
    values = [0.1, 1, 1.0, -0.0, 0.0, math.inf, -math.inf, math.nan]
    numbers = [Number.of(v, torch.float64) for v in values]
    assert len(set(numbers)) == len(values)
    for value, number in zip(values, numbers, strict=True):
        assert type(number.value) is type(value)
        assert number.value == value or math.isnan(value)
        assert math.copysign(1, number.value) == math.copysign(1, value)
        assert Number.of(value, torch.float64) == number

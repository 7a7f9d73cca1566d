"""Rules of the verifier that no text can break; ``filetests/error_*.txt`` break the others."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.fx
from programs import (
    MATRIX,
    SCALAR,
    LeafBuilder,
    binary_leaf,
    inline_calls,
    random_program,
    remove_unused_packs,
    unary_leaf,
)

from lazyinline.reuse.errors import VerifyError
from lazyinline.reuse.ir.program import Call, Composite, Leaf, Program, UserInput, Value
from lazyinline.reuse.ir.verify import verify

aten = torch.ops.aten
SINE = unary_leaf(aten.sin.default, name="sine")
ADD = binary_leaf(aten.add.Tensor, name="add")
X, Y, OTHER = Value(MATRIX, "x"), Value(MATRIX, "y"), Value(MATRIX, "other")


def body(
    calls: tuple[Call, ...] = (Call(SINE, (X,), (Y,), "layers.0"),),
    outputs: tuple[Value, ...] = (Y,),
    inputs: tuple[Value, ...] = (X,),
    sources: tuple[UserInput, ...] = (),
) -> Program:
    """A right program of one call on one leaf, but for what is given."""
    return Program(inputs, calls, outputs, sources)


def with_leaf(change: Callable[[torch.fx.Graph], None]) -> Program:
    """A call on a leaf whose graph was changed behind its back."""
    builder = LeafBuilder([MATRIX])
    leaf = builder.leaf([builder.add(aten.sin.default, builder.nodes[0])], "broken")
    change(leaf.module.graph)
    return body((Call(leaf, (X,), (Y,)),))


def placeholder_more(graph: torch.fx.Graph) -> None:
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("more")


def output_more(graph: torch.fx.Graph) -> None:
    (node,) = graph.output_node().args[0]  # type: ignore[misc]
    graph.output_node().args = ((node, node),)


def output_bare(graph: torch.fx.Graph) -> None:
    graph.output_node().args = graph.output_node().args[0]  # type: ignore[assignment]


def parameter(graph: torch.fx.Graph) -> None:
    with graph.inserting_before(graph.output_node()):
        graph.create_node("get_attr", "weight")


def in_composite(inner: Program) -> Program:
    """The program as the body of a composite that is called once, in a right program."""
    inputs = tuple(Value(v.type) for v in inner.inputs)
    results = tuple(Value(v.type) for v in inner.outputs)
    return Program(inputs, (Call(Composite("outer", inner), inputs, results),), results)


TWICE = (Call(SINE, (X,), (Y,)), Call(SINE, (X,), (Y,)))
BROKEN: dict[str, Program] = {
    "2 inputs but 1 sources": body(inputs=(X, OTHER), sources=(UserInput(0, "x"),)),
    "@main inputs: a value is defined twice": body(inputs=(X, X)),
    "@main, call 1 of @sine: a value is defined twice": body(TWICE),
    "@main, call 0 of @sine: a value is defined twice": body((Call(SINE, (X,), (X,)),), (X,)),
    "@main, call 0 of @sine: operand 0 is used before": body((Call(SINE, (OTHER,), (Y,)),)),
    "@main, call 0 of @add: operand 1 is used before it is defined": body(
        (Call(ADD, (X, Y), (OTHER,)), Call(SINE, (X,), (Y,)))
    ),
    "@main returns a value that no call defines": body(outputs=(OTHER,)),
    "@main, call 0 of @sine: 0 results for 1": body((Call(SINE, (X,), ()),), ()),
    "@main, call 0 of @sine: result 0 is": body((Call(SINE, (X,), (Value(SCALAR),)),), ()),
    "@broken: 2 placeholders": with_leaf(placeholder_more),
    "@broken: outputs do not match": with_leaf(output_more),
    "@broken: outputs do not match its": with_leaf(output_bare),
    "@broken: node weight is a get_attr": with_leaf(parameter),
    "@outer returns a value that no call defines": in_composite(body(outputs=(OTHER,))),
    "@broken: outputs": in_composite(with_leaf(output_more)),
    "@outer, call 1 of @sine: a value is defined twice": in_composite(body(TWICE)),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_rule_is_named_with_its_place(message: str) -> None:
    with pytest.raises(VerifyError) as error:
        verify(BROKEN[message])
    first, _, rest = str(error.value).partition("\n")
    assert message in first
    assert "(level 'shared')" in first
    assert "program @main" in rest, "the message shows the program"


def test_right_programs_pass_and_come_back() -> None:
    for program in (body(), in_composite(body()), random_program(7)):
        assert verify(program) is program


def test_flat_level_takes_what_inlining_gives() -> None:
    for seed in range(20):
        verify(remove_unused_packs(inline_calls(random_program(seed))), "flat")


def test_same_closure_is_checked_once() -> None:
    """A thousand calls on one leaf cost one look into its graph."""
    looks = []

    class Watched(torch.fx.Graph):
        @property
        def nodes(self) -> object:
            looks.append(1)
            return super().nodes

    builder = LeafBuilder([MATRIX])
    leaf: Leaf = builder.leaf([builder.add(aten.sin.default, builder.nodes[0])])
    values = [Value(MATRIX) for _ in range(1001)]
    calls = [Call(leaf, (a,), (b,)) for a, b in itertools.pairwise(values)]
    leaf.module.graph.__class__ = Watched
    looks.clear()
    verify(Program((values[0],), tuple(calls), (values[-1],)))
    assert 1 <= len(looks) <= 5

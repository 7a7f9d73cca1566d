"""Each rule of the verifier, broken once on purpose: the message names the place."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.fx
from programs import (
    MATRIX,
    SCALAR,
    VECTOR,
    LeafBuilder,
    binary_leaf,
    random_program,
    remove_unused_packs,
    tensor_type,
    unary_leaf,
)

from lazyinline.reuse.errors import VerifyError
from lazyinline.reuse.ir.program import (
    Call,
    Composite,
    Leaf,
    Pack,
    Program,
    Unpack,
    UserInput,
    Value,
)
from lazyinline.reuse.ir.rewrite import inline_calls
from lazyinline.reuse.ir.types import StructType
from lazyinline.reuse.ir.verify import verify

aten = torch.ops.aten
SINE = unary_leaf(aten.sin.default, name="sine")
ADD = binary_leaf(aten.add.Tensor, name="add")
STRUCT = StructType((MATRIX, VECTOR))


def body(*, leaf: Leaf = SINE, **changes: object) -> Program:
    """A right program of one call on one leaf, with some parts changed."""
    x, y = Value(MATRIX, "x"), Value(MATRIX, "y")
    parts: dict[str, object] = {
        "inputs": (x,),
        "calls": (Call(leaf, (x,), (y,), "layers.0"),),
        "outputs": (y,),
    }
    parts.update({k: v(x, y) if callable(v) else v for k, v in changes.items()})
    return Program(**parts)  # type: ignore[arg-type]


def with_leaf(change: Callable[[torch.fx.Graph], None], **types: object) -> Program:
    """A call on a leaf whose graph was changed behind its back."""
    builder = LeafBuilder([MATRIX])
    leaf = builder.leaf([builder.add(aten.sin.default, builder.nodes[0])], "broken")
    change(leaf.module.graph)
    return body(leaf=Leaf("broken", leaf.module, (MATRIX,), (MATRIX,), **types))  # type: ignore[arg-type]


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


def in_place(graph: torch.fx.Graph) -> None:
    first = next(iter(graph.nodes))
    with graph.inserting_before(graph.output_node()):
        graph.call_function(aten.add_.Tensor, (first, 1))


def in_place_by_keyword(graph: torch.fx.Graph) -> None:
    first = next(iter(graph.nodes))
    with graph.inserting_before(graph.output_node()):
        graph.call_function(aten.sin.out, (first,), {"out": first})


def in_place_through_view(graph: torch.fx.Graph) -> None:
    first = next(iter(graph.nodes))
    with graph.inserting_before(graph.output_node()):
        view = graph.call_function(aten.select.int, (first, 0, 0))
        view.meta["val"] = first.meta["val"].select(0, 0)
        graph.call_function(aten.add_.Tensor, (view, 1))


def in_composite(inner: Program) -> Program:
    """The program as the body of a composite that is called once, in a right program."""
    inputs = tuple(Value(v.type) for v in inner.inputs)
    results = tuple(Value(v.type) for v in inner.outputs)
    return Program(inputs, (Call(Composite("outer", inner), inputs, results),), results)


def packing(closure: Pack | Unpack, path: str) -> Program:
    args = tuple(Value(t) for t in closure.input_types)
    results = tuple(Value(t) for t in closure.output_types)
    return Program(args, (Call(closure, args, results, path),), results)


def twice(x: Value, y: Value) -> tuple[Call, ...]:
    return (Call(SINE, (x,), (y,)), Call(SINE, (x,), (y,)))


STRIDED = tensor_type(3, 4, stride=(1, 3))
DOUBLE = tensor_type(3, 4)
BROKEN: dict[str, tuple[Callable[[], Program], str]] = {
    "sources for half of the inputs": (
        lambda: body(
            inputs=lambda x, y: (x, Value(MATRIX)), sources=(UserInput(0, "x"),), outputs=()
        ),
        "2 inputs but 1 sources",
    ),
    "input twice": (lambda: body(inputs=lambda x, y: (x, x)), "@main inputs: a value is defined"),
    "result twice": (lambda: body(calls=twice), "@main, call 1 of @sine: a value is defined twice"),
    "result that is an input": (
        lambda: body(calls=lambda x, y: (Call(SINE, (x,), (x,)),), outputs=lambda x, y: (x,)),
        "@main, call 0 of @sine: a value is defined twice",
    ),
    "undefined operand": (
        lambda: body(calls=lambda x, y: (Call(SINE, (Value(MATRIX),), (y,)),)),
        "@main, call 0 of @sine: operand 0 is used before it is defined",
    ),
    "operand of a later call": (
        lambda: body(
            calls=lambda x, y: (
                Call(ADD, (x, y), (Value(MATRIX),)),
                Call(SINE, (x,), (y,)),
            )
        ),
        "@main, call 0 of @add: operand 1 is used before it is defined",
    ),
    "undefined output": (
        lambda: body(outputs=(Value(MATRIX),)),
        "@main returns a value that no call defines",
    ),
    "operand missing": (
        lambda: body(calls=lambda x, y: (Call(ADD, (x,), (y,)),)),
        "@main, call 0 of @add: 1 operands for 2",
    ),
    "result missing": (
        lambda: body(calls=lambda x, y: (Call(SINE, (x,), ()),), outputs=()),
        "@main, call 0 of @sine: 0 results for 1",
    ),
    "operand of another shape": (
        lambda: body(leaf=unary_leaf(aten.sin.default, VECTOR, name="sine")),
        "@main, call 0 of @sine: operand 0 is",
    ),
    "operand of other strides": (
        lambda: body(leaf=unary_leaf(aten.sin.default, STRIDED, name="sine")),
        "@main, call 0 of @sine: operand 0 is",
    ),
    "result of another shape": (
        lambda: body(calls=lambda x, y: (Call(SINE, (x,), (Value(SCALAR),)),), outputs=()),
        "@main, call 0 of @sine: result 0 is",
    ),
    "pack with a path": (lambda: packing(Pack(STRUCT), "layers.0"), "@main, call 0 of @pack: pack"),
    "unpack with a path": (lambda: packing(Unpack(STRUCT), "layers.0"), "call 0 of @unpack: pack"),
    "write of another type": (
        lambda: body(
            inputs=lambda x, y: (x, Value(VECTOR)), writes=((0, 1),), outputs=lambda x, y: (y,)
        ),
        "write of output 0 into input 1 changes the type",
    ),
    "placeholder more": (lambda: with_leaf(placeholder_more), "@broken: 2 placeholders"),
    "output more": (lambda: with_leaf(output_more), "@broken: outputs do not match"),
    "output that is no tuple": (lambda: with_leaf(output_bare), "@broken: outputs do not match"),
    "hidden parameter": (lambda: with_leaf(parameter), "@broken: node weight is a get_attr"),
    "input changed in place": (
        lambda: with_leaf(in_place),
        "@broken: node add__tensor changes an input in place",
    ),
    "input given as out": (
        lambda: with_leaf(in_place_by_keyword),
        "@broken: node sin_out changes an input in place",
    ),
    "input changed through a view": (
        lambda: with_leaf(in_place_through_view),
        "@broken: node add__tensor changes an input in place",
    ),
    "broken body of a composite": (
        lambda: in_composite(body(outputs=(Value(MATRIX),))),
        "@outer returns a value that no call defines",
    ),
    "broken leaf in a composite": (
        lambda: in_composite(with_leaf(output_more)),
        "@broken: outputs do not match",
    ),
    "broken call in a composite": (
        lambda: in_composite(body(calls=twice)),
        "@outer, call 1 of @sine: a value is defined twice",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_named_with_its_place(name: str) -> None:
    make, message = BROKEN[name]
    with pytest.raises(VerifyError) as error:
        verify(make())
    first, _, rest = str(error.value).partition("\n")
    assert message in first
    assert "(level 'shared')" in first
    assert "program @main" in rest, "the message shows the program"


def test_right_programs_pass_and_come_back() -> None:
    for program in (body(), in_composite(body()), packing(Pack(STRUCT), ""), random_program(7)):
        assert verify(program) is program


def test_flat_level_refuses_composites() -> None:
    program = in_composite(body())
    assert verify(inline_calls(program), "flat")
    with pytest.raises(VerifyError, match=r"@outer is a composite closure \(level 'flat'\)"):
        verify(program, "flat")


def test_flat_level_takes_what_inlining_gives() -> None:
    for seed in range(20):
        verify(remove_unused_packs(inline_calls(random_program(seed))), "flat")


def test_unknown_level_is_refused() -> None:
    with pytest.raises(VerifyError, match=r"unknown level 'linked'.*'shared', 'aten', 'flat'"):
        verify(body(), "linked")


def test_same_closure_is_checked_once() -> None:
    """A thousand calls on one leaf cost one look into its graph."""
    looks = []

    class Watched(torch.fx.Graph):
        @property
        def nodes(self) -> object:
            looks.append(1)
            return super().nodes

    builder = LeafBuilder([MATRIX])
    builder.graph.__class__ = Watched
    leaf = builder.leaf([builder.add(aten.sin.default, builder.nodes[0])])
    values = [Value(MATRIX) for _ in range(1001)]
    calls = [Call(leaf, (a,), (b,)) for a, b in itertools.pairwise(values)]
    leaf.module.graph.__class__ = Watched
    looks.clear()
    verify(Program((values[0],), tuple(calls), (values[-1],)))
    assert 1 <= len(looks) <= 4


def test_aten_level_refuses_leaves_with_composite_operators() -> None:
    assert verify(body(leaf=replace(SINE, level="aten")), "aten")
    with pytest.raises(VerifyError, match="@sine is a leaf of level 'composite'"):
        verify(body(leaf=replace(SINE, level="composite")), "aten")

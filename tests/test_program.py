"""Programs as data: types as text, counting, immutability, printing, differences, rules."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.fx
from models import Around
from programs import MATRIX, SCALAR, VECTOR, LeafBuilder, binary_leaf, unary_leaf
from torch import nn

import lazyinline
from lazyinline.reuse.errors import VerifyError
from lazyinline.reuse.ir.printer import WIDTH, format_program, text_to_compare
from lazyinline.reuse.ir.program import Call, Composite, Leaf, Program, UserInput, Value
from lazyinline.reuse.ir.types import StructType, TensorType
from lazyinline.reuse.ir.verify import verify

aten = torch.ops.aten


DTYPES = {"f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64}
DTYPES |= {"u8": torch.uint8, "bool": torch.bool, "c64": torch.complex64}
DTYPES |= {"float8_e4m3fn": torch.float8_e4m3fn}


def test_tensor_type_as_text() -> None:
    for text, shape in {"f32[8,16]": (8, 16), "f32[]": (), "f32[0,3]": (0, 3)}.items():
        assert str(TensorType.of(torch.zeros(shape))) == text
    for name, dtype in DTYPES.items():
        assert str(TensorType.of(torch.zeros(2, dtype=dtype))) == f"{name}[2]"


def test_struct_type_counts_the_tensors_inside() -> None:
    inner = StructType((MATRIX, VECTOR))
    assert str(inner) == "struct<2>"
    assert str(StructType((inner, SCALAR, inner))) == "struct<5>"
    assert str(StructType(())) == "struct<0>"
    assert StructType((inner, SCALAR)).num_bytes == (12 + 4 + 1) * 8


def test_types_are_equal_only_where_a_kernel_fits_both() -> None:
    base = torch.zeros(3, 4)
    others = [base.double(), base[:2], base.t().contiguous().t(), base.to("meta")]
    assert TensorType.of(base) == TensorType.of(torch.ones(3, 4))
    assert all(TensorType.of(other) != TensorType.of(base) for other in others)


DENSE = [torch.zeros(3, 4), torch.zeros(3, 4).t(), torch.zeros(2, 3, 4).permute(1, 2, 0)]
DENSE += [torch.zeros(3, 1, 4)[:, :1], torch.zeros(())]
NOT_DENSE = [torch.zeros(4).expand(3, 4), torch.zeros(3, 8)[:, ::2], torch.zeros(3, 8)[:, :4]]


@pytest.mark.parametrize("tensor", [*DENSE, *NOT_DENSE], ids=lambda t: f"{t.shape} {t.stride()}")
def test_cotangent_has_the_layout_of_a_dense_value(tensor: torch.Tensor) -> None:
    type_ = TensorType.of(tensor)
    assert type_.is_dense == any(tensor is dense for dense in DENSE)
    assert type_.cotangent().stride == (tensor if type_.is_dense else tensor.contiguous()).stride()
    assert type_.cotangent().shape == type_.shape


def leaf_of(nodes: int, name: str) -> Leaf:
    """A leaf on one matrix with this many operators."""
    builder = LeafBuilder([MATRIX])
    for _ in range(nodes):
        builder.add(aten.sin.default, builder.nodes[-1])
    return builder.leaf([builder.nodes[-1]], name)


def chain(*closures: Leaf | Composite) -> Program:
    """Calls the closures one after another."""
    values = [Value(MATRIX, "x")]
    calls = []
    for closure in closures:
        values.append(Value(MATRIX, "y"))
        calls.append(Call(closure, (values[-2],), (values[-1],)))
    return Program((values[0],), tuple(calls), (values[-1],))


THREE, FIVE = leaf_of(3, "three"), leaf_of(5, "five")


def test_counting_visits_each_closure_once() -> None:
    """Forty levels of two calls each: 2**40 operators if inlined."""
    closure: Leaf | Composite = leaf_of(1, "one")
    for level in range(40):
        closure = Composite(f"level{level}", chain(closure, closure))
    program = chain(closure)
    assert program.num_nodes_if_inlined() == 2**40
    assert program.num_nodes() == 1 + 40 * 2 + 1
    assert str(program).count("closure @") == 41


@lazyinline.lazy_inline
class Block(nn.Module):
    def __init__(self, size: int, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=False)
        self.gain = nn.Parameter(torch.ones(size))
        self.register_buffer("shift", torch.zeros(size))
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.gain + self.shift


class Model(nn.Module):
    def __init__(self, layers: int, size: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, size)
        self.layers = nn.ModuleList(Block(size, i) for i in range(layers))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return {"hidden": x, "loss": x.square().sum()}


IDS = torch.zeros(2, 3, dtype=torch.int64)


def test_captured_program_as_text(golden: Callable[[str, str], None]) -> None:
    golden("captured", str(lazyinline.capture(Model(3), (IDS,), train=True)))


def test_source_lines_are_shown_on_request() -> None:
    program = lazyinline.capture(Model(2), (IDS,))
    shown = format_program(program, source="show")
    assert re.search(r"= tanh\(%\d+\)  // .*test_program\.py:\d+ Block\.forward", shown)
    assert re.search(r"= embedding\(.*test_program\.py:\d+ Model\.forward", shown)
    assert ".py:" not in format_program(program)


def test_a_printed_program_says_once_what_all_its_lines_share_and_fits_a_screen() -> None:
    wide = Around(
        lambda layers, x: torch.cat([layer(x) for layer in layers]).sum(),
        *(nn.Linear(3, 3) for _ in range(9)),
    )
    program = lazyinline.capture(wide, (torch.zeros(3, 3),), train=False, reuse="off")
    text = str(program)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.count("no_grad") == len(program.closures) == 1
    assert "no_grad" not in str(lazyinline.capture(wide, (torch.zeros(3, 3),), train=True))
    names = re.findall(r"%layers\.\d\.\w+", text)
    assert len(set(names)) == 18, "every parameter is there"
    compared = text_to_compare(program)
    assert compared.split() == text.split()
    assert max(map(len, compared.splitlines())) > WIDTH, "a name's length breaks no line there"


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

"""Programs in other forms: fx and torch.export, there and back."""

import copy
import functools
import io
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from comparing import assert_close, assert_same_buffers, assert_same_gradients, seed_all
from models import Attention, BatchNormBlock, Block, Made, Net, Stack, batch
from programs import random_arguments, random_program
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import lazyinline
from lazyinline import CaptureError, ExportError, Program
from lazyinline.reuse import torch_pytree
from lazyinline.reuse.errors import ParseError
from lazyinline.reuse.ir.leaf import flatten_value, interpret
from lazyinline.reuse.ir.printer import text_to_compare
from lazyinline.reuse.ir.program import UserInput
from lazyinline_command.main import main


def assert_same_text(found: Program, program: Program) -> None:
    assert text_to_compare(found) == text_to_compare(program)
    assert str(found) == str(program)


def leaves_of(result: Any) -> list[Any]:
    found: list[Any] = torch.utils._pytree.tree_leaves(result)
    return found


def tensors(values: Any) -> list[Tensor]:
    found, _ = torch_pytree.flatten(values)
    return list({id(x): x for x in found if isinstance(x, Tensor)}.values())


def reloaded(exported: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_come_back_from_fx_and_run_there(seed: int) -> None:
    program = random_program(seed)
    module = program.to_fx()
    assert_same_text(Program.from_fx(module), program)
    assert_same_text(Program.from_fx(copy.deepcopy(module)), program)
    args = random_arguments(program, seed)
    expected = flatten_value(interpret(program, args))
    for found, wanted in zip(flatten_value(module(*args)), expected, strict=True):
        assert torch.equal(found, wanted)


class Modes(Block):
    """Operators under other modes than those around them; a result of several parts."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.up(x)
        return x + self.down(F.gelu(y.float())) * scale


class Parts(nn.Module):
    """Takes and gives nested things; a mask and a constant are among them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(Modes, 2)
        self.register_buffer("offset", torch.ones(2), persistent=False)

    def forward(self, given: Mapping[str, Tensor], *, mask: Tensor | None = None) -> Any:
        y = self.net(given["x"])
        return {"y": (y + self.offset, y), "n": 2, "rows": [given["x"].unbind(0)[1], None]}


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "blocks": (lambda: Net(lambda: Block(norm=True)), (batch(),)),
    "attention": (lambda: Stack(Attention(), Attention(), Attention()), (torch.randn(2, 5, 8),)),
    "modes": (lambda: Net(Modes, 2), (batch(),)),
    "parts": (Parts, ({"x": batch()},)),
    "statistics": (lambda: Net(BatchNormBlock).train(), (batch(),)),
    "dropout": (lambda: Net(lambda: Block(dropout=0.5)).train(), (batch(),)),
}


def assert_comes_back(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None = None, *, train: bool = False
) -> None:
    """Asserts that a model's program comes back from each form, which computes what eager does."""
    program = lazyinline.capture(model, args, kwargs, train=train)
    assert_same_text(Program.from_networkx(program.to_networkx()), program)
    flat = leaves_of((args, dict(kwargs or {})))
    given = [flat[s.index] for s in program.sources if isinstance(s, UserInput)]
    with torch.set_grad_enabled(train):
        seed_all()
        expected = copy.deepcopy(model)(*args, **(kwargs or {}))
        own = copy.deepcopy(program.to_fx())
        assert_same_text(Program.from_fx(own), program)
        seed_all()
        found = own(*given)
        assert type(found) is type(expected)
        assert_close(tensors(found), tensors(expected), 0)
        exported = reloaded(program.to_exported())
        assert_same_text(lazyinline.from_exported(exported), program)
        seed_all()
        assert_close(tensors(exported.module()(*given)), tensors(expected), 0)


@pytest.mark.sweep(keep=["blocks-False", "parts-True", "statistics-True", "dropout-True"])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_program_comes_back_from_each_form_which_computes_what_eager_does(
    name: str, train: bool
) -> None:
    make, args = CASES[name]
    seed_all()
    assert_comes_back(make(), args, train=train)


@pytest.mark.sweep
@pytest.mark.parametrize("family", (*zoo.ASKED, *zoo.FURTHER), ids=lambda family: family.name)
@pytest.mark.parametrize("train", [False, True])
def test_programs_of_families_come_back(family: zoo.Family, train: bool) -> None:
    model, inputs = family.build()
    model.train(train)(**inputs)  # some note at their first call what they are asked for
    if train and family.name == "Wav2Vec2":
        with pytest.raises(CaptureError, match="needs the value of a tensor"):
            lazyinline.capture(model, (), inputs, train=True)
    elif family.name == "Bloom":  # an operator is a Python function
        with pytest.raises(ParseError, match="no operator 'GeLUFunction'"):
            assert_comes_back(model, (), inputs, train=train)
    else:
        assert_comes_back(model, (), inputs, train=train)


def decoder() -> nn.Module:
    return Stack(*(Attention() for _ in range(3)))


SEQUENCES = {1: Dim("length", min=2, max=16)}


def sequences(length: int) -> Tensor:
    return torch.randn(2, length, 8, generator=torch.Generator().manual_seed(length))


@functools.cache
def exported_once(dynamic: bool) -> tuple[nn.Module, ExportedProgram]:
    """A model, and what PyTorch makes of it; nobody may change them."""
    model = decoder()
    shapes = (SEQUENCES,) if dynamic else None
    return model, torch.export.export(model, (sequences(5),), dynamic_shapes=shapes)


@pytest.mark.sweep(keep="True")
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_exported_model_is_compiled_once_for_equal_blocks_and_trains(dynamic: bool) -> None:
    (model, exported), x = exported_once(dynamic), sequences(5)
    model = copy.deepcopy(model)
    compiled = lazyinline.compile(reloaded(exported), backend="eager")
    assert_close(compiled(x), model(x))
    assert compiled.last_report is not None
    # As of the model itself: the first of three blocks has no gradient of its input, and is apart.
    assert compiled.last_report.num_shared_calls == 1
    compiled(x).sum().backward()
    model(x).sum().backward()
    assert_same_gradients(compiled, model)
    if dynamic:
        for length in (6, 7):
            assert_close(compiled(sequences(length)), model(sequences(length)))
    with pytest.raises(AssertionError, match="Guard failed"):
        compiled(sequences(17))


def test_an_export_that_was_decomposed_trains_and_keeps_its_statistics() -> None:
    seed_all()
    model, x = Net(BatchNormBlock, 3).train(), batch()
    exported = torch.export.export(copy.deepcopy(model), (x,)).run_decompositions()
    compiled = lazyinline.compile(exported, backend="eager")
    for _ in range(2):
        compiled(x).square().sum().backward()
        model(x).square().sum().backward()
    assert compiled.last_report is not None and compiled.last_report.num_shared_calls > 0
    assert_same_gradients(compiled, model)
    assert_same_buffers(compiled, model)


def test_what_pytorch_exported_is_a_program_like_a_captured_one() -> None:
    program = lazyinline.from_exported(exported_once(dynamic=False)[1])
    assert [call.path for call in program.calls] == [f"layers.{i}" for i in range(3)]
    assert len(program.closures) == 1 and program.closures[0].name == "Attention"
    compiled = lazyinline.compile(program, backend="eager")
    with torch.no_grad():
        assert_close(compiled(sequences(5)), program.to_fx()(sequences(5)), 0)
    assert compiled.last_report is not None and compiled.last_report.num_shared_calls == 2


@torch.no_grad()
def test_sizes_that_vary_are_symbols_with_their_conditions() -> None:
    model, exported = exported_once(dynamic=True)
    program = lazyinline.from_exported(exported)
    assert "f32[2,s" in str(program)
    module = program.to_fx()
    again = reloaded(program.to_exported())
    assert_same_text(lazyinline.from_exported(again), program)
    assert_same_text(Program.from_fx(module), program)
    for length in (6, 16):
        x = sequences(length)
        assert_close(module(x), model(x), 0)
        assert_close(again.module()(x), model(x), 0)
    for form in (module, again.module()):
        with pytest.raises(AssertionError):
            form(sequences(17))


def test_the_command_line_takes_what_pytorch_exported(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "model.pt2")
    torch.export.save(exported_once(dynamic=False)[1], file)
    assert main(["inspect", file]) == 0
    assert "closure @Attention(" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none.pt2")]) == 2
    assert "none.pt2 cannot be loaded" in capsys.readouterr().err


def test_an_export_checks_what_it_was_exported_for() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            return F.dropout(x * scale, 0.5, self.training)

    exported = torch.export.export(Scaled().eval(), (batch(), 2.0))
    compiled = lazyinline.compile(exported, backend="eager")
    assert_close(compiled(batch(), 2.0), 2 * batch(), 0)
    with pytest.raises(AssertionError, match=r"scale == 2\.0"):
        compiled(batch(), 3.0)
    with pytest.raises(NotImplementedError):  # the mode stands in the graph
        compiled.train()
    exported.example_inputs = None
    with pytest.raises(CaptureError, match="has no example_inputs"):
        lazyinline.compile(exported)


def test_a_module_of_a_program_refuses_inputs_of_another_type() -> None:
    module = lazyinline.capture(decoder(), (sequences(5),)).to_fx()
    for wrong in (sequences(6), sequences(5).double(), sequences(5)[0]):
        with pytest.raises(AssertionError, match="for inputs of which x is a f32"):
            module(wrong)


def test_a_changed_module_or_export_is_taken_for_what_it_computes() -> None:
    model, x = Net(lambda: Block(norm=True), 3), batch()
    program = lazyinline.capture(model, (x,))
    module, exported = program.to_fx(), program.to_exported()
    for graph in [m.graph for m in module.modules() if isinstance(m, torch.fx.GraphModule)]:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
            node.target = torch.ops.aten.relu.default
        graph.owning_module.recompile()
    for node in exported.graph.nodes:
        if node.target is torch.ops.aten.tanh.default:
            node.target = torch.ops.aten.relu.default
    exported.graph_module.recompile()
    with pytest.raises(ExportError, match="no longer, what to_fx made"):
        Program.from_fx(module)
    expected = module(x)
    assert not torch.equal(expected, model(x))
    for changed in (lazyinline.capture(module, (x,)), lazyinline.from_exported(exported)):
        assert "relu" in str(changed) and "tanh" not in str(changed)
        assert_close(changed.to_fx()(x), expected, 0)


def test_control_flow_runs_in_fx_and_is_refused_by_name_where_there_is_no_form_for_it() -> None:
    x = torch.ones(3)
    program = lazyinline.capture(
        Made(lambda self, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))), (x,)
    )
    module = program.to_fx()
    assert_same_text(Program.from_fx(module), program)
    assert_same_text(Program.from_networkx(program.to_networkx()), program)
    assert_close([module(x), module(-x)], [x.sin(), x.cos()], 0)
    with pytest.raises(ExportError, match="@choose is control flow"):
        program.to_exported()


def test_a_graph_of_networkx_shows_calls_and_operands() -> None:
    program = lazyinline.capture(decoder(), (sequences(5),))
    graph = program.to_networkx()
    nodes = graph.nodes(data=True)
    calls = [(node, data["path"]) for node, data in nodes if data.get("closure") == "Attention"]
    assert calls == [(i, f"layers.{i}") for i in range(3)]
    assert graph.edges["%x", 0, 0] == {"value": "%x", "type": "f32[2,5,8]", "position": 0}
    assert graph.edges[0, 1, 0]["type"] == "f32[2,5,8]"
    inside = graph.graph["closures"]["Attention"].nodes(data="operator")
    assert "scaled_dot_product_attention" in dict(inside).values()

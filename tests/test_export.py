"""ONNX files: one function per block, the numbers of eager PyTorch, names a person knows."""

import importlib.util
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decoders as own
import hugging_face
import numpy as np
import onnx
import onnx.inliner
import onnx.printer
import onnx.reference
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from exported import assert_trains_as_eager, is_close, run
from models import Around, Stack, block, example
from pytest import MonkeyPatch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import lazyinline
from lazyinline import ExportError, lazy_inline
from lazyinline.backend.onnx.torch_onnx import convolution_backward

lazy_inline(own.DecoderBlock)
lazy_inline(own.GptBlock)

SMALL = {"hidden": 32, "num_heads": 2, "vocab": 50, "seq": 8}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def small() -> tuple[nn.Module, Tensor]:
    """Two equal blocks, and an input."""
    kind = block(lambda self, x: x + self.linear(x).sigmoid())
    return Stack(kind(), kind()), example(grad=False)


def nodes_of(path: Path) -> dict[str, int]:
    model = onnx.load(path, load_external_data=False)
    return {"main": len(model.graph.node), **{f.name: len(f.node) for f in model.functions}}


@pytest.mark.parametrize("name", hugging_face.NAMES)
@pytest.mark.parametrize("functions", [True, False], ids=["functions", "flat"])
@pytest.mark.smoke
@pytest.mark.sweep(keep="functions-llama")
def test_hugging_face_models_equal_eager(name: str, functions: bool, path: Path) -> None:
    model, inputs = hugging_face.example(name)
    report = lazyinline.export_onnx(model, (), path, kwargs=inputs, functions=functions)
    with torch.no_grad():
        expected = model(**inputs)
    for found, output in zip(run(path, **inputs), report.outputs, strict=True):
        assert is_close(found, expected[output])
    assert list(report.outputs) == list(expected)
    onnx.checker.check_model(str(path), full_check=True)
    if functions:
        sizes = nodes_of(path)
        assert sizes["main"] == 5  # embedding, three layers, head
        assert max(sizes, key=lambda key: sizes[key]).endswith(("Layer", "Block"))
    else:
        assert list(nodes_of(path)) == ["main"]


def test_training_graph_gives_loss_and_every_gradient(path: Path) -> None:
    model, (ids, targets) = own.llama(2, **SMALL)
    assert_trains_as_eager(model, path, ids_BT=ids, targets_BT=targets)
    layers = [n.op_type for n in onnx.load(path).graph.node if "Block" in n.op_type]
    assert len(layers) == 4 and len(set(layers)) == 2  # forward and backward of each


def mean_square(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return Around(lambda layers, x: layers[0](x).square().mean(), Stack(*layers))


def test_training_graph_of_convolutions_gives_every_gradient(path: Path) -> None:
    @lazy_inline
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2, dilation=2)
            self.up = nn.ConvTranspose2d(8, 4, (3, 4), stride=2, output_padding=(1, 0))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.up(F.gelu(self.down(x)))[..., : x.shape[2], : x.shape[3]]

    assert_trains_as_eager(mean_square(Block(), Block()), path, torch.randn(2, 4, 8, 8))


class Attention(nn.Module):
    """nanoGPT's: the tail is a view, which only PyTorch's own layout of attention allows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm(x)).split(width, 2)
        q, k, v = (t.view(batch, length, 2, width // 2).transpose(1, 2) for t in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(batch, length, width)
        return x + self.out(y)


def test_training_graph_of_attention_and_norms(path: Path) -> None:
    assert_trains_as_eager(mean_square(Attention()), path, torch.randn(2, 4, 8))


def test_a_training_graph_that_draws_is_written_where_it_need_not_be_verified(path: Path) -> None:
    model, x = mean_square(nn.Linear(8, 8), nn.Dropout(0.25)), torch.randn(4, 8)
    with pytest.raises(ExportError, match=r"draws random numbers .* set dropout to 0"):
        lazyinline.export_onnx(model, (x,), path, train=True)
    assert not path.exists()
    report = lazyinline.export_onnx(model, (x,), path, train=True, verify=False)
    found = dict(zip(report.outputs, run(path, x), strict=True))
    for name, parameter in model.named_parameters():
        assert found[f"grad.{name}"].shape == parameter.shape
        assert np.isfinite(found[f"grad.{name}"]).all()


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_a_convolution_are_convolutions(dims: int, transposed: bool) -> None:
    torch.manual_seed(0)
    steps, sizes = ((1, 1), (2, 1), (1, 2), (3, 2)), ((7, 8), (1, 3), (0, 1), (0, 1))
    for (stride, dilation), groups, size, kernel, padding, extra in itertools.product(
        steps, (1, 2, 4), *sizes
    ):
        x = torch.randn(3, 4, *[size] * dims, dtype=torch.float64)
        rows, columns = (4, 8 // groups) if transposed else (8, 4 // groups)
        weight = torch.randn(rows, columns, *[kernel] * dims, dtype=torch.float64)
        added = extra if transposed and extra < max(stride, dilation) else 0
        numbers = ([n] * dims for n in (stride, padding, dilation))
        options = (*numbers, transposed, [added] * dims, groups)
        y = torch.ops.aten.convolution.default(x, weight, None, *options)
        arguments = (torch.randn_like(y), x, weight, [8], *options, [True] * 3)
        expected = torch.ops.aten.convolution_backward.default(*arguments)
        for found, wanted in zip(convolution_backward(*arguments), expected, strict=True):
            assert found.shape == wanted.shape
            assert torch.allclose(found, wanted)


RUNTIME = tuple(map(int, onnxruntime.__version__.split(".")[:2]))
on_new_runtime = pytest.mark.skipif(
    RUNTIME < (1, 24), reason="onnxruntime 1.23, the last one for Python 3.10, cannot run this file"
)


@pytest.mark.parametrize("opset", [20, pytest.param(24, marks=on_new_runtime)])
@pytest.mark.sweep(keep="20")
def test_operator_sets(opset: int, path: Path) -> None:
    lazyinline.export_onnx(Stack(Attention()), (torch.randn(2, 4, 8),), path, opset=opset)
    loaded = onnx.load(path)
    imports = [*loaded.opset_import, *(i for f in loaded.functions for i in f.opset_import)]
    assert {i.version for i in imports if i.domain == ""} == {opset}
    onnx.checker.check_model(str(path), full_check=True)


def test_without_its_packages_the_extra_is_named(path: Path, monkeypatch: MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "onnx" else find(n))
    with pytest.raises(ExportError, match=r"needs onnx, .*pip install 'lazyinline\[onnx\]'"):
        lazyinline.export_onnx(nn.Linear(2, 2), (torch.ones(2),), path)


def test_round_trips(path: Path) -> None:
    model, (ids, _) = own.llama(2, **SMALL)
    lazyinline.export_onnx(model.eval(), (ids,), path)
    expected, loaded = model(ids), onnx.load(path)
    (found,) = onnx.reference.ReferenceEvaluator(loaded).run(None, {"ids_BT": ids.numpy()})
    assert is_close(found, expected)
    flat = onnx.inliner.inline_local_functions(loaded)
    assert not flat.functions
    onnx.checker.check_model(flat, full_check=True)
    onnx.save(flat, path)
    assert is_close(run(path, ids_BT=ids)[0], expected)


@on_new_runtime
def test_a_file_as_text(path: Path, golden: Callable[[str, str], None]) -> None:
    twice = block(lambda self, x: F.relu(self.linear(x)))
    for train, name in ((False, "onnx_inference"), (True, "onnx_training")):
        model = Around(lambda layers, x: layers[1](layers[0](x)).sum(), twice(), twice())
        lazyinline.export_onnx(model, (example(grad=False),), path, train=train)
        loaded = onnx.load(path)
        del loaded.metadata_props[:]  # the versions of torch and of lazyinline
        loaded.producer_version = ""
        weights = [f"weight {w.name} {list(w.dims)}" for w in loaded.graph.initializer]
        functions = [f"{f.name}: {[n.op_type for n in f.node]}" for f in loaded.functions]
        del loaded.graph.initializer[:]
        if train:  # names inside functions are those of the traced graph, which may skip a number
            del loaded.functions[:]
        golden(name, "\n".join([*weights, *functions, onnx.printer.to_text(loaded)]))


def test_nested_blocks_are_nested_functions(path: Path) -> None:
    inner = block(lambda self, x: F.relu(self.linear(x)))

    @lazy_inline
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = inner(), inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)) + x

    model, x = Stack(Outer(), Outer(), Outer()), example(grad=False)
    lazyinline.export_onnx(model, (x,), path)
    loaded = onnx.load(path)
    functions = {f.name: [n.op_type for n in f.node] for f in loaded.functions}
    assert [n.op_type for n in loaded.graph.node] == ["Outer", "Outer", "Outer"]
    assert functions["Outer"][:2] == ["Block", "Block"]
    inside = [n.name for f in loaded.functions if f.name == "Outer" for n in f.node]
    assert inside[:2] == ["first", "second"]
    lazyinline.export_onnx(model, (x,), path, functions=False)
    assert any(n.name.startswith("layers.2/second/") for n in onnx.load(path).graph.node)


def test_a_program_and_a_compiled_model_are_exported_too(path: Path) -> None:
    model, x = small()
    found = []
    for one in (model, lazyinline.compile(model, backend="eager"), lazyinline.capture(model, (x,))):
        report = lazyinline.export_onnx(one, (x,), path)
        assert report.max_relative_error is not None
        assert is_close(run(path, x=x)[0], model(x))
        found.append(nodes_of(path))
    assert found[0] == found[1] == found[2]


def test_results_that_are_inputs_parameters_or_twice_the_same(path: Path) -> None:
    same = block(lambda self, x: (x, self.linear.weight, self.linear(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = same(), same()

        def forward(self, x: Tensor) -> dict[str, Any]:
            x, weight, y = self.first(x)
            _, other, z = self.second(y)
            return {"x": x, "weights": [weight, other, weight], "y": y, "again": y, "z": z}

    model, x = Model(), example(grad=False)
    report = lazyinline.export_onnx(model, (x,), path)
    assert report.outputs == ("x_out", "weights.0", "weights.1", "y", "z")
    onnx.checker.check_model(str(path), full_check=True)


@pytest.mark.parametrize("sizes", [None, {"x": {0: "rows"}, "y": {0: "rows"}}], ids=["", "dynamic"])
def test_one_example_passed_as_two_arguments_is_two_inputs(sizes: Any, path: Path) -> None:
    class Difference(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x - 2 * y

    model, x, y = Difference(), torch.randn(3, 4), torch.randn(3, 4)
    report = lazyinline.export_onnx(model, (x,), path, kwargs={"y": x}, dynamic_shapes=sizes)
    assert report.inputs == ("x", "y")
    assert is_close(run(path, x=x, y=y)[0], model(x, y))


def test_changed_buffers_are_results(path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    x = torch.randn(8, 4)
    before = {n: b.clone() for n, b in model.named_buffers()}
    report = lazyinline.export_onnx(model, (x,), path)
    assert set(report.outputs) == {"output", *(f"new.{n}" for n in before)}
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    model(x)
    found = dict(zip(report.outputs, run(path, input=x), strict=True))
    for name, buffer in model.named_buffers():
        assert np.allclose(found[f"new.{name}"], buffer.numpy(), rtol=1e-4)


def test_an_operator_that_pytorch_makes_of_changes_in_place(path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.linear(x).mul_(0.5)
        return x + F.cosine_similarity(h, x.roll(1, 0), -1).unsqueeze(-1)

    similar = block(forward)
    model, x = Stack(similar(), similar()), example(3, 4, grad=False)
    lazyinline.export_onnx(model, (x,), path)
    assert is_close(run(path, x=x)[0], model(x))


def test_weights_can_lie_in_a_file_beside_it_and_the_difference_is_logged(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = nn.Linear(32, 32), torch.randn(3, 32)  # small weights stay inside
    with caplog.at_level(logging.INFO, logger="lazyinline"):
        report = lazyinline.export_onnx(model, (x,), path, external_data=True)
    assert f"differ by {report.max_relative_error:.1e}" in caplog.text
    assert {p.name for p in path.parent.iterdir()} == {"model.onnx", "model.onnx.data"}
    assert (path.parent / "model.onnx.data").stat().st_size <= report.weight_bytes
    assert is_close(run(path, x)[0], model(x))
    onnx.checker.check_model(str(path), full_check=True)


ERFINV = block(lambda self, x: torch.erfinv(self.linear(x).tanh()))
HISTC = block(lambda self, x: self.linear(x) + torch.histc(x, 4))
GRID = block(lambda self, x: F.grid_sample(x, self.linear(x).tanh()[:, 0, :, None, :2]))
BACKWARD = "the backward of aten.grid_sampler.default in Block.backward at test_export.py:"


@pytest.mark.parametrize(
    ("odd", "shape", "train", "said"),
    [
        (ERFINV, (3, 4), False, "aten.erfinv.default in Block at test_export.py:"),
        (HISTC, (3, 4), False, "aten.histc.default in Block at test_export.py:"),
        (HISTC, (3, 4), False, "with min == max (0.0) is not supported"),
        (ERFINV, (3, 4), True, "aten.erfinv.default in Block.forward at test_export.py:"),
        (GRID, (1, 1, 4, 4), True, BACKWARD),
    ],
)
def test_what_has_no_translation_is_named_with_block_and_line(
    odd: type[nn.Module], shape: tuple[int, ...], train: bool, said: str, path: Path
) -> None:
    model = mean_square(odd()) if train else Stack(odd(), odd())
    with pytest.raises(ExportError) as caught:
        lazyinline.export_onnx(model, (example(*shape, grad=False),), path, train=train)
    text = str(caught.value)
    assert said in text and text.count("erfinv") == (odd is ERFINV)
    assert not path.exists()


def test_a_wrong_file_is_not_kept(path: Path, monkeypatch: MonkeyPatch) -> None:
    from lazyinline.backend.onnx import torch_onnx

    translate = torch_onnx.translate

    def wrong(*args: Any) -> Any:
        model = translate(*args)
        for node in model.graph:
            if node.op_type == "Sigmoid":
                node.op_type = "Tanh"
        return model

    monkeypatch.setattr(torch_onnx, "translate", wrong)
    path.write_text("an older file")
    model, x = small()
    with pytest.raises(ExportError, match=r"Output output differs .* 1e-04 is allowed"):
        lazyinline.export_onnx(model, (x,), path)
    assert path.read_text() == "an older file"
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]


def test_bad_input_gets_a_clear_error(path: Path) -> None:
    model, x = Stack(nn.Linear(4, 4)), torch.randn(3, 4)
    for arguments, text in (
        ({"opset": 17}, "opset=17: from 18 to 24"),
        ({"path": path.parent / "no" / "model.onnx"}, "no such folder"),
        ({"train": True}, r"output: f32\[3,4\]"),
    ):
        with pytest.raises(ExportError, match=text):
            lazyinline.export_onnx(model, (x,), **{"path": path, **arguments})
    with pytest.raises(ExportError, match="not a dict"):
        lazyinline.export_onnx({}, (x,), path)  # type: ignore[arg-type]
    with pytest.raises(ExportError, match=r"layers\.0\.weight is on the meta device"):
        lazyinline.export_onnx(Stack(nn.Linear(4, 4)).to("meta"), (x,), path)
    program = lazyinline.capture(model, (x,))
    with pytest.raises(ExportError, match="x is missing"):
        lazyinline.export_onnx(program, (), path)
    program = lazyinline.capture(mean_square(*model.layers), (x,))
    with pytest.raises(ExportError, match="captured with train=True"):
        lazyinline.export_onnx(program, (x,), path, train=True)


class Held:
    """What somebody registered with PyTorch's trees, without names for what it holds."""

    def __init__(self, *held: Any) -> None:
        self.held = held


class HeldByKey(dict):
    """The same with keys, as the outputs of diffusers are."""


def by_key(values: Any, keys: Any) -> HeldByKey:
    return HeldByKey(zip(keys, values, strict=True))


pytree.register_pytree_node(Held, lambda x: (list(x.held), None), lambda held, _: Held(*held))
pytree.register_pytree_node(HeldByKey, lambda x: (list(x.values()), list(x)), by_key)


@pytest.mark.parametrize("as_input", [False, True])
def test_results_of_a_class_without_names_get_key_or_position(as_input: bool, path: Path) -> None:
    class Net(nn.Linear):
        def forward(self, x: Any) -> Any:
            y = super().forward(x.held[0] if as_input else x)
            return HeldByKey(sample=y, rest=Held(y + 1, {"more": (y * 2,)}))

    net, x = Net(4, 4), torch.randn(2, 4)
    lazyinline.export_onnx(net, (Held(x) if as_input else x,), path)
    names = [v.name for v in onnx.load(path).graph.output]
    assert names == ["sample", "rest.0", "rest.1.more.0"]
    y = nn.functional.linear(x, net.weight, net.bias)
    for found, expected in zip(run(path, x), (y, y + 1, y * 2), strict=True):
        assert is_close(found, expected)
    compiled = lazyinline.compile(net, backend="eager")
    found = compiled(Held(x) if as_input else x)
    assert torch.equal(found["rest"].held[1]["more"][0], y * 2)
    assert not compiled.last_report.ran_eagerly

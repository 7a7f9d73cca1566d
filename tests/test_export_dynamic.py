"""ONNX files whose inputs vary in size: decoders, a decode step with its cache, and experts."""

import pathlib
from typing import Any

import decoders as own
import hugging_face
import onnx
import pytest
import torch
from exported import is_close, run, session
from torch import Tensor, nn
from torch.export import Dim
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

import lazyinline
from lazyinline import ExportError, lazy_inline

lazy_inline(own.DecoderBlock)
lazy_inline(MixtralDecoderLayer)

BATCH, SEQ = Dim("batch"), Dim("seq", max=32)
SHAPES = ((1, 5), (3, 32), (7, 1))


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "model.onnx"


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("example", [(2, 16), (8, 8), (2, 2)], ids=str)
@pytest.mark.sweep(keep="(2, 16)")
def test_own_decoder_at_three_shapes(example: tuple[int, int], path: pathlib.Path) -> None:
    # (2, 2) is also the number of heads; equal sizes of the example mean nothing.
    model, _ = own.llama(2, hidden=32, num_heads=2, vocab=50, seq=32)
    ids = torch.randint(50, example)
    shapes = {"ids_BT": {0: BATCH, 1: SEQ}}
    report = lazyinline.export_onnx(model.eval(), (ids,), path, dynamic_shapes=shapes)
    assert report.functions.keys() == {"glue", "DecoderBlock", "glue_1"}
    loaded = session(path)
    assert [i.shape for i in loaded.get_inputs()] == [["batch", "seq"]]
    assert [o.shape for o in loaded.get_outputs()] == [["batch", "seq", 50]]
    for shape in SHAPES:
        ids = torch.randint(50, shape)
        (found,) = loaded.run(None, {"ids_BT": ids.numpy()})
        assert is_close(found, model(ids))
    onnx.checker.check_model(str(path), full_check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", hugging_face.NAMES)
@pytest.mark.sweep
def test_hugging_face_models_at_three_shapes(name: str, path: pathlib.Path) -> None:
    model, inputs = hugging_face.example(name, layers=1)
    make: Any = hugging_face.tokens
    if name == "vit":
        make = lambda batch, _: hugging_face.images(batch)  # noqa: E731
    dims = {0: BATCH} if name == "vit" else {0: BATCH, 1: SEQ}
    inputs = make(8, 8)  # sizes that coincide
    shapes = {key: dims for key in inputs}
    lazyinline.export_onnx(model, (), path, kwargs=inputs, dynamic_shapes=shapes)
    loaded = session(path)
    for shape in SHAPES:
        inputs = make(*shape)
        found = loaded.run(None, {k: v.numpy() for k, v in inputs.items()})
        with torch.no_grad():
            assert is_close(found[0], model(**inputs)[0])


def test_a_dimension_that_is_not_free_is_refused(path: pathlib.Path) -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(4)

    class Equal(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    x = torch.ones(2, 4)
    with pytest.raises(ExportError, match=r"width is declared dynamic.*only with width = 4"):
        lazyinline.export_onnx(Fixed(), (x,), path, dynamic_shapes={"x": {1: Dim("width")}})
    shapes = {"x": {0: Dim("a")}, "y": {0: Dim("b")}}
    with pytest.raises(ExportError, match=r"works only with (a = b|b = a)"):
        lazyinline.export_onnx(Equal(), (x, x + 1), path, dynamic_shapes=shapes)
    assert not path.exists()


def test_bad_dynamic_shapes_get_a_clear_error(path: pathlib.Path) -> None:
    model, (ids, targets) = own.llama(1, hidden=32, num_heads=2, vocab=50, seq=8)
    for shapes, text in (
        ({"ids": {0: BATCH}}, r"names \['ids'\]; the model is called with \['ids_BT'\]"),
        ({"ids_BT": {2: BATCH}}, r"ids_BT has 2 dimensions, not \[2\]"),
        ({"ids_BT": {1: Dim("seq", max=4)}}, "seq is 8, not from 0 to 4"),
        ({"ids_BT": {1: 2.5}}, r"ids_BT_1 is 2\.5; a dimension is a name, a torch\.export\.Dim"),
    ):
        with pytest.raises(ExportError, match=text):
            lazyinline.export_onnx(model, (ids,), path, dynamic_shapes=shapes)
    both = {"ids_BT": {0: BATCH}, "targets_BT": {0: BATCH}}
    with pytest.raises(ExportError, match="inference"):
        lazyinline.export_onnx(model, (ids, targets), path, dynamic_shapes=both, train=True)


EXACT = 1e-5


class Grouped(nn.Module):
    def forward(self, left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(left, right, offs=ends)


@pytest.mark.parametrize(
    ("left", "right"),
    [((12, 8), (3, 8, 4)), ((4, 12), (12, 8)), ((3, 4, 8), (8, 12))],
    ids=["groups of rows", "groups of the sum", "groups of columns"],
)
def test_a_grouped_product_follows_the_offsets(left: Any, right: Any, path: pathlib.Path) -> None:
    a, b = torch.randn(left), torch.randn(right)
    ends = [torch.tensor(e, dtype=torch.int32) for e in ([4, 8, 12], [0, 12, 12], [3, 3, 12])]
    lazyinline.export_onnx(Grouped(), (a, b, ends[0]), path)
    for end in ends:  # groups of no rows too
        assert is_close(run(path, a, b, end)[0], Grouped()(a, b, end), EXACT)
    if left == (12, 8):  # rows behind the last group are zeros
        short = torch.tensor([4, 6, 9], dtype=torch.int32)
        (found,) = run(path, a, b, short)
        assert found.shape == (12, 4)
        assert is_close(found[:9], Grouped()(a, b, short)[:9], EXACT)
        assert not found[9:].any()


@pytest.mark.sweep
def test_a_mixture_of_experts_runs_at_every_length(path: pathlib.Path) -> None:
    model = hugging_face.build("mixtral", num_local_experts=4, use_cache=False).eval()
    ids = torch.randint(1, hugging_face.VOCABULARY, (2, 12))
    shapes = {"input_ids": {1: "seq"}}
    report = lazyinline.export_onnx(model, (ids,), path, dynamic_shapes=shapes)
    assert report.functions.keys() == {"glue", "MixtralDecoderLayer", "glue_1"}
    for length in (5, 12, 31):
        ids = torch.randint(1, hugging_face.VOCABULARY, (2, length))
        assert is_close(run(path, ids)[0], model(ids).logits, EXACT)

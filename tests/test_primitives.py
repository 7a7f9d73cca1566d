"""Primitives: the list, the level, and that what is reduced computes the same."""

from __future__ import annotations

import copy
import functools
import itertools
import pathlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import decoders
import hugging_face
import operators
import pytest
import torch
import torch.nn.functional as F
from models import Around, block
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import lazyinline
from lazyinline import VerifyError
from lazyinline.autodiff.derivative import Derivative
from lazyinline.autodiff.torch_primitives import Reducer
from lazyinline.frontend.capture.surroundings import one_at_a_time
from lazyinline.frontend.inspection import reduced
from lazyinline.frontend.passes.programs import differentiation, programs_of
from lazyinline.reuse.ir.leaf import interpret
from lazyinline.reuse.ir.operators import is_primitive
from lazyinline.reuse.ir.program import Leaf, ModelTensor, Program, walk_closures
from lazyinline.reuse.ir.verify import not_primitive, verify
from lazyinline_command.main import main

SMALL = {"hidden": 16, "num_heads": 2, "seq": 6, "vocab": 20}
TOLERANCE = 1e-5


def test_the_list_is_core_aten_and_names_what_it_lacks() -> None:
    listed = lazyinline.primitives()
    assert isinstance(listed, tuple)
    assert len({one.name for one in listed}) == len(listed)
    groups = [name for name, _ in itertools.groupby(one.group for one in listed)]
    assert groups[0] == "core ATen" and len(groups) == len(set(groups))
    core = {one.name for one in listed if one.group == "core ATen"}
    assert {"aten.mm.default", "aten.native_layer_norm.default"} <= core
    assert 180 < len(core) < 250 and len(listed) - len(core) < 100
    for one in listed:
        operator = functools.reduce(getattr, one.name.split("."), torch.ops)
        assert is_primitive(operator) and (torch.Tag.core in operator.tags) == (one.name in core)


def stack(body: Callable[..., Tensor], number: int = 3) -> nn.Module:
    """Returns equal blocks, one after another, and a loss."""

    def forward(layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x.square().mean()

    kind = block(lambda self, x: body(self.linear(x)))
    return Around(forward, *(kind() for _ in range(number))).float()


def example() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@torch.library.custom_op("lazyinline_tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return 3 * x


@tripled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


tripled.register_autograd(lambda context, gradient: tripled(gradient))


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("make", [decoders.gpt, decoders.llama], ids=["gpt", "llama"])
@pytest.mark.sweep(keep="llama-training")
def test_a_decoder_is_reduced_once_per_different_closure(make: Any, train: bool) -> None:
    model, args = make(2, **SMALL)
    programs = reduced(model, args, train=train)
    assert list(programs) == (["forward", "backward"] if train else ["forward"])
    captured = lazyinline.capture(model, args, train=train)
    for program in programs.values():
        verify(program, "primitive")
        assert not not_primitive(program)
        blocks = [c for c in walk_closures(program) if "Block" in c.name]
        assert len(blocks) == 1, "equal blocks are one closure"
    assert len(programs["forward"].calls) >= len(captured.calls)


@pytest.mark.smoke
def test_the_verifier_names_operator_closure_and_line() -> None:
    captured = lazyinline.capture(stack(F.silu), (example(),))
    with pytest.raises(
        VerifyError, match=r"aten\.silu\.default \(@Block, from test_primitives\.py:"
    ):
        verify(captured, "primitive")
    verify(Reducer().of(captured), "primitive")


def test_a_custom_operator_stays_whole_and_is_named_at_its_line() -> None:
    """And all else knows the lines that it comes from."""
    programs = reduced(stack(lambda x: tripled(F.silu(x))), (example(),), train=True)
    for part, program in programs.items():
        (found,) = not_primitive(program)
        assert found.operator == "lazyinline_tests.tripled.default"
        assert found.closure.startswith("Block") and found.closure.endswith(part)
        assert found.source.startswith("test_primitives.py:")
        with pytest.raises(VerifyError, match="tripled"):
            verify(program, "primitive")
        for leaf in walk_closures(program):
            if isinstance(leaf, Leaf) and leaf.name != "add":
                assert all(node.meta["stamp"].source for node in leaf.nodes), leaf.name


def halves(captured: Program) -> tuple[Derivative, Program, Program]:
    """The derivative of a program's first output, and its halves as primitives."""
    with one_at_a_time():
        request, reducer = differentiation(captured), Reducer()
        derivative = reducer.derivative(replace(request, outputs=request.outputs[:1]))
        assert derivative is not None
        programs = programs_of(derivative).values()
        forward, backward = (verify(reducer.of(one), "primitive") for one in programs)
        return derivative, forward, backward


def assert_reduced_equals_eager(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> None:
    """Loss, written buffers and every gradient of the primitives, run one by one, are eager's."""
    kwargs = kwargs or {}
    twin = copy.deepcopy(model)
    captured = lazyinline.capture(model, args, kwargs, train=True)
    derivative, forward, backward = halves(captured)
    flat = pytree.tree_leaves((tuple(args), kwargs))
    operands = [
        s.tensor.detach().clone() if isinstance(s, ModelTensor) else flat[s.index]
        for s in captured.sources
    ]
    torch.manual_seed(5)
    *results, saved = interpret(forward, operands)
    kept = [operands[i] for i in derivative.kept_inputs]
    kept += [results[i] for i in derivative.kept_outputs]
    gradients = interpret(backward, [saved, *kept, torch.ones_like(results[0])])
    torch.manual_seed(5)
    expected = twin(*args, **kwargs)
    expected = expected if isinstance(expected, Tensor) else expected[0]
    expected.backward()
    torch.testing.assert_close(results[0], expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    parameters = dict(twin.named_parameters(remove_duplicate=False))
    found = {
        captured.sources[i].name: g
        for i, g in zip(derivative.gradient_inputs, gradients, strict=True)
    }
    wanted = {n for n, p in parameters.items() if p.grad is not None and p.grad.any()}
    names = {n for n in wanted for m in found if parameters[m] is parameters[n]}
    assert names == wanted, "a gradient is missing"
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient,
            parameters[name].grad,
            rtol=TOLERANCE,
            atol=TOLERANCE,
            msg=partial("{}: {}".format, name),
        )
    buffers = {id(b): after for b, after in zip(model.buffers(), twin.buffers(), strict=True)}
    for output, target in captured.writes:
        after = buffers.get(id(captured.sources[target].tensor))
        if after is not None:
            torch.testing.assert_close(results[output], after)


@pytest.mark.parametrize(("make", "dropout"), [(decoders.gpt, 0.3), (decoders.llama, 0.0)])
@pytest.mark.sweep(keep="0.3")
def test_a_decoder_of_primitives_computes_and_draws_as_eager(make: Any, dropout: float) -> None:
    assert_reduced_equals_eager(*make(2, **SMALL, **({"dropout": dropout} if dropout else {})))


def image(layers: Any, x: Tensor) -> Tensor:
    """Convolutions, norms that write their statistics, pooling, resizing, padding."""
    first, norm, group, up = layers
    x = F.gelu(norm(first(x)))
    x = F.max_pool2d(group(x), 2)
    x = F.interpolate(up(x), size=5, mode="bilinear")
    x = F.adaptive_avg_pool2d(F.elu(x), 3)
    return F.cross_entropy(x.flatten(1), torch.tensor([1, 4]))


def written(layers: Any, x: Tensor) -> Tensor:
    """Writes in place, through views and at indices, and takes attention with a mask."""
    y = layers[0](x)
    y[0].mul_(2)
    y.t()[1].add_(x[:, 0])
    z = y.clone().index_put_((torch.tensor([0, 0]),), x[:2], accumulate=True)
    q = z.reshape(1, 2, 3, 6)
    mask = torch.tensor([True, False, True]).expand(3, 3)
    h = F.scaled_dot_product_attention(q, q * 2, q.tanh(), attn_mask=mask)
    return h.logsumexp(-1).sum() + z.masked_fill(z > 1, 0).cumsum(0).std()


def turned(layers: Any, x: Tensor) -> Tensor:
    """Complex numbers: a rotation written as polar, a spectrum."""
    turn = torch.polar(torch.ones(2), torch.tensor([0.3, 0.7]))
    z = torch.view_as_complex(layers[0](x).reshape(-1, 2, 2)) * turn
    spectrum = torch.fft.rfft(x * layers[0].weight[0]).abs().sum()
    return torch.view_as_real(z.conj().resolve_conj() * z).sum() + spectrum


def choosing(layers: Any, x: Tensor) -> Tensor:
    """A product of each group of rows with a matrix of its own."""
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    return torch._grouped_mm(x, layers[0].weight.view(3, 8, 4), offs=ends).sin().sum()


def unbiased(size: int, results: int | None = None) -> nn.Module:
    return nn.Linear(size, results or size, bias=False)


IMAGE_LAYERS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Conv2d(1, 4, 3, padding=1, padding_mode="replicate"),
    lambda: nn.BatchNorm2d(4),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.ConvTranspose2d(4, 2, 2, stride=2),
)
MODELS: dict[str, tuple[Any, tuple[Callable[[], nn.Module], ...], tuple[int, ...]]] = {
    "image": (image, IMAGE_LAYERS, (2, 1, 6, 6)),
    "written": (written, (lambda: unbiased(6),), (6, 6)),
    "turned": (turned, (lambda: unbiased(4),), (4, 4)),
    "choosing": (choosing, (lambda: unbiased(8, 12),), (6, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_primitives_compute_what_eager_does(name: str) -> None:
    forward, layers, shape = MODELS[name]
    torch.manual_seed(0)
    model = Around(forward, *(make() for make in layers))
    assert_reduced_equals_eager(model, (torch.randn(shape),))


WITHOUT_A_RULE = {"median"}


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.sweep
def test_operators_in_all_layouts_in_turn(kind: str) -> None:
    chosen = {n: f for n, f in operators.operators_of(kind).items() if n not in WITHOUT_A_RULE}
    layouts = list(operators.layouts_of(kind).values())
    assert_reduced_equals_eager(
        operators.Sweep(list(chosen.values()), layouts, kind), (torch.ones(()),)
    )


@pytest.mark.parametrize("name", hugging_face.NAMES)
@pytest.mark.sweep
def test_a_family_of_primitives_computes_what_eager_does(name: str) -> None:
    model, inputs = hugging_face.example(name, layers=2)

    def loss(layers: Any, **inputs: Any) -> Tensor:
        return layers[0](**inputs)[0].square().mean()  # type: ignore[no-any-return]

    assert_reduced_equals_eager(Around(loss, model.train()), (), inputs)


def test_inspect_prints_the_level(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_model.py").write_text(
        f"import decoders\ndef make():\n    return decoders.gpt(1, **{SMALL})\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "own_model:make", "--train", "--level", "primitive"]) == 0
    out = capsys.readouterr().out
    assert "// forward, as primitives" in out and "// backward, as primitives" in out
    assert "native_layer_norm" in out and "scaled_dot_product" not in out
    assert re.search(r"^\d+ different primitives, and nothing else\.$", out, re.MULTILINE)
    assert main(["inspect", "own_model:make", "--level", "primitive", "--after", "lower"]) == 2
    assert "--level primitive" in capsys.readouterr().err

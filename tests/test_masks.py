"""A mask that is a constant, and means what attention has a word for, is not made.

Libraries make one where they cannot see numbers; eager makes none. By its numbers alone is it
recognised: whatever is not exactly causal stays, and equals eager.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_equals_eager
from hugging_face import build
from models import Attention
from torch import Tensor, nn

import lazyinline
from lazyinline.reuse.ir import masks
from lazyinline.reuse.ir.program import Leaf, Program, walk_closures

TOKENS = 6
Make = Callable[["Model", Tensor], Tensor]


class MaskedAttention(Attention):
    """The same with a mask that it is handed."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        heads = self.qkv(x).unflatten(-1, (3 * self.num_heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, 1), attn_mask=mask)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Blocks that get masks in turns, as some decoders have them."""

    kept: Tensor

    def __init__(self, *make: Make, num_blocks: int = 4) -> None:
        super().__init__()
        self.make = make
        self.blocks = nn.ModuleList(MaskedAttention() for _ in range(num_blocks))
        self.register_buffer("kept", torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        masks = [make(self, x) for make in self.make]
        for i, block in enumerate(self.blocks):
            x = block(x, masks[i % len(masks)])
        return x


def x() -> Tensor:
    return torch.randn(2, TOKENS, 8, generator=torch.Generator().manual_seed(0))


def triangle(model: Model, x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return (at[None, :] <= at[:, None]).expand(x.shape[0], 1, -1, -1)


def window(model: Model, x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    near = at[:, None] - at[None, :] < 3
    return ((at[None, :] <= at[:, None]) & near).expand(x.shape[0], 1, -1, -1)


TOLD: dict[str, tuple[Make, bool]] = {
    "a triangle": (triangle, True),
    "what is added": (lambda _, x: torch.full([x.shape[1]] * 2, -torch.inf).triu(1), True),
    "everything": (lambda _, x: torch.ones(len(x), 1, 1, x.shape[1], dtype=torch.bool), False),
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", TOLD)
@pytest.mark.sweep(keep="a triangle-eager")
def test_a_mask_that_attention_has_a_word_for_is_not_made(name: str, backend: str) -> None:
    make, is_causal = TOLD[name]
    outcome = assert_equals_eager(Model(make), (x(),), backend=backend)
    assert outcome.told.told_masks == ["1 of @MaskedAttention"]
    program = program_of(outcome.compiled)
    (attention,) = attentions(program)
    assert (attention.args[3], attention.args[5]) == (None, is_causal)
    assert not any(value.type.shape[-1] == TOKENS for call in program.calls for value in call.args)  # type: ignore[union-attr]


def off_by_one(model: Model, x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    hidden = (at[:, None] == TOKENS - 1) & (at[None, :] == 0)
    return triangle(model, x) & ~hidden


def of_one_row(model: Model, x: Tensor) -> Tensor:
    first = torch.arange(x.shape[0])[:, None, None, None] == 0
    return triangle(model, x) | first


def changed_later(model: Model, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    mask[:, 0] = False
    mask[0, 0] = True
    return mask


OTHERS: dict[str, Make] = {
    "a window": window,
    "off by one": off_by_one,
    "almost nothing added": lambda model, x: torch.where(triangle(model, x), 1e-30, -torch.inf),
    "of one row": of_one_row,
    "changed later": changed_later,
    "of the input": lambda model, x: triangle(model, x) & (x[:, None, None, :, 0] < 9),
    "of a buffer": lambda model, x: model.kept,
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.sweep(keep=["window", "of one row", "changed later", "of the input"])
def test_any_other_mask_stays(name: str) -> None:
    outcome = assert_equals_eager(Model(OTHERS[name], num_blocks=2), (x(),))
    assert outcome.told.told_masks == []


def test_blocks_with_different_masks_become_different_closures() -> None:
    outcome = assert_equals_eager(Model(triangle, window), (x().requires_grad_(),))
    assert outcome.told.told_masks == ["1 of @MaskedAttention"]
    causal, other = attentions(program_of(outcome.compiled))
    assert causal.args[3] is None and other.args[3] is not None
    assert outcome.shared == 3, "a mask is no reason to trace a block again"


def test_a_mask_too_large_to_be_computed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_MOST_BYTES", TOKENS * TOKENS - 1)
    outcome = assert_equals_eager(Model(triangle, num_blocks=2), (x(),))
    assert outcome.told.told_masks == []


def test_sizes_that_vary_keep_the_mask() -> None:
    compiled = lazyinline.compile(Model(triangle, num_blocks=2), backend="eager", dynamic=True)
    for tokens in (TOKENS, TOKENS + 2):
        given = torch.randn(2, tokens, 8)
        torch.testing.assert_close(compiled(given), Model.forward(compiled, given))  # type: ignore[arg-type]
    assert lazyinline.last_report(compiled).told_masks == []  # type: ignore[union-attr]


def decoder(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    model = build(kind, 2, use_cache=False, **(window if kind == "qwen2" else {}))
    ids = torch.randint(1, 67, (2, 12), generator=torch.Generator().manual_seed(0))
    return model.eval(), {"input_ids": ids}


# Of Qwen's layers one looks at all tokens, and one at the last four.
@pytest.mark.parametrize(("kind", "num_kinds"), [("llama", 1), ("qwen2", 2)])
@pytest.mark.sweep(keep="qwen2")
def test_a_decoder_of_transformers_attends_as_in_eager(kind: str, num_kinds: int) -> None:
    model, kwargs = decoder(kind)
    outcome = assert_equals_eager(model, (), kwargs)
    found = attentions(program_of(outcome.compiled))
    assert [node.args[5:6] == (True,) for node in found].count(True) == 1
    assert len(found) == num_kinds


def test_texts_one_after_the_other_in_a_row_keep_their_mask() -> None:
    model, kwargs = decoder("llama")
    positions = torch.arange(12).remainder(5).expand(2, -1)
    outcome = assert_equals_eager(model, (), {**kwargs, "position_ids": positions})
    assert outcome.told.told_masks == []


class Stacked(nn.Module):
    """PyTorch's own decoder, which looks at its mask's numbers for a hint."""

    given: Tensor

    def __init__(self, layer: nn.Module, make: str = "made") -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.make = make
        self.register_buffer("given", torch.full((TOKENS, TOKENS), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        made = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, mask=made if self.make == "made" else self.given)


class HintedLayer(nn.TransformerEncoderLayer):
    """Somebody's layer, which goes by the hint alone."""

    def forward(self, src: Tensor, src_mask: Any, is_causal: bool, **rest: Any) -> Tensor:  # type: ignore[override]
        heads = src.unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=is_causal)
        return src + self.linear2(self.linear1(mixed.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("make", ["made", "a buffer"])
@pytest.mark.sweep(keep="made")
def test_pytorchs_own_layers_are_compiled_with_a_mask_and_no_hint(make: str) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    outcome = assert_equals_eager(Stacked(layer, make), (x(),))
    assert outcome.told.num_block_calls == 2  # the first sees an input without gradient
    assert not outcome.told.ran_eagerly
    assert bool(outcome.told.told_masks) == (make == "made")


def test_a_layer_that_goes_by_the_hint_gets_eagers() -> None:
    model = Stacked(HintedLayer(8, 2, 16, dropout=0, batch_first=True))
    compiled = lazyinline.compile(model, backend="eager")
    assert torch.equal(compiled(x()), model(x()))
    assert "value of a tensor" in compiled.last_report.ran_eagerly


def program_of(compiled: Any) -> Program:
    return compiled.__dict__["_lazyinline_calls"].entries.first._compiled.captured.program  # type: ignore[no-any-return]


def attentions(program: Program) -> list[torch.fx.Node]:
    leaves = [c for c in walk_closures(program) if isinstance(c, Leaf)]
    return [n for leaf in leaves for n in leaf.nodes if n.target is masks.ATTENTION]

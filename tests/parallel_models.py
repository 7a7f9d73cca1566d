"""A small Llama-like decoder whose projections are separate, and what trains it over a mesh."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparing import relative_error
from decoders import DecoderConfig, GptDecoder
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import lazyinline

VOCABULARY = 32

Model = TypeVar("Model", bound=nn.Module)

MEGATRON = {
    "layers.*.attention.[qkv]": ColwiseParallel(),
    "layers.*.attention.out": RowwiseParallel(),
    "layers.*.gate": ColwiseParallel(),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
}
FEED_FORWARD = {name: style for name, style in MEGATRON.items() if "attention" not in name}


class Attention(nn.Module):
    """Attention; heads of keys and values may be fewer, each for several heads of queries."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        few = key_heads * self.size
        self.k, self.v = (nn.Linear(width, few, bias=False) for _ in range(2))
        self.options: dict[str, Any] = {"enable_gqa": True} if key_heads < heads else {}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, **self.options)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class Layer(nn.Module):
    """Attention, unless there are no heads, and a gated feed-forward network."""

    def __init__(self, width: int, heads: int, key_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, key_heads) if heads else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        h = self.norm_2(x)
        y: Tensor = x + self.down(self.dropout(F.silu(self.gate(h)) * self.up(h)))
        return y


@lazyinline.lazy_inline  # too small to be a block without
class FeedForward(Layer):
    """A layer without attention, which compiles in half the time."""


class Experts(nn.Module):
    """Feed-forward networks of which a router weighs two for each token."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        chance = self.router(x).softmax(-1)
        best = chance.topk(2).indices
        weight = chance * torch.zeros_like(chance).scatter(-1, best, 1.0)
        hidden = F.silu(torch.einsum("btd,edf->ebtf", x, self.up))
        return torch.einsum("ebtf,efd,bte->btd", hidden, self.down, weight)


def mixture(layers: int = 2) -> nn.Module:
    """A model with experts behind each layer's last projection; ``MIXTURE`` is a plan for it."""
    model = TinyLlama(layers)
    for layer in model.layers:
        layer.down = nn.Sequential(layer.down, Experts())  # type: ignore[arg-type]
    return numbered(model)


MIXTURE = {name: style for name, style in MEGATRON.items() if name != "layers.*.down"}
MIXTURE["layers.*.down.0"] = RowwiseParallel()


def llama(layers: int = 2) -> nn.Module:
    """Transformers' Llama; ``LLAMA`` is a plan for it."""
    from hugging_face import build

    return numbered(build("llama", layers, num_key_value_heads=4, use_cache=False))


LLAMA = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in ("q", "k", "v")}
LLAMA |= {f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
LLAMA |= {
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


def named_tokens(seed: int = 0) -> dict[str, Tensor]:
    """Tokens that are their own targets, by transformers' names."""
    return dict.fromkeys(("input_ids", "labels"), tokens(seed)[0])


class TinyMixture(nn.Module):
    """Returns the loss of the next tokens; its layers are experts alone."""

    def __init__(self, layers: int = 2, *, width: int = 16, experts: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Experts(width, experts) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class TinyLlama(nn.Module):
    """Returns the loss of the next tokens; embedding and head may be one tensor."""

    def __init__(
        self,
        layers: int = 2,
        *,
        width: int = 16,
        heads: int = 4,
        key_heads: int = 4,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        kind, sizes = Layer if heads else FeedForward, (width, heads, key_heads)
        self.layers = nn.ModuleList(kind(*sizes, dropout) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def tiny(layers: int = 2, **options: Any) -> TinyLlama:
    """A model in float64, the same at each call."""
    return numbered(TinyLlama(layers, **options))


def numbered(model: Model) -> Model:
    """Returns a model in float64 with the same numbers at each call, from any thread."""
    generator = torch.Generator().manual_seed(0)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def tokens_for_heads(layers: int = 2) -> TinyLlama:
    """A model between whose projections tokens are split, and in its attention heads."""
    model = tiny(layers)
    lazyinline.shard(model.embed, {}, output=Shard(1))
    for layer in model.layers:
        attention: Any = layer.attention
        for projection in (attention.q, attention.k, attention.v):
            lazyinline.shard(projection, {}, output=Shard(2))
        lazyinline.shard(attention.out, {}, output=Shard(1))
    return model


def tokens(seed: int = 0, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Tokens, and those that follow; a few targets do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, 9), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, :3] = -100  # so that rows have different numbers of losses
    return ids[:, :-1].contiguous(), targets


def mesh_of(**axes: int) -> Any:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def far_off(
    model: nn.Module,
    mesh: Any,
    plan: Any,
    batches: Callable[[int], Sequence[Any] | Mapping[str, Any]] = tokens,
    *,
    num_parts: int = 1,
    **options: Any,
) -> list[str]:
    """Trains a model over a mesh and alone, five steps; says where numbers differ.

    Alone it takes a batch in so many parts, one after the other, as its dropout shows.
    """
    alone, wrong, seen = copy.deepcopy(model), [], set[str]()
    args, kwargs = _arguments(batches(0))
    dist.barrier()  # ranks may be threads: none seeds for its model while another one captures
    parallel = lazyinline.parallelize(model, args, kwargs, mesh=mesh, plan=plan, **options)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone))
    for step in range(5):
        args, kwargs = _arguments(batches(step))
        torch.manual_seed(step)
        loss = parallel.step(*args, **kwargs)
        torch.manual_seed(step)
        theirs.zero_grad()
        if num_parts == 1:
            output = alone(*args, **kwargs)
            expected = output if isinstance(output, Tensor) else output.loss
        else:
            parts = zip(*(x.chunk(num_parts) for x in args), strict=True)
            expected = torch.stack([alone(*part) for part in parts]).mean()
        expected.backward()
        if relative_error(loss, expected.detach()) > 1e-5:
            wrong.append(f"step {step}: the loss is {loss}, not {expected}")
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert q.grad is not None
            if p.grad is None:  # another stage's
                continue
            seen.add(name)
            error = relative_error(p.grad.full_tensor(), q.grad)
            if error > 1e-5:
                wrong.append(f"step {step}: the gradient of {name} is off by {error:.1e}")
        ours.step()
        theirs.step()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    missing = {name for name, _ in model.named_parameters()}.difference(*everyone)
    return [*wrong, f"nobody has a gradient of {missing}"] if missing else wrong


def _arguments(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    return ((), batch) if isinstance(batch, Mapping) else (batch, {})


def is_refused_before_2_13(run: Callable[[], object]) -> bool:
    """Whether this PyTorch has no rule for the views of a joint projection, which says so then."""
    if torch.__version__ >= "2.13":
        return False
    with pytest.raises(lazyinline.PlanError, match="cannot be split over the mesh as planned"):
        run()
    return True


def tiny_gpt(layers: int = 2) -> nn.Module:
    """A model whose queries, keys and values are of one projection."""
    return numbered(GptDecoder(DecoderConfig(layers, 16, 4, vocab=VOCABULARY, seq=8)))

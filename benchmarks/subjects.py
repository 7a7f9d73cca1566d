"""The models under measurement, and how each is taken apart for ``per-part``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import decoders
import torch
from measurement import MODELS
from torch import Tensor, nn

Step = Callable[[], Tensor]
"""Runs a forward and returns the loss."""

Batch = tuple[tuple[Tensor, ...], Mapping[str, Tensor]]
"""Positional and keyword inputs of the model."""

# The same sizes for every model: those of decoders.DecoderConfig.
HIDDEN, HEADS, VOCAB, SEQ, BATCH = 256, 4, 1000, 64, 2


@dataclass(frozen=True)
class Subject:
    """A model with one example batch.

    Attributes:
        blocks: the repeated layers, all of one class.
        compile_head: compiles everything after the blocks, loss included, as one part, and
            returns what is called in the model's place.
        micro_batches: how many equal parts of the batch are run one after another.
    """

    model: nn.Module
    blocks: Sequence[nn.Module]
    compile_head: Callable[[], Callable[..., Any]]
    args: tuple[Tensor, ...] = ()
    kwargs: Mapping[str, Tensor] = field(default_factory=dict)
    micro_batches: int = 1

    def loss(self, module: Callable[..., Any]) -> Tensor:
        """Runs the model, or what it was compiled to; returns the mean loss of the parts."""
        return mean_loss(module, self.parts())

    def parts(self) -> list[Batch]:
        """Returns the inputs of each micro-batch."""
        args = [tensor.tensor_split(self.micro_batches) for tensor in self.args]
        kwargs = {n: t.tensor_split(self.micro_batches) for n, t in self.kwargs.items()}
        return [
            (tuple(a[i] for a in args), {name: k[i] for name, k in kwargs.items()})
            for i in range(self.micro_batches)
        ]


def mean_loss(module: Callable[..., Any], parts: Sequence[Batch]) -> Tensor:
    """Runs a model on each micro-batch, one after another; returns the mean loss."""
    losses = []
    for args, kwargs in parts:
        output = module(*args, **kwargs)
        losses.append(output if isinstance(output, Tensor) else output.loss)
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


@dataclass(frozen=True)
class Family:
    """Models that differ in depth only.

    Attributes:
        block_class: returns the class of the repeated layer.
        build: makes the model of a number of layers, for a number of micro-batches.
    """

    block_class: Callable[[], type[nn.Module]]
    build: Callable[[int, int], Subject]


def family(name: str) -> Family:
    """Returns the family of a ``--model`` name; imports no more than that family needs."""
    if name == "own":
        return Family(lambda: decoders.DecoderBlock, functools.partial(_own, decoders.llama))
    if name == "own-gpt":
        return Family(lambda: decoders.GptBlock, functools.partial(_own, decoders.gpt))
    if name == "hf-llama":
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        return Family(lambda: LlamaDecoderLayer, _hf_llama)
    if name == "hf-gpt2":
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        return Family(lambda: GPT2Block, _hf_gpt2)
    raise ValueError(f"there is no model {name!r}; there are {', '.join(MODELS)}")


def _own(build: Callable[..., Any], layers: int, micro_batches: int) -> Subject:
    sizes = {"hidden": HIDDEN, "num_heads": HEADS, "vocab": VOCAB, "seq": SEQ}
    model: decoders.Decoder | decoders.GptDecoder
    model, args = build(layers, batch=BATCH * micro_batches, **sizes)

    def compile_head() -> nn.Module:
        model.head.compile(fullgraph=True)
        return model

    return Subject(model, list(model.blocks), compile_head, args, micro_batches=micro_batches)


def _hf_llama(layers: int, micro_batches: int) -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=SEQ,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    return _hf(model, model.model.layers, "norm", micro_batches)


def _hf_gpt2(layers: int, micro_batches: int) -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    # No dropout: gradients are compared with eager's.
    config = GPT2Config(
        n_layer=layers,
        n_embd=HIDDEN,
        n_head=HEADS,
        vocab_size=VOCAB,
        n_positions=SEQ,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    # Its class name tells transformers no loss; it would log a warning, which Dynamo refuses.
    model.loss_type = "ForCausalLM"
    return _hf(model, model.transformer.h, "ln_f", micro_batches)


def _hf(model: Any, blocks: Sequence[nn.Module], norm_name: str, micro_batches: int) -> Subject:
    ids = torch.randint(VOCAB, (BATCH * micro_batches, SEQ))

    def compile_head() -> Callable[..., Tensor]:
        body = model.base_model
        norm = getattr(body, norm_name)
        setattr(body, norm_name, nn.Identity())  # the head applies it

        def head(hidden: Tensor, labels: Tensor) -> Tensor:
            logits = model.lm_head(norm(hidden))
            loss: Tensor = model.loss_function(logits, labels, vocab_size=VOCAB)
            return loss

        compiled = torch.compile(head, fullgraph=True)

        def loss_of(input_ids: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = compiled(body(input_ids).last_hidden_state, labels)
            return loss

        return loss_of

    kwargs = {"input_ids": ids, "labels": ids}
    return Subject(
        model.train(), list(blocks), compile_head, kwargs=kwargs, micro_batches=micro_batches
    )

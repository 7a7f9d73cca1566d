"""Small Hugging Face models with an example batch, their layer classes marked."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    T5EncoderModel,
)
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.t5.modeling_t5 import T5Block
from transformers.models.vit.modeling_vit import ViTLayer

from lazyinline import lazy_inline

for layer in (GPT2Block, LlamaDecoderLayer, Qwen2DecoderLayer, BertLayer, T5Block, ViTLayer):
    lazy_inline(layer)

NAMES = ("gpt2", "llama", "qwen2", "bert", "t5-encoder", "vit")
VOCABULARY = 67
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
OF_T5 = {"d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0}
# What makes a model of a configuration, and what that needs besides.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (AutoModelForCausalLM.from_config, {}),
    "bert": (AutoModelForMaskedLM.from_config, {}),
    "albert": (AutoModelForMaskedLM.from_config, {"embedding_size": 16}),
    "t5": (AutoModelForSeq2SeqLM.from_config, OF_T5),
    "t5-encoder": (T5EncoderModel, OF_T5),
    "vit": (AutoModelForImageClassification.from_config, {"image_size": 16, "patch_size": 4}),
}
OTHERS = (AutoModelForCausalLM.from_config, {"num_key_value_heads": 2, "head_dim": 8})


def build(kind: str, layers: int = 2, **options: Any) -> Any:
    """Returns a model, the same each time, by options of its configuration."""
    head, more = KINDS.get(kind, OTHERS)
    depth = {"num_hidden_layers": layers}
    if kind == "t5":
        depth["num_decoder_layers"] = layers
    sizes = SIZES | ({} if kind == "vit" else TOKENS) | more | depth
    config = AutoConfig.for_model(kind.removesuffix("-encoder"), **sizes | options)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return head(config).train()


def tokens(batch: int, length: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Token ids and a mask; the last sequence is padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, : length // 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def images(batch: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    }


def example(name: str, *, layers: int = 3) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a model in eval mode, without a cache, and keyword inputs."""
    cache = {} if name in ("bert", "vit") else {"use_cache": False}
    inputs = images(2) if name == "vit" else tokens(2, 8)
    return build(name, layers, **cache).eval(), inputs

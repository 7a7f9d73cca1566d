"""Small Hugging Face models with an example batch, their layer classes marked."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTForImageClassification,
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
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


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
    """Returns a model in eval mode and keyword inputs."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = _model(name, layers)
    return model.eval(), images(2) if name == "vit" else tokens(2, 8)


def _model(name: str, layers: int) -> nn.Module:
    cached = {"use_cache": False, **TOKENS}
    if name == "gpt2":
        sizes = {"n_positions": 32, "n_embd": 32, "n_layer": layers, "n_head": 4}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **cached))
    if name == "t5-encoder":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": layers, "num_heads": 4}
        return T5EncoderModel(T5Config(vocab_size=VOCABULARY, use_cache=False, **sizes))
    if name == "vit":
        sizes = {key: SIZES[key] for key in ("hidden_size", "intermediate_size")}
        config = ViTConfig(
            num_hidden_layers=layers, num_attention_heads=4, image_size=16, patch_size=4, **sizes
        )
        return ViTForImageClassification(config)
    if name == "bert":
        return BertForMaskedLM(BertConfig(num_hidden_layers=layers, **SIZES))
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[name]
    config = config_class(num_hidden_layers=layers, num_key_value_heads=2, **SIZES, **cached)
    return model_class(config)

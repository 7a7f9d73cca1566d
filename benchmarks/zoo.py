"""Hugging Face families from small configurations, unmodified, each with one example batch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCAB, BATCH, SEQ, LAYERS, HIDDEN, HEADS, IMAGE = 96, 2, 12, 4, 32, 4, 32

# Every configuration takes those of these sizes that it knows.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 64,
    "image_size": IMAGE,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ2SEQ = {
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
    "decoder_start_token_id": 1,
}
TOWER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
TEXT_TOWER = TOWER | {"vocab_size": VOCAB, "max_position_embeddings": 64, "eos_token_id": 2}
VISION_TOWER = TOWER | {"image_size": IMAGE, "patch_size": 8}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": HIDDEN,
    "shared_expert_intermediate_size": HIDDEN,
}

Inputs = Callable[[], dict[str, Any]]


def text() -> dict[str, Any]:
    """A padded batch of token ids with labels."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (BATCH, SEQ), generator=generator)
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unpadded_text() -> dict[str, Any]:
    """Token ids with labels."""
    ids = text()["input_ids"]
    return {"input_ids": ids, "labels": ids}


def image() -> dict[str, Any]:
    """Images with a class each."""
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def image_and_text() -> dict[str, Any]:
    """Images and texts that belong together."""
    ids = text()["input_ids"].clone()
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": image()["pixel_values"], "return_loss": True}


def spectrogram() -> dict[str, Any]:
    """Log-mel features with a transcript."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(BATCH, 16, 2 * SEQ, generator=generator)
    return {"input_features": features, "labels": text()["input_ids"]}


def waveform() -> dict[str, Any]:
    """Sound."""
    generator = torch.Generator().manual_seed(3)
    return {"input_values": torch.randn(BATCH, 1600, generator=generator)}


@dataclass(frozen=True, eq=False)
class Family:
    """One family: which model class of transformers, which sizes, which inputs."""

    name: str
    model: str
    config: str
    inputs: Inputs = text
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        """Returns the model, the same at each call, and a batch."""
        torch.manual_seed(0)
        make = getattr(transformers, self.config)
        known = vars(make())
        sizes = {k: v for k, v in (SIZES | SEQ2SEQ | EXPERTS).items() if k in known}
        config = make(**(sizes | dict(self.options)))
        model = getattr(transformers, self.model)(config)
        return model, self.inputs()


def causal(name: str, prefix: str, **options: Any) -> Family:
    """A language model whose classes are named after its family."""
    return Family(name, f"{prefix}ForCausalLM", f"{prefix}Config", text, options)


GPT2 = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
T5 = {
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": 2 * HIDDEN,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": HEADS,
}

ASKED = (
    Family("GPT-2", "GPT2LMHeadModel", "GPT2Config", text, GPT2),
    causal("Llama", "Llama"),
    causal("Qwen2", "Qwen2"),
    causal("Qwen3", "Qwen3"),
    causal("Mistral", "Mistral", sliding_window=8),
    causal("Gemma 2", "Gemma2", sliding_window=8),
    causal("Phi-3", "Phi3"),
    causal("OPT", "OPT", ffn_dim=64, word_embed_proj_dim=HIDDEN),
    causal("GPT-NeoX", "GPTNeoX"),
    Family("BERT", "BertForMaskedLM", "BertConfig"),
    Family("RoBERTa", "RobertaForMaskedLM", "RobertaConfig"),
    Family("T5", "T5ForConditionalGeneration", "T5Config", text, T5),
    Family("BART", "BartForConditionalGeneration", "BartConfig"),
    Family("ViT", "ViTForImageClassification", "ViTConfig", image),
    Family(
        "CLIP",
        "CLIPModel",
        "CLIPConfig",
        image_and_text,
        {"text_config": TEXT_TOWER, "vision_config": VISION_TOWER, "projection_dim": 16},
    ),
    causal("Mixtral", "Mixtral", sliding_window=None),
    causal("DeepSeek-V3", "DeepseekV3", **LATENT),
    Family(
        "Llama 4", "Llama4ForCausalLM", "Llama4TextConfig", text, {"intermediate_size_mlp": HIDDEN}
    ),
)

FURTHER = (
    causal("Qwen2-MoE", "Qwen2Moe"),
    causal("Qwen3-MoE", "Qwen3Moe"),
    causal("Gemma", "Gemma"),
    Family("Gemma 3", "Gemma3ForCausalLM", "Gemma3TextConfig", text, {"sliding_window": 8}),
    causal("Falcon", "Falcon"),
    causal("Bloom", "Bloom", n_layer=LAYERS, n_head=HEADS),
    causal("MPT", "Mpt", d_model=HIDDEN, n_layers=LAYERS, n_heads=HEADS, max_seq_len=64),
    causal("Cohere", "Cohere"),
    causal("StarCoder2", "Starcoder2"),
    causal("Granite", "Granite"),
    causal("OLMo2", "Olmo2"),
    causal("OLMoE", "Olmoe"),
    causal("Phi", "Phi"),
    causal("GPT-J", "GPTJ", **GPT2, rotary_dim=4),
    causal("GPT-BigCode", "GPTBigCode", **GPT2),
    causal("StableLM", "StableLm"),
    causal("SmolLM3", "SmolLM3"),
    causal("GPT-OSS", "GptOss", sliding_window=8),
    causal("Nemotron", "Nemotron"),
    causal("GLM-4", "Glm4"),
    causal("Persimmon", "Persimmon"),
    causal("Mamba", "Mamba", state_size=4, conv_kernel=4, expand=2, time_step_rank=4),
    Family(
        "DistilBERT",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        text,
        {"dim": HIDDEN, "hidden_dim": 64, "n_layers": LAYERS, "n_heads": HEADS},
    ),
    Family("ALBERT", "AlbertForMaskedLM", "AlbertConfig", text, {"embedding_size": 16}),
    Family("ELECTRA", "ElectraForMaskedLM", "ElectraConfig", text, {"embedding_size": 16}),
    Family(
        "DeBERTa-v2",
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        text,
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
    ),
    Family(
        "ModernBERT",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        text,
        {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    ),
    Family("MPNet", "MPNetForMaskedLM", "MPNetConfig"),
    Family("FNet", "FNetForMaskedLM", "FNetConfig", unpadded_text, {}),
    Family("Pegasus", "PegasusForConditionalGeneration", "PegasusConfig"),
    Family(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        spectrogram,
        {"num_mel_bins": 16, "max_source_positions": SEQ, "max_target_positions": 32},
    ),
    Family(
        "Wav2Vec2",
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        waveform,
        {
            "conv_dim": [16] * 3,
            "conv_stride": [5, 4, 4],
            "conv_kernel": [10, 4, 4],
            "num_feat_extract_layers": 3,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
    Family(
        "Swin",
        "SwinForImageClassification",
        "SwinConfig",
        image,
        {"patch_size": 2, "embed_dim": 16, "depths": [2, 4], "num_heads": [2, 4], "window_size": 4},
    ),
    Family(
        "ConvNeXt",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        image,
        {"depths": [2, 2, 3, 2], "hidden_sizes": [8, 16, 24, 32], "patch_size": 4},
    ),
    Family(
        "ResNet",
        "ResNetForImageClassification",
        "ResNetConfig",
        image,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 3], "layer_type": "basic"},
    ),
    Family("DINOv2", "Dinov2ForImageClassification", "Dinov2Config", image),
    Family(
        "SigLIP",
        "SiglipModel",
        "SiglipConfig",
        image_and_text,
        {"text_config": TEXT_TOWER, "vision_config": VISION_TOWER},
    ),
)


def add_families(parser: argparse.ArgumentParser) -> None:
    """Lets a command take the names of families."""
    parser.add_argument("--only", nargs="+", metavar="NAME", help="families by name")


def chosen_families(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Family]:
    """Returns the families that were named, or all; an unknown name ends the command."""
    known = {family.name: family for family in (*ASKED, *FURTHER)}
    unknown = set(options.only or ()) - known.keys()
    if unknown:
        parser.error(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [known[name] for name in options.only or known]


def scalar(output: Any) -> Tensor:
    """Returns the loss of an output, or else the sum of the squares of what has a gradient."""
    if getattr(output, "loss", None) is not None:
        return output.loss  # type: ignore[no-any-return]
    parts = [t for t in output.to_tuple() if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([t.square().mean() for t in parts]).sum()

"""Small random models of architectures without a family, as Transformers' configs by model_type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from support.engine.tiny_shape import SHAPE, VOCAB_SIZE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_PADDED = {**SHAPE, "pad_token_id": 0}
_WITHOUT_GROUPS = {key: value for key, value in _PADDED.items() if key != "num_key_value_heads"}
_GPT = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "n_inner": 96}
_GPT = {**_GPT, "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2}
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOWS = {"sliding_window": 9, "layer_types": _TYPES}
_EXPERTS = {
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_GROUPED = {**_EXPERTS, "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_SCALES = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 5.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

# Differences from _PADDED, of which each config gets the fields that it has.
TRANSFORMERS_MODELS: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {**_EXPERTS, **_WINDOWS, "head_dim": 24, "num_dense_layers": 1, "num_shared_experts": 1},
    "apertus": {"attention_bias": True},
    "arcee": {"rope_parameters": _YARN},
    "aria_text": {**_EXPERTS, "moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 1},
    "biogpt": {"scale_embedding": True},
    "bitnet": {},
    "codegen": {**_GPT, "rotary_dim": 8},
    "cohere2_moe": {**_EXPERTS, **_WINDOWS, "head_dim": 16},
    "ctrl": {**_GPT, "dff": 96},
    "cwm": {**_WINDOWS, "head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "dots1": {**_GROUPED, "n_shared_experts": 1},
    "ernie4_5": {"use_bias": True, "head_dim": 24},
    "exaone4": {**_WINDOWS, "head_dim": 16},
    "exaone_moe": {**_GROUPED, **_WINDOWS, "num_shared_experts": 1, "head_dim": 16},
    "flex_olmo": _EXPERTS,
    "gpt_bigcode": _GPT,
    "gptj": {**_GPT, "rotary_dim": 8},
    "granite_swa": {**_WINDOWS, **_SCALES},
    "granitemoe_swa": {**_EXPERTS, **_WINDOWS, **_SCALES},
    "granitemoeshared": {**_EXPERTS, **_SCALES, "shared_intermediate_size": 48},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 24},
    "hunyuan_v1_moe": {**_EXPERTS, "head_dim": 16, "moe_topk": 2},
    "hy_v3": {**_EXPERTS, "head_dim": 16},
    "hyperclovax": {**_SCALES, "attention_bias": True},
    "jais2": {"head_dim": 16},
    "mellum": {**_EXPERTS, **_WINDOWS, "head_dim": 16},
    "modernbert-decoder": {"global_attn_every_n_layers": 3, "local_attention": 16},
    "nanochat": {"final_logit_softcapping": 3.0},
    "nemotron": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32, "init_std": 0.15},
    "persimmon": {},
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
    "seed_oss": {"head_dim": 24, "attention_out_bias": True},
    "solar_open": {**_GROUPED, "head_dim": 16, "n_shared_experts": 1},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "vaultgemma": {**_WINDOWS, "head_dim": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
}


def tiny_config(model_type: str, more: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns a small config of this type. Fields that the type does not have are left out."""
    known = AutoConfig.for_model(model_type)
    names = {type(known).attribute_map.get(name, name) for name in vars(known)} | set(vars(known))
    values = {name: value for name, value in {**_PADDED, **more}.items() if name in names}
    return AutoConfig.for_model(model_type, **values)


def save_tiny(folder: Path, model_type: str, more: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """Saves a model with random weights, including vectors. Returns it in fp32."""
    torch.manual_seed(sum(model_type.encode()))
    config = tiny_config(model_type, TRANSFORMERS_MODELS[model_type] if more is None else more)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if name.endswith(".weight") else 0.0, 0.2)
            elif "embed" not in name and "wte" not in name:
                parameter.normal_(0.0, 0.3)  # with smaller weights, models repeat one token
    model.save_pretrained(folder)
    return model

"""The metadata that llama.cpp's converter writes for models of Transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

# general.architecture where it is not the model type.
_ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "cohere": "command-r",
}


def architecture_name(config: PreTrainedConfig) -> str:
    """Returns general.architecture."""
    return _ARCHITECTURES.get(config.model_type, config.model_type)


def model_metadata(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the keys of the model, without the architecture's prefix."""
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        **_epsilon(config),
        **_rope(config),
    }
    if head_dim := getattr(config, "head_dim", None):
        values |= {f"attention.{part}_length": head_dim for part in ("key", "value")}
    more = _MORE.get(config.model_type)
    return values | (more(config) if more else {})


def _epsilon(config: PreTrainedConfig) -> dict[str, float]:
    for key in ("layer_norm_eps", "norm_epsilon"):
        if value := getattr(config, key, None):
            return {"attention.layer_norm_epsilon": value}
    return {"attention.layer_norm_rms_epsilon": float(config.rms_norm_eps)}


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    sets = config.rope_parameters
    rope = sets.get("full_attention", sets)
    values = {"rope.freq_base": float(rope["rope_theta"])}
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return values


def _phi3(config: PreTrainedConfig) -> dict[str, Any]:
    rope = config.rope_parameters
    longest = config.max_position_embeddings
    original = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", longest
    )
    rotated = int(rope.get("partial_rotary_factor", 1.0) * config.hidden_size) // config.num_attention_heads
    values = {
        "rope.scaling.original_context_length": original,
        "rope.dimension_count": rotated,
        "attention.sliding_window": config.sliding_window or 0,
    }
    if rope["rope_type"] == "longrope":
        scale = longest / original
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        values["rope.scaling.attn_factor"] = factor
    return values


def _gemma2(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": config.sliding_window,
    }


def _gemma3(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": config.sliding_window,
    }


def _granite(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _olmo3(config: PreTrainedConfig) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    return {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": slides}


def _cohere(config: PreTrainedConfig) -> dict[str, Any]:
    return {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}


def _cohere2(config: PreTrainedConfig) -> dict[str, Any]:
    rotated = config.hidden_size // config.num_attention_heads
    return {**_cohere(config), "attention.sliding_window": config.sliding_window, "rope.dimension_count": rotated}


def _experts(config: PreTrainedConfig) -> dict[str, Any]:
    count = getattr(config, "num_local_experts", None) or config.num_experts
    return {"expert_count": count, "expert_used_count": config.num_experts_per_tok}


def _qwen3_moe(config: PreTrainedConfig) -> dict[str, Any]:
    return {**_experts(config), "expert_feed_forward_length": config.moe_intermediate_size}


def _qwen2_moe(config: PreTrainedConfig) -> dict[str, Any]:
    return {**_qwen3_moe(config), "expert_shared_feed_forward_length": config.shared_expert_intermediate_size}


def _granite_moe(config: PreTrainedConfig) -> dict[str, Any]:
    return {**_granite(config), **_experts(config)}


def _phi_moe(config: PreTrainedConfig) -> dict[str, Any]:
    values = {**_phi3(config), **_experts(config)}
    if scale := config.rope_parameters.get("short_mscale"):
        values["rope.scaling.attn_factor"] = scale
    return values


def _ernie_moe(config: PreTrainedConfig) -> dict[str, Any]:
    values = {
        "expert_count": config.moe_num_experts,
        "expert_used_count": config.moe_k,
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.moe_num_shared_experts,
    }
    if config.moe_num_shared_experts:
        values["expert_shared_feed_forward_length"] = config.intermediate_size // config.num_key_value_heads
    return values


_MORE: Mapping[str, Callable[[PreTrainedConfig], dict[str, Any]]] = {
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "granite": _granite,
    "olmo3": _olmo3,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "mixtral": _experts,
    "olmoe": _experts,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "granitemoe": _granite_moe,
    "phimoe": _phi_moe,
    "ernie4_5_moe": _ernie_moe,
}

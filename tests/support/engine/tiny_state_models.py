"""Small random models with states in Hugging Face form, for the table of tiny_models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from support.engine.tiny_shape import SHAPE
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

_KINDS = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "head_dim": 32,
    "layer_types": _KINDS,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "pad_token_id": 0,
}
STATE_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "mlp_only_layers": [0],
}
_MAMBA: dict[str, Any] = {
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 80,
    "num_local_experts": 0,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}

_NEMOTRON: dict[str, Any] = {
    "head_dim": 24,
    "ssm_state_size": 12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 20,
    "n_groups": 2,
    "time_step_min": 1e-9,  # Transformers limits the steps of prompts by it, but not those of decodes
}
_UNGATED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}

_KIMI: dict[str, Any] = {
    "pad_token_id": 0,
    "num_key_value_heads": 4,
    "layer_types": _KINDS,
    "linear_head_dim": 20,
    "linear_num_heads": 3,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 2,
    "topk_group": 1,
}


def decaying(model: PreTrainedModel) -> PreTrainedModel:
    """Sets rates of decay so that states reach back some tokens, and differ by head; and what corrects routers."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(0.3, -0.3, len(buffer)))
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-3.0, 0.5, parameter.numel()).view_as(parameter))
    return model


STATE_MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "qwen3_next": lambda: decaying(Qwen3NextForCausalLM(Qwen3NextConfig(**SHAPE, **DELTA, **STATE_EXPERTS))),
    "qwen3_5_text": lambda: decaying(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, **DELTA))),
    "kimi_linear": lambda: decaying(KimiLinearForCausalLM(KimiLinearConfig(**{**SHAPE, **_KIMI}))),
    "lfm2": lambda: Lfm2ForCausalLM(
        Lfm2Config(**SHAPE, pad_token_id=0, layer_types=["conv", "full_attention", "conv"], block_multiple_of=16)
    ),
    "lfm2-biased": lambda: Lfm2ForCausalLM(
        Lfm2Config(
            **SHAPE,
            pad_token_id=0,
            full_attn_idxs=[2],
            block_auto_adjust_ff_dim=False,
            conv_bias=True,
            conv_L_cache=4,
            tie_word_embeddings=False,
        )
    ),
    "granitemoehybrid-mamba": lambda: decaying(
        GraniteMoeHybridForCausalLM(
            GraniteMoeHybridConfig(**SHAPE, **_MAMBA, position_embedding_type="rope", time_step_limit=(0.01, 4.0))
        )
    ),
    "nemotron_h": lambda: decaying(
        NemotronHForCausalLM(
            NemotronHConfig(
                **{key: value for key, value in SHAPE.items() if key != "num_hidden_layers"},
                **_NEMOTRON,
                hybrid_override_pattern="M-MM*-M-",
            )
        )
    ),
    "nemotron_h-experts": lambda: decaying(
        NemotronHForCausalLM(
            NemotronHConfig(
                **{key: value for key, value in SHAPE.items() if key != "num_hidden_layers"},
                **_NEMOTRON,
                **_UNGATED,
                hybrid_override_pattern="ME*EM-M",
            )
        )
    ),
    "granitemoehybrid-experts": lambda: decaying(
        GraniteMoeHybridForCausalLM(
            GraniteMoeHybridConfig(**SHAPE, **{**_MAMBA, "num_local_experts": 8, "num_experts_per_tok": 3})
        )
    ),
}

"""Small random models with states, of sizes that the CUDA kernels take, for the table of gpu_engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
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

_SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "attn_implementation": "eager",
    "pad_token_id": 0,
}
_DELTA = {
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 192,
    "mlp_only_layers": [0],
}
_MAMBA = {
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 512,
    "num_local_experts": 0,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,  # Transformers before 5.24 norms all groups together
    "mamba_d_state": 32,
    "mamba_expand": 2,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
}
_NEMOTRON = {
    "hybrid_override_pattern": "ME*EM-M",
    "head_dim": 64,
    "ssm_state_size": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 1,
    "time_step_min": 1e-9,  # Transformers limits the steps of prompts by it, but not those of decodes
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 192,
}


def _decaying(model: PreTrainedModel) -> PreTrainedModel:
    """Sets rates of decay so that states reach back some tokens, and differ by head."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-3.0, 0.5, len(parameter)))
    return model


STATE_MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "qwen3_next-64": lambda: _decaying(Qwen3NextForCausalLM(Qwen3NextConfig(**_SHAPE, **_DELTA, **_EXPERTS))),
    "qwen3_5_text-64": lambda: _decaying(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_SHAPE, **_DELTA))),
    "lfm2-64": lambda: Lfm2ForCausalLM(
        Lfm2Config(**_SHAPE, layer_types=["conv", "full_attention", "conv"], block_multiple_of=256)
    ),
    "granitemoehybrid-64": lambda: _decaying(
        GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**_SHAPE, **_MAMBA, position_embedding_type="rope"))
    ),
    "nemotron_h-64": lambda: _decaying(
        NemotronHForCausalLM(
            NemotronHConfig(**{key: value for key, value in _SHAPE.items() if key != "num_hidden_layers"}, **_NEMOTRON)
        )
    ),
}

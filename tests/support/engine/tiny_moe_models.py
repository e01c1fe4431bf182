"""Small random models with experts in Hugging Face form, for the table of tiny_models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from support.engine.tiny_shape import SHAPE
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_WIDE = {"num_local_experts": 8, "num_experts_per_tok": 3}
_NARROW = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_SHARED = {"shared_expert_intermediate_size": 56, "mlp_only_layers": [0]}
_SCALES = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
_ERNIE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 40}
_GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "pad_token_id": 0,
}

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_GPT_OSS = {
    "head_dim": 24,
    "sliding_window": 9,
    "swiglu_limit": 0.8,
    "rope_parameters": {**_YARN, "truncate": False},
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + pair / 4 for pair in range(8)],
    "long_factor": [2.0 + pair for pair in range(8)],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 512,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
LATENT_SHAPE = {**SHAPE, **_LATENT}
_LATENT_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_YARN_ALL = {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.9}
_PHI = {"num_local_experts": 8, "router_jitter_noise": 0.3, "lm_head_bias": True}

MOE_MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, **_WIDE, sliding_window=11)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, **_NARROW, head_dim=24, norm_topk_prob=True, mlp_only_layers=[1])
    ),
    "qwen3_moe-weights": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **_NARROW, decoder_sparse_step=2)),
    "qwen2_moe": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**SHAPE, **_NARROW, **_SHARED)),
    "qwen2_moe-window": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SHAPE, **_NARROW, use_sliding_window=True, sliding_window=9, norm_topk_prob=True)
    ),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SHAPE, num_experts=8, num_experts_per_tok=3)),
    "granitemoe": lambda: GraniteMoeForCausalLM(GraniteMoeConfig(**SHAPE, **_WIDE, **_SCALES)),
    "glm4_moe": lambda: _corrected(Glm4MoeForCausalLM(Glm4MoeConfig(**SHAPE, **_GLM, head_dim=24, use_qk_norm=True))),
    "glm4_moe-biased": lambda: _corrected(
        Glm4MoeForCausalLM(
            Glm4MoeConfig(**SHAPE, **_GLM, n_shared_experts=2, first_k_dense_replace=2, attention_bias=True)
        )
    ),
    "ernie4_5_moe": lambda: _corrected(
        Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**SHAPE, **_ERNIE, use_bias=True, moe_layer_interval=2))
    ),
    "ernie4_5_moe-unshared": lambda: _corrected(
        Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**SHAPE, **_ERNIE, moe_num_shared_experts=0))
    ),
    "minimax_m2": lambda: _corrected(
        MiniMaxM2ForCausalLM(MiniMaxM2Config(**SHAPE, **_WIDE, head_dim=24, rotary_dim=16))
    ),
    "phimoe": lambda: PhimoeForCausalLM(PhimoeConfig(**SHAPE, **_PHI, attention_bias=True, sliding_window=9)),
    "phimoe-longrope": lambda: PhimoeForCausalLM(PhimoeConfig(**SHAPE, **_PHI, rope_parameters=_LONG)),
    "deepseek_v2": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **LATENT_SHAPE, **_LATENT_EXPERTS, topk_method="group_limited_greedy", rope_parameters=_YARN_ALL
        )
    ),
    "deepseek_v2-lite": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(**{**LATENT_SHAPE, "q_lora_rank": None}, **{**_LATENT_EXPERTS, "n_group": 1})
    ),
    "deepseek_v3": lambda: _corrected(
        DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT_SHAPE, **_LATENT_EXPERTS, rope_parameters=_YARN_ALL))
    ),
    "deepseek_v3-halves": lambda: _corrected(
        DeepseekV3ForCausalLM(
            DeepseekV3Config(**LATENT_SHAPE, **_LATENT_EXPERTS, rope_interleave=False, attention_bias=True)
        )
    ),
    "glm4_moe_lite": lambda: _corrected(
        Glm4MoeLiteForCausalLM(
            Glm4MoeLiteConfig(
                **LATENT_SHAPE,
                **{name: value for name, value in _LATENT_EXPERTS.items() if name != "first_k_dense_replace"},
                mlp_layer_types=["sparse", "dense", "sparse"],
                pad_token_id=0,
            )
        )
    ),
    "gpt_oss": lambda: _biased(GptOssForCausalLM(GptOssConfig(**SHAPE, **_WIDE, **_GPT_OSS))),
}


def _corrected(model: PreTrainedModel) -> PreTrainedModel:
    """Fills the routers' correction biases, which are zeros in a new model."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            tensor.data.normal_(0.0, 0.2)
    return model


def _biased(model: PreTrainedModel) -> PreTrainedModel:
    """Fills the experts' biases, which are zeros in a new model."""
    for name, tensor in model.named_parameters():
        if name.endswith("proj_bias"):
            tensor.data.normal_(0.0, 0.2)
    return model

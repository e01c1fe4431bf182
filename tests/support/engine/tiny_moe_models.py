"""Small random models with experts in Hugging Face form: rows of tiny_models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from support.engine.tiny_shape import SHAPE
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_WIDE = {"num_local_experts": 8, "num_experts_per_tok": 3}
_NARROW = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

MOE_MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, **_WIDE, sliding_window=11)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, **_NARROW, head_dim=24, norm_topk_prob=True, mlp_only_layers=[1])
    ),
    "qwen3_moe-weights": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **_NARROW, decoder_sparse_step=2)),
}

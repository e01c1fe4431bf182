"""Configs of known models, which run without their files under --load-format dummy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_UNQUANTIZED: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "eos_token_id": [128001, 128008, 128009],
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "eos_token_id": [151645, 151643],
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "eos_token_id": [151645, 151643],
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "eos_token_id": [200002, 199999, 200012],
    },
    "storyteller-7m": {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 65536,
        "rope_theta": 1000000.0,
        "use_sliding_window": True,
        "sliding_window": 512,
        "layer_types": ["full_attention" if layer in (3, 6) else "sliding_attention" for layer in range(8)],
        "tie_word_embeddings": True,
        "eos_token_id": [4, 2],
    },
}
_FORMATS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
    "mxfp4": {"quant_method": "mxfp4"},
}
_IN_FORMATS = (("llama-3.1-8b", "fp8"), ("qwen3-30b-a3b", "fp8"), ("gpt-oss-20b", "mxfp4"))
PRESETS: Mapping[str, Mapping[str, Any]] = {
    **_UNQUANTIZED,
    **{
        f"{name}-{weights}": {**_UNQUANTIZED[name], "quantization_config": _FORMATS[weights]}
        for name, weights in _IN_FORMATS
    },
}

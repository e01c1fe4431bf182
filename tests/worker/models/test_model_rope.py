"""RoPE's tables against Transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from baton.worker.layers.rope import cos_sin_table
from baton.worker.models.registry import parse_config


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "factor": 2.5},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.3},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 512,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    ],
    ids=lambda rope: "-".join(str(value) for value in rope.values()),
)
def test_tables_equal_transformers(rope: dict[str, Any]) -> None:
    rope = {"rope_theta": 10000.0, **rope}
    shape = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 4096}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**shape, rope_parameters=dict(rope)))
    cos, sin = theirs(torch.zeros(1), torch.arange(4000).unsqueeze(0))
    raw = {**LlamaConfig(**shape).to_dict(), "architectures": ["LlamaForCausalLM"], "rope_parameters": rope}
    config = parse_config(raw, "config.json")
    ours = cos_sin_table(config.ropes[0], config.head_dim, 4000)
    torch.testing.assert_close(ours[:, :32], cos[0, :, :32], atol=2e-4, rtol=0)
    torch.testing.assert_close(ours[:, 32:], sin[0, :, :32], atol=2e-4, rtol=0)

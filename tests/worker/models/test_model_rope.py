"""RoPE's tables against Transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from baton.worker.layers.rope import cos_sin_table
from baton.worker.models.registry import parse_config
from baton.worker.weights.digest import dummy_digest


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


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0 + pair / 16 for pair in range(32)],
    "long_factor": [1.0 + pair for pair in range(32)],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(("rope", "most"), [(LONGROPE, 4096), (DYNAMIC, 1024)])
@pytest.mark.parametrize("length", [600, 1024, 1025, 2048])
def test_tables_for_a_length_equal_transformers(rope: dict[str, Any], most: int, length: int) -> None:
    shape = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": most}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**shape, rope_parameters=dict(rope)))
    cos, sin = theirs(torch.zeros(1), torch.arange(length).unsqueeze(0))
    raw = {**LlamaConfig(**shape).to_dict(), "architectures": ["LlamaForCausalLM"], "rope_parameters": rope}
    config = parse_config(raw, "config.json").at_length(length)
    ours = cos_sin_table(config.ropes[0], config.head_dim, length)
    torch.testing.assert_close(ours[:, :32], cos[0, :, :32], atol=3e-4, rtol=0)
    torch.testing.assert_close(ours[:, 32:], sin[0, :, :32], atol=3e-4, rtol=0)
    assert config.max_model_len >= length


def test_dynamic_scaling_extends_a_model_only_on_request() -> None:
    raw = {**LlamaConfig(max_position_embeddings=1024).to_dict(), "architectures": ["LlamaForCausalLM"]}
    config = parse_config({**raw, "rope_parameters": DYNAMIC}, "config.json")
    assert config.at_length(0).max_model_len == 1024
    assert config.at_length(2048).max_model_len == 2048
    assert config.at_length(9999).max_model_len == 2048
    plain = parse_config({**raw, "rope_parameters": {"rope_theta": 10000.0}}, "config.json")
    assert config.at_length(0).ropes == plain.ropes


def test_workers_that_serve_other_lengths_do_not_share_kv() -> None:
    raw = {**LlamaConfig(max_position_embeddings=4096).to_dict(), "architectures": ["LlamaForCausalLM"]}
    config = parse_config(
        {**raw, "rope_parameters": {**LONGROPE, "short_factor": [2.0] * 64, "long_factor": [3.0] * 64}}, "x"
    )
    digests = [dummy_digest(config.at_length(length), 0) for length in (0, 4096, 1024, 512)]
    assert digests[0] == digests[1] != digests[2] == digests[3]

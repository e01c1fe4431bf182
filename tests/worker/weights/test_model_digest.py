"""Digests of known models do not change, so that workers of two versions share KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.worker.models.presets import PRESETS
from baton.worker.models.registry import load_config, parse_config
from baton.worker.weights.checkpoint import Checkpoint
from baton.worker.weights.digest import dummy_digest, model_digest

SAMPLE_MODEL = Path(__file__).resolve().parents[3] / "models" / "storyteller-7m"
SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
QWEN2 = ["Qwen2ForCausalLM"]
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24},
    "llama3 rope": {"rope_scaling": LLAMA3, "rope_theta": 5e5},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn": {"rope_scaling": YARN, "max_position_embeddings": 1000},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 32, "num_key_value_heads": 2},
    "qwen2": {"architectures": QWEN2, "rms_norm_eps": 1e-5},
    "qwen2, windows": {"architectures": QWEN2, **WINDOW},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
}
# Of dummy weights on a CPU with seed 0.
DIGESTS = {
    "llama": "5de557d6c93dc0dfaaebcc04fd9397e7",
    "llama, biases": "d08c1257c3c8da0cdc81a56c8e19e5ad",
    "llama3 rope": "a9d57dbe65384b530aacc33e5626e368",
    "linear rope": "b5ff204ae001de2657956afedfd7c43b",
    "yarn": "be9025ae2a9dd730a599ac3189b0c1e0",
    "mistral": "74b7e2bf9f016062222ee8b42dcbebf8",
    "qwen2": "93458bb51f24e05cdf4fa64883b80a95",
    "qwen2, windows": "f9dbc0f9e64561c11abf59fad10a6f0f",
    "qwen3": "5ca1de40b9ae2df7653e9b752b714dc3",
    "llama-3.1-8b": "a747364e328d3d6275450875b2f2f4a5",
    "qwen3-0.6b": "5837f3b079f229f4c42fa86d9bf669a7",
    "storyteller-7m": "463f4ffa9da661ed19f2aa6a055ba0b3",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_the_digest_of_a_config_is_that_of_earlier_versions(name: str) -> None:
    raw = PRESETS[name] if name in PRESETS else {**SMALL, **CONFIGS[name]}
    assert dummy_digest(parse_config(raw, name), 0).hex() == DIGESTS[name]


def test_the_digest_of_a_checkpoint_is_that_of_earlier_versions() -> None:
    with Checkpoint(SAMPLE_MODEL) as checkpoint:
        assert model_digest(load_config(SAMPLE_MODEL), checkpoint).hex() == "d4935f6c8f7ccd621e02a61dc758eac3"


def test_the_digest_includes_properties_of_later_families() -> None:
    granite = {**SMALL, "architectures": ["GraniteForCausalLM"]}
    scales = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    changed = [{}, *({scale: 2.0} for scale in scales)]
    digests = {dummy_digest(parse_config({**granite, **change}, "granite"), 0) for change in changed}
    assert len(digests) == len(changed)


def test_the_digest_holds_how_experts_are_chosen() -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    changed: list[dict[str, Any]] = [
        {},
        {"num_experts": 4},
        {"num_experts_per_tok": 3},
        {"moe_intermediate_size": 32},
        {"norm_topk_prob": True},
        {"mlp_only_layers": [2]},
        {"mlp_only_layers": [0]},
    ]
    base = {**SMALL, **sizes, "architectures": ["Qwen3MoeForCausalLM"]}
    digests = {dummy_digest(parse_config({**base, **change}, "qwen3_moe"), 0) for change in changed}
    assert len(digests) == len(changed)


def test_fields_of_experts_at_their_defaults_do_not_count() -> None:
    """Pins the digest of a model with experts: fields of later versions are omitted at their defaults."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "architectures": ["MixtralForCausalLM"]}
    assert dummy_digest(parse_config({**SMALL, **experts}, "mixtral"), 0).hex() == "5d001f06b9f72856d923f12048c51492"


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("GlmForCausalLM", [{"partial_rotary_factor": 0.25}]),
        ("SmolLM3ForCausalLM", [{"no_rope_layers": [1, 0, 1, 1]}, {"no_rope_layers": [0, 1, 1, 1]}]),
        ("CohereForCausalLM", [{"use_qk_norm": True}, {"logit_scale": 0.5}, {"layer_norm_eps": 1e-6}]),
        ("OlmoForCausalLM", [{"clip_qkv": 2.0}]),
        ("Gemma2ForCausalLM", [{"attn_logit_softcapping": None}, {"final_logit_softcapping": 7.0}]),
        ("Gemma3ForCausalLM", [{"rope_local_base_freq": 5e3}, {"hidden_activation": "gelu"}]),
        ("GPTNeoXForCausalLM", [{"use_parallel_residual": False}, {"rotary_pct": 0.5}]),
        ("GPT2LMHeadModel", [{"scale_attn_by_inverse_layer_idx": True}, {"activation_function": "gelu"}]),
    ],
)
def test_the_digest_holds_what_dense_families_read(architecture: str, changes: list[dict[str, Any]]) -> None:
    base = {**SMALL, "architectures": [architecture]}
    configs = [parse_config({**base, **change}, architecture) for change in [{}, *changes]]
    assert len({dummy_digest(config, 0) for config in configs}) == len(configs)

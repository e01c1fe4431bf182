"""What families with experts read, and refuse by the key's name."""

from __future__ import annotations

from typing import Any

import pytest

from baton.kernels.routing import RouterSpec
from baton.rpc.errors import InvalidRequest
from baton.worker.layers.spec import ExpertsSpec, MlpSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.registry import parse_config

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
# Without a head_dim of their own, and as checkpoints have them.
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "moe_k": 2}
LONG = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "short_mscale": 1.2,
    "long_mscale": 1.3,
}


def of(architecture: str, **more: Any) -> ModelConfig:
    return parse_config({**SIZES, **EXPERTS, "architectures": [architecture], **more}, "config.json")


def experts_of(config: ModelConfig) -> list[bool]:
    return [isinstance(layer.mlp, ExpertsSpec) for layer in config.layers]


def test_the_first_key_present_counts_the_experts() -> None:
    config = of("Qwen3MoeForCausalLM", num_experts=16, num_local_experts=8)
    assert config.layers[0].mlp == ExpertsSpec(RouterSpec(16, 2), 32)
    assert of("Qwen3MoeForCausalLM", num_experts=None).layers[0].mlp == ExpertsSpec(RouterSpec(8, 2), 32)


@pytest.mark.parametrize(
    ("architecture", "more", "expected"),
    [
        ("Qwen3MoeForCausalLM", {}, [True] * 4),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}, [False, True, False, True]),
        ("Qwen2MoeForCausalLM", {"mlp_only_layers": [1, 2], "shared_expert_intermediate_size": 8}, [1, 0, 0, 1]),
        ("Glm4MoeForCausalLM", {}, [False, True, True, True]),
        ("Glm4MoeForCausalLM", {"first_k_dense_replace": 3}, [False, False, False, True]),
        ("Ernie4_5_MoeForCausalLM", {}, [False, True, True, True]),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_start_index": 0, "moe_layer_end_index": 2}, [1, 1, 1, 0]),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_interval": 2}, [False, True, False, True]),
    ],
)
def test_some_layers_are_dense(architecture: str, more: dict[str, Any], expected: list[bool]) -> None:
    assert experts_of(of(architecture, **more)) == [bool(each) for each in expected]


def test_shared_experts_are_as_wide_as_all_of_them() -> None:
    mlp = of("Glm4MoeForCausalLM", n_shared_experts=3).layers[1].mlp
    assert isinstance(mlp, ExpertsSpec)
    assert mlp.shared == MlpSpec(96)
    assert mlp.token_width == 2 * 32 + 96


def test_a_part_of_each_head_rotates_by_either_key() -> None:
    old, new = (
        of("MiniMaxM2ForCausalLM", head_dim=32, **more)
        for more in ({"rotary_dim": 8}, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}})
    )
    assert old.layers[0].attention.rope.rotary_dim == new.layers[0].attention.rope.rotary_dim == 8


def test_an_architectures_former_name_means_the_same() -> None:
    assert of("PhiMoEForCausalLM") == of("PhimoeForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "more", "message"),
    [
        ("MixtralForCausalLM", {"num_local_experts": None}, "num_local_experts is missing"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, r"num_experts_per_tok is 9; it must be at most .* \(8\)"),
        ("MixtralForCausalLM", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be silu"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": ["a"]}, "mlp_only_layers is .*a list of layers"),
        ("PhimoeForCausalLM", {"rope_scaling": LONG}, r"long_mscale is 1.3; it must be short_mscale \(1.2\)"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv is 8.0; it must be null"),
        ("Glm4MoeForCausalLM", {"n_group": 3}, r"n_group is 3; it must be a divisor .*\(8\)"),
        ("Glm4MoeForCausalLM", {"n_group": 8, "num_experts_per_tok": 3}, "topk_group is None; it must be so many"),
    ],
)
def test_what_cannot_be_computed_is_named(architecture: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        of(architecture, **more)

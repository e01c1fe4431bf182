"""What families with latent attention read, and refuse by the key's name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.kv.partial_groups import PartialGroups
from baton.worker.kv_spec import KvGroup, KvKind, KvSpec
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.spec import ExpertsSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.kv_groups import window_spec_of
from baton.worker.models.registry import parse_config

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}


def of(version: int, **more: Any) -> ModelConfig:
    return parse_config({**SIZES, "architectures": [f"DeepseekV{version}ForCausalLM"], **more}, "config.json")


def latent_of(config: ModelConfig) -> LatentSpec:
    found = config.layers[0].attention
    assert isinstance(found, LatentSpec)
    return found


def test_a_token_has_one_vector_a_layer() -> None:
    (group,) = window_spec_of(of(3), bytes(16), 16, "bfloat16").groups
    assert group == KvGroup(KvKind.LATENT, (0, 1, 2, 3), "bfloat16", 1, 40)


def test_scores_are_scaled_for_the_length_that_yarn_extends_to() -> None:
    plain, scaled = latent_of(of(3)), latent_of(of(3, rope_scaling={**YARN, "mscale_all_dim": 1.0}))
    assert plain.scale == 24**-0.5
    assert scaled.scale == pytest.approx(24**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert of(3, rope_scaling={**YARN, "mscale_all_dim": 1.0}).max_model_len == 40 * 4096


@pytest.mark.parametrize(("version", "default"), [(2, 0), (3, 3)])
def test_the_first_layers_are_dense(version: int, default: int) -> None:
    for config, count in ((of(version), default), (of(version, first_k_dense_replace=2), 2)):
        assert [isinstance(layer.mlp, ExpertsSpec) for layer in config.layers] == [each >= count for each in range(4)]


def test_kimi_k2_is_a_deepseek_v3() -> None:
    more = {"model_type": "kimi_k2", "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}
    assert of(3, **more) == of(3)


@pytest.mark.parametrize(
    ("version", "more", "message"),
    [
        (2, {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        (2, {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; it must be an even number"),
        (2, {"attention_bias": True, "q_lora_rank": None}, "attention_bias is True; it must be false where"),
        (2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; it must be one of greedy, group_limited_greedy"),
        (2, {"norm_topk_prob": True}, "norm_topk_prob is True; it must be false"),
        (3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'; it must be sigmoid"),
        (3, {"topk_method": "greedy"}, "topk_method is 'greedy'; it must be noaux_tc"),
        (3, {"moe_layer_freq": 2}, "moe_layer_freq is 2; it must be 1"),
        (3, {"n_group": 3}, "n_group is 3; it must be a divisor"),
    ],
)
def test_what_cannot_be_computed_is_named(version: int, more: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        of(version, **more)


def test_windows_stand_beside_a_latent_group() -> None:
    latent, window = KvGroup(KvKind.LATENT, (0,), "bfloat16", 1, 40), KvGroup(KvKind.WINDOW, (1,), "bfloat16", 1, 40, 8)
    assert len(PartialGroups(KvSpec(bytes(16), 16, (latent, window)), 16, 64)) == 1
    with pytest.raises(Unsupported, match="KV groups window, latent: the first must be full or latent"):
        PartialGroups(KvSpec(bytes(16), 16, (window, latent)), 16, 64)

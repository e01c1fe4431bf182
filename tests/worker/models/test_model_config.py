"""config.json becomes a ModelConfig, or an error with the file, the key and the allowed values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.rpc.errors import InvalidRequest
from baton.worker.models.presets import PRESETS
from baton.worker.models.registry import load_config, parse_config
from baton.worker.models.supported.cuda_limits import misfit

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"]}
GPT2 = {"architectures": ["GPT2LMHeadModel"]}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"]}
GRANITE4 = {"architectures": ["GraniteMoeHybridForCausalLM"]}
NEMOTRON_H = {"architectures": ["NemotronHForCausalLM"]}
UNGATED = {
    "hybrid_override_pattern": "ME*E",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
}
KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 40,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
KDA = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "head_dim": 20, "num_heads": 3, "short_conv_kernel_size": 3}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_missing_keys_have_the_architectures_defaults() -> None:
    config = parse_config(SMALL, "config.json")
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    (rope,) = config.ropes
    assert rope.kind == "default"
    assert config.windows == (0, 0, 0, 0)
    attention, mlp = config.layers[0].attention, config.layers[0].mlp
    assert not any((config.tie_embeddings, attention.qkv_bias, attention.o_bias, mlp.bias))
    assert attention.qk_norm == "none"


def test_architectures_differ_as_data() -> None:
    def of(name: str, **more: Any) -> Any:
        return parse_config({**SMALL, "architectures": [name], "sliding_window": 32, **more}, "config.json")

    assert of("MistralForCausalLM").windows == (32, 32, 32, 32)
    assert of("MistralForCausalLM", sliding_window=None).windows == (0, 0, 0, 0)
    assert of("LlamaForCausalLM").windows == (0, 0, 0, 0)
    qwen2 = of("Qwen2ForCausalLM", use_sliding_window=True, max_window_layers=3)
    attention = qwen2.layers[0].attention
    assert (attention.qkv_bias, attention.o_bias, qwen2.windows) == (True, False, (0, 0, 0, 32))
    assert of("Qwen2ForCausalLM").windows == (0, 0, 0, 0)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert of("Qwen3ForCausalLM", use_sliding_window=True, layer_types=kinds).windows == (32, 0, 32, 0)
    assert of("Qwen3ForCausalLM").layers[0].attention.qk_norm == "head"
    assert of("LlamaForCausalLM", attention_bias=True, mlp_bias=True).layers[0].mlp.bias


def test_code_that_a_known_architecture_does_not_need_is_left_where_it_is() -> None:
    config = parse_config({**SMALL, **PHI3, "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3"}}, "config.json")
    assert config.architecture == "Phi3ForCausalLM"


def test_model_type_replaces_missing_architectures() -> None:
    raw = {key: value for key, value in SMALL.items() if key != "architectures"}
    assert parse_config({**raw, "model_type": "qwen3"}, "config.json").architecture == "Qwen3ForCausalLM"


def test_rope_is_read_in_the_old_and_the_new_spelling() -> None:
    old = parse_config({**SMALL, "rope_theta": 5e5, "rope_scaling": LLAMA3}, "config.json")
    new = parse_config({**SMALL, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, "config.json")
    assert old.ropes == new.ropes
    (rope,) = old.ropes
    assert (rope.kind, rope.theta, rope.original_length) == ("llama3", 5e5, 8192)
    oldest = parse_config({**SMALL, "rope_scaling": {"type": "linear", "factor": 2.0}}, "config.json")
    assert [(rope.kind, rope.factor) for rope in oldest.ropes] == [("linear", 2.0)]


def test_kimi_linear_is_read_as_checkpoints_and_as_transformers_write_it() -> None:
    """The former number layers from 1, in an object of their own."""
    written = {"linear_head_dim": 20, "linear_num_heads": 3, "linear_conv_kernel_dim": 3, "model_max_length": 77}
    raw = {**SMALL, **KIMI_LINEAR, **written}
    config = parse_config(raw, "config.json")
    left_out = ("layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    bare = {key: value for key, value in raw.items() if key not in left_out}
    assert parse_config({**bare, "linear_attn_config": KDA}, "config.json") == config
    assert config.state_layers == (0, 2)
    assert config.max_model_len == 77
    assert misfit(config) == (
        "executor=cuda has no layers with states like those of KimiLinearForCausalLM yet; use executor=cpu"
    )


def test_yarn_stretches_the_models_length() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    config = parse_config({**SMALL, "max_position_embeddings": 1000, "rope_scaling": scaling}, "config.json")
    assert config.max_model_len == 4000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, r"architectures is \['BloomForCausalLM'\], of which Baton has no"),
        (
            {"architectures": None, "model_type": "bloom"},
            r"model_type is 'bloom', of which Baton has no family; .*baton models",
        ),
        ({"hidden_size": None}, r"hidden_size is missing; it must be a positive integer"),
        ({"hidden_size": "64"}, r"hidden_size is '64'; it must be a positive integer"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0; it must be a positive integer"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads is 3; it must be a divisor of num_attention_heads \(4\)"),
        ({"head_dim": 15}, r"head_dim is 15; it must be an even number"),
        ({"rms_norm_eps": -1}, r"rms_norm_eps is -1; it must be a number above 0"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings is 'yes'; it must be true or false"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'; it must be silu"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config is .*only unquantized weights"),
        ({"eos_token_id": "2"}, r"eos_token_id is '2'; it must be an integer or a list"),
        (
            {"rope_scaling": {"rope_type": "proportional"}},
            r"rope_type is 'proportional'; it must be one of default, lin",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"short_factor is None; it must be a list of 8 numbers above 0"),
        ({"rope_scaling": {**LONG, "long_factor": [1.0] * 7}}, r"long_factor is .*must be a list of 8 numbers above 0"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling: factor is missing"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, r"high_freq_factor is 0.5; it must be above"),
        ({"rope_scaling": 3}, r"rope_scaling is 3; it must be an object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0.5; it must be 1"),
        ({**PHI3, "partial_rotary_factor": 0.7}, r"partial_rotary_factor is 0.7; .* even number of head_dim \(16\)"),
        ({**PHI3, "partial_rotary_factor": 1.5}, r"partial_rotary_factor is 1.5; .* even number of head_dim \(16\)"),
        ({"rope_parameters": {"full_attention": {}}}, r"full_attention is {}; it must be absent"),
        ({**GPT2, "activation_function": "tanh"}, r"activation_function is 'tanh'; it must be one of silu, gelu"),
        ({**GPT2, "add_cross_attention": True}, r"add_cross_attention is True; it must be false"),
        ({**GEMMA2, "use_bidirectional_attention": True}, r"use_bidirectional_attention is True; it must be false"),
        ({**GEMMA2, "attn_logit_softcapping": 0}, r"attn_logit_softcapping is 0; it must be a number above 0"),
        ({**SMOLLM3, "no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]; it must be a list of 4 x 0 or 1"),
        ({**GRANITE4, "layer_types": ["attention", "conv"] * 2}, r"layer_types is .* must be a list of 4 x attention"),
        (
            {**GRANITE4, "layer_types": ["attention", "mamba"] * 2, "mamba_n_heads": 4, "time_step_limit": [0.5, 0.1]},
            r"time_step_limit is \[0.5, 0.1\]; it must be a list of the least and the largest step size",
        ),
        ({**NEMOTRON_H, **UNGATED, "moe_latent_size": 8}, r"moe_latent_size is 8; it must be null"),
        ({**NEMOTRON_H, **UNGATED, "n_shared_experts": 2}, r"n_shared_experts is 2; it must be 1"),
        ({**NEMOTRON_H, **UNGATED, "mlp_hidden_act": "silu"}, r"mlp_hidden_act is 'silu'; it must be relu2 where"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "M*E-"}, r"hybrid_override_pattern is 'M\*E-'; .*experts follow"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "M-M-"}, r"hybrid_override_pattern is 'M-M-'; .*with attention"),
        (
            {**NEMOTRON_H, "hybrid_override_pattern": "-M*-"},
            r"hybrid_override_pattern is '-M\*-'; .*MLPs and experts follow",
        ),
        (
            {**NEMOTRON_H, "layers_block_type": ["mamba", "conv"]},
            r"layers_block_type is .*mamba, attention, mlp and moe",
        ),
        (
            {**NEMOTRON_H, "hybrid_override_pattern": None},
            r"hybrid_override_pattern is None; it must be .*pattern of M",
        ),
        ({**KIMI_LINEAR, "mla_use_nope": False}, r"mla_use_nope is False; it must be true"),
        ({**KIMI_LINEAR, "num_expert_group": 3}, r"num_expert_group is 3; it must be a divisor of .*\(8\)"),
        ({**KIMI_LINEAR, "linear_conv_kernel_dim": 1}, r"linear_conv_kernel_dim is 1; it must be at least 2"),
        ({**KIMI_LINEAR, "layer_types": None}, r"layer_types is None; it must be a list of 4 x linear_attention or"),
        (
            {**KIMI_LINEAR, "layer_types": None, "linear_attn_config": {**KDA, "kda_layers": [0, 2]}},
            r"linear_attn_config: full_attn_layers is \[2, 4\]; .*each of the layers 1 to 4 once",
        ),
        (
            {**GRANITE4, "layer_types": ["attention"] * 4, "num_local_experts": 1},
            r"num_experts_per_tok is 2; it must be at most num_local_experts \(1\)",
        ),
        (
            {**PHI3, "rope_scaling": {"type": "su", "short_factor": [0] * 8}},
            r"short_factor is .*list of 8 numbers above 0",
        ),
        ({"auto_map": {"AutoModel": "a.B"}}, r"auto_map is .* no code of a model folder is run"),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, r"logits_scaling is 0; it must be a number"),
    ],
)
def test_a_wrong_value_is_named_with_the_allowed_values(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^model/config.json: .*{message}") as caught:
        parse_config({**SMALL, **change}, "model/config.json")
    assert caught.value.field == "model"


def test_layer_types_that_do_not_fit_are_refused() -> None:
    raw = {**SMALL, "architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": ["full_attention"]}
    with pytest.raises(InvalidRequest, match="a list of 4 x full_attention or sliding_attention"):
        parse_config(raw, "config.json")


def test_the_generation_configs_end_of_sequence_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "eos_token_id": 2}))
    assert load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_config(tmp_path).eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "config.json is missing: a Hugging Face"), ("{", "is not JSON"), ("[]", "holds a list; it must hold an")],
)
def test_a_broken_config_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidRequest, match=f"{tmp_path}/config.json.*{message}|{message}"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_configs(name: str) -> None:
    assert parse_config(PRESETS[name], name).num_layers > 0


def test_the_text_part_of_a_config_with_images_is_read() -> None:
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "sliding_window": 8}
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    config = parse_config(raw, "config.json")
    assert (config.vocab_size, config.num_q_heads, config.head_dim, config.tie_embeddings) == (262208, 8, 256, True)
    assert config.windows == (8, 8, 8, 8, 8, 0)
    assert config.eos_token_ids == (1, 106)
    raw = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {**text, "model_type": "mamba"}}
    with pytest.raises(InvalidRequest, match=r"text_config: model_type is 'mamba'; it must be one of mistral"):
        parse_config(raw, "config.json")

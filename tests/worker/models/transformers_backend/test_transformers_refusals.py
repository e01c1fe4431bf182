"""What a model of Transformers cannot do over Baton's cache is refused when its config is read, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from support.engine.tiny_transformers_models import tiny_config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from baton.rpc.errors import InvalidRequest
from baton.worker.models.registry import parse_config
from baton.worker.models.transformers_backend import installed

SOURCE = "model/config.json"
SMALL: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ARCEE = {**SMALL, "architectures": ["ArceeForCausalLM"]}
MLA = {
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "first_k_dense_replace": 3,
    "num_key_value_heads": 4,
}


def read(raw: Mapping[str, Any], implementation: str = "transformers") -> str:
    return parse_config(raw, SOURCE, implementation).implementation


@pytest.mark.parametrize(
    ("model_type", "more", "message"),
    [
        ("bloom", {}, "its attention does not use Transformers' attention interface (ALiBi, "),
        ("falcon", {}, "its attention does not use Transformers' attention interface"),
        ("mamba", {}, "backbone.layers.0.mixer.conv1d: a convolution over tokens (linear_attention)"),
        ("qwen3_next", {}, "model.layers.0.linear_attn.conv1d: a convolution over tokens"),
        ("minimax", {}, "layers (full_attention, linear_attention): layers with recurrent state"),
        ("diffllama", {}, "6 calls of attention in 3 layers: layers with recurrent state, or that attend twice"),
        ("deepseek_v3", MLA, "model.layers.0.self_attn: keys of 24 and values of 16 elements (latent attention)"),
        ("doge", {}, "model.layers.0.self_attn: its mask is neither causal nor a sliding window"),
        ("llama4_text", {}, "model.layers.0.self_attn: its mask is neither causal nor a sliding window"),
        ("bert", {}, "bert.encoder.layer.0.attention.self: its mask is neither causal nor a sliding window"),
        ("deepseek_v32", MLA, "model.layers.0.self_attn: attention gets indices, which Baton's does not take"),
        ("gemma4_text", {}, "its heads have another shape than those of model.layers.0.self_attn"),
        ("jetmoe", {}, "its forward pass needs values on the host"),
        ("marian", {}, "it takes no position_ids (its positions follow from the whole batch)"),
    ],
)
def test_what_attention_cannot_do_is_refused(model_type: str, more: dict[str, Any], message: str) -> None:
    raw = {
        **tiny_config(model_type, more).to_dict(),
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        "is_encoder_decoder": False,
    }
    with pytest.raises(InvalidRequest, match=f"^{SOURCE}: .*{re.escape(message)}") as caught:
        read(raw)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {**ARCEE, "is_encoder_decoder": True},
            "ArceeForCausalLM cannot run with model_impl=transformers: it has an en",
        ),
        ({**ARCEE, "quantization_config": {"bits": 4}}, "quantization_config is .*only unquantized weights"),
        ({**ARCEE, "num_attention_heads": 5}, "Transformers refuses it for ArceeForCausalLM: .*not a multiple"),
        ({**ARCEE, "hidden_act": "none"}, "Transformers makes no ArceeForCausalLM: KeyError"),
        ({**ARCEE, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE of the kind dynamic depends on"),
        (
            {**SMALL, "architectures": ["ArceForCausalLM"]},
            "no causal language model of this name; .* ArceeForCausalLM",
        ),
        ({**SMALL, "architectures": ["Gemma3ForConditionalGeneration"]}, "it has more parts than a language model"),
    ],
)
def test_configs_that_cannot_run_are_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{SOURCE}: .*{message}"):
        read(raw)


def test_auto_takes_a_family_where_there_is_one() -> None:
    llama = {**SMALL, "architectures": ["LlamaForCausalLM"]}
    assert [read(llama, name) for name in ("auto", "baton")] == ["Baton", "Baton"]
    assert read(llama, "transformers").startswith("Transformers 5.")
    assert read(ARCEE, "auto").startswith("Transformers 5.")
    assert read({**SMALL, "model_type": "arcee"}, "auto").startswith("Transformers 5.")


def test_code_of_a_folder_is_never_run() -> None:
    remote = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    assert read({**ARCEE, **remote}).startswith("Transformers 5.")
    with pytest.raises(InvalidRequest, match="OwnForCausalLM cannot run with model_impl=transformers"):
        read({**SMALL, "architectures": ["OwnForCausalLM"], **remote})


@pytest.mark.parametrize(
    ("name", "implementation", "hint"),
    [
        ("ArceeForCausalLM", "baton", "; --model-impl transformers may run it; baton models"),
        (
            "ArceForCausalLM",
            "auto",
            "; the nearest name is ArceeForCausalLM, which --model-impl transformers may run; ",
        ),
        ("LlamaForCausalML", "auto", "; the nearest name is LlamaForCausalLM; "),
        ("X", "auto", "; baton models lists those that there are$"),
        ("BloomForCausalLM", "auto", "; Transformers' own is refused: .*attention interface"),
    ],
)
def test_an_unknown_architecture_is_named_with_the_nearest(name: str, implementation: str, hint: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"architectures is \['{name}'\], of which Baton has no family{hint}"):
        read({**SMALL, "architectures": [name]}, implementation)


def test_without_transformers_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_version", lambda: None)
    monkeypatch.setattr(installed, "_by_model_type", dict)
    installed.causal_architectures.cache_clear()
    try:
        with pytest.raises(InvalidRequest, match="needs Transformers 5 or newer: pip install") as caught:
            read(ARCEE)
        assert caught.value.field == "model_impl"
        with pytest.raises(InvalidRequest, match=r"Transformers \(pip install .*\) runs more; baton models"):
            read(ARCEE, "auto")
    finally:
        installed.causal_architectures.cache_clear()

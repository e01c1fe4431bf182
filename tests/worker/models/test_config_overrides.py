"""--hf-overrides: merged into config.json at any depth; wrong keys, types and texts are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.tiny_models import make_model

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.executors.factory import sim_settings
from baton.worker.models.registry import load_config, parse_config
from baton.worker.weights.loading import ModelOptions, load_model, read_config

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "_name_or_path": "somewhere",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def refused(overrides: dict[str, Any], raw: dict[str, Any] = SMALL) -> str:
    with pytest.raises(InvalidRequest) as error:
        parse_config(raw, "config.json", overrides=overrides)
    return error.value.message


def test_values_replace_those_of_the_config() -> None:
    config = parse_config(SMALL, "config.json", overrides={"rope_theta": 5e5, "tie_word_embeddings": True})
    assert (config.ropes[0].theta, config.tie_embeddings) == (5e5, True)


def test_keys_that_the_config_lacks_may_be_added_if_they_are_read() -> None:
    config = parse_config(SMALL, "config.json", overrides={"max_position_embeddings": 8192, "rope_scaling": YARN})
    assert config == parse_config({**SMALL, "max_position_embeddings": 8192, "rope_scaling": YARN}, "config.json")
    # The default of a key is a value like any other.
    assert parse_config(SMALL, "config.json", overrides={"attention_bias": False}) == parse_config(SMALL, "config.json")


def test_objects_are_merged() -> None:
    raw = {**SMALL, "max_position_embeddings": 8192, "rope_scaling": YARN}
    merged = parse_config(raw, "config.json", overrides={"rope_scaling": {"factor": 2.0}})
    assert merged == parse_config({**raw, "rope_scaling": {**YARN, "factor": 2.0}}, "config.json")


def test_null_leaves_a_key_out() -> None:
    raw = {**SMALL, "rope_scaling": YARN, "quantization_config": {"bits": 4}}
    config = parse_config(raw, "config.json", overrides={"rope_scaling": None, "quantization_config": None})
    assert config == parse_config(SMALL, "config.json")


def test_the_part_of_a_text_model_can_be_overridden(tmp_path: Path) -> None:
    make_model("gemma3", tmp_path)
    config = load_config(tmp_path, overrides={"text_config": {"rms_norm_eps": 0.5, "final_logit_softcapping": 3.0}})
    assert (config.norm.eps, config.logits_soft_cap) == (0.5, 3.0)
    with pytest.raises(
        InvalidRequest, match=r"no key text_config\.rms_norm_ep, .*did you mean text_config\.rms_norm_eps\?"
    ):
        load_config(tmp_path, overrides={"text_config": {"rms_norm_ep": 0.5}})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("rop_theta", "rope_theta"),
        ("tie_word_embedding", "tie_word_embeddings"),
        ("max_positions_embeddings", "max_position_embeddings"),
        ("rope_scalling", "rope_scaling"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(key: str, nearest: str) -> None:
    assert refused({key: 1}) == (
        f"hf_overrides: config.json has no key {key}, and LlamaForCausalLM reads none of that name; "
        f"did you mean {nearest}?"
    )


def test_an_unknown_key_that_resembles_none_is_refused() -> None:
    assert refused({"zzz": 1}).endswith("has no key zzz, and LlamaForCausalLM reads none of that name")
    assert "has no key rope_scaling.facter, " in refused({"rope_scaling": {**YARN, "facter": 1}})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_theta": "1e6"}, 'rope_theta is "1e6", a string; in config.json it is 10000.0: give a number'),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, a number; in config.json it is false: give a boolean"),
        ({"architectures": "Qwen2ForCausalLM"}, 'architectures is "Qwen2ForCausalLM", a string; .* give a list'),
        ({"vocab_size": {"a": 1}}, 'vocab_size is {"a": 1}, an object; in config.json it is 100: give a number'),
    ],
)
def test_a_value_of_another_type_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"hf_overrides: {message}, or null to leave it out"):
        parse_config(SMALL, "config.json", overrides=overrides)


def test_a_value_that_the_architecture_refuses_names_where_it_is_from() -> None:
    assert refused({"num_key_value_heads": 3}).startswith("config.json with hf_overrides: num_key_value_heads is 3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is a list; it must be an object with keys of config.json"),
        ('"rope"', "is a string; it must be an object"),
    ],
)
def test_other_texts_than_objects_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        WorkerConfig(hf_overrides=text).validate()
    assert error.value.field == "hf_overrides"


def test_the_digest_follows_overrides_that_change_kv(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    plain, same, other = (
        load_model(str(tmp_path), "auto", torch.float32, options=ModelOptions(overrides=overrides)).digest
        for overrides in ({}, {"bos_token_id": 7}, {"rms_norm_eps": 0.1})
    )
    assert plain == same != other


def test_presets_and_the_simulator_follow_overrides(tmp_path: Path) -> None:
    options = ModelOptions(overrides={"num_hidden_layers": 2})
    assert read_config("llama-3.1-8b", "dummy", options).num_layers == 2
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "max_position_embeddings": 4096}))
    config = WorkerConfig(model=str(tmp_path), executor="sim", hf_overrides='{"max_position_embeddings": 512}')
    assert sim_settings(config).max_model_len == 512

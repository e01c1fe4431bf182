"""Checkpoints whose tensors do not fit config.json: missing, misnamed, misshapen; and heads, tied and untied."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.tiny_models import MODELS, make_model
from transformers import AutoModelForCausalLM

from baton.rpc.errors import InvalidRequest
from baton.worker.models.config import ModelConfig
from baton.worker.models.registry import FAMILIES, load_config
from baton.worker.weights.loading import load_model, read_config

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("llama", tmp_path)
    return tmp_path


def set_tied(folder: Path, tied: bool) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))


def names_of(folder: Path) -> tuple[str, str]:
    """Returns the names of embedding and head as the checkpoint has them, or ours for one that it lacks."""
    config: ModelConfig = load_config(folder)
    there = load_file(folder / WEIGHTS)

    def name(stem: str) -> str:
        return next((one for one in config.names.spellings(f"{stem}.weight") if one in there), f"{stem}.weight")

    return name(config.names.embed), name(config.names.lm_head)


def test_a_misnamed_tensor_is_reported_with_the_nearest_name(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.1.self_attn.qproj.weight"] = tensors.pop(Q_PROJ)
    save_file(tensors, folder / WEIGHTS)
    message = rf"no file holds the tensor {Q_PROJ} \[64, 64\]; the nearest name there is model.layers.1.self_attn.qproj"
    with pytest.raises(InvalidRequest, match=message):
        load_model(str(folder), "auto", torch.float32)


def test_all_problems_are_counted_and_the_first_are_named(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    for layer in range(3):
        del tensors[f"model.layers.{layer}.mlp.up_proj.weight"], tensors[f"model.layers.{layer}.mlp.down_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(InvalidRequest) as error:
        load_model(str(folder), "auto", torch.float32)
    assert "model.norm.weight has shape [7]; by config.json it must be [64]" in error.value.message
    assert "no file holds the tensor model.layers.0.mlp.up_proj.weight" in error.value.message
    assert error.value.message.endswith("; and 3 more tensors")


def test_a_checkpoint_that_does_not_fit_is_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, "model.norm.weight": torch.zeros(7)}, folder / WEIGHTS)
    monkeypatch.setattr("baton.worker.weights.filling.TensorStream.run", lambda *_: pytest.fail("tensors were read"))
    with pytest.raises(InvalidRequest, match=r"model\.norm\.weight has shape"):
        load_model(str(folder), "auto", torch.float32)


BY_FAMILY = {}  # a tiny model of each architecture
for _name in MODELS:
    BY_FAMILY.setdefault(_name.partition("-")[0], _name)


@pytest.mark.parametrize("name", BY_FAMILY.values())
def test_heads_of_each_family_follow_the_config_and_the_checkpoint(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    embed, head = names_of(tmp_path)
    own_head = tensors[embed].flip(0).contiguous()

    set_tied(tmp_path, False)
    save_file({**tensors, head: own_head}, tmp_path / WEIGHTS)
    assert torch.equal(load_model(str(tmp_path), "auto", torch.float32).weights.lm_head.params["weight"], own_head)

    save_file({key: value for key, value in tensors.items() if key != head}, tmp_path / WEIGHTS)
    with pytest.raises(InvalidRequest, match=rf"no file holds the tensor {load_config(tmp_path).names.lm_head}.weight"):
        load_model(str(tmp_path), "auto", torch.float32)

    set_tied(tmp_path, True)
    weights = load_model(str(tmp_path), "auto", torch.float32).weights
    assert weights.lm_head.params["weight"] is weights.embed

    save_file({**tensors, head: tensors[embed].clone()}, tmp_path / WEIGHTS)
    weights = load_model(str(tmp_path), "auto", torch.float32).weights
    assert weights.lm_head.params["weight"] is weights.embed


def test_the_heads_of_every_family_are_tested() -> None:
    assert {family.model_type for family in FAMILIES.values() if family.generates} <= BY_FAMILY.keys()


def test_a_tied_config_with_another_head_in_the_checkpoint_is_untied_as_transformers_does(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = load_file(folder / WEIGHTS)
    set_tied(folder, True)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, folder / WEIGHTS)
    with caplog.at_level(logging.WARNING):
        loaded = load_model(str(folder), "auto", torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.weights.lm_head.params["weight"], theirs.lm_head.weight)
    assert torch.equal(loaded.weights.embed, theirs.model.embed_tokens.weight)
    assert "the head is tied to the embedding, but the checkpoint has another one" in caplog.text
    assert read_config(str(folder), "auto") == loaded.config


def test_a_tied_model_stored_by_its_head_is_loaded_as_transformers_does(folder: Path) -> None:
    set_tied(folder, True)
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / WEIGHTS)
    weights = load_model(str(folder), "auto", torch.float32).weights
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(weights.embed, theirs.model.embed_tokens.weight)
    assert weights.lm_head.params["weight"] is weights.embed

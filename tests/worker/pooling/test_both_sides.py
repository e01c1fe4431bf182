"""Causal architectures as embedders: those with `is_causal: false` see both sides, as Transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine.pooled_runs import assert_same, make_pooling_engine, normalized, run_pooled
from support.engine.pooling_models import hidden_of, make_embedder, shape_with
from support.engine.tiny_models import prompts
from transformers import Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from baton.rpc.errors import InvalidRequest
from baton.worker.core import PoolingParams, PoolingTask
from baton.worker.models.registry import parse_config

_EMBED = PoolingParams(PoolingTask.EMBED, reads_all=True)
_KINDS = {"llama": LlamaConfig, "gte-qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}


def config_of(kind: type[Any], **more: Any) -> Any:
    if kind is MistralConfig:
        more["sliding_window"] = None
    return kind(**shape_with(**more))


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
@pytest.mark.parametrize("name", _KINDS)
def test_embeddings_that_see_both_sides_equal_transformers(tmp_path: Path, name: str, mode: str) -> None:
    model = make_embedder(config_of(_KINDS[name], is_causal=False), tmp_path, [mode])
    texts = prompts(7, 60)
    engine = make_pooling_engine(tmp_path)
    for text, found in zip(texts, run_pooled(engine, texts, _EMBED), strict=True):
        states = hidden_of(model, text)
        assert_same(found, normalized(states[-1] if mode == "lasttoken" else states.mean(0)))
    assert engine.count_blocks().num_blocks == 0


def test_the_first_token_depends_on_the_last_one_only_where_both_sides_are_seen(tmp_path: Path) -> None:
    text = prompts(1, 60)[0]
    other = [*text[:-1], text[-1] ^ 1]
    for is_causal in (True, False):
        folder = tmp_path / str(is_causal)
        make_embedder(config_of(LlamaConfig, is_causal=is_causal), folder, ["cls_token"])
        first, second = run_pooled(make_pooling_engine(folder, num_blocks=64), [text, other], _EMBED)
        assert bool(abs(first - second).max() < 1e-5) == is_causal


def test_e5_mistral_takes_the_last_token_of_causal_layers(tmp_path: Path) -> None:
    model = make_embedder(config_of(MistralConfig), tmp_path, ["lasttoken"])
    texts = prompts(5, 60)
    engine = make_pooling_engine(tmp_path, budget=24, num_blocks=200)
    found = run_pooled(engine, texts, PoolingParams(PoolingTask.EMBED))
    for text, vectors in zip(texts, found, strict=True):
        assert_same(vectors, normalized(hidden_of(model, text)[-1]))


def test_layers_that_need_an_order_are_refused() -> None:
    raw = Gemma2Config(**shape_with()).to_dict() | {"architectures": ["Gemma2Model"], "is_causal": False}
    with pytest.raises(InvalidRequest, match="is_causal is False; it must be true: layers of Gemma2ForCausalLM"):
        parse_config(raw, "config.json")


def test_an_override_makes_layers_see_both_sides() -> None:
    raw = config_of(Qwen2Config).to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    assert parse_config(raw, "config.json").cached
    config = parse_config(raw, "config.json", overrides={"is_causal": False})
    assert not config.cached
    assert config.default_pick == "mean"


def test_layers_by_transformers_that_see_both_sides_are_refused() -> None:
    raw = config_of(LlamaConfig).to_dict() | {"architectures": ["LlamaForCausalLM"], "is_causal": False}
    with pytest.raises(InvalidRequest, match="is_causal is False; it must be true"):
        parse_config(raw, "config.json", implementation="transformers")

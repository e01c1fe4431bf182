"""Reward models: two linears on a causal model, of a whole text or of each token; and classifiers with one class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.pooled_runs import make_pooling_engine, run_pooled
from support.engine.pooling_heads import write_reward_model
from support.engine.pooling_models import hidden_of, make_classifier, scores_of, shape_with
from transformers import LlamaConfig

from baton.rpc.errors import InvalidRequest
from baton.worker.core import PoolingParams, PoolingTask

TEXTS = [[5, 9, 11, 30], [7, 8], list(range(1, 40))]


@torch.inference_mode()
def test_a_reward_is_that_of_the_last_token(tmp_path: Path) -> None:
    model, head = write_reward_model(tmp_path, "Qwen2ForRewardModel", 1)
    engine = make_pooling_engine(tmp_path, budget=24)
    for text, found in zip(TEXTS, run_pooled(engine, TEXTS, PoolingParams(PoolingTask.CLASSIFY)), strict=True):
        np.testing.assert_allclose(found[0], head(hidden_of(model, text)[-1]).numpy(), rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def test_rewards_of_steps_are_chances_at_each_token(tmp_path: Path) -> None:
    model, head = write_reward_model(tmp_path, "Qwen2ForProcessRewardModel", 2)
    engine = make_pooling_engine(tmp_path, budget=24)
    params = PoolingParams(PoolingTask.TOKEN_CLASSIFY, reads_all=True)
    for text, found in zip(TEXTS, run_pooled(engine, TEXTS, params), strict=True):
        np.testing.assert_allclose(found, head(hidden_of(model, text)).softmax(-1).numpy(), atol=1e-4)


@pytest.mark.parametrize("activation", [True, False])
def test_a_classifier_with_one_class_rewards_a_text(tmp_path: Path, activation: bool) -> None:
    model = make_classifier(LlamaConfig(**shape_with(num_labels=1)), tmp_path)
    params = PoolingParams(PoolingTask.CLASSIFY, activation=activation)
    for text, found in zip(TEXTS, run_pooled(make_pooling_engine(tmp_path), TEXTS, params), strict=True):
        expected = scores_of(model, text)
        expected = expected.sigmoid() if activation else expected
        np.testing.assert_allclose(found[0], expected.numpy(), rtol=1e-3, atol=1e-4)


def test_remote_code_of_other_heads_is_refused(tmp_path: Path) -> None:
    write_reward_model(tmp_path, "Qwen2ForSequenceClassification", 1)
    with pytest.raises(InvalidRequest, match=r"auto_map .*must be absent"):
        make_pooling_engine(tmp_path)


@pytest.mark.parametrize("architecture", ["XLMRobertaModel", "XLMRobertaLoRA"])
def test_adapters_inside_the_weights_are_refused_with_what_would_do(tmp_path: Path, architecture: str) -> None:
    config: dict[str, Any] = {
        "architectures": [architecture], "model_type": "xlm-roberta",
        "auto_map": {"AutoModel": "modeling_lora.XLMRobertaLoRA"},
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100,
        "position_embedding_type": "rotary", "lora_adaptations": ["retrieval.query", "text-matching"], "lora_rank": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match=r"lora_adaptations .*jina-embeddings-v3-hf.*merge_and_unload"):
        make_pooling_engine(tmp_path)

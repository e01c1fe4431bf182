"""Heads of late interaction and of rewards on a GPU: their vectors and scores are those of Transformers' states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.gpu_pooling import LEAST_COSINES, MODELS, STD, states_of, texts_of, vectors_on_gpu
from support.engine.pooled_runs import normalized
from support.engine.pooling_heads import WIDTH, write_colbert, write_pylate, write_reward_model
from transformers import Qwen2Config

from baton.worker.core import PoolingParams, PoolingTask

pytestmark = pytest.mark.gpu

TEXTS = texts_of([1, 2, 16, 17, 64, 65, 129, 300])
TOKENS = PoolingParams(PoolingTask.TOKEN_EMBED, reads_all=True)
REWARDED: dict[str, Any] = {
    "vocab_size": 2000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1100, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(("write", "name"), [(write_colbert, "bert-64"), (write_pylate, "modernbert-64")])
def test_vectors_of_tokens_are_those_of_transformers(write: Callable[..., Any], name: str, tmp_path: Path) -> None:
    model, linear = write(tmp_path, MODELS[name](), STD)
    expected = [normalized(states_of(model, text) @ linear.T) for text in TEXTS]
    for dtype, least in LEAST_COSINES.items():
        for text, found, one in zip(TEXTS, vectors_on_gpu(tmp_path, TEXTS, TOKENS, dtype=dtype), expected, strict=True):
            assert found.shape == (len(text), WIDTH)
            assert float((found * one).sum(-1).min()) > least, dtype


def test_rewards_of_texts_and_of_steps_are_those_of_transformers(tmp_path: Path) -> None:
    params = PoolingParams(PoolingTask.CLASSIFY)
    model, head = write_reward_model(tmp_path, "Qwen2ForRewardModel", 1, Qwen2Config(**REWARDED), STD)
    expected = [_scores(head, states_of(model, text)[-1]) for text in TEXTS]
    for budget in (4096, 100):  # whole, and in chunks
        for found, one in zip(vectors_on_gpu(tmp_path, TEXTS, params, budget), expected, strict=True):
            np.testing.assert_allclose(found[0], one, rtol=2e-3, atol=2e-3)
    steps = tmp_path / "steps"
    model, head = write_reward_model(steps, "Qwen2ForProcessRewardModel", 2, Qwen2Config(**REWARDED), STD)
    by_token = PoolingParams(PoolingTask.TOKEN_CLASSIFY, reads_all=True)
    chances = [torch.softmax(torch.from_numpy(_scores(head, states_of(model, text))), -1).numpy() for text in TEXTS]
    for budget in (4096, 100):
        for found, one in zip(vectors_on_gpu(steps, TEXTS, by_token, budget), chances, strict=True):
            np.testing.assert_allclose(found, one, rtol=2e-3, atol=2e-3)


@torch.inference_mode()
def _scores(head: torch.nn.Module, states: torch.Tensor) -> np.ndarray:
    scores: np.ndarray = head(states).numpy()
    return scores

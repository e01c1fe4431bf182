"""Encoders, cross-encoders and causal embedders of real shapes on a GPU: their vectors are those of Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.gpu_pooling import (
    CAUSAL,
    EMBED,
    LEAST_COSINES,
    MODELS,
    ROWS,
    STD,
    least_cosine,
    states_of,
    texts_of,
    vectors_on_gpu,
)
from support.engine.pooled_runs import normalized, pooling_engine_over, run_pooled
from support.engine.pooling_models import make_classifier, make_embedder
from transformers import Qwen3Config

from baton.worker.config import WorkerConfig
from baton.worker.core import PoolingParams, PoolingTask
from baton.worker.executors.cuda.whole_executor import WholeExecutor
from baton.worker.executors.factory import make_executor

pytestmark = pytest.mark.gpu

RAGGED = texts_of([1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300, 512, 1000])


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_of_encoders_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_embedder(MODELS[name](), tmp_path, ["mean_tokens"], std=STD)
    expected = [normalized(states_of(model, text).mean(0)) for text in RAGGED]
    for dtype, least in LEAST_COSINES.items():
        assert least_cosine(vectors_on_gpu(tmp_path, RAGGED, dtype=dtype), expected) > least, dtype


@pytest.mark.parametrize("name", ["bert-64", "modernbert-64"])
def test_graphs_and_neighbours_change_no_embedding(name: str, tmp_path: Path) -> None:
    model = make_embedder(MODELS[name](), tmp_path, ["cls_token"], std=STD)
    short = texts_of([1, 3, 40, 60, 16, 90, 128, 400, 512], seed=1)
    expected = [normalized(states_of(model, text)[0]) for text in short]
    for budget in (4096, 512, 16):  # together, as graphs of several texts, and one at a time
        for graphs in (True, False):
            found = vectors_on_gpu(tmp_path, short, budget=budget, cuda_graphs=graphs)
            assert least_cosine(found, expected) > LEAST_COSINES["float32"], (budget, graphs)


def test_batch_invariant_embeddings_are_equal_bit_for_bit(tmp_path: Path) -> None:
    make_embedder(MODELS["bert-64"](), tmp_path, ["mean_tokens"], std=STD)
    options: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True}
    together = vectors_on_gpu(tmp_path, RAGGED, **options)
    alone = vectors_on_gpu(tmp_path, RAGGED, budget=16, **options)
    assert all(np.array_equal(one, other) for one, other in zip(together, alone, strict=True))


@torch.inference_mode()
def test_scores_of_classes_and_of_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    model = make_classifier(MODELS["bert-64"](), tmp_path, std=STD).cuda()
    params = [
        PoolingParams(PoolingTask.CLASSIFY, activation=False, second_text_start=len(text) // 2, reads_all=True)
        for text in RAGGED
    ]
    for text, found in zip(RAGGED, vectors_on_gpu(tmp_path, RAGGED, params), strict=True):
        ids = torch.tensor([text], device="cuda")
        types = (torch.arange(len(text), device="cuda") >= max(1, len(text) // 2)).long()[None]
        types = types if len(text) // 2 else torch.zeros_like(types)
        expected = model(ids, attention_mask=torch.ones_like(ids), token_type_ids=types).logits
        np.testing.assert_allclose(found, expected.cpu().numpy(), rtol=2e-3, atol=2e-3)
    tokens = make_classifier(MODELS["bert-64"](), tmp_path, by_token=True, std=STD).cuda()
    by_token = PoolingParams(PoolingTask.TOKEN_CLASSIFY, reads_all=True)
    for text, found in zip(RAGGED[:8], vectors_on_gpu(tmp_path, RAGGED[:8], by_token), strict=True):
        ids = torch.tensor([text], device="cuda")
        expected = tokens(ids, attention_mask=torch.ones_like(ids)).logits[0].softmax(-1)
        np.testing.assert_allclose(found, expected.cpu().numpy(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_causal_embedders_are_those_of_transformers_with_any_chunks(mode: str, tmp_path: Path) -> None:
    model = make_embedder(Qwen3Config(**CAUSAL), tmp_path, [mode], std=STD)
    picked = (lambda states: states[-1]) if mode == "lasttoken" else (lambda states: states.mean(0))
    expected = [normalized(picked(states_of(model, text))) for text in RAGGED]
    params = PoolingParams(PoolingTask.EMBED, reads_all=mode != "lasttoken")
    for budget in (4096, 100):
        found = vectors_on_gpu(tmp_path, RAGGED, params, budget)
        assert least_cosine(found, expected) > LEAST_COSINES["float32"]
        half = vectors_on_gpu(tmp_path, RAGGED, params, budget, dtype="bfloat16")
        assert least_cosine(half, expected) > LEAST_COSINES["bfloat16"]


def test_classes_of_causal_models_run(tmp_path: Path) -> None:
    model = make_classifier(Qwen3Config(**CAUSAL, pad_token_id=0), tmp_path, std=STD).cuda()
    params = PoolingParams(PoolingTask.CLASSIFY, activation=False)
    for text, found in zip(RAGGED, vectors_on_gpu(tmp_path, RAGGED, params), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([text], device="cuda")).logits
        np.testing.assert_allclose(found, expected.cpu().numpy(), rtol=5e-3, atol=5e-3)


def test_hundreds_of_texts_share_steps_and_survive_a_sleep(tmp_path: Path) -> None:
    model = make_embedder(MODELS["bert-32"](), tmp_path, ["mean_tokens"], std=STD)
    texts = texts_of([int(length) for length in np.random.default_rng(3).integers(1, 200, 600)])
    config = WorkerConfig(
        model=str(tmp_path), executor="cuda", dtype="float32", max_num_batched_tokens=8192, max_num_requests=ROWS
    )
    executor = make_executor(config)
    leader: Any = executor.leader
    assert isinstance(leader, WholeExecutor)
    expected = [normalized(states_of(model, text).mean(0)) for text in texts[:40]]
    for level in (0, 1, 2):
        if level:
            assert leader.sleep(level) > 0
            leader.wake(leader.read_weights(str(tmp_path)) if level == 2 else None)
        found = run_pooled(pooling_engine_over(executor, 8192, ROWS), texts, EMBED)
        assert len(found) == 600
        assert least_cosine(found[:40], expected) > LEAST_COSINES["float32"]
    executor.close()

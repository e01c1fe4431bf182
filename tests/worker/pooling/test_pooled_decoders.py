"""Causal models that pool: whatever the scheduler does, the vectors are those of Transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.engine.pooled_runs import assert_same, make_pooling_engine, normalized, run_pooled
from support.engine.pooling_models import NUM_LABELS, hidden_of, make_classifier, make_embedder, scores_of, shape_with
from support.engine.tiny_models import prompts
from transformers import Qwen3Config

from baton.rpc.errors import DataLoss, InvalidRequest, Unsupported
from baton.worker.core import (
    FinishReason,
    HeadKind,
    PoolingParams,
    PoolingTask,
    Request,
    SamplingParams,
    StopConditions,
)
from baton.worker.engine.engine import Engine

EMBED, CLASSIFY = PoolingParams(PoolingTask.EMBED), PoolingParams(PoolingTask.CLASSIFY)
TOKEN_EMBED = PoolingParams(PoolingTask.TOKEN_EMBED, reads_all=True)
CONFIG = Qwen3Config(**shape_with(num_labels=NUM_LABELS))


def make_engine(folder: Path, num_blocks: int = 200, budget: int = 512, rows: int = 16, **fields: object) -> Engine:
    return make_pooling_engine(folder, budget, rows, num_blocks=num_blocks, **fields)


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens", "cls_token", "max_tokens"])
def test_embeddings_in_chunks_and_after_prefix_hits_equal_transformers(tmp_path: Path, mode: str) -> None:
    model = make_embedder(CONFIG, tmp_path, [mode])
    reads_all = mode != "lasttoken"
    shared = prompts(1, 40)[0][:20]
    texts = [*prompts(6, 60), *([*shared, *text] for text in prompts(4, 30, seed=3))]
    engine = make_engine(tmp_path, budget=20)
    params = PoolingParams(PoolingTask.EMBED, reads_all=reads_all)
    for _ in range(2):
        for text, found in zip(texts, run_pooled(engine, texts, params), strict=True):
            states = hidden_of(model, text)
            picked = {
                "lasttoken": states[-1],
                "mean_tokens": states.mean(0),
                "cls_token": states[0],
                "max_tokens": states.amax(0),
            }
            assert_same(found, normalized(picked[mode]))
    assert (engine.counters().num_cached_tokens > 0) is not reads_all


def test_preempted_texts_have_the_same_embeddings(tmp_path: Path) -> None:
    model = make_embedder(CONFIG, tmp_path)
    texts = prompts(8, 60)
    for text, found in zip(
        texts, run_pooled(make_engine(tmp_path, num_blocks=10, budget=16), texts, EMBED), strict=True
    ):
        assert_same(found, normalized(hidden_of(model, text)[-1]))


def test_a_text_that_is_aborted_between_its_chunks_frees_its_row_and_blocks(tmp_path: Path) -> None:
    make_embedder(CONFIG, tmp_path)
    engine = make_engine(tmp_path, budget=20, rows=1)
    for name in ("running", "waiting"):
        request = Request(
            name, [7] * 60, 60, SamplingParams(), StopConditions(max_tokens=1), bytes(16), head=HeadKind.POOL,
            pooling=EMBED,
        )  # fmt: skip
        engine.submit(request)
    assert not engine.step().pooled
    assert engine.is_running("running")
    for name in ("running", "waiting"):
        engine.abort(name)
    finishes = [finish for _ in range(2) for finish in engine.step().finishes]
    assert [finish.reason for finish in finishes] == [FinishReason.ABORT] * 2
    assert not engine.has_work()
    assert engine.counters().num_steps == 1
    assert engine.count_blocks().num_held_blocks == 0
    assert run_pooled(engine, [[5, 6]], EMBED)[0].shape == (1, 64)


def test_parameters_of_requests_in_one_step(tmp_path: Path) -> None:
    model = make_embedder(CONFIG, tmp_path)
    text = prompts(1, 30)[0]
    each = [
        EMBED,
        PoolingParams(PoolingTask.EMBED, dimensions=16),
        PoolingParams(PoolingTask.EMBED, activation=False),
        TOKEN_EMBED,
    ]
    whole, cut, raw, tokens = run_pooled(make_engine(tmp_path, budget=50), [text] * 4, each)
    states = hidden_of(model, text)
    assert_same(whole, normalized(states[-1]))
    assert_same(cut, normalized(states[-1, :16]))
    assert_same(raw, states[-1].numpy())
    assert_same(tokens, normalized(states))


def test_scores_of_classes_equal_transformers(tmp_path: Path) -> None:
    model = make_classifier(CONFIG, tmp_path)
    texts = prompts(6, 50)
    engine = make_engine(tmp_path, budget=24)
    for text, found in zip(texts, run_pooled(engine, texts, CLASSIFY), strict=True):
        np.testing.assert_allclose(found[0], scores_of(model, text).softmax(-1).numpy(), atol=1e-4)
    raw = run_pooled(engine, texts[:1], PoolingParams(PoolingTask.CLASSIFY, activation=False))
    np.testing.assert_allclose(raw[0][0], scores_of(model, texts[0]).numpy(), rtol=1e-3, atol=1e-4)


def test_scores_of_tokens_equal_transformers(tmp_path: Path) -> None:
    model = make_classifier(CONFIG, tmp_path, by_token=True)
    texts = prompts(4, 50)
    params = PoolingParams(PoolingTask.TOKEN_CLASSIFY, reads_all=True)
    for text, found in zip(texts, run_pooled(make_engine(tmp_path, budget=24), texts, params), strict=True):
        np.testing.assert_allclose(found, scores_of(model, text).softmax(-1).numpy(), atol=1e-4)


def test_a_causal_model_is_converted_to_an_embedder(tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG).eval()
    model.save_pretrained(tmp_path)
    text = prompts(1, 30)[0]
    found = run_pooled(make_engine(tmp_path, convert="embed"), [text], EMBED)
    assert_same(found[0], normalized(hidden_of(model.model, text)[-1]))


def test_a_wrong_task_names_those_of_the_model(tmp_path: Path) -> None:
    make_embedder(CONFIG, tmp_path)
    engine = make_engine(tmp_path)
    with pytest.raises(Unsupported, match="no task classify; its tasks: embed, token_embed"):
        run_pooled(engine, [[1, 2]], CLASSIFY)
    generation = Request("g", [1, 2], 2, SamplingParams(), StopConditions(max_tokens=1), bytes(16))
    with pytest.raises(Unsupported, match="no head generate; its heads: pool"):
        engine.submit(generation)


def test_weights_with_nan_fail_the_request_and_not_the_engine(tmp_path: Path) -> None:
    model = make_embedder(CONFIG, tmp_path)
    with torch.no_grad():
        model.embed_tokens.weight[7] = float("nan")  # type: ignore[union-attr, index]
    model.save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    with pytest.raises(DataLoss, match="not finite"):
        run_pooled(engine, [[3, 7]], EMBED)
    assert run_pooled(engine, [[3, 4]], EMBED)[0].shape == (1, CONFIG.hidden_size)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", "[{}]", "list of objects with type"),
        ("modules.json", '[{"type": "sentence_transformers.models.LSTM"}]', "'LSTM' is not served"),
        ("1_Pooling/config.json", '{"word_embedding_dimension": 5}', "it must be 64"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}',
            "exactly one of",
        ),
        ("1_Pooling/config.json", '{"pooling_mode_weightedmean_tokens": true}', "exactly one of"),
    ],
)
def test_a_pooling_file_that_contradicts_the_model_is_named(
    tmp_path: Path, file: str, content: str, message: str
) -> None:
    make_embedder(CONFIG, tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(InvalidRequest, match=message) as refused:
        make_engine(tmp_path)
    assert file in str(refused.value)

"""Encoders: whoever shares a step, the vectors are those of Transformers, and no block is taken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.encoder_models import ENCODERS, NUM_LABELS
from support.engine.pooled_runs import assert_same, make_pooling_engine, normalized, run_pooled
from support.engine.pooling_models import make_classifier, make_embedder
from support.engine.tiny_models import prompts
from transformers import AutoModelForMaskedLM, PreTrainedModel

from baton.rpc.errors import DataLoss, InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.core import PoolingParams, PoolingTask
from baton.worker.executors.cpu.executor import CpuExecutor

EMBED = PoolingParams(PoolingTask.EMBED, reads_all=True)
CLASSIFY = PoolingParams(PoolingTask.CLASSIFY, reads_all=True)
EACH = pytest.mark.parametrize("name", ENCODERS)


def texts_of(count: int, longest: int = 80, seed: int = 0) -> list[list[int]]:
    """Texts of several lengths without the token of padding, which Roberta does not count."""
    return [[max(4, token) for token in text] for text in prompts(count, longest, seed=seed)]


@torch.inference_mode()
def output_of(model: PreTrainedModel, text: Sequence[int], second_start: int = 0) -> Any:
    more = {}
    if second_start:
        more["token_type_ids"] = (torch.arange(len(text)) >= second_start).long()[None]
    return model(torch.tensor([list(text)]), attention_mask=torch.ones(1, len(text)), **more)


@EACH
def test_embeddings_of_texts_in_one_step_equal_transformers(tmp_path: Path, name: str) -> None:
    model = make_embedder(ENCODERS[name].make(), tmp_path, ["mean_tokens"])
    texts = [*texts_of(7), [5], *([text[:20] for text in texts_of(3, seed=1)])]
    engine = make_pooling_engine(tmp_path)
    for text, found in zip(texts, run_pooled(engine, texts, EMBED), strict=True):
        assert_same(found, normalized(output_of(model, text).last_hidden_state[0].mean(0)))
    assert engine.counters().num_steps == 1
    assert engine.count_blocks().num_blocks == 0


@EACH
def test_scores_of_classes_equal_transformers(tmp_path: Path, name: str) -> None:
    encoder = ENCODERS[name]
    model = make_classifier(encoder.make(), tmp_path)
    texts = [text for text in texts_of(5) if len(text) > 8]
    starts = [0, *(len(text) // 2 for text in texts[1:])]
    each = [
        PoolingParams(PoolingTask.CLASSIFY, activation=False, second_text_start=start, reads_all=True)
        for start in starts
    ]
    for text, start, found in zip(texts, starts, run_pooled(make_pooling_engine(tmp_path), texts, each), strict=True):
        expected = output_of(model, text, start if encoder.has_types else 0).logits[0]
        np.testing.assert_allclose(found[0], expected.numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_scores_of_tokens_equal_transformers(tmp_path: Path, name: str) -> None:
    model = make_classifier(ENCODERS[name].make(), tmp_path, by_token=True)
    texts = texts_of(3)
    params = PoolingParams(PoolingTask.TOKEN_CLASSIFY, reads_all=True)
    for text, found in zip(texts, run_pooled(make_pooling_engine(tmp_path), texts, params), strict=True):
        np.testing.assert_allclose(found, output_of(model, text).logits[0].softmax(-1).numpy(), atol=1e-4)


def test_second_texts_change_the_scores_of_models_that_tell_them_apart(tmp_path: Path) -> None:
    make_classifier(ENCODERS["bert"].make(), tmp_path)
    text = texts_of(1)[0]
    each = [PoolingParams(PoolingTask.CLASSIFY, second_text_start=start, reads_all=True) for start in (0, 3, 0)]
    one, pair, again = run_pooled(make_pooling_engine(tmp_path), [text] * 3, each)
    np.testing.assert_allclose(one, again, atol=1e-6)
    assert np.abs(one - pair).max() > 1e-3


def test_a_text_longer_than_a_step_is_computed_whole_and_alone(tmp_path: Path) -> None:
    model = make_embedder(ENCODERS["modernbert"].make(), tmp_path, ["cls_token"])
    short, long = [5, 6, 7], [4 + index % 100 for index in range(90)]
    engine = make_pooling_engine(tmp_path, budget=16)
    texts = [short, long, short, short]
    for text, found in zip(texts, run_pooled(engine, texts, EMBED), strict=True):
        assert_same(found, normalized(output_of(model, text).last_hidden_state[0, 0]))
    assert engine.counters().num_steps == 3


def test_more_texts_than_rows_take_turns(tmp_path: Path) -> None:
    make_embedder(ENCODERS["bert"].make(), tmp_path, ["mean_tokens"])
    engine = make_pooling_engine(tmp_path, rows=2)
    assert len(run_pooled(engine, [[5, 6]] * 5, EMBED)) == 5
    assert engine.counters().num_steps == 3


def test_a_text_of_the_greatest_length_fits_and_one_token_more_does_not(tmp_path: Path) -> None:
    make_embedder(ENCODERS["roberta"].make(), tmp_path, ["mean_tokens"])
    engine = make_pooling_engine(tmp_path)
    most = 96 - 2  # positions begin behind that of padding
    assert engine.max_model_len == most
    assert run_pooled(engine, [[7] * most], EMBED)[0].shape == (1, 64)
    with pytest.raises(InvalidRequest, match="has 95 tokens; this worker takes at most 94"):
        run_pooled(engine, [[7] * (most + 1)], EMBED)


def test_a_masked_language_model_embeds_by_the_mean(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(ENCODERS["bert"].make()).eval()
    model.save_pretrained(tmp_path)
    text = texts_of(1)[0]
    found = run_pooled(make_pooling_engine(tmp_path), [text], EMBED)[0]
    assert_same(found, normalized(output_of(model.bert, text).last_hidden_state[0].mean(0)))


def test_weights_with_nan_fail_their_texts_alone(tmp_path: Path) -> None:
    model = make_embedder(ENCODERS["bert"].make(), tmp_path, ["mean_tokens"])
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[7] = float("nan")  # type: ignore[union-attr, index]
    model.save_pretrained(tmp_path)
    engine = make_pooling_engine(tmp_path)
    with pytest.raises(DataLoss, match="not finite"):
        run_pooled(engine, [[3, 7]], EMBED)
    assert run_pooled(engine, [[3, 4]], EMBED)[0].shape == (1, 64)


def test_names_of_old_checkpoints_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_embedder(ENCODERS["bert"].make(), tmp_path, ["mean_tokens"])
    old = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(old, tmp_path / "model.safetensors")
    text = texts_of(1)[0]
    found = run_pooled(make_pooling_engine(tmp_path), [text], EMBED)[0]
    assert_same(found, normalized(output_of(model, text).last_hidden_state[0].mean(0)))


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({}, {"convert": "none"}, "generates no tokens; convert must be"),
        ({}, {"host_cache_gb": 0.1}, "host_cache_gb=0.1: BertModel keeps no KV"),
        ({"position_embedding_type": "relative_key"}, {}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, {}, "is_decoder is True"),
        ({"hidden_act": "mish"}, {}, "hidden_act is 'mish'"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, fields: dict[str, Any], options: Any, message: str) -> None:
    make_embedder(ENCODERS["bert"].make(), tmp_path, ["mean_tokens"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(InvalidRequest, match=message):
        make_pooling_engine(tmp_path, **options)


def test_labels_name_the_classes(tmp_path: Path) -> None:
    make_classifier(ENCODERS["bert"].make(), tmp_path)
    pooler = CpuExecutor(WorkerConfig(model=str(tmp_path), threads=1, max_num_requests=1)).model.pooler
    assert pooler is not None
    assert (len(pooler.labels), pooler.takes_pairs) == (NUM_LABELS, True)

"""Encoders, embedders and classifiers on the CUDA executors, in Triton's interpreter, equal those of Transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.encoder_models import ENCODERS
from support.engine.interpreted_card import use_interpreted_card
from support.engine.pooled_runs import assert_same, make_pooling_engine, normalized, pooling_engine_over, run_pooled
from support.engine.pooling_models import hidden_of, make_classifier, make_embedder, shape_with
from transformers import Qwen3Config

from baton.worker.config import WorkerConfig
from baton.worker.core import PoolingParams, PoolingTask
from baton.worker.engine.engine import Engine
from baton.worker.executors.cuda.start import start_cuda_executor
from baton.worker.executors.cuda.steps import whole_graphs

pytestmark = pytest.mark.interpreted

LAYERS = {"modernbert": 2}  # with and without a window
EMBED = PoolingParams(PoolingTask.EMBED, reads_all=True)
TEXTS = [[7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [5], [30 + index for index in range(34)], [6, 6]]


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    use_interpreted_card(monkeypatch)


def engine_of(folder: Path, budget: int = 512, *, graphs: bool = False) -> Engine:
    config = WorkerConfig(
        model=str(folder), executor="cuda", dtype="float32", max_num_requests=4, num_blocks=32, cuda_graphs=graphs,
    )  # fmt: skip
    return pooling_engine_over(start_cuda_executor(config), budget, rows=4)


def assert_equal_on_cpus(folder: Path, texts: Sequence[Sequence[int]], params: Any, budget: int = 512) -> None:
    expected = run_pooled(make_pooling_engine(folder), texts, params)
    for found, other in zip(run_pooled(engine_of(folder, budget), texts, params), expected, strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_of_encoders_equal_transformers(tmp_path: Path, name: str) -> None:
    model = make_embedder(ENCODERS[name].make(num_hidden_layers=LAYERS.get(name, 1)), tmp_path, ["mean_tokens"])
    engine = engine_of(tmp_path)
    for text, found in zip(TEXTS, run_pooled(engine, TEXTS, EMBED), strict=True):
        assert_same(found, normalized(hidden_of(model, text).mean(0)))
    assert engine.counters().num_steps == 1
    assert engine.count_blocks().num_blocks == 0


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_scores_of_pairs_and_of_tokens_equal_those_of_cpus(tmp_path: Path, name: str) -> None:
    make_classifier(ENCODERS[name].make(num_hidden_layers=LAYERS.get(name, 1)), tmp_path)
    each = [
        PoolingParams(PoolingTask.CLASSIFY, second_text_start=4, reads_all=True),
        PoolingParams(PoolingTask.CLASSIFY, activation=False, reads_all=True),
        PoolingParams(PoolingTask.TOKEN_CLASSIFY, reads_all=True),
        PoolingParams(PoolingTask.TOKEN_CLASSIFY, activation=False, reads_all=True),
    ]
    assert_equal_on_cpus(tmp_path, TEXTS, each)


class Replayed:
    """A graph that launches again, into the memory of its first launch."""

    count = 0

    def __init__(self, launch: Callable[[], torch.Tensor]) -> None:
        self.launch = launch
        self.hidden = launch()

    def replay(self) -> None:
        Replayed.count += 1
        self.hidden.copy_(self.launch())


# Padding is computed on uninitialized memory.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_padding_of_graphs_changes_no_embedding(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(launch: Callable[[], torch.Tensor], pool: object, stream: object) -> tuple[Replayed, torch.Tensor]:
        graph = Replayed(launch)
        return graph, graph.hidden

    monkeypatch.setattr(whole_graphs, "capture", capture)
    monkeypatch.setattr(whole_graphs, "SIZES", (16, 32))
    monkeypatch.setattr(whole_graphs, "FEW_TOKENS", 16)  # so that both kinds of tiles are used
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(Replayed, "count", 0)
    model = make_embedder(ENCODERS[name].make(num_hidden_layers=LAYERS.get(name, 1)), tmp_path, ["mean_tokens"])
    engine = engine_of(tmp_path, budget=16, graphs=True)
    texts = [*TEXTS, [9] * 16, [4, 5, 6], [8, 9]]
    for text, found in zip(texts, run_pooled(engine, texts, EMBED), strict=True):
        assert_same(found, normalized(hidden_of(model, text).mean(0)))
    assert 1 < Replayed.count < engine.counters().num_steps, "the longest text has no graph"


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_causal_embedders_in_chunks_equal_transformers(tmp_path: Path, mode: str) -> None:
    model = make_embedder(Qwen3Config(**shape_with(num_hidden_layers=1)), tmp_path, [mode])
    picked = (lambda states: states[-1]) if mode == "lasttoken" else (lambda states: states.mean(0))
    params = PoolingParams(PoolingTask.EMBED, reads_all=mode != "lasttoken")
    for text, found in zip(TEXTS, run_pooled(engine_of(tmp_path, budget=20), TEXTS, params), strict=True):
        assert_same(found, normalized(picked(hidden_of(model, text))))


def test_embeddings_are_cut_and_tokens_of_causal_models_come_in_chunks(tmp_path: Path) -> None:
    make_embedder(Qwen3Config(**shape_with(num_hidden_layers=1)), tmp_path)
    each = [
        PoolingParams(PoolingTask.EMBED, dimensions=8),
        PoolingParams(PoolingTask.EMBED, activation=False),
        PoolingParams(PoolingTask.TOKEN_EMBED, dimensions=20, reads_all=True),
        PoolingParams(PoolingTask.TOKEN_EMBED, reads_all=True),
    ]
    assert_equal_on_cpus(tmp_path, TEXTS, each, budget=20)


def test_weights_are_freed_and_come_back(tmp_path: Path) -> None:
    make_embedder(ENCODERS["bert"].make(num_hidden_layers=1), tmp_path, ["mean_tokens"])
    engine = engine_of(tmp_path)
    before = run_pooled(engine, TEXTS[:1], EMBED)
    executor: Any = engine._executor
    executor.sleep(2)
    executor.wake(executor.read_weights(str(tmp_path)))
    np.testing.assert_array_equal(run_pooled(engine, TEXTS[:1], EMBED)[0], before[0])
    assert "whole_attention" in {choice.op for choice in executor.facts.kernels}
    assert torch.float32 is executor._dtype

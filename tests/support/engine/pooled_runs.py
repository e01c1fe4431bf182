"""Texts run through an engine for their vectors, and comparisons of these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.worker.config import WorkerConfig
from baton.worker.core import FinishReason, HeadKind, PoolingParams, Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.scheduling.settings import EngineSettings


def make_pooling_engine(folder: Path, budget: int = 512, rows: int = 16, **fields: Any) -> Engine:
    config = WorkerConfig(model=str(folder), threads=1, block_size=8, max_num_requests=rows, **fields)
    return pooling_engine_over(CpuExecutor(config), budget, rows)


def pooling_engine_over(executor: Executor, budget: int = 512, rows: int = 16) -> Engine:
    return Engine(executor, EngineSettings(max_num_requests=rows, max_num_batched_tokens=budget), epoch=1)


def run_pooled(
    engine: Engine, texts: Sequence[Sequence[int]], params: PoolingParams | Sequence[PoolingParams]
) -> list[np.ndarray]:
    """Returns the vectors of each text."""
    each = [params] * len(texts) if isinstance(params, PoolingParams) else list(params)
    requests = [
        Request(
            f"{index}", list(text), len(text), SamplingParams(), StopConditions(max_tokens=1), bytes(16),
            head=HeadKind.POOL, pooling=pooling,
        )
        for index, (text, pooling) in enumerate(zip(texts, each, strict=True))
    ]  # fmt: skip
    for request in requests:
        engine.submit(request)
    found: dict[str, np.ndarray] = {}
    for _ in range(2000):
        outputs = engine.step()
        found |= {request.request_id: vectors for request, vectors in outputs.pooled}
        if outputs.failures:
            raise outputs.failures[0].error
        assert all(finish.reason is FinishReason.STOP for finish in outputs.finishes)
        if len(found) == len(texts):
            engine.audit()
            return [found[request.request_id] for request in requests]
    raise AssertionError("the engine does not finish")


def normalized(vectors: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(vectors, dim=-1).numpy()


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Checks vectors by their cosines and their values."""
    expected = np.atleast_2d(expected)
    assert found.shape == expected.shape
    cosines = (found * expected).sum(-1) / np.linalg.norm(found, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert cosines.min() > 0.99999
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-4)

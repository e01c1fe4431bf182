"""Models with a vector of each token: ColBERT's own layout and PyLate's have the vectors of a plain computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine.encoder_models import ENCODERS
from support.engine.pooled_runs import assert_same, make_pooling_engine, normalized, run_pooled
from support.engine.pooling_heads import WIDTH, write_colbert, write_pylate
from support.engine.pooling_models import hidden_of

from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.config import WorkerConfig
from baton.worker.core import PoolingParams, PoolingTask
from baton.worker.executors.cpu.executor import CpuExecutor

TEXTS = [[5, 9, 11, 30], [7, 8], [40] * 20]
TOKENS = PoolingParams(PoolingTask.TOKEN_EMBED, reads_all=True)


@pytest.mark.parametrize(("write", "name"), [(write_colbert, "bert"), (write_pylate, "modernbert")])
def test_vectors_of_tokens_are_projected_and_have_length_1(tmp_path: Path, write: Any, name: str) -> None:
    model, linear = write(tmp_path, ENCODERS[name].make())
    engine = make_pooling_engine(tmp_path)
    for text, found in zip(TEXTS, run_pooled(engine, TEXTS, TOKENS), strict=True):
        assert_same(found, normalized(hidden_of(model, text) @ linear.T))
    with pytest.raises(Unsupported, match="no task embed; its tasks: token_embed"):
        run_pooled(engine, TEXTS, PoolingParams(PoolingTask.EMBED, reads_all=True))
    pooler = CpuExecutor(WorkerConfig(model=str(tmp_path), threads=1, max_num_requests=1)).model.pooler
    assert pooler is not None
    assert (pooler.tasks, pooler.width) == ((PoolingTask.TOKEN_EMBED,), WIDTH)


@pytest.mark.parametrize(
    ("dim", "message"),
    [(None, r"\[24, 64\]; by config.json it must be \[128, 64\]"), (0, "dim is 0"), ("x", "dim is 'x'")],
)
def test_a_width_that_contradicts_the_weights_is_named(tmp_path: Path, dim: Any, message: str) -> None:
    write_colbert(tmp_path, ENCODERS["bert"].make(), dim=dim)
    with pytest.raises(InvalidRequest, match=message):
        make_pooling_engine(tmp_path)

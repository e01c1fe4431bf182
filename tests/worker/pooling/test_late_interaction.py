"""Models with a vector of each token: ColBERT's own layout and PyLate's have the vectors of a plain computation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.encoder_models import ENCODERS
from support.engine.pooled_runs import assert_same, make_pooling_engine, normalized, run_pooled
from support.engine.pooling_models import hidden_of, make_embedder
from transformers import PreTrainedModel

from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.config import WorkerConfig
from baton.worker.core import PoolingParams, PoolingTask
from baton.worker.executors.cpu.executor import CpuExecutor

WIDTH = 24
TEXTS = [[5, 9, 11, 30], [7, 8], [40] * 20]
TOKENS = PoolingParams(PoolingTask.TOKEN_EMBED, reads_all=True)


def write_colbert(folder: Path, **changed: Any) -> tuple[PreTrainedModel, torch.Tensor]:
    """Writes a BERT with a linear beside it, as colbert-ir/colbertv2.0 has it."""
    model = make_embedder(ENCODERS["bert"].make(), folder)
    (folder / "modules.json").unlink()
    linear = torch.nn.init.normal_(torch.empty(WIDTH, 64), generator=torch.Generator().manual_seed(1))
    tensors = {f"bert.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, "linear.weight": linear}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["HF_ColBERT"], "dim": WIDTH, **changed})
    )
    return model, linear


def write_pylate(folder: Path) -> tuple[PreTrainedModel, torch.Tensor]:
    """Writes a ModernBERT whose modules are a Transformer and a linear, as PyLate saves them."""
    model = make_embedder(ENCODERS["modernbert"].make(), folder)
    modules = [("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense")]
    listed = [{"idx": at, "name": str(at), "path": path, "type": kind} for at, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Dense").mkdir()
    dense = {"in_features": 64, "out_features": WIDTH, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    linear = torch.nn.init.normal_(torch.empty(WIDTH, 64), generator=torch.Generator().manual_seed(1))
    save_file({"linear.weight": linear}, folder / "1_Dense" / "model.safetensors")
    return model, linear


@pytest.mark.parametrize("write", [write_colbert, write_pylate])
def test_vectors_of_tokens_are_projected_and_have_length_1(tmp_path: Path, write: Any) -> None:
    model, linear = write(tmp_path)
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
    write_colbert(tmp_path, dim=dim)
    with pytest.raises(InvalidRequest, match=message):
        make_pooling_engine(tmp_path)

"""Encoders and causal embedders of real shapes on a GPU, and their states in Transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from support.engine.pooled_runs import pooling_engine_over, run_pooled
from transformers import BertConfig, ModernBertConfig, MPNetConfig, PretrainedConfig, PreTrainedModel, XLMRobertaConfig

from baton.worker.config import WorkerConfig
from baton.worker.core import PoolingParams, PoolingTask
from baton.worker.executors.factory import make_executor

ROWS = 300
STD = 0.04  # of weights: scores of attention are about 1
EMBED = PoolingParams(PoolingTask.EMBED, reads_all=True)
_BASE: dict[str, Any] = {
    "vocab_size": 2000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4,
    "num_attention_heads": 12, "max_position_embeddings": 1100, "num_labels": 3, "initializer_range": 0.05,
}  # fmt: skip
_SMALL = _BASE | {"hidden_size": 384, "intermediate_size": 1536}  # MiniLM's: heads of 32
CAUSAL = _BASE | {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "bert-64": lambda: BertConfig(**_BASE),
    "bert-32": lambda: BertConfig(**_SMALL),
    "mpnet-64": lambda: MPNetConfig(**_BASE),
    "xlm-roberta-64": lambda: XLMRobertaConfig(**_BASE, type_vocab_size=1),
    "modernbert-64": lambda: ModernBertConfig(**_BASE, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                                              cls_token_id=1, sep_token_id=2),
}  # fmt: skip
# Not in older versions.
if hasattr(transformers, "GteConfig"):
    MODELS["gte-64"] = lambda: transformers.GteConfig(**_BASE)
if hasattr(transformers, "JinaEmbeddingsV3Config"):
    MODELS["jina-v3-64"] = lambda: transformers.JinaEmbeddingsV3Config(**_BASE)
if hasattr(transformers, "NomicBertConfig"):
    MODELS["nomic-64"] = lambda: transformers.NomicBertConfig(**_BASE)
    MODELS["nomic-128"] = lambda: transformers.NomicBertConfig(**_BASE | {"num_attention_heads": 6})
LEAST_COSINES = {"float32": 0.99999, "float16": 0.9998, "bfloat16": 0.999}  # two of the texts: 0.91


def texts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(5, 2000, length).tolist() for length in lengths]


def vectors_on_gpu(
    folder: Path, texts: Sequence[Sequence[int]], params: Any = EMBED, budget: int = 4096, **fields: Any
) -> list[np.ndarray]:
    rows = min(ROWS, budget)
    defaults = {"dtype": "float32", "num_blocks": 600, "max_num_batched_tokens": budget, "max_num_requests": rows}
    executor = make_executor(WorkerConfig(model=str(folder), executor="cuda", **{**defaults, **fields}))
    try:
        return run_pooled(pooling_engine_over(executor, budget, rows), texts, params)
    finally:
        executor.close()


@torch.inference_mode()
def states_of(model: PreTrainedModel, text: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([list(text)], device="cuda")
    states: torch.Tensor = model.cuda().float()(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    return states.cpu()


def least_cosine(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    return min(
        float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))
        for one, other in zip(found, expected, strict=True)
    )

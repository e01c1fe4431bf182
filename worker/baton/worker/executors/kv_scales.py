"""The scales of quantized KV: from a checkpoint, or computed from steps of random tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest, Mismatch
from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId, Int32, MoreBlocks, Row, RowInit, SamplingParams, StepPlan, TokenMasks
from baton.worker.executors.kv_dtype import dtype_name
from baton.worker.kv_spec import KvSpec
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.kv_groups import window_spec_of
from baton.worker.weights.kv_scales import check_kv_scales
from baton.worker.weights.loading import LoadedModel

# The same for every configuration, so that all workers of a model have the same scales.
_NUM_PROMPTS = 4
_PROMPT_TOKENS = 512


def with_start_scales(loaded: LoadedModel, config: WorkerConfig) -> LoadedModel:
    """Returns what was loaded, with scales of 1 if those of the KV are computed at start.

    Raises InvalidRequest for latent attention, and for scales of the checkpoint that are used and no numbers above 0.
    """
    if config.kv_cache_dtype == "auto":
        return loaded
    if any(isinstance(layer.attention, LatentSpec) for layer in loaded.config.layers):
        raise InvalidRequest(
            f"kv_cache_dtype={config.kv_cache_dtype}: {loaded.config.architecture} keeps one vector a token, which is "
            "not rounded; it must be auto",
            field="kv_cache_dtype",
        )
    if config.calculate_kv_scales and loaded.config.state_layers:
        raise InvalidRequest(
            f"calculate_kv_scales=true: {loaded.config.architecture} has layers with states, which have no keys and "
            "values to measure; leave it out",
            field="calculate_kv_scales",
        )
    if config.calculate_kv_scales:
        return replace(loaded, kv_scales=torch.ones_like(loaded.kv_scales))
    check_kv_scales(loaded.kv_scales)
    return loaded


def scaled_kv_spec(config: ModelConfig, loaded: LoadedModel, block_size: int, dtype: torch.dtype) -> KvSpec:
    """Returns the spec of blocks of this dtype. It has scales if they are not all 1."""
    scaled = dtype == torch.float8_e4m3fn and bool((loaded.kv_scales != 1).any())
    kv_scales = tuple(loaded.kv_scales.flatten().tolist()) if scaled else ()
    return window_spec_of(config, loaded.digest, block_size, dtype_name(dtype), kv_scales)


def check_same_scales(spec: KvSpec, loaded: LoadedModel, dtype: torch.dtype, source: str) -> None:
    """Raises Mismatch for weights that scale quantized KV otherwise than the blocks of a spec."""
    if scaled_kv_spec(loaded.config, loaded, spec.block_size, dtype).groups != spec.groups:
        raise Mismatch(
            f"model={source!r} scales its quantized KV in another way: such weights need a restart", field="model"
        )


def kv_scales_of(loaded: LoadedModel, device: torch.device) -> Tensor:
    """Returns scales [num_layers, 2, num_kv_heads]. The checkpoint has one per tensor."""
    scales = loaded.kv_scales.to(device)
    return scales[:, :, None].repeat(1, 1, loaded.config.num_kv_heads)


def scale_plans(
    vocab_size: int, max_model_len: int, block_size: int, max_num_batched_tokens: int, num_groups: int = 1
) -> list[StepPlan]:
    """Returns steps that compute prompts of random tokens, the same at every start.

    Raises InvalidRequest if a step cannot hold a prompt: its parts would be read with scales of other parts.
    """
    length = min(_PROMPT_TOKENS, max_model_len)
    if length > max_num_batched_tokens:
        raise InvalidRequest(
            f"max_num_batched_tokens={max_num_batched_tokens} must be at least {length} with calculate_kv_scales,"
            " whose prompts are computed whole",
            field="max_num_batched_tokens",
        )
    return list(_plans(np.random.default_rng(0), vocab_size, length, block_size, num_groups))


def _plans(
    random: np.random.Generator, vocab_size: int, length: int, block_size: int, num_groups: int
) -> Iterator[StepPlan]:
    count = -(-length // block_size)
    tables = [list(map(BlockId, range(group * count, (group + 1) * count))) for group in range(num_groups)]
    for step in range(_NUM_PROMPTS):
        token_ids = random.integers(vocab_size, size=length, dtype=np.int32)
        yield StepPlan(
            step,
            admitted=[RowInit(Row(0), token_ids, length, SamplingParams())],
            new_blocks=[(Row(0), tables[0])],
            more_blocks=[MoreBlocks(Row(0), group, 0, table) for group, table in enumerate(tables[1:], 1)],
            rows=np.zeros(1, np.int32),
            num_scheduled_tokens=np.array([length], np.int32),
            num_computed_tokens=np.zeros(1, np.int32),
            samples=np.zeros(1, np.bool_),
            num_decodes=0,
        )


class NoHead:
    """Implements Head for steps whose keys and values matter alone."""

    def take_rows(self, plan: StepPlan) -> None:
        """Keeps no state of rows."""

    def run(self, plan: StepPlan, step: object, decoder: object, hidden: Tensor) -> None:
        """Computes no logits."""

    def finish(self, plan: StepPlan, undrawn: None, masks: TokenMasks | None, left_out: Int32) -> None:
        """Has no results."""

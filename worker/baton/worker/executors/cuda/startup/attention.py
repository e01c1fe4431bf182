"""The paged cache and the device of a model, by the kind of its attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from baton.worker.config import WorkerConfig
from baton.worker.kv_spec import KvSpec
from baton.worker.layers.cuda.attention import PagedAttention
from baton.worker.layers.cuda.device import CudaDevice
from baton.worker.layers.cuda.latent_attention import PagedLatents
from baton.worker.layers.cuda.latent_device import LatentDevice
from baton.worker.layers.cuda.paged import PagedCache
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.rope_config import RopeConfig
from baton.worker.models.config import ModelConfig


def make_paged(
    config: WorkerConfig,
    model: ModelConfig,
    spec: KvSpec,
    cache: Tensor,
    block_tables: Tensor,
    dtype: torch.dtype,
    kv_scale: Tensor | None,
) -> PagedAttention | PagedLatents:
    """Returns the cache of a model's attention over block_tables [num_groups, num_rows, max_blocks]."""
    places = list(zip(spec.layer_groups, spec.layer_places, strict=True))
    attention, rows = model.layers[0].attention, config.max_num_requests
    if isinstance(attention, LatentSpec):
        return PagedLatents(attention, cache, block_tables.unbind(), rows, dtype, places)
    first, *more = block_tables.unbind()
    return PagedAttention(
        model.layers[0].grouped,
        model.windows,
        cache,
        first,
        rows,
        dtype,
        kv_scale=kv_scale,
        batch_invariant=config.invariant,
        more_tables=more,
        places=places,
    )


def device_of(
    config: WorkerConfig, paged: PagedCache, cos_sin: Mapping[RopeConfig, Tensor]
) -> CudaDevice | LatentDevice:
    """Returns the device that computes with this cache."""
    if isinstance(paged, PagedLatents):
        return LatentDevice(paged, cos_sin, config.max_num_batched_tokens)
    assert isinstance(paged, PagedAttention), "there are two kinds"
    return CudaDevice(paged, cos_sin, batch_invariant=config.invariant)

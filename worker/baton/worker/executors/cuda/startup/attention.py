"""The paged cache and the device of a model, by the kind of its attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from baton.worker.config import WorkerConfig
from baton.worker.executors.cuda.inputs.device_states import DeviceStates
from baton.worker.kv_spec import KvKind, KvSpec
from baton.worker.layers.cuda.attention import PagedAttention
from baton.worker.layers.cuda.device import CudaDevice
from baton.worker.layers.cuda.latent_attention import PagedLatents
from baton.worker.layers.cuda.latent_device import LatentDevice
from baton.worker.layers.cuda.paged import PagedCache
from baton.worker.layers.cuda.recurrence import PagedStates
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.rope_config import RopeConfig
from baton.worker.layers.state_places import StatePlaces
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
    attention, rows = model.attention, config.max_num_requests
    if isinstance(attention, LatentSpec):
        return PagedLatents(attention, cache, block_tables.unbind(), rows, dtype, places)
    first, *more = block_tables.unbind()
    return PagedAttention(
        attention,
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
    config: WorkerConfig, paged: PagedCache, cos_sin: Mapping[RopeConfig, Tensor], states: Sequence[DeviceStates]
) -> CudaDevice | LatentDevice:
    """Returns the device that computes with this cache."""
    if isinstance(paged, PagedLatents):
        return LatentDevice(paged, cos_sin, config.max_num_batched_tokens)
    assert isinstance(paged, PagedAttention), "there are two kinds"
    of_groups = {each.group: each.paged for each in states}
    return CudaDevice(paged, cos_sin, of_groups, batch_invariant=config.invariant)


def state_places(spec: KvSpec, paged: PagedCache) -> dict[range, StatePlaces]:
    """Returns where the states of each group lie in the cache's pages, by their KV layers."""
    return {
        span: StatePlaces(lambda: paged.cache.flatten(2).view(torch.float32), spec.placed_state(group))
        for span, group in zip(spec.spans, spec.groups, strict=True)
        if group.kind is KvKind.STATE
    }


def make_states(spec: KvSpec, paged: PagedCache, num_rows: int) -> list[DeviceStates]:
    """Returns the states of the batch's rows in each group of states, over the cache's pages."""
    return [
        DeviceStates(
            index,
            spec,
            num_rows,
            PagedStates(spec.placed_state(group), lambda: paged.cache, spec.block_size),
            paged.cache.device,
        )
        for index, group in enumerate(spec.groups)
        if group.kind is KvKind.STATE
    ]

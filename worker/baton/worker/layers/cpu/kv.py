"""The keys and values of all layers on a CPU: their blocks, and the scales of those in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.worker.layers.kv_scale_meter import KvScaleMeter


class PagedKv:
    """What the layers' attention reads and writes."""

    def __init__(
        self,
        cache: Sequence[Tensor],
        dtype: torch.dtype | None = None,
        groups: Sequence[int] = (),
        scales: Tensor | None = None,
    ) -> None:
        """`dtype`: of activations; None: that of the cache. `groups`: of each layer's blocks; empty: there is one.
        `scales` [num_layers, 2, num_kv_heads] fp32: of keys and values in 8 bits; None: the cache is of `dtype`."""
        self.cache = cache  # per layer: [num_blocks, 2, num_kv_heads, block_size, head_dim]
        self.dtype = dtype or cache[0].dtype
        self.scales = None if scales is None else scales.unbind()
        self.meter: KvScaleMeter | None = None  # while scales are computed
        self._groups = groups

    def group_of(self, layer: int) -> int:
        """Returns whose block tables a layer has."""
        return self._groups[layer] if self._groups else 0

    def scale_of(self, layer: int) -> Tensor | None:
        """Returns what a layer's keys and values are multiplied by, [2, num_kv_heads]."""
        return None if self.scales is None else self.scales[layer]

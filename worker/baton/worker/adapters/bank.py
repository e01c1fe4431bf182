"""The adapters on a device: a slot of each site for each of them, and the rows of a step that use one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.adapters.adapter import Adapter
from baton.worker.adapters.base_model import BaseModel, Site

NO_SLOT = -1  # of a row without an adapter


class SiteBank(NamedTuple):
    """The updates of one site by all slots, as kernels take them."""

    a: Tensor  # [num_slots, num_parts, max_rank, in_features]
    b: Tensor  # [num_slots, out_features, max_rank]
    ranks: Tensor  # [num_slots, num_parts] int32; 0: no update
    scales: Tensor  # [num_slots, num_parts] fp32


class AdapterRows(NamedTuple):
    """The rows of a step that have an adapter."""

    order: Tensor  # [num_rows] int64, those of a slot side by side
    tiles: Tensor  # [num_tiles, 3] int32: slot, first index into `order`, number of rows


class AdapterBank:
    """Memory for `num_slots` adapters. A slot is written while no row uses it, on any thread."""

    def __init__(
        self, base: BaseModel, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self.rows: AdapterRows | None = None  # of the step that is computed; None: no row has an adapter
        self.sites: Mapping[str, SiteBank] = {
            site.name: _site_bank(site, num_slots, max_rank, dtype, device) for site in base.sites
        }
        self._parts = {site.name: site.ends for site in base.sites}
        self._device = device

    def ends(self, name: str) -> tuple[int, ...]:
        """Returns the column after each part's last one, of a site."""
        return self._parts[name]

    def write(self, slot: int, adapter: Adapter) -> None:
        """Copies an adapter into a slot that no row uses."""
        for name, site in self.sites.items():
            site.ranks[slot] = 0
            ends = self._parts[name]
            for index, part in adapter.weights.get(name, {}).items():
                start = ends[index - 1] if index else 0
                site.a[slot, index, : part.rank] = part.a
                site.b[slot, start : ends[index], : part.rank] = part.b
                site.scales[slot, index] = part.scale
                site.ranks[slot, index] = part.rank

    def begin(self, slots: NDArray[np.int32]) -> None:
        """Sets the slot of each row, [num_tokens], of the step that is computed next; NO_SLOT: it has no adapter."""
        self.rows = _rows_of(slots, self._device) if (slots != NO_SLOT).any() else None


def _site_bank(site: Site, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> SiteBank:
    # Zeroed pages of a host take no memory until they are written.
    parts = len(site.parts)
    return SiteBank(
        torch.zeros(num_slots, parts, max_rank, site.in_features, dtype=dtype, device=device),
        torch.zeros(num_slots, site.out_features, max_rank, dtype=dtype, device=device),
        torch.zeros(num_slots, parts, dtype=torch.int32, device=device),
        torch.zeros(num_slots, parts, dtype=torch.float32, device=device),
    )


def _rows_of(slots: NDArray[np.int32], device: torch.device) -> AdapterRows:
    """Returns the rows with one tile for each slot."""
    order = np.argsort(slots, kind="stable")
    order = order[np.count_nonzero(slots == NO_SLOT) :]
    used, starts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    tiles = np.stack((used, starts, counts), axis=1).astype(np.int32)
    return AdapterRows(torch.from_numpy(order).to(device), torch.from_numpy(tiles).to(device))

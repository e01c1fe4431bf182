"""The adapters on a device: a slot of memory for each of them, and where in it each site's matrices are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.worker.adapters.adapter import Adapter, packed_size
from baton.worker.adapters.base_model import BaseModel
from baton.worker.adapters.rows import AdapterRows

Copy = Callable[[Sequence[tuple[Tensor, Tensor]]], None]  # of pairs of a target on the device and its host source


class SiteBank(NamedTuple):
    """The updates of one site by all slots, as kernels take them."""

    slots: Tensor  # [num_slots, slot_size]
    offsets: Tensor  # [num_slots, num_parts, 2] int64, of a [rank, in_features] and b [rank, rows] in a slot
    ranks: Tensor  # [num_slots, num_parts] int32; 0: no update
    scales: Tensor  # [num_slots, num_parts] fp32
    max_rank: int


class AdapterBank:
    """Memory for `num_slots` adapters. A slot is written while no row uses it, on any thread."""

    def __init__(
        self,
        base: BaseModel,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        copy: Copy | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.rows: AdapterRows | None = None  # of the step that is computed; None: no row has an adapter
        self._copy = copy or _copy_each
        num_parts = base.num_parts
        # Zeroed pages of a host take no memory until they are written.
        self._slots = torch.zeros(num_slots, slot_size(base, max_rank), dtype=dtype, device=device)
        self._offsets = torch.zeros(num_slots, num_parts, 2, dtype=torch.int64, device=device)
        self._ranks = torch.zeros(num_slots, num_parts, dtype=torch.int32, device=device)
        self._scales = torch.zeros(num_slots, num_parts, dtype=torch.float32, device=device)
        self.sites: dict[str, SiteBank] = {}
        self._ends: Mapping[str, tuple[int, ...]] = {site.name: site.ends for site in base.sites}
        for site in base.sites:
            own = slice(base.columns[site.name], base.columns[site.name] + len(site.parts))
            self.sites[site.name] = SiteBank(
                self._slots, self._offsets[:, own], self._ranks[:, own], self._scales[:, own], max_rank
            )

    @property
    def num_bytes(self) -> int:
        """Size of all slots."""
        return self._slots.nbytes

    def ends(self, name: str) -> tuple[int, ...]:
        """Returns the column after each part's last one, of a site."""
        return self._ends[name]

    @torch.inference_mode()
    def write(self, slot: int, adapter: Adapter) -> None:
        """Copies an adapter into a slot that no row uses."""
        size, tables = len(adapter.memory), adapter.tables
        self._copy(
            [
                (self._slots[slot, :size], adapter.memory),
                (self._offsets[slot], tables.offsets),
                (self._ranks[slot], tables.ranks),
                (self._scales[slot], tables.scales),
            ]
        )


def slot_size(base: BaseModel, max_rank: int) -> int:
    """Returns the elements of the largest adapter: of this rank at every site."""
    return packed_size((max_rank, site.in_features, part.rows) for site in base.sites for part in site.parts)


def _copy_each(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)

"""The adapters on a device: a slot of memory for each of them, and where in it each site's matrices are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.worker.adapters.adapter import Adapter, packed_size
from baton.worker.adapters.base_model import BaseModel
from baton.worker.adapters.rows import AdapterRows
from baton.worker.adapters.site import Site

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
        *,
        expert_rank: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.expert_rank = expert_rank  # 0: experts are not changed
        self.rows: AdapterRows | None = None  # of the step that is computed; None: no row has an adapter
        self.row_slots: Tensor | None = None  # [num_rows] of these rows, -1: no adapter
        self._copy = copy or _copy_each
        num_parts = base.num_parts
        # Zeroed pages of a host take no memory until they are written.
        self._slots = torch.zeros(num_slots, slot_size(base, max_rank, expert_rank), dtype=dtype, device=device)
        self._offsets = torch.zeros(num_slots, num_parts, 2, dtype=torch.int64, device=device)
        self._ranks = torch.zeros(num_slots, num_parts, dtype=torch.int32, device=device)
        self._scales = torch.zeros(num_slots, num_parts, dtype=torch.float32, device=device)
        self.sites: dict[str, SiteBank] = {}
        self._ends: Mapping[str, tuple[int, ...]] = {site.name: site.ends for site in base.sites}
        # Offsets of experts' matrices are from the first slot on, others from their slot on.
        self._from_first = torch.zeros(num_parts, 1, dtype=torch.int64)
        for site in base.sites:
            first = base.columns[site.name]
            own = slice(first, first + len(site.parts))
            if site.num_experts:
                self._from_first[own] = 1
                self.sites[site.name] = self._of_experts(site, first)
                continue
            self.sites[site.name] = SiteBank(
                self._slots, self._offsets[:, own], self._ranks[:, own], self._scales[:, own], max_rank
            )

    def _of_experts(self, site: Site, first: int) -> SiteBank:
        """Returns the updates of experts by slots, as those of a linear by more slots: expert e of slot s is number
        s * expert_step + e of them."""
        each, step = site.parts_each, self.expert_step(site)
        count = (self.num_slots - 1) * step + site.num_experts
        return SiteBank(
            self._slots.view(-1).expand(count, -1),
            self._offsets.as_strided((count, each, 2), (2 * each, 2, 1), 2 * first),
            self._ranks.as_strided((count, each), (each, 1), first),
            self._scales.as_strided((count, each), (each, 1), first),
            self.expert_rank,
        )

    def expert_step(self, site: Site) -> int:
        """Returns how far the numbers of the same expert in two slots are apart."""
        return self._ranks.shape[1] // site.parts_each

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
                (self._offsets[slot], tables.offsets + self._from_first * (slot * self._slots.shape[1])),
                (self._ranks[slot], tables.ranks),
                (self._scales[slot], tables.scales),
            ]
        )


def slot_size(base: BaseModel, max_rank: int, expert_rank: int) -> int:
    """Returns the elements of the largest adapter: of these ranks at every linear, and at every expert."""
    return packed_size(
        (rank, site.in_features, part.rows)
        for site in base.sites
        if (rank := expert_rank if site.num_experts else max_rank)
        for part in site.parts
    )


def _copy_each(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)

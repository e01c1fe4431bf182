"""The steps with adapters that a start runs, so that none of their kernels is compiled while requests run."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from baton.kernels.adapters.shrink import splits_of
from baton.worker.adapters.bank import AdapterBank
from baton.worker.adapters.base_model import BaseModel
from baton.worker.adapters.rows import most_tiles
from baton.worker.core import StepPlan
from baton.worker.executors.cuda.adapters.device_rows import tile_rows_of
from baton.worker.executors.cuda.adapters.tensors import CudaAdapters
from baton.worker.executors.cuda.startup.warm_up import largest_step

_GROWTH = 32  # sizes between n and 2 n are looked at n / 32 apart


def with_adapters(
    plans: Sequence[StepPlan], adapters: CudaAdapters, most: int, *, longest: int, rows: int
) -> list[StepPlan]:
    """Returns these plans, and those of all variants of the kernels up to `most` tokens, with an adapter in every row:
    that of slot 0, whose ranks are 0. `longest`: tokens of a request; `rows`: of a step."""
    varied = [largest_step(size, longest, rows) for size in varied_sizes(adapters.base, adapters.bank, most)]
    return [
        replace(plan, admitted=[replace(init, adapter_slot=0) for init in plan.admitted]) for plan in [*plans, *varied]
    ]


def varied_sizes(base: BaseModel, bank: AdapterBank, most: int) -> list[int]:
    """Returns a number of tokens for each variant of the kernels."""
    shapes = {(site.in_features, len(site.parts)) for site in base.sites if not (site.is_embedding or site.num_experts)}
    itemsize = next(iter(bank.sites.values())).slots.itemsize
    found: dict[Hashable, int] = {}
    size = 1
    while size <= most:
        tile_rows = tile_rows_of(size)
        tiles = most_tiles(size, bank.num_slots, tile_rows)
        splits = tuple(splits_of(tiles, tile_rows, parts, bank.max_rank, k, itemsize) for k, parts in sorted(shapes))
        found.setdefault((tile_rows, splits), size)
        size += max(1, size // _GROWTH)
    return list(found.values())

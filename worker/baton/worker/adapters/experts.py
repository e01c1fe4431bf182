"""The ops of experts that adapters change, over those of any weight format."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from baton.kernels.reference.moe.experts import gated_by
from baton.kernels.routing import Gate
from baton.worker.adapters.bank import AdapterBank
from baton.worker.adapters.expert_sites import ExpertSites
from baton.worker.adapters.pairs import PairTiles, pair_tiles
from baton.worker.adapters.site import Site
from baton.worker.quantization.base import Params
from baton.worker.quantization.experts import DOWN, GATE_UP, ExpertsOps
from baton.worker.quantization.neighbours import Kernels, Norm, Stream


class AdapterExpertsOps(ExpertsOps):
    """Adds the updates of rows with adapters to each expert's products. In a step without any, every op is the
    format's own, fused as it is."""

    def __init__(
        self, kernels: Kernels, base: ExpertsOps, bank: AdapterBank, sites: ExpertSites, add: Callable[..., Tensor]
    ) -> None:
        super().__init__(kernels)
        self._base = base
        self._bank = bank
        self._sites = sites
        self._add = add  # the kernel add_adapters

    def reset(self) -> None:
        self._base.reset()

    def run(self, params: Params, x: Tensor, weights: Tensor, ids: Tensor, gate: Gate) -> Tensor:
        slots = self._bank.row_slots
        if slots is None:
            return self._base.run(params, x, weights, ids, gate)
        pairs = pair_tiles(ids, slots, self._bank.num_slots, self._sites.down.num_experts)
        rows = x.repeat_interleave(ids.shape[1], 0)
        gated = gated_by(self._product(params, GATE_UP, self._sites.gate_up, rows, ids, pairs), gate)
        out = self._product(params, DOWN, self._sites.down, gated, ids, pairs)
        return out.view(*ids.shape, -1).mul_(weights.unsqueeze(-1)).sum(1)

    def product(self, params: Params, linear: str, rows: Tensor, ids: Tensor) -> Tensor:
        return self._base.product(params, linear, rows, ids)

    def add(self, params: Params, x: Tensor, weights: Tensor, ids: Tensor, gate: Gate, stream: Stream) -> None:
        if self._bank.row_slots is None:
            self._base.add(params, x, weights, ids, gate, stream)
        else:
            super().add(params, x, weights, ids, gate, stream)

    def fuses_norm(self, params: Params, num_pairs: int) -> bool:
        return self._bank.row_slots is None and self._base.fuses_norm(params, num_pairs)

    def add_normed(self, params: Params, stream: Stream, norm: Norm, weights: Tensor, ids: Tensor, gate: Gate) -> None:
        self._base.add_normed(params, stream, norm, weights, ids, gate)

    def _product(self, params: Params, linear: str, site: Site, rows: Tensor, ids: Tensor, pairs: PairTiles) -> Tensor:
        """Returns each pair's row times its expert's matrix, with the update."""
        out = self._base.product(params, linear, rows, ids)
        numbered = pairs.numbered(self._bank.expert_step(site))
        return self._add(rows, out, *self._bank.sites[site.name], site.ends, *numbered)

"""The updates of one site on a GPU. The narrow half runs beside the linear's own product, on a stream of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.adapters.expand import expand_adapters
from baton.kernels.adapters.expand_gated import expand_gated_adapters
from baton.kernels.adapters.shrink import narrow_products, shrink_adapters
from baton.worker.adapters.bank import SiteBank
from baton.worker.adapters.rows import AdapterRows


class CudaUpdates:
    """Implements baton.worker.adapters.ops.SiteUpdates. Can be captured."""

    def __init__(self, site: SiteBank, ends: tuple[int, ...], beside: torch.cuda.Stream) -> None:
        self._site = site
        self._ends = ends
        self._beside = beside
        self._kept: Tensor | None = None  # that the other stream still reads

    def start(self, x: Tensor, rows: AdapterRows) -> Tensor:
        slots, offsets, ranks, _, max_rank = self._site
        # Allocated for the current stream, which has joined the other one when it is freed.
        low = narrow_products(x, slots, ranks, max_rank, *rows)
        self._beside.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._beside):
            return shrink_adapters(x, slots, offsets, ranks, max_rank, *rows, out=low, alone=True)

    def start_to(self, x: Tensor, target: Tensor, rows: AdapterRows, factor: float) -> None:
        low = self.start(x, rows)
        slots, offsets, ranks, scales, _ = self._site
        with torch.cuda.stream(self._beside):
            expand_adapters(target, low, slots, offsets, ranks, scales, self._ends, *rows, factor=factor, joined=True)
        self._kept = low

    def end(self) -> None:
        torch.cuda.current_stream(self._site.slots.device).wait_stream(self._beside)
        self._kept = None  # its memory may be used again from here on

    def add(self, started: Tensor, product: Tensor, rows: AdapterRows) -> Tensor:
        torch.cuda.current_stream(product.device).wait_stream(self._beside)
        slots, offsets, ranks, scales, _ = self._site
        return expand_adapters(product, started, slots, offsets, ranks, scales, self._ends, *rows, joined=True)

    def gate(self, started: Tensor, product: Tensor, rows: AdapterRows) -> Tensor:
        torch.cuda.current_stream(product.device).wait_stream(self._beside)
        slots, offsets, ranks, scales, _ = self._site
        return expand_gated_adapters(product, started, slots, offsets, ranks, scales, *rows, joined=True)

"""The ops of a linear whose rows may have adapters, over those of any weight format."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from baton.worker.adapters.bank import AdapterBank
from baton.worker.quantization.base import LinearOps, Params
from baton.worker.quantization.neighbours import Kernels, Norm, Stream


class AdapterOps(LinearOps):
    """Adds the updates of rows with adapters. In a step without any, every op is the format's own, fused as it is."""

    def __init__(
        self, kernels: Kernels, base: LinearOps, bank: AdapterBank, site: str, add: Callable[..., Tensor]
    ) -> None:
        super().__init__(kernels)
        self._base = base
        self._bank = bank
        self._site = bank.sites[site]
        self._ends = bank.ends(site)
        self._add = add
        self._unfused = _Unfused(self)

    def reset(self) -> None:
        self._base.reset()

    def prepared(self, params: Params) -> Params:
        return self._base.prepared(params)

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        product, rows = self._base.multiply(params, x, out), self._bank.rows
        return product if rows is None else self._add(x, product, *self._site, self._ends, *rows)

    def project(self, params: Params, stream: Stream, norm: Norm | None, out: Tensor | None = None) -> Tensor:
        return self._ops.project(params, stream, norm, out)

    def gate(self, params: Params, stream: Stream, norm: Norm | None) -> Tensor:
        return self._ops.gate(params, stream, norm)

    def activate(self, params: Params, stream: Stream, norm: Norm | None, activation: str) -> Tensor:
        return self._ops.activate(params, stream, norm, activation)

    def add(self, params: Params, x: Tensor, stream: Stream, scale: float = 1.0) -> None:
        self._ops.add(params, x, stream, scale)

    @property
    def _ops(self) -> LinearOps:
        """What computes the ops that formats fuse: without rows with adapters, the format."""
        return self._base if self._bank.rows is None else self._unfused


class _Unfused(LinearOps):
    """Every op by a product, whose updates are added before what follows it."""

    def __init__(self, ops: AdapterOps) -> None:
        super().__init__(ops.kernels)
        self._multiply = ops.multiply

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._multiply(params, x, out)

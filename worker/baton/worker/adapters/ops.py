"""The ops of a linear whose rows may have adapters, over those of any weight format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from baton.worker.adapters.bank import AdapterBank, SiteBank
from baton.worker.adapters.rows import AdapterRows
from baton.worker.quantization.base import LinearOps, Params
from baton.worker.quantization.neighbours import Kernels, Norm, Stream


class SiteUpdates(Protocol):
    """Computes the updates of one site."""

    def start(self, x: Tensor, rows: AdapterRows) -> Any:
        """Starts what depends on the linear's input alone, beside the product that follows."""

    def start_to(self, x: Tensor, target: Tensor, rows: AdapterRows, factor: float) -> None:
        """Starts to add the updates, times `factor`, to memory that the product that follows does not use."""

    def end(self) -> None:
        """Has what follows computed after what `start_to` started."""

    def add(self, started: Any, product: Tensor, rows: AdapterRows) -> Tensor:
        """Adds the updates to the linear's output. Returns it."""

    def gate(self, started: Any, product: Tensor, rows: AdapterRows) -> Tensor:
        """Returns silu(first half) * second half of the output with its updates."""


class PlainUpdates:
    """Implements SiteUpdates by one op after the product."""

    def __init__(self, site: SiteBank, ends: tuple[int, ...], add: Callable[..., Tensor], kernels: Kernels) -> None:
        self._site = site
        self._ends = ends
        self._add = add  # the kernel add_adapters
        self._kernels = kernels

    def start(self, x: Tensor, rows: AdapterRows) -> Tensor:
        return x

    def start_to(self, x: Tensor, target: Tensor, rows: AdapterRows, factor: float) -> None:
        self._add(x, target, *self._site, self._ends, *rows, factor=factor)

    def end(self) -> None:
        """Does nothing: `start_to` has added the updates."""

    def add(self, started: Tensor, product: Tensor, rows: AdapterRows) -> Tensor:
        return self._add(started, product, *self._site, self._ends, *rows)

    def gate(self, started: Tensor, product: Tensor, rows: AdapterRows) -> Tensor:
        return self._kernels.silu_mul(self.add(started, product, rows))


class AdapterOps(LinearOps):
    """Adds the updates of rows with adapters. In a step without any, every op is the format's own, fused as it is."""

    def __init__(self, kernels: Kernels, base: LinearOps, bank: AdapterBank, updates: SiteUpdates) -> None:
        super().__init__(kernels)
        self._base = base
        self._bank = bank
        self._unfused = _Unfused(kernels, base, bank, updates)

    def reset(self) -> None:
        self._base.reset()

    def prepared(self, params: Params) -> Params:
        return self._base.prepared(params)

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._ops.multiply(params, x, out)

    def project(self, params: Params, stream: Stream, norm: Norm | None, out: Tensor | None = None) -> Tensor:
        return self._ops.project(params, stream, norm, out)

    def gate(self, params: Params, stream: Stream, norm: Norm | None) -> Tensor:
        return self._ops.gate(params, stream, norm)

    def activate(self, params: Params, stream: Stream, norm: Norm | None, activation: str) -> Tensor:
        return self._ops.activate(params, stream, norm, activation)

    def fuses_gate(self, params: Params, like: Tensor) -> bool:
        return self._ops.fuses_gate(params, like)

    def add_gated(self, params: Params, gate_up: Tensor, stream: Stream, scale: float = 1.0) -> None:
        self._ops.add_gated(params, gate_up, stream, scale)

    def add(self, params: Params, x: Tensor, stream: Stream, scale: float = 1.0) -> None:
        self._ops.add(params, x, stream, scale)

    @property
    def _ops(self) -> LinearOps:
        """What computes the ops: without rows with adapters, the format."""
        return self._base if self._bank.rows is None else self._unfused


class _Unfused(LinearOps):
    """Every op by a product, whose updates are added before what follows it."""

    def __init__(self, kernels: Kernels, base: LinearOps, bank: AdapterBank, updates: SiteUpdates) -> None:
        super().__init__(kernels)
        self._base = base
        self._bank = bank
        self._updates = updates

    @property
    def _rows(self) -> AdapterRows:
        rows = self._bank.rows
        assert rows is not None, "steps without adapters use the format's ops"
        return rows

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        started = self._updates.start(x, self._rows)
        return self._updates.add(started, self._base.multiply(params, x, out), self._rows)

    def add(self, params: Params, x: Tensor, stream: Stream, scale: float = 1.0) -> None:
        self._updates.start_to(x, stream.settled(), self._rows, scale)
        product = self._base.multiply(params, x)
        self._updates.end()
        stream.add(product if scale == 1 else product.mul_(scale))

    def gate(self, params: Params, stream: Stream, norm: Norm | None) -> Tensor:
        x = stream.normed(norm, self.kernels)
        started = self._updates.start(x, self._rows)
        return self._updates.gate(started, self._base.multiply(params, x), self._rows)

"""The ops around a linear that may be fused into it: the norm before, the residual addition after."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from baton.kernels.routing import RouterSpec


class Norm(NamedTuple):
    """RMSNorm of a linear's input or output."""

    weight: Tensor  # [size]
    eps: float


def norm_of(weight: Tensor | None, eps: float) -> Norm | None:
    """Returns the norm with this weight, if there is one."""
    return None if weight is None else Norm(weight, eps)


class Kernels(Protocol):
    """A device's kernels for these ops."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
        """Returns x / sqrt(mean(x^2) + eps) * weight. With `residual`, adds x to it and returns the norm of the sum."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns silu(first half) * second half of gate_up [num_tokens, 2 size]."""

    def route(self, logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
        """Returns weights [num_tokens, top_k] fp32 and ids of the experts that tokens choose."""


class Stream:
    """The residual stream of a step. An update may be deferred, so that the next norm adds it in the same pass."""

    __slots__ = ("fuse_norms", "residual", "update")

    def __init__(self, residual: Tensor, *, fuse_norms: bool = False) -> None:
        self.residual = residual  # [num_tokens, hidden_size], updated in place
        self.update: Tensor | None = None  # deferred
        self.fuse_norms = fuse_norms  # linears may apply the norms before them

    def add(self, update: Tensor) -> None:
        """Defers `update` to the next norm, after adding an earlier one."""
        self.settled()
        self.update = update

    def settled(self) -> Tensor:
        """Adds the deferred update, if any. Returns the stream."""
        if self.update is not None:
            self.residual.add_(self.update)
            self.update = None
        return self.residual

    def normed(self, norm: Norm | None, kernels: Kernels) -> Tensor:
        """Returns the norm of the stream, or the stream itself without a norm."""
        if norm is None:
            return self.settled()
        if self.update is None:
            return kernels.rms_norm(self.residual, norm.weight, norm.eps)
        update, self.update = self.update, None
        return kernels.rms_norm(update, norm.weight, norm.eps, residual=self.residual)

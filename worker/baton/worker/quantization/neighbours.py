"""What stands around a linear in a decoder, and may be fused into it: the norm before, the residual stream after."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Norm(NamedTuple):
    """RMSNorm of a linear's input or output."""

    weight: Tensor  # [size]
    eps: float


def norm_of(weight: Tensor | None, eps: float) -> Norm | None:
    """Returns the norm with this weight, if there is one."""
    return None if weight is None else Norm(weight, eps)


class Kernels(Protocol):
    """A device's kernels for the neighbours."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
        """Returns x / sqrt(mean(x^2) + eps) * weight; with `residual`, of the sum, which `residual` becomes."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns silu(first half) * second half of gate_up [num_tokens, 2 size]."""


class Stream:
    """The residual stream of a step. An update may wait in it, so that the next norm adds it in the same pass."""

    __slots__ = ("fuse_norms", "residual", "update")

    def __init__(self, residual: Tensor, *, fuse_norms: bool = False) -> None:
        self.residual = residual  # [num_tokens, hidden_size], updated in place
        self.update: Tensor | None = None  # still to be added
        self.fuse_norms = fuse_norms  # a linear may apply the norm before it itself

    def add(self, update: Tensor) -> None:
        """Adds `update` now or in the next norm."""
        self.settled()
        self.update = update

    def settled(self) -> Tensor:
        """Returns the stream with nothing waiting."""
        if self.update is not None:
            self.residual.add_(self.update)
            self.update = None
        return self.residual

    def normed(self, norm: Norm | None, kernels: Kernels) -> Tensor:
        """Returns the norm of the stream, or the stream itself where there is no norm."""
        if norm is None:
            return self.settled()
        if self.update is None:
            return kernels.rms_norm(self.residual, norm.weight, norm.eps)
        update, self.update = self.update, None
        return kernels.rms_norm(update, norm.weight, norm.eps, residual=self.residual)

"""The ops around a linear that may be fused into it: the norm before, the residual addition after."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from baton.kernels.routing import RouterSpec


class Norm(NamedTuple):
    """RMSNorm or LayerNorm of a linear's input or output."""

    weight: Tensor  # [size]
    eps: float
    bias: Tensor | None = None  # [size], of LayerNorm
    centered: bool = False  # LayerNorm

    def apply(self, x: Tensor, kernels: Kernels, residual: Tensor | None = None, *, keep_sum: bool = True) -> Tensor:
        """Returns the norm of x. With `residual`, adds x to it and returns the norm of the sum; without `keep_sum`, the
        residual is not used any more."""
        if self.centered:
            return kernels.layer_norm(x, self.weight, self.bias, self.eps, residual=residual, keep_sum=keep_sum)
        return kernels.rms_norm(x, self.weight, self.eps, residual=residual)


class Kernels(Protocol):
    """A device's kernels for these ops."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
        """Returns x / sqrt(mean(x^2) + eps) * weight. With `residual`, adds x to it and returns the norm of the sum."""

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        residual: Tensor | None = None,
        keep_sum: bool = True,
    ) -> Tensor:
        """Returns (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, of the sum as in `rms_norm`. weight [size], or
        [k, size], whose row r % k belongs to row r of x. Without `keep_sum`, the residual is undefined afterwards."""

    def activate(self, x: Tensor, activation: str, *, gated: bool) -> Tensor:
        """Returns activation(x); `gated`: activation(first half) * second half."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns silu(first half) * second half of gate_up [num_tokens, 2 size]."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """Returns the sigmoid of x, which may be changed."""

    def route(self, logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
        """Returns weights [num_tokens, top_k] fp32 and ids of the experts that tokens choose."""


class Stream:
    """The residual stream of a step. An update may be deferred, so that the next norm adds it in the same pass."""

    __slots__ = ("fuse_norms", "residual", "update")

    def __init__(self, residual: Tensor, *, fuse_norms: bool = False) -> None:
        self.residual = residual  # [num_tokens, hidden_size], updated in place or replaced
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

    def norm(self, norm: Norm, kernels: Kernels) -> None:
        """Replaces the stream by its norm."""
        update, self.update = self.update, None
        if update is None:
            self.residual = norm.apply(self.residual, kernels)
        else:
            self.residual = norm.apply(update, kernels, self.residual, keep_sum=False)

    def normed(self, norm: Norm | None, kernels: Kernels) -> Tensor:
        """Returns the norm of the stream, or the stream itself without a norm."""
        if norm is None:
            return self.settled()
        if self.update is None:
            return norm.apply(self.residual, kernels)
        update, self.update = self.update, None
        return norm.apply(update, kernels, self.residual)

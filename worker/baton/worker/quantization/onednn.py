"""Ops of unquantized linears on a CPU by oneDNN, over the matrices as they are or over packed copies."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.reference.linear.packed import fuses, pack, packed_linear, packed_rows, packed_sum
from baton.worker.quantization.base import LinearOps, Params
from baton.worker.quantization.neighbours import Norm, Stream


class OneDnnOps(LinearOps):
    """Implements LinearOps for parameters of the unquantized format, whose memory it shares."""

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        product = packed_linear(x, params["weight"], params.get("bias"))
        return product if out is None else out.copy_(product)

    def activate(self, params: Params, stream: Stream, norm: Norm | None, activation: str) -> Tensor:
        if not fuses(activation):
            return super().activate(params, stream, norm, activation)
        return packed_linear(stream.normed(norm, self.kernels), params["weight"], params.get("bias"), activation)

    def add(self, params: Params, x: Tensor, stream: Stream, scale: float = 1.0) -> None:
        if scale != 1:
            super().add(params, x, stream, scale)
            return
        stream.residual = packed_sum(x, params["weight"], params.get("bias"), stream.settled())


class PackedOps(OneDnnOps):
    """Multiplies with a packed copy of each matrix: faster still, for twice the memory."""

    def prepared(self, params: Params) -> Params:
        """Returns the packed matrix, and the bias if there is one."""
        return {**params, "weight": pack(params["weight"])}


class InvariantOps(OneDnnOps):
    """Multiplies so that a row's result does not depend on other rows, bit for bit."""

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        product = packed_rows(x, params["weight"], params.get("bias"))
        return product if out is None else out.copy_(product)

    def activate(self, params: Params, stream: Stream, norm: Norm | None, activation: str) -> Tensor:
        product = self.multiply(params, stream.normed(norm, self.kernels))
        return self.kernels.activate(product, activation, gated=False)

    def add(self, params: Params, x: Tensor, stream: Stream, scale: float = 1.0) -> None:
        update = self.multiply(params, x)
        stream.settled().add_(update, alpha=scale)

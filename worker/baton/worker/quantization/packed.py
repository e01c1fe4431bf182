"""Ops of unquantized linears on a CPU over a packed copy of each matrix: faster, for twice the memory."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.reference.linear.packed import fuses, pack, packed_linear, packed_sum
from baton.worker.quantization.base import LinearOps, Params
from baton.worker.quantization.neighbours import Norm, Stream


class PackedOps(LinearOps):
    """Implements LinearOps for parameters of the unquantized format."""

    def prepared(self, params: Params) -> Params:
        """Returns the packed matrix, and the bias if there is one."""
        return {"packed": pack(params["weight"])} | ({"bias": params["bias"]} if "bias" in params else {})

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        product = packed_linear(x, params["packed"], params.get("bias"))
        return product if out is None else out.copy_(product)

    def activate(self, params: Params, stream: Stream, norm: Norm | None, activation: str) -> Tensor:
        if not fuses(activation):
            return super().activate(params, stream, norm, activation)
        return packed_linear(stream.normed(norm, self.kernels), params["packed"], params.get("bias"), activation)

    def add(self, params: Params, x: Tensor, stream: Stream, scale: float = 1.0) -> None:
        if scale != 1:
            super().add(params, x, stream, scale)
            return
        stream.residual = packed_sum(x, params["packed"], params.get("bias"), stream.settled())

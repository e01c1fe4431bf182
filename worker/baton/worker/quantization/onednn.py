"""Ops of unquantized linears on a CPU by oneDNN, over the matrices as they are or over packed copies."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.reference.linear.packed import can_pack, fuses, pack, packed_linear, packed_sum
from baton.worker.quantization.base import LinearOps, Params
from baton.worker.quantization.neighbours import Norm, Stream

_LEAST_VALUES = 1 << 18  # a call costs 20 us more than one of the BLAS


def beats_blas() -> bool:
    """Returns whether oneDNN is faster than this PyTorch's BLAS: MKL multiplies one row by a single thread."""
    has_mkl = bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
    return has_mkl and can_pack(torch.float32)


def is_large(weight: Tensor) -> bool:
    """Returns whether oneDNN multiplies a matrix faster than MKL does. Half precision always takes oneDNN."""
    return weight.dtype is torch.float32 and weight.numel() >= _LEAST_VALUES


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

"""Ops of packed linears on a GPU."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from baton.kernels.activation.rounded_silu_mul import rounded_silu_mul
from baton.kernels.linear.quantized.choice import LinearKernel
from baton.kernels.linear.quantized.linear import kernel_of, quantized_linear, rounded_linear, rounding_of
from baton.kernels.linear.quantized.vector import vector_linear
from baton.kernels.linear.small_linear import Workspace
from baton.kernels.norm.rounded_rms_norm import rounded_rms_norm
from baton.kernels.packed.launch import has_e4m3
from baton.kernels.packed.weight import PackedWeight, readable
from baton.rpc.errors import Unsupported
from baton.worker.quantization.base import LinearOps, Params
from baton.worker.quantization.neighbours import Kernels, Norm, Stream

_SPLIT_FLOATS = 1 << 22  # of partial sums
_GATED_ROWS = 16  # gates and ups are whole words of 8 rows each


class Packing(Protocol):
    """What the ops need of a PackedMethod."""

    @property
    def name(self) -> str:
        """The method's name."""

    def packed_weight(self, params: Params) -> PackedWeight:
        """Returns the weight as kernels read it."""


class CudaPackedOps(LinearOps):
    """Products that read the weight as it is packed."""

    def __init__(
        self, kernels: Kernels, method: Packing, device: torch.device, *, batch_invariant: bool = False
    ) -> None:
        super().__init__(kernels)
        self._method = method
        self._invariant = batch_invariant
        self._has_e4m3 = has_e4m3(device)
        self._workspace = Workspace(device, _SPLIT_FLOATS)

    def reset(self) -> None:
        self._workspace.arrived.zero_()

    def prepared(self, params: Params) -> Params:
        """Returns the parameters as they are. Raises Unsupported for a weight that the kernels do not read."""
        scale = self._weight(params).scale
        if scale is not None and scale.dtype == torch.float8_e4m3fn and not self._has_e4m3:
            raise Unsupported(
                f"weights in {self._method.name} have scales in FP8, which need compute capability 8.9; use "
                "executor=cpu, or a newer GPU",
                field="model",
            )
        return params

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        return quantized_linear(x, self._weight(params), self._workspace, out, batch_invariant=self._invariant)

    def project(self, params: Params, stream: Stream, norm: Norm | None, out: Tensor | None = None) -> Tensor:
        if not self._is_fused(stream, norm):
            return self._project_many(params, stream, norm, out)
        weight = self._weight(params)
        if out is None:
            out = stream.residual.new_empty(1, weight.num_rows)
        return vector_linear(stream.residual, weight, out, **_fused(norm))

    def _project_many(self, params: Params, stream: Stream, norm: Norm | None, out: Tensor | None) -> Tensor:
        """Computes the norm together with the rounding of its result, if the product's kernel takes that."""
        weight = self._weight(params)
        kernel, wanted = self._rounding(weight, stream.residual)
        if norm is None or norm.centered or wanted is None:
            return super().project(params, stream, norm, out)
        group, row_unit = wanted
        update, stream.update = stream.update, None
        given, residual = (stream.residual, None) if update is None else (update, stream.residual)
        x = rounded_rms_norm(given, norm.weight, norm.eps, group, residual=residual, row_unit=row_unit)
        return rounded_linear(kernel, x, weight, self._workspace, out)

    def gate(self, params: Params, stream: Stream, norm: Norm | None) -> Tensor:
        weight = self._weight(params)
        if weight.num_rows % _GATED_ROWS or not self._is_fused(stream, norm):
            return super().gate(params, stream, norm)
        out = stream.residual.new_empty(1, weight.num_rows // 2)
        return vector_linear(stream.residual, weight, out, gated=True, **_fused(norm))

    def _rounding(self, weight: PackedWeight, like: Tensor) -> tuple[LinearKernel, tuple[int, int] | None]:
        """Returns the kernel of as many tokens as `like` has, and in what groups and rows it takes them rounded."""
        kernel = kernel_of(like, weight, weight.stored.shape[1], batch_invariant=self._invariant)
        return kernel, rounding_of(kernel, weight) if len(like) else None

    def fuses_gate(self, params: Params, like: Tensor) -> bool:
        return self._rounding(self._weight(params), like)[1] is not None

    def add_gated(self, params: Params, gate_up: Tensor, stream: Stream, scale: float = 1.0) -> None:
        weight = self._weight(params)
        kernel, wanted = self._rounding(weight, gate_up)
        if wanted is None:
            super().add_gated(params, gate_up, stream, scale)
            return
        group, row_unit = wanted
        x = rounded_silu_mul(gate_up, group, row_unit=row_unit)
        update = rounded_linear(kernel, x, weight, self._workspace)
        stream.add(update if scale == 1 else update.mul_(scale))

    def add(self, params: Params, x: Tensor, stream: Stream, scale: float = 1.0) -> None:
        if len(x) != 1 or scale != 1 or self._invariant:
            super().add(params, x, stream, scale)
            return
        residual = stream.settled()
        vector_linear(x, self._weight(params), residual, residual=residual)

    def _is_fused(self, stream: Stream, norm: Norm | None) -> bool:
        """Returns whether one launch computes the norm, the product of one token and the gate."""
        if norm is not None and (norm.centered or not stream.fuse_norms):
            return False
        return len(stream.residual) == 1 and stream.update is None and not self._invariant

    def _weight(self, params: Params) -> PackedWeight:
        weight = self._method.packed_weight(params)
        return weight._replace(stored=readable(weight.stored, has_e4m3=self._has_e4m3))


def _fused(norm: Norm | None) -> dict[str, Any]:
    return {} if norm is None else {"norm": norm.weight, "eps": norm.eps}

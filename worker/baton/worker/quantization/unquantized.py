"""Unquantized weights: one matrix per linear. Norms, gates and residual additions are fused where that is faster."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.reference.linear.packed import beats_blas, is_large
from baton.kernels.table import SMALL_ADD, SMALL_GATE, SMALL_PROJECT, SUMMING_ADD, WIDE_LINEAR, Case, Row, find
from baton.worker.quantization.base import LinearOps, LinearShape, Params, Source
from baton.worker.quantization.neighbours import Kernels, Norm, Stream
from baton.worker.quantization.onednn import OneDnnOps


class Unquantized:
    """Implements QuantMethod: `weight` [out_features, in_features] and `bias` [out_features] in the model's dtype."""

    name = "unquantized"

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> Params:
        """Allocates the matrix, and the bias if there is one."""
        weight = torch.empty(shape.out_features, shape.in_features, dtype=dtype, device=device)
        if not shape.bias:
            return {"weight": weight}
        return {"weight": weight, "bias": torch.empty(shape.out_features, dtype=dtype, device=device)}

    def load(self, params: Params, shape: LinearShape, source: Source) -> None:
        """Fills the rows of each part, in their order."""
        start = 0
        for part in shape.parts:
            rows = slice(start, start + part.rows)
            source(f"{part.name}.weight", (part.rows, shape.in_features), params["weight"][rows])
            if shape.bias:
                source(f"{part.name}.bias", (part.rows,), params["bias"][rows])
            start += part.rows

    def over(self, table: Tensor, bias: Tensor | None = None) -> Params:
        """Returns parameters sharing the memory of `table` [out_features, in_features], for tied embeddings."""
        return {"weight": table} if bias is None else {"weight": table, "bias": bias}

    def on_cpu(self, kernels: Kernels) -> LinearOps:
        """Returns ops that use PyTorch's BLAS, and oneDNN for large matrices of float32."""
        return _CpuOps(kernels)

    def on_cuda(self, kernels: Kernels, device: torch.device, *, batch_invariant: bool) -> LinearOps:
        """Returns ops that use cuBLAS or our kernels, by the number of tokens; only our kernels if batch-invariant."""
        return _InvariantOps(kernels) if batch_invariant else _CudaOps(kernels, device)


class _BlasOps(LinearOps):
    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        product = functional.linear(x, params["weight"], params.get("bias"))
        return product if out is None else out.copy_(product)

    def add(self, params: Params, x: Tensor, stream: Stream, scale: float = 1.0) -> None:
        residual, bias = stream.settled(), params.get("bias")
        residual.addmm_(x, params["weight"].t(), alpha=scale)
        if bias is not None:
            residual.add_(bias, alpha=scale)


class _CpuOps(LinearOps):
    """Multiplies each matrix by what is faster for its size."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._small = _BlasOps(kernels)
        self._large = OneDnnOps(kernels) if beats_blas() else self._small

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._of(params).multiply(params, x, out)

    def activate(self, params: Params, stream: Stream, norm: Norm | None, activation: str) -> Tensor:
        return self._of(params).activate(params, stream, norm, activation)

    def add(self, params: Params, x: Tensor, stream: Stream, scale: float = 1.0) -> None:
        self._of(params).add(params, x, stream, scale)

    def _of(self, params: Params) -> LinearOps:
        return self._large if is_large(params["weight"]) else self._small


class _CudaOps(LinearOps):
    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        from baton.kernels.linear.small_linear import Workspace, beats_blas  # imported here: CPUs have no Triton

        super().__init__(kernels)
        self._small_linear: Callable[..., Tensor] = SMALL_PROJECT.load()
        self._wide: Callable[..., Tensor] = WIDE_LINEAR.load()
        self._beats_blas = beats_blas
        self._workspace = Workspace(device)

    def reset(self) -> None:
        self._workspace.arrived.zero_()

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        bias = params.get("bias")
        if bias is None:
            return torch.mm(x, params["weight"].t(), out=out)
        return torch.addmm(bias, x, params["weight"].t(), out=out)

    def multiply_wide(self, params: Params, x: Tensor) -> Tensor:
        if "bias" in params or not WIDE_LINEAR.fits(Case(dtype=x.dtype, num_tokens=len(x))):
            return super().multiply_wide(params, x)
        product: Tensor = self._wide(x, params["weight"])
        return product

    def project(self, params: Params, stream: Stream, norm: Norm | None, out: Tensor | None = None) -> Tensor:
        if self._is_small(SMALL_PROJECT, stream, norm):
            return self._small(params, stream, norm, out=out)
        return super().project(params, stream, norm, out)

    def gate(self, params: Params, stream: Stream, norm: Norm | None) -> Tensor:
        if self._is_small(SMALL_GATE, stream, norm):
            return self._small(params, stream, norm, gated=True)
        return super().gate(params, stream, norm)

    def add(self, params: Params, x: Tensor, stream: Stream, scale: float = 1.0) -> None:
        weight, bias, num_tokens = params["weight"], params.get("bias"), x.shape[0]
        if num_tokens in SMALL_ADD.tokens and scale == 1 and self._beats_blas(num_tokens, *weight.shape):
            residual = stream.settled()
            self._small_linear(x, weight, self._workspace, bias=bias, residual=residual, out=residual)
        elif bias is None and (num_tokens in SUMMING_ADD.tokens or scale != 1):
            stream.settled().addmm_(x, weight.t(), alpha=scale)
        else:
            super().add(params, x, stream, scale)  # the product adds the bias, the next norm the update

    def _is_small(self, row: Row, stream: Stream, norm: Norm | None) -> bool:
        if norm is not None and norm.centered:
            return False
        if stream.update is not None:  # the norm adds it, as a launch of its own
            return False
        return stream.fuse_norms and stream.residual.shape[0] in row.tokens

    def _small(
        self, params: Params, stream: Stream, norm: Norm | None, *, gated: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Computes the norm, the product and the gate in one launch."""
        weight, eps = (None, 0.0) if norm is None else norm[:2]
        return self._small_linear(
            stream.settled(),
            params["weight"],
            self._workspace,
            bias=params.get("bias"),
            norm=weight,
            eps=eps,
            gated=gated,
            out=out,
        )


class _InvariantOps(LinearOps):
    """Ops that sum in one order for any number of tokens; norms are not fused, for the same reason."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._matmul: Callable[..., Tensor] = find("multiply", Case(batch_invariant=True)).load()

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        product, bias = self._matmul(x, params["weight"], out=out), params.get("bias")
        return product if bias is None else product.add_(bias)

    def gate(self, params: Params, stream: Stream, norm: Norm | None) -> Tensor:
        if "bias" in params:
            return super().gate(params, stream, norm)
        return self._matmul(stream.normed(norm, self.kernels), params["weight"], gated=True)

    def add(self, params: Params, x: Tensor, stream: Stream, scale: float = 1.0) -> None:
        residual = stream.settled()
        if "bias" in params or scale != 1:
            residual.add_(self.multiply(params, x), alpha=scale)
        else:
            self._matmul(x, params["weight"], residual=residual, out=residual)

"""Weights as int8 with one fp32 scale for each row: `NAME.weight` and `NAME.weight_scale`.

config.json says `"quantization_config": {"quant_method": "row-int8", "ignore": ["lm_head"]}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from baton.worker.quantization.base import LinearOps, LinearShape, Params, QuantMethod, Source
from baton.worker.quantization.neighbours import Kernels
from baton.worker.quantization.registry import UNQUANTIZED
from baton.worker.quantization.weight_format import WeightFormat


class RowInt8Ops(LinearOps):
    """Dequantizes the matrix for each product, on any device."""

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        weight = params["weight"].to(x.dtype) * params["scale"].to(x.dtype)[:, None]
        product = functional.linear(x, weight, params.get("bias"))
        return product if out is None else out.copy_(product)


class RowInt8:
    """Keeps weights as int8 with one scale for each row. Implements QuantMethod."""

    name = "row-int8"

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> Params:
        """Allocates half the bytes of bfloat16, and the scales."""
        params = {
            "weight": torch.empty(shape.out_features, shape.in_features, dtype=torch.int8, device=device),
            "scale": torch.empty(shape.out_features, dtype=torch.float32, device=device),
        }
        return {**params, "bias": torch.empty(shape.out_features, dtype=dtype, device=device)} if shape.bias else params

    def load(self, params: Params, shape: LinearShape, source: Source) -> None:
        """Fills the rows of each part."""
        start = 0
        for part in shape.parts:
            rows = slice(start, start + part.rows)
            source(f"{part.name}.weight", (part.rows, shape.in_features), params["weight"][rows])
            source(f"{part.name}.weight_scale", (part.rows,), params["scale"][rows])
            if shape.bias:
                source(f"{part.name}.bias", (part.rows,), params["bias"][rows])
            start += part.rows

    def on_cpu(self, kernels: Kernels) -> LinearOps:
        return RowInt8Ops(kernels)

    def on_cuda(self, kernels: Kernels, device: torch.device, *, batch_invariant: bool) -> LinearOps:
        if batch_invariant:
            raise ValueError("row-int8 depends on the batch: leave out --batch-invariant")
        return RowInt8Ops(kernels)


class RowInt8Format(WeightFormat):
    """All linears but the ignored ones."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        unknown = settings.keys() - {"quant_method", "ignore"}
        if unknown:
            raise ValueError(f"{sorted(unknown)[0]} is unknown; there are quant_method and ignore")
        self._ignored = tuple(settings.get("ignore", ()))
        self._method = RowInt8()

    def method_of(self, shape: LinearShape) -> QuantMethod:
        ignored = any(part.name.startswith(self._ignored) for part in shape.parts) if self._ignored else False
        return UNQUANTIZED if ignored else self._method

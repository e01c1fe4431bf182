"""FP8 and int8 with a scale a row, as compressed-tensors keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from baton.worker.weights.quantizing import compressed, numbers
from baton.worker.weights.quantizing.scheme import Packed, Scheme


class ScaledRows(Scheme):
    """w = stored * scale of the row"""

    def settings(self, left_out: Sequence[str]) -> dict[str, Any]:
        kind = {"num_bits": 8, "type": "float" if self.name == "fp8" else "int"}
        form = "float-quantized" if self.name == "fp8" else "int-quantized"
        weights, activations = {**kind, "strategy": "channel"}, {**kind, **compressed.BY_TOKEN}
        return compressed.settings(form, left_out, weights, activations)

    def pack(self, weight: Tensor, dtype: torch.dtype, largest: float) -> Packed:
        most = weight.abs().amax(1, keepdim=True)
        if self.name == "fp8":
            scale = numbers.scale_of(most, numbers.FP8_MOST, dtype)
            stored = numbers.to_fp8(weight, scale)
        else:
            scale = numbers.scale_of(most, 127.5, dtype)
            stored = numbers.rounded(weight, scale, -128, 127).to(torch.int8)
        return Packed({".weight": stored, ".weight_scale": scale.to(dtype)}, stored.float() * scale)


scheme = ScaledRows

"""Packed integers of compressed-tensors: W4A16 and W8A16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from baton.worker.weights.quantizing import compressed, integers, numbers
from baton.worker.weights.quantizing.scheme import Packed, Scheme

_BITS = {"w8a16": 8, "w4a16": 4, "w4a16-asym": 4}


class PackedIntegers(Scheme):
    """`NAME.weight_packed` of words along columns, `NAME.weight_scale`, `NAME.weight_shape` and perhaps zeros."""

    def settings(self, left_out: Sequence[str]) -> dict[str, Any]:
        kind = {"num_bits": _BITS[self.name], "type": "int", "symmetric": not self._has_zeros}
        return compressed.settings("pack-quantized", left_out, {**kind, "strategy": "group", "group_size": self.group})

    def pack(self, weight: Tensor, dtype: torch.dtype, largest: float) -> Packed:
        bits = _BITS[self.name]
        made = (integers.with_zeros if self._has_zeros else integers.symmetric)(weight, bits, self.group, dtype)
        tensors = {
            ".weight_packed": numbers.words_of(made.stored, bits),
            ".weight_scale": made.scale.to(dtype),
            ".weight_shape": torch.tensor(weight.shape),
        }
        if self._has_zeros:
            tensors[".weight_zero_point"] = numbers.words_of(made.zero.t(), bits).t().contiguous()
        return Packed(tensors, made.weight)

    @property
    def _has_zeros(self) -> bool:
        return self.name.endswith("-asym")


scheme = PackedIntegers

"""Packed integers of compressed-tensors: W4A16 and W8A16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from baton.worker.weights.quantizing import compressed, numbers
from baton.worker.weights.quantizing.integer_scheme import IntegerScheme
from baton.worker.weights.quantizing.integers import Integers
from baton.worker.weights.quantizing.scheme import Packed

_BITS = {"w8a16": 8, "w4a16": 4, "w4a16-asym": 4}


class PackedIntegers(IntegerScheme):
    """`NAME.weight_packed` of words along columns, `NAME.weight_scale`, `NAME.weight_shape` and perhaps zeros."""

    def __init__(self, name: str, group: int) -> None:
        super().__init__(name, group)
        self.bits, self.has_zeros = _BITS[name], name.endswith("-asym")

    def settings(self, left_out: Sequence[str]) -> dict[str, Any]:
        kind = {"num_bits": self.bits, "type": "int", "symmetric": not self.has_zeros}
        return compressed.settings("pack-quantized", left_out, {**kind, "strategy": "group", "group_size": self.group})

    def pack_integers(self, made: Integers, dtype: torch.dtype) -> Packed:
        tensors = {
            ".weight_packed": numbers.words_of(made.stored, self.bits),
            ".weight_scale": made.scale.to(dtype),
            ".weight_shape": torch.tensor(made.stored.shape),
        }
        if self.has_zeros:
            tensors[".weight_zero_point"] = numbers.words_of(made.zero.t(), self.bits).t().contiguous()
        return Packed(tensors, made.weight)


scheme = PackedIntegers

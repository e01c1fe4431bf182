"""Packs weights in AWQ's layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from baton.worker.weights.quantizing import integers, numbers
from baton.worker.weights.quantizing.scheme import Packed, Scheme

_BITS = 4
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output features of a word, from its lowest bits


class Awq(Scheme):
    """`NAME.qweight` and `NAME.qzeros` of words along output features, and `NAME.scales`, all transposed."""

    def settings(self, left_out: Sequence[str]) -> dict[str, Any]:
        return {
            "bits": _BITS,
            "group_size": self.group,
            "modules_to_not_convert": list(left_out),
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        }

    def pack(self, weight: Tensor, dtype: torch.dtype, largest: float) -> Packed:
        made = integers.with_zeros(weight, _BITS, self.group, torch.float16)
        tensors = {
            ".qweight": numbers.words_of(made.stored.t(), _BITS, _ORDER),
            ".qzeros": numbers.words_of(made.zero.t(), _BITS, _ORDER),
            ".scales": made.scale.t().to(torch.float16).contiguous(),
        }
        return Packed(tensors, made.weight)


scheme = Awq

"""Packs weights in AWQ's layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from baton.worker.weights.quantizing import numbers
from baton.worker.weights.quantizing.integer_scheme import IntegerScheme
from baton.worker.weights.quantizing.integers import Integers
from baton.worker.weights.quantizing.scheme import Packed

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output features of a word, from its lowest bits


class Awq(IntegerScheme):
    """`NAME.qweight` and `NAME.qzeros` of words along output features, and `NAME.scales`, all transposed."""

    has_zeros = True
    fixed_scale_dtype = torch.float16

    def settings(self, left_out: Sequence[str]) -> dict[str, Any]:
        return {
            "bits": self.bits,
            "group_size": self.group,
            "modules_to_not_convert": list(left_out),
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        }

    def pack_integers(self, made: Integers, dtype: torch.dtype) -> Packed:
        tensors = {
            ".qweight": numbers.words_of(made.stored.t(), self.bits, _ORDER),
            ".qzeros": numbers.words_of(made.zero.t(), self.bits, _ORDER),
            ".scales": made.scale.t().to(torch.float16).contiguous(),
        }
        return Packed(tensors, made.weight)


scheme = Awq

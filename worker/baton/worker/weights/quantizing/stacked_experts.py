"""MXFP4 as gpt-oss ships it: stacks of experts are packed, and all else stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from baton.worker.quantization.quantized.fp4 import MX_GROUP
from baton.worker.weights.quantizing.four_bit_floats import MxFp4
from baton.worker.weights.quantizing.scheme import Packed, Scheme


class StackedMxFp4(Scheme):
    """`NAME_blocks` [experts, rows, groups, 16] and `NAME_scales` [experts, rows, groups]."""

    packs_stacks = True

    def settings(self, left_out: Sequence[str]) -> dict[str, Any]:
        return {"modules_to_not_convert": list(left_out), "quant_method": "mxfp4"}

    def pack(self, weight: Tensor, dtype: torch.dtype, largest: float) -> Packed:
        """Rounds one expert's matrix."""
        packed = MxFp4("mxfp4", 0).pack(weight, dtype, largest)
        blocks = packed.tensors[".weight_packed"].unflatten(1, (-1, MX_GROUP // 2))  # type: ignore[no-untyped-call]
        return Packed({"_blocks": blocks, "_scales": packed.tensors[".weight_scale"]}, packed.weight)


scheme = StackedMxFp4

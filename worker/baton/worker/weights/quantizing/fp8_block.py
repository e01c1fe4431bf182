"""FP8 in blocks, as DeepSeek and Qwen ship it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from baton.worker.weights.quantizing import numbers
from baton.worker.weights.quantizing.scheme import Packed, Scheme

_BLOCK = 128


class Blocks(Scheme):
    """w = stored * scale of a block of 128x128; those at the edges may be smaller"""

    def settings(self, left_out: Sequence[str]) -> dict[str, Any]:
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": list(left_out),
            "quant_method": "fp8",
            "weight_block_size": [_BLOCK, _BLOCK],
        }

    def pack(self, weight: Tensor, dtype: torch.dtype, largest: float) -> Packed:
        rows, columns = weight.shape
        padded = functional.pad(weight, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
        blocks = padded.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK))  # type: ignore[no-untyped-call]
        scale = numbers.scale_of(blocks.abs().amax((1, 3)), numbers.FP8_MOST, torch.float32)
        spread = scale.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
        stored = numbers.to_fp8(weight, spread)
        return Packed({".weight": stored, ".weight_scale_inv": scale}, stored.float() * spread)


scheme = Blocks

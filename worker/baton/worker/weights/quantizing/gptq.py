"""Packs weights in GPTQ's layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from baton.worker.weights.quantizing import integers, numbers
from baton.worker.weights.quantizing.scheme import Packed, Scheme

_BITS = 4
_WRAPPERS = re.compile(r"^((model|language_model)\.)*")


class Gptq(Scheme):
    """`NAME.qweight` of words along columns, transposed, `NAME.qzeros`, `NAME.scales` and `NAME.g_idx`."""

    def settings(self, left_out: Sequence[str]) -> dict[str, Any]:
        return {
            "bits": _BITS,
            "checkpoint_format": "gptq",
            "desc_act": False,
            "dynamic": {f"-:.*\\b{re.escape(_WRAPPERS.sub('', name))}$": {} for name in left_out},
            "group_size": self.group,
            "lm_head": False,
            "pack_dtype": "int32",
            "quant_method": "gptq",
            "sym": True,
        }

    def pack(self, weight: Tensor, dtype: torch.dtype, largest: float) -> Packed:
        made = integers.symmetric(weight, _BITS, self.group, torch.float16)
        tensors = {
            ".qweight": numbers.words_of(made.stored, _BITS).t().contiguous(),
            # The first version of the layout stores them less 1.
            ".qzeros": numbers.words_of(made.zero.t() - 1, _BITS),
            ".scales": made.scale.t().to(torch.float16).contiguous(),
            ".g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // self.group,
        }
        return Packed(tensors, made.weight)


scheme = Gptq

"""Packs weights in GPTQ's layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from baton.worker.weights.quantizing import numbers
from baton.worker.weights.quantizing.integer_scheme import IntegerScheme
from baton.worker.weights.quantizing.integers import Integers
from baton.worker.weights.quantizing.scheme import Packed

_WRAPPERS = re.compile(r"^((model|language_model)\.)*")


class Gptq(IntegerScheme):
    """`NAME.qweight` of words along columns, transposed, `NAME.qzeros`, `NAME.scales` and `NAME.g_idx`."""

    fixed_scale_dtype = torch.float16

    def settings(self, left_out: Sequence[str]) -> dict[str, Any]:
        return {
            "bits": self.bits,
            "checkpoint_format": "gptq",
            "desc_act": False,
            "dynamic": {f"-:.*\\b{re.escape(_WRAPPERS.sub('', name))}$": {} for name in left_out},
            "group_size": self.group,
            "lm_head": False,
            "pack_dtype": "int32",
            "quant_method": "gptq",
            "sym": True,
        }

    def pack_integers(self, made: Integers, dtype: torch.dtype) -> Packed:
        tensors = {
            ".qweight": numbers.words_of(made.stored, self.bits).t().contiguous(),
            # The first version of the layout stores them less 1.
            ".qzeros": numbers.words_of(made.zero.t() - 1, self.bits),
            ".scales": made.scale.t().to(torch.float16).contiguous(),
            ".g_idx": torch.arange(made.stored.shape[1], dtype=torch.int32) // self.group,
        }
        return Packed(tensors, made.weight)


scheme = Gptq

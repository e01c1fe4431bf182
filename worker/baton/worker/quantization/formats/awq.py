"""AWQ: 4 bits with a scale and a zero a group, packed along the output features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from baton.worker.quantization.formats import settings as read
from baton.worker.quantization.formats.base import FormatOfLinears
from baton.worker.quantization.formats.modules import Modules
from baton.worker.quantization.quantized.grouped import Grouped, Packing, group_scales, packed_zeros
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.quantized.tensors import StoredTensor

_BITS = 4
_PER_WORD = 8
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # a word's integers are rows 0, 2, 4, 6, 1, 3, 5, 7


class Awq(FormatOfLinears):
    """`NAME.qweight` [in, out / 8], `NAME.qzeros` [groups, out / 8] and `NAME.scales` [groups, out]."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        read.choice(settings, "w_bit" if settings.get("w_bit") is not None else "bits", (_BITS,))
        version = str(settings.get("version") or settings.get("format") or "gemm").lower()
        read.choice({"version": version}, "version", ("gemm",))
        read.choice(settings, "zero_point", (True,), True)
        key = "q_group_size" if settings.get("q_group_size") is not None else "group_size"
        group = read.group_size(settings, key, default=128)
        self._left_out = Modules(read.names(settings, "modules_to_not_convert"))
        self._method = Grouped(
            Packing(
                "awq",
                _BITS,
                group,
                StoredTensor("weight", ".qweight", torch.int32, rows=_PER_WORD, transposed=True),
                group_scales(".scales", group, transposed=True),
                packed_zeros(".qzeros", _BITS, group, transposed=True),
                order=_ORDER,
            )
        )

    def packed(self, name: str) -> PackedMethod | None:
        return None if self._left_out.has(name) else self._method


FORMAT = Awq

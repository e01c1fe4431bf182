"""AWQ: 4 bits with a scale and a zero a group, packed along the output features, and kept along the input features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.worker.quantization.formats import settings as read
from baton.worker.quantization.formats.base import FormatOfLinears
from baton.worker.quantization.formats.modules import Modules
from baton.worker.quantization.quantized.grouped import Packing, columns_packed, group_scales, packed_zeros
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.quantized.rows_of_words import RowsOfWords

_BITS = 4
_WEIGHT = ".qweight"


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
        self._method = RowsOfWords(
            Packing(
                "awq",
                _BITS,
                group,
                columns_packed(_WEIGHT, _BITS),
                group_scales(".scales", group, transposed=True),
                packed_zeros(".qzeros", _BITS, group, transposed=True),
            ),
            _WEIGHT,
        )

    def packed(self, name: str) -> PackedMethod | None:
        return None if self._left_out.has(name) else self._method


FORMAT = Awq

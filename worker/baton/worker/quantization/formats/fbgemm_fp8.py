"""FP8 as Meta ships it (Llama 3.1 405B): e4m3 with a scale a row. Activations are not rounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.worker.quantization.formats import settings as read
from baton.worker.quantization.formats.base import FormatOfLinears
from baton.worker.quantization.formats.modules import Modules
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.quantized.scaled import FP8, Scaled


class FbgemmFp8(FormatOfLinears):
    """`NAME.weight` and `NAME.weight_scale` [rows, 1]."""

    unused = (".input_scale_ub",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._left_out = Modules(read.names(settings, "modules_to_not_convert"))
        self._method = Scaled(FP8)

    def packed(self, name: str) -> PackedMethod | None:
        return None if self._left_out.has(name) else self._method


FORMAT = FbgemmFp8

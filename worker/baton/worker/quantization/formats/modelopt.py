"""ModelOpt, in both forms of its config: FP8 and NVFP4. Activations are not rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton.worker.quantization.formats import settings as read
from baton.worker.quantization.formats.base import FormatOfLinears
from baton.worker.quantization.formats.modules import Modules
from baton.worker.quantization.quantized.fp4 import NV_GROUP, NvFp4
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.quantized.scaled import FP8, Scaled

_METHODS: Mapping[str, Callable[[], PackedMethod]] = {
    "FP8": lambda: Scaled(FP8, one_a_part=True),
    "NVFP4": lambda: NvFp4(".weight", ".weight_scale", ".weight_scale_2", global_scale="multiplies"),
}


class ModelOpt(FormatOfLinears):
    """`NAME.weight`, `NAME.weight_scale` and, of NVFP4, `NAME.weight_scale_2`."""

    covers_heads = True
    unused = (".input_scale", ".output_scale")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        values = read.inner(settings, "quantization") or settings
        algorithm = read.choice(values, "quant_algo", tuple(_METHODS))
        if algorithm == "NVFP4":
            read.choice(values, "group_size", (NV_GROUP,), NV_GROUP)
        self._left_out = Modules(read.names(values, "exclude_modules", "ignore"))
        self._method = _METHODS[algorithm]()

    def packed(self, name: str) -> PackedMethod | None:
        return None if self._left_out.has(name) else self._method


FORMAT = ModelOpt

"""FP8 as DeepSeek, Qwen, Mistral and AutoFP8 ship it: e4m3 with a scale a tensor or a block.

Activations are not rounded, whatever activation_scheme says: their scales are for kernels of 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from baton.worker.quantization.formats import settings as read
from baton.worker.quantization.formats.base import FormatOfLinears
from baton.worker.quantization.formats.modules import Modules
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.quantized.scaled import FP8, Scaled


class Fp8(FormatOfLinears):
    """`NAME.weight` and `NAME.weight_scale_inv`, which multiplies it; a scale a tensor may be `NAME.weight_scale`."""

    unused = (".input_scale", ".activation_scale", ".activation_scale_inv")
    other_endings: ClassVar[Mapping[str, str]] = {".weight_scale_inv": ".weight_scale"}

    def __init__(self, settings: Mapping[str, Any]) -> None:
        read.choice(settings, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        read.choice(settings, "activation_scheme", ("dynamic", "static"), "dynamic")
        read.choice(settings, "expert_dtype", ("fp8",), "fp8")
        if settings.get("modules_to_convert"):
            raise ValueError(f"modules_to_convert is {settings['modules_to_convert']!r}; it must be absent")
        block = read.block(settings, "weight_block_size")
        self._left_out = Modules(read.names(settings, "modules_to_not_convert", "ignored_layers"))
        self._method = Scaled(FP8, block, one_a_part=block is None, scale_ending=".weight_scale_inv")

    def packed(self, name: str) -> PackedMethod | None:
        return None if self._left_out.has(name) else self._method


FORMAT = Fp8

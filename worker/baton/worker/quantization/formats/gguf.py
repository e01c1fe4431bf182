"""GGUF: every matrix has a type of its own. Types without dequantization here are read by the package gguf at load."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from baton.worker.quantization.formats import settings as read
from baton.worker.quantization.formats.base import FormatOfLinears
from baton.worker.quantization.quantized.gguf import GgufBlocks
from baton.worker.quantization.quantized.gguf_blocks import BLOCK_TYPES
from baton.worker.quantization.quantized.gguf_planes import GgufPlanes
from baton.worker.quantization.quantized.method import PackedMethod

_EXPERT = re.compile(r"(.*experts\.)\d+(\..*)")


class Gguf(FormatOfLinears):
    """The settings are made of a file's header: `tensors` has the type of each matrix by its name.

    With `planes`, values are kept apart from their scales, as the GPU's kernels read them.
    """

    covers_heads = covers_tables = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        types = read.inner(settings, "tensors")
        if types is None:
            raise ValueError("tensors is missing; it must have the type of each matrix, as a GGUF file's header does")
        self._types = types
        method: type[GgufBlocks | GgufPlanes] = GgufPlanes if settings.get("planes") else GgufBlocks
        self._methods = {name: method(name, kind) for name, kind in BLOCK_TYPES.items()}

    def packed(self, name: str) -> PackedMethod | None:
        kind = self._types.get(name)
        if kind is None and (match := _EXPERT.fullmatch(name)):
            kind = self._types.get(f"{match[1]}{{}}{match[2]}")
        return self._methods.get(str(kind))


FORMAT = Gguf

"""bitsandbytes: NF4 and FP4, whose scales may be quantized too, and int8.

Outliers of activations are not taken apart (LLM.int8()): activations are not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from baton.worker.quantization.formats import settings as read
from baton.worker.quantization.formats.base import FormatOfLinears
from baton.worker.quantization.formats.modules import Modules
from baton.worker.quantization.quantized.bitsandbytes import TABLES, FourBits, Int8, offset_in
from baton.worker.quantization.quantized.method import PackedMethod

_SKIPPED = "llm_int8_skip_modules"


class BitsAndBytes(FormatOfLinears):
    """`NAME.weight` [values / 2, 1] with `absmax`, `quant_map`, the state in JSON and, of nested scales,
    `nested_absmax` and `nested_quant_map`; of int8, `NAME.weight` and `NAME.SCB`."""

    unused = (".weight_format", ".weight.quant_map")
    covers_heads = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        four, eight = (read.flag(settings, f"load_in_{bits}bit", default=False) for bits in (4, 8))
        if four == eight:
            raise ValueError(f"load_in_4bit is {four} and load_in_8bit is {eight}; one must be true")
        read.choice(settings, "bnb_4bit_quant_storage", ("uint8",), "uint8")
        self._nested = read.flag(settings, "bnb_4bit_use_double_quant", default=False)
        self._kind = read.choice(settings, "bnb_4bit_quant_type", tuple(TABLES), "fp4")
        self._four = FourBits(self._kind, nested=self._nested) if four else None
        self._method: PackedMethod = self._four or Int8()
        # By default, heads are left out.
        skipped = ("lm_head",) if settings.get(_SKIPPED) is None else read.names(settings, _SKIPPED)
        self._left_out = Modules(skipped)

    def packed(self, name: str) -> PackedMethod | None:
        return None if self._left_out.has(name) else self._method

    def decoder_of(self, name: str) -> Callable[[Tensor], Tensor] | None:
        if self._four is None or not name.endswith(self._four.state_ending):
            return None
        return partial(offset_in, name=name, kind=self._kind, nested=self._nested)


FORMAT = BitsAndBytes

"""GPTQ: 2, 4 or 8 bits with a scale and a zero a group, also with columns in the order of activations (desc_act)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from baton.worker.quantization.formats import settings as read
from baton.worker.quantization.formats.base import FormatOfLinears
from baton.worker.quantization.formats.modules import Modules
from baton.worker.quantization.quantized.grouped import (
    Grouped,
    Packing,
    columns_packed,
    group_scales,
    packed_zeros,
)
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.quantized.ordered import Ordered

_BITS = (2, 4, 8)
_GROUPS = ".g_idx"


class Gptq(FormatOfLinears):
    """`NAME.qweight` [in / per word, out], `NAME.qzeros` [groups, out / per word], `NAME.scales` [groups, out] and,
    with desc_act, `NAME.g_idx` [in]. Zeros of the first version are stored less 1."""

    unused = (_GROUPS,)  # without desc_act

    def __init__(self, settings: Mapping[str, Any]) -> None:
        read.flag(settings, "sym", default=True)
        version = settings.get("checkpoint_format") or settings.get("format")
        read.choice({"checkpoint_format": version}, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        self._zero_plus = 0 if version == "gptq_v2" else 1
        self.covers_heads = read.flag(settings, "lm_head", default=False)
        self._settings = settings
        self._made: dict[tuple[int, int, bool], Grouped] = {}
        self._default = self._grouped(settings)
        self._overrides = [_override(key, value) for key, value in (read.inner(settings, "dynamic") or {}).items()]
        self._left_out = Modules(read.names(settings, "modules_to_not_convert"))
        inside = settings.get("modules_in_block_to_quantize") or []
        flat = [name for each in inside for name in (each if isinstance(each, list) else [each])]
        self._inside = Modules(flat) if flat else None

    def packed(self, name: str) -> PackedMethod | None:
        if self._left_out.has(name) or not (self._inside is None or self._inside.has(name) or name == "lm_head"):
            return None
        for leaves_out, regex, values in self._overrides:
            if regex.match(name):
                return None if leaves_out else self._grouped({**self._settings, **values})
        return self._default

    def _grouped(self, settings: Mapping[str, Any]) -> Grouped:
        bits, group = read.choice(settings, "bits", _BITS), read.group_size(settings, default=128)
        ordered = read.flag(settings, "desc_act", default=False) and group > 0
        key = (bits, group, ordered)
        if key not in self._made:
            packing = Packing(
                "gptq",
                bits,
                group,
                columns_packed(".qweight", bits, transposed=True),
                group_scales(".scales", group, transposed=True),
                packed_zeros(".qzeros", bits, group, transposed=True),
                self._zero_plus,
            )
            self._made[key] = Ordered(packing, _GROUPS) if ordered else Grouped(packing)
        return self._made[key]


def _override(key: str, values: object) -> tuple[bool, re.Pattern[str], Mapping[str, Any]]:
    """Returns whether an entry of `dynamic` leaves modules out, which they are, and their settings."""
    if not isinstance(values, Mapping):
        raise ValueError(f"dynamic: {key!r} is {values!r}; it must be an object")
    try:
        return key.startswith("-:"), re.compile(re.sub(r"^[-+]:", "", key)), values
    except re.error as error:
        raise ValueError(f"dynamic: {key!r} is no regular expression: {error}") from error


FORMAT = Gptq

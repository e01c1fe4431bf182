"""AutoRound: GPTQ's or AWQ's layout, whose linears may differ by `extra_config`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from baton.worker.quantization.formats import settings as read
from baton.worker.quantization.formats.awq import Awq
from baton.worker.quantization.formats.base import FormatOfLinears
from baton.worker.quantization.formats.gptq import Gptq
from baton.worker.quantization.quantized.method import PackedMethod

_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_LEAST_WHOLE = 16  # bits, of linears that are left out
_HEAD = "lm_head"


class AutoRound(FormatOfLinears):
    """The tensors are those of the other format."""

    unused = Gptq.unused

    def __init__(self, settings: Mapping[str, Any]) -> None:
        packing = read.choice(settings, "packing_format", (_GPTQ, _AWQ), _GPTQ)
        read.choice(settings, "data_type", ("int",), "int")
        extra = {name: read.inner({name: own}, name) or {} for name, own in _extra(settings).items()}
        self._whole = frozenset(name for name, own in extra.items() if own.get("bits", 0) >= _LEAST_WHOLE)
        self.covers_heads = _HEAD in extra and _HEAD not in self._whole
        others = {name: own for name, own in extra.items() if name not in self._whole}
        self._format: FormatOfLinears = _gptq(settings, others) if packing == _GPTQ else _awq(settings, others)

    def packed(self, name: str) -> PackedMethod | None:
        return None if name in self._whole else self._format.packed(name)


def _extra(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return read.inner(settings, "extra_config") or {}


def _gptq(settings: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> FormatOfLinears:
    dynamic = {
        rf"+:{re.escape(name)}$": {key: own[key] for key in ("bits", "group_size") if own.get(key) is not None}
        for name, own in others.items()
    }
    plain = {key: settings[key] for key in ("bits", "group_size", "sym") if key in settings}
    return Gptq({**plain, "dynamic": dynamic, "desc_act": False})


def _awq(settings: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> FormatOfLinears:
    for name, own in others.items():
        for key in ("bits", "group_size"):
            if own.get(key, settings.get(key)) != settings.get(key):
                raise ValueError(f"extra_config: {name}: {key} is {own[key]!r}; in {_AWQ} it must be as of all")
    return Awq({key: settings[key] for key in ("bits", "group_size") if key in settings})


FORMAT = AutoRound

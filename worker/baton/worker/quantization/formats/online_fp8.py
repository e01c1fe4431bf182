"""FP8 made of unquantized weights while they load: e4m3 with a scale a row.

Activations are not rounded: that is for kernels of 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.worker.quantization.base import LinearShape, QuantMethod
from baton.worker.quantization.experts import ExpertsMethod, ExpertsShape
from baton.worker.quantization.quantized.online import OnlineExperts, OnlineFp8
from baton.worker.quantization.registry import UNQUANTIZED
from baton.worker.quantization.weight_format import WeightFormat


class Fp8AtLoad(WeightFormat):
    """All linears of layers, experts too. Routers and heads stay as they are."""

    covers_experts = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._linears = OnlineFp8()
        self._experts = OnlineExperts(self._linears)

    def method_of(self, shape: LinearShape) -> QuantMethod:
        return self._linears if shape.kind == "layer" else UNQUANTIZED

    def experts_method_of(self, shape: ExpertsShape) -> ExpertsMethod:
        return self._experts


FORMAT = Fp8AtLoad

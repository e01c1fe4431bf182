"""Weight formats by name."""

from __future__ import annotations

from collections.abc import Mapping

from baton.worker.quantization.base import QuantMethod
from baton.worker.quantization.experts import ExpertsMethod
from baton.worker.quantization.unquantized import Unquantized
from baton.worker.quantization.unquantized_experts import UnquantizedExperts

UNQUANTIZED = Unquantized()
METHODS: Mapping[str, QuantMethod] = {method.name: method for method in (UNQUANTIZED,)}

UNQUANTIZED_EXPERTS = UnquantizedExperts()
EXPERTS_METHODS: Mapping[str, ExpertsMethod] = {method.name: method for method in (UNQUANTIZED_EXPERTS,)}

"""Weight formats by name."""

from __future__ import annotations

from collections.abc import Mapping

from baton.worker.quantization.base import QuantMethod
from baton.worker.quantization.unquantized import Unquantized

UNQUANTIZED = Unquantized()
METHODS: Mapping[str, QuantMethod] = {method.name: method for method in (UNQUANTIZED,)}

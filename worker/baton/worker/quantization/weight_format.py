"""The interface of weight formats that plugins bring. Version 1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from baton.worker.quantization.base import LinearShape, QuantMethod


class WeightFormat(ABC):
    """A format that a model's config.json names as its quant_method. An entry point of that name names a subclass."""

    def __init__(self, settings: Mapping[str, Any]) -> None:  # noqa: B027 - some have no settings
        """Reads quantization_config. Raises ValueError for settings that it does not support."""

    @abstractmethod
    def method_of(self, shape: LinearShape) -> QuantMethod:
        """Returns how the weights of a linear are stored and multiplied; UNQUANTIZED for one that is as usual.

        One name of a method stands for one way: its ops are shared by all linears.
        """

"""The interface of weight formats that a model's config.json names. That of plugins is version 1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from baton.worker.quantization.base import LinearShape, QuantMethod, TableMethod
from baton.worker.quantization.experts import ExpertsMethod, ExpertsShape


class WeightFormat(ABC):
    """A format that a model's config.json names as its quant_method. An entry point of that name names a subclass."""

    covers_experts: ClassVar[bool] = False
    unused: ClassVar[tuple[str, ...]] = ()  # endings of tensors that checkpoints have and products do not need
    other_endings: ClassVar[Mapping[str, str]] = {}  # of tensors in some checkpoints, by the ending that `load` names

    def __init__(self, settings: Mapping[str, Any]) -> None:  # noqa: B027 - some have no settings
        """Reads quantization_config. Raises ValueError for settings that it does not support."""

    @abstractmethod
    def method_of(self, shape: LinearShape) -> QuantMethod:
        """Returns how the weights of a linear are stored and multiplied; UNQUANTIZED for one that is as usual.

        One name of a method stands for one way: its ops are shared by all linears.
        """

    def table_method_of(self, shape: LinearShape) -> TableMethod | None:
        """Returns how an embedding is stored; None: as usual."""
        return None

    def decoder_of(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """Returns what makes one number in fp32 of the bytes of a tensor, if they are of no fixed number."""
        return None

    def experts_method_of(self, shape: ExpertsShape) -> ExpertsMethod:
        """Returns how the weights of a layer's experts are stored and multiplied, if `covers_experts`."""
        raise NotImplementedError

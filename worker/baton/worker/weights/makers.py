"""Makers of a model's tensors: one that only allocates them, and one that fills them from a source too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from baton.worker.layers.experts import StackedWeights
from baton.worker.layers.linear import LinearWeights
from baton.worker.models.config import WeightsInFormat
from baton.worker.quantization.base import LinearShape, QuantMethod, Source
from baton.worker.quantization.experts import ExpertsMethod, ExpertsShape
from baton.worker.quantization.registry import UNQUANTIZED, UNQUANTIZED_EXPERTS

_EXPERTS_METHOD: ExpertsMethod = UNQUANTIZED_EXPERTS


@dataclass(frozen=True, slots=True)
class Allocator:
    """Allocates weights without values."""

    dtype: torch.dtype
    device: torch.device
    format: WeightsInFormat | None  # None: unquantized

    def linear(self, shape: LinearShape) -> LinearWeights:
        method: QuantMethod = UNQUANTIZED if self.format is None else self.format.method_of(shape)
        return LinearWeights(method, method.create(shape, self.dtype, self.device))

    def reading(self, change: Callable[[Source], Source]) -> Allocator:
        """Returns a maker of tensors that the checkpoint keeps in another way."""
        return self

    def experts(self, shape: ExpertsShape) -> StackedWeights:
        return StackedWeights(_EXPERTS_METHOD, _EXPERTS_METHOD.create(shape, self.dtype, self.device))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def fill(self, name: str, shape: tuple[int, ...], into: Tensor, plus: float = 0.0) -> Tensor:
        """Returns the tensor, which holds the named one of this shape, plus a number, at the end."""
        return into

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.fill(name, shape, self.empty(shape))

    def complete(self) -> None:
        """Ends the making, when the source has filled all tensors."""


@dataclass(frozen=True, slots=True)
class Loader(Allocator):
    """Allocates weights and fills them from `source`."""

    source: Source
    sums: list[tuple[Tensor, float]] = field(default_factory=list)

    def linear(self, shape: LinearShape) -> LinearWeights:
        weights = Allocator.linear(self, shape)
        weights.method.load(weights.params, shape, self.source)
        return weights

    def reading(self, change: Callable[[Source], Source]) -> Loader:
        return replace(self, source=change(self.source))

    def experts(self, shape: ExpertsShape) -> StackedWeights:
        weights = Allocator.experts(self, shape)
        weights.method.load(weights.params, shape, self.source)
        return weights

    def fill(self, name: str, shape: tuple[int, ...], into: Tensor, plus: float = 0.0) -> Tensor:
        self.source(name, shape, into)
        if plus:
            self.sums.append((into, plus))
        return into

    def complete(self) -> None:
        for tensor, number in self.sums:
            tensor.add_(number)

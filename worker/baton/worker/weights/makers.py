"""Makers of a model's tensors: one that only allocates them, and one that fills them from a source too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from baton.worker.layers.experts import StackedWeights
from baton.worker.layers.linear import LinearWeights
from baton.worker.layers.table import PackedTable, Table
from baton.worker.quantization.base import Finish, LinearShape, QuantMethod, Source, Staged
from baton.worker.quantization.experts import ExpertsMethod, ExpertsShape
from baton.worker.quantization.registry import UNQUANTIZED, UNQUANTIZED_EXPERTS
from baton.worker.quantization.weight_format import WeightFormat

_MOST_STAGED_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class Allocator:
    """Allocates weights without values."""

    dtype: torch.dtype
    device: torch.device
    format: WeightFormat | None  # None: unquantized

    def linear(self, shape: LinearShape) -> LinearWeights:
        method: QuantMethod = UNQUANTIZED if self.format is None else self.format.method_of(shape)
        return LinearWeights(method, method.create(shape, self.dtype, self.device), shape.parts[0].name)

    def table(self, shape: LinearShape) -> Table:
        """Returns an embedding, packed if its format has it so."""
        method = None if self.format is None else self.format.table_method_of(shape)
        if method is None:
            return self.tensor(f"{shape.parts[0].name}.weight", (shape.out_features, shape.in_features))
        return PackedTable(method, method.create(shape, self.dtype, self.device), shape.in_features)

    def reading(self, change: Callable[[Source], Source]) -> Allocator:
        """Returns a maker of tensors that the checkpoint keeps in another way."""
        return self

    def experts(self, shape: ExpertsShape) -> StackedWeights:
        method: ExpertsMethod = UNQUANTIZED_EXPERTS if self.format is None else self.format.experts_method_of(shape)
        return StackedWeights(method, method.create(shape, self.dtype, self.device), shape.prefix)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def fill(self, name: str, shape: tuple[int, ...], into: Tensor, plus: float = 0.0) -> Tensor:
        """Returns the tensor, which holds the named one of this shape, plus a number, at the end."""
        return into

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.fill(name, shape, self.empty(shape))

    def finish(self, change: Finish) -> None:
        """Calls `change` when what was made so far is filled."""

    def complete(self) -> None:
        """Completes what was made."""


@dataclass(frozen=True, slots=True)
class Recorder(Allocator):
    """Allocates weights and keeps the shapes of their linears."""

    shapes: list[LinearShape | ExpertsShape] = field(default_factory=list)

    def linear(self, shape: LinearShape) -> LinearWeights:
        self.shapes.append(shape)
        return Allocator.linear(self, shape)

    def experts(self, shape: ExpertsShape) -> StackedWeights:
        self.shapes.append(shape)
        return Allocator.experts(self, shape)


@dataclass(frozen=True, slots=True)
class Loader(Allocator):
    """Allocates weights and fills them from `source`."""

    source: Source
    read: Callable[[], None]  # makes the source fill what it was asked for
    finishes: list[Finish] = field(default_factory=list)

    def linear(self, shape: LinearShape) -> LinearWeights:
        weights = Allocator.linear(self, shape)
        self._add(weights.method.load(weights.params, shape, self.source))
        return weights

    def table(self, shape: LinearShape) -> Table:
        made = Allocator.table(self, shape)
        if isinstance(made, PackedTable):
            self._add(made.method.load(made.params, shape, self.source))
        return made

    def reading(self, change: Callable[[Source], Source]) -> Loader:
        return replace(self, source=change(self.source))

    def experts(self, shape: ExpertsShape) -> StackedWeights:
        weights = Allocator.experts(self, shape)
        self._add(weights.method.load(weights.params, shape, self.source))
        return weights

    def fill(self, name: str, shape: tuple[int, ...], into: Tensor, plus: float = 0.0) -> Tensor:
        self.source(name, shape, into)
        if plus:
            self.finishes.append(partial(into.add_, plus))
        return into

    def finish(self, change: Finish) -> None:
        self._add(change)

    def complete(self) -> None:
        self.read()
        while self.finishes:
            self.finishes.pop(0)()

    def _add(self, finish: Finish | None) -> None:
        if finish is not None and self.device.type != "meta":  # which has no values
            self.finishes.append(finish)
            if sum(one.num_bytes for one in self.finishes if isinstance(one, Staged)) >= _MOST_STAGED_BYTES:
                self.complete()

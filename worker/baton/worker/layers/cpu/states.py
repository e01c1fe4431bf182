"""The states of recurrent layers in the pages of a KV cache on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.kernels.recurrent_states import States
from baton.kernels.reference.recurrence.state_access import read_states, write_states
from baton.worker.state_pieces import PlacedMatrix, PlacedState


@dataclass(frozen=True, slots=True)
class StateRun:
    """Some sequences of a step, whose tokens follow one another, and their states."""

    start: int  # of the step's tokens
    stop: int
    cu_seqlens: Tensor  # [num_seqs + 1] int32, from 0
    read: Tensor  # [num_seqs, pages] int64: states before the step; -1: zeros
    write: Tensor  # [num_seqs, pages] int64: states after it
    decodes: bool  # each sequence has one known token, and drafts
    deferred: list[DeferredStates] | None = None  # gets what writes the states once drafts are accepted; None: none are


class DeferredStates(NamedTuple):
    """The states of one layer that a step has not written."""

    write: Callable[[Tensor], None]  # of the first so many tokens of each sequence, [num_seqs] int32


class StatePlaces:
    """Where a group's states lie in pages [num_layers, num_pages, values of a part in fp32]."""

    def __init__(self, pages: Tensor, placed: PlacedState) -> None:
        num_layers, num_pages, part_values = pages.shape
        self._pages = pages
        self._unit = gcd(part_values, placed.unit)
        self._part_units = part_values // self._unit
        self._layers = [
            [_Places(matrix, num_layers, num_pages, self._unit) for matrix in layer] for layer in placed.layers
        ]

    def states(self, layer: int, run: StateRun) -> list[States]:
        """Returns the states of a run's sequences in one layer of the group, one for each matrix."""
        return [
            States(self._pool(places), self._ids(places, run.read), self._ids(places, run.write))
            for places in self._layers[layer]
        ]

    def load(self, layer: int, pages: Tensor) -> Tensor:
        """Returns one layer's values of the states in pages [num_states, pages], [num_states, values] fp32.

        The values are those of each matrix in turn, [heads, rows, columns].
        """
        parts = []
        for places in self._layers[layer]:
            ids = self._ids(places, pages)
            parts.append(read_states(States(self._pool(places), ids, ids), places.num_heads).flatten(1))
        return torch.cat(parts, 1)

    def store(self, layer: int, pages: Tensor, values: Tensor) -> None:
        """Writes what `load` returns."""
        matrices = self._layers[layer]
        for places, part in zip(matrices, torch.split(values, [one.num_values for one in matrices], 1), strict=True):
            ids = self._ids(places, pages)
            write_states(States(self._pool(places), ids, ids), part.view(len(pages), places.num_heads, places.rows, -1))

    def _pool(self, places: _Places) -> Tensor:
        """Returns all pieces of this shape that may begin somewhere."""
        size = places.rows * places.width
        count = (self._pages.numel() - size) // self._unit + 1
        return self._pages.as_strided((count, places.rows, places.width), (self._unit, places.width, 1))

    def _ids(self, places: _Places, pages: Tensor) -> Tensor:
        picked = pages[:, places.pages]
        starts = (places.first + picked) * self._part_units + places.offsets
        return torch.where(picked < 0, -1, starts).to(torch.int32)


class _Places:
    """One matrix's pieces."""

    def __init__(self, matrix: PlacedMatrix, num_layers: int, num_pages: int, unit: int) -> None:
        self.num_heads, self.rows, self.width = matrix.num_heads, matrix.rows, matrix.width
        self.num_values = len(matrix.parts) * matrix.rows * matrix.width
        parts = np.array(matrix.parts)
        self.pages = torch.from_numpy(parts // num_layers)  # of the state's pages
        self.first = torch.from_numpy(parts % num_layers) * num_pages  # part of that page's layer
        self.offsets = torch.from_numpy(np.array(matrix.offsets) // unit)

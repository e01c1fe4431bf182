"""Where the states of recurrent layers lie in the pages of a KV cache, on any device."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import numpy as np
import torch
from torch import Tensor

from baton.kernels.recurrent_states import States
from baton.kernels.reference.recurrence.state_access import put_states, read_states
from baton.worker.state_pieces import VALUE_BYTES, PlacedMatrix, PlacedState


class StatePlaces:
    """Where a group's states lie in the pages [num_layers, num_pages, values of a part in fp32] that `pages` returns.

    Numbers of pages are on the host. No method waits for the device.
    """

    def __init__(self, pages: Callable[[], Tensor], placed: PlacedState) -> None:
        num_layers, _, part_values = pages().shape
        self.num_pages = -(-placed.num_parts // num_layers)  # of a state
        self._pages = pages
        self._unit = gcd(part_values, placed.unit)
        self._part_units = part_values // self._unit
        self._layers = [[_Places(matrix, num_layers, self._unit) for matrix in layer] for layer in placed.layers]

    @property
    def num_bytes(self) -> int:
        """Bytes of one state in one layer."""
        return sum(places.num_values for places in self._layers[0]) * VALUE_BYTES

    def states(self, layer: int, read: Tensor, write: Tensor) -> list[States]:
        """Returns the states in one layer of the group, one for each matrix, that are read and written in these pages
        [num_states, pages]; -1: none."""
        pages = self._pages()
        return [
            States(self._pool(pages, places), self._ids(pages, places, read), self._ids(pages, places, write))
            for places in self._layers[layer]
        ]

    def load(self, layer: int, pages: Tensor) -> Tensor:
        """Returns one layer's values of the states in pages [num_states, pages], [num_states, values] fp32.

        The values are those of each matrix in turn, [heads, rows, columns].
        """
        states = self.states(layer, pages, pages)
        heads = [places.num_heads for places in self._layers[layer]]
        return torch.cat([read_states(*each).flatten(1) for each in zip(states, heads, strict=True)], 1)

    def store(self, layer: int, pages: Tensor, values: Tensor) -> None:
        """Writes what `load` returns."""
        whole = self._pages()
        matrices = self._layers[layer]
        for places, part in zip(matrices, torch.split(values, [one.num_values for one in matrices], 1), strict=True):
            ids = self._ids(whole, places, pages).flatten()
            put_states(self._pool(whole, places), ids, part.view(len(pages), places.num_heads, places.rows, -1))

    def _pool(self, pages: Tensor, places: _Places) -> Tensor:
        """Returns all pieces of this shape that may begin somewhere."""
        size = places.rows * places.width
        count = (pages.numel() - size) // self._unit + 1
        return pages.as_strided((count, places.rows, places.width), (self._unit, places.width, 1))

    def _ids(self, pages: Tensor, places: _Places, picked: Tensor) -> Tensor:
        picked = picked[:, places.pages]
        starts = (places.layers * pages.shape[1] + picked) * self._part_units + places.offsets
        return torch.where(picked < 0, -1, starts).to(torch.int32).to(pages.device, non_blocking=True)


class _Places:
    """Holds where the pieces of one matrix lie."""

    def __init__(self, matrix: PlacedMatrix, num_layers: int, unit: int) -> None:
        self.num_heads, self.rows, self.width = matrix.num_heads, matrix.rows, matrix.width
        self.num_values = len(matrix.parts) * matrix.rows * matrix.width
        parts = np.array(matrix.parts)
        self.pages = torch.from_numpy(parts // num_layers)  # of the state's pages
        self.layers = torch.from_numpy(parts % num_layers)  # of that page
        self.offsets = torch.from_numpy(np.array(matrix.offsets) // unit)

"""Recurrent layers on a GPU: the states of a group in the pages of a cache, and the ops of one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

import numpy as np
import torch
from torch import Tensor

from baton.kernels.kv.state_ids import state_ids
from baton.kernels.recurrent_states import States
from baton.kernels.table import Case
from baton.worker.layers.cuda.step import StateRun, StepInputs
from baton.worker.layers.device import StateTensors
from baton.worker.layers.mixers import make_mixer
from baton.worker.layers.state_spec import StateSpec
from baton.worker.state_pieces import PlacedMatrix, PlacedState


class PagedStates:
    """The states of one group in the pages of a cache [num_layers, num_pages, ...], which `cache` returns."""

    def __init__(self, placed: PlacedState, cache: Callable[[], Tensor], block_size: int) -> None:
        pages = cache()
        self._cache = cache
        self._block_size = block_size
        self._num_layers = pages.shape[0]
        part_values = pages[0, 0].numel() * pages.element_size() // 4
        self._unit = gcd(part_values, placed.unit)
        self._page_units = part_values // self._unit
        matrices = zip(*placed.layers, strict=True)
        self._places = [_Places(list(each), self._num_layers, self._unit, pages.device) for each in matrices]

    def ids(self, records: Tensor, rows: Tensor, before: Tensor, after: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns where each matrix is read and written, as state_ids does."""
        units = self._cache().shape[1] * self._page_units  # of a layer of the cache
        return [
            state_ids(
                records,
                rows,
                before,
                after,
                places.pages,
                places.bases(units),
                block_size=self._block_size,
                page_units=self._page_units,
            )
            for places in self._places
        ]

    def states(self, layer: int, run: StateRun) -> list[States]:
        """Returns the states of a run's sequences in one layer of the group, one for each matrix."""
        values = self._cache().view(-1).view(torch.float32)
        return [
            States(self._pool(values, places), read[layer, run.first : run.last], write[layer, run.first : run.last])
            for places, (read, write) in zip(self._places, run.ids, strict=True)
        ]

    def _pool(self, values: Tensor, places: _Places) -> Tensor:
        """Returns all pieces of this shape that may begin somewhere."""
        count = (values.numel() - places.rows * places.width) // self._unit + 1
        return values.as_strided((count, places.rows, places.width), (self._unit, places.width, 1))


class _Places:
    """One matrix's pieces in all layers."""

    def __init__(self, layers: Sequence[PlacedMatrix], num_layers: int, unit: int, device: torch.device) -> None:
        self.rows, self.width = layers[0].rows, layers[0].width
        parts = np.array([matrix.parts for matrix in layers], np.int32)
        offsets = np.array([matrix.offsets for matrix in layers], np.int32) // np.int32(unit)
        self.pages = torch.from_numpy(parts // num_layers).to(device)  # [layers of the group, pieces]
        self._layers = torch.from_numpy(parts % num_layers).to(device)
        self._offsets = torch.from_numpy(offsets).to(device)
        self._bases: tuple[int, Tensor] | None = None

    def bases(self, layer_units: int) -> Tensor:
        """Returns the pieces' places in page 0, in a cache whose layers have so many units each."""
        if self._bases is None or self._bases[0] != layer_units:
            self._bases = layer_units, self._layers * layer_units + self._offsets
        return self._bases[1]


class CudaRecurrence:
    """Implements StateOps over the states of one group."""

    def __init__(
        self,
        spec: StateSpec,
        tensors: StateTensors,
        states: PagedStates,
        group: int,  # of the KV
        layer: int,  # of the group
    ) -> None:
        self._mixer = make_mixer(spec, tensors, Case("cuda"))
        self._states = states
        self._group = group
        self._layer = layer
        self._attended_size = spec.attended_size

    def mix(self, projected: Tensor, step: StepInputs) -> Tensor:
        """Returns [num_tokens, attended_size] of projected [num_tokens, projected_size]. Replaces the states."""
        runs = step.states[self._group]
        if len(runs) == 1:
            return self._run(projected, runs[0])
        mixed = projected.new_empty(projected.shape[0], self._attended_size)
        for run in runs:
            mixed[run.start : run.stop] = self._run(projected[run.start : run.stop], run)
        return mixed

    def _run(self, projected: Tensor, run: StateRun) -> Tensor:
        return self._mixer(projected, self._states.states(self._layer, run), run.cu_seqlens, by_token=run.decodes)

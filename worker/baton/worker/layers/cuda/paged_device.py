"""What decoders on a GPU share, whichever attention reads their paged cache. Never waits for the device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from baton.worker.layers.cuda.base import CudaLinears
from baton.worker.layers.cuda.paged import PagedCache
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.layers.device import StateOps, StateTensors
from baton.worker.layers.rope_config import RopeConfig
from baton.worker.layers.state_spec import StateSpec
from baton.worker.layers.table import Table


class PagedDevice(CudaLinears):
    """The parts of baton.worker.layers.device.Device that do not depend on the kind of attention."""

    def __init__(
        self, paged: PagedCache, cos_sin: Mapping[RopeConfig, Tensor], *, batch_invariant: bool = False
    ) -> None:
        super().__init__(paged.cache.device, cos_sin, batch_invariant=batch_invariant)
        self._cached = paged

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations. The cache may be quantized."""
        return self._cached.dtype

    def inputs(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Returns the step's token ids and positions."""
        return step.tokens.long(), step.positions.long()

    def embed(self, table: Table, step: StepInputs) -> Tensor:
        """Returns the tokens' rows of `table`."""
        return self.taken(table, step.tokens)

    def embed_positions(self, table: Tensor, step: StepInputs) -> Tensor:
        """Returns the positions' rows of `table`."""
        return functional.embedding(step.positions, table)

    @abstractmethod
    def recurrence(self, index: int, spec: StateSpec, tensors: StateTensors) -> StateOps[StepInputs]:
        """Returns the ops of layer `index`."""

    def reset(self) -> None:
        """Restores scratch memory after a step that failed midway."""
        self._cached.reset()
        super().reset()

    @abstractmethod
    def warm_up(self) -> None:
        """Launches the attention variants that the steps of the warm-up do not use."""

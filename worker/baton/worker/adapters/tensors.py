"""The adapters of an executor that computes: folders become tensors of its device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch

from baton.worker.adapters.adapter import Adapter
from baton.worker.adapters.bank import NO_SLOT, AdapterBank
from baton.worker.adapters.base_model import base_model_of
from baton.worker.adapters.memory import HostAdapter
from baton.worker.adapters.reading import read_adapter, read_digest
from baton.worker.core import RowInit, StepPlan
from baton.worker.models.config import ModelConfig


class TensorAdapters:
    """Implements AdapterMemory over a bank, and knows the slots of the batch's rows."""

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        max_rank: int,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.base = base_model_of(config, dtype)
        self.num_slots = num_slots
        self.bank = AdapterBank(self.base, num_slots, max_rank, dtype, device)
        self._max_rank = max_rank
        self._dtype = dtype
        self._slots = np.full(num_rows, NO_SLOT, np.int32)  # by row

    def digest(self, path: str) -> bytes:
        return read_digest(Path(path))

    def read(self, path: str) -> Adapter:
        return read_adapter(Path(path), self.base, self._max_rank, self._dtype)

    def write(self, slot: int, adapter: HostAdapter) -> None:
        self.bank.write(slot, cast(Adapter, adapter))

    def admit(self, inits: Sequence[RowInit]) -> None:
        """Stores the slots of admitted rows."""
        for init in inits:
            self._slots[init.row] = init.adapter_slot

    def begin(self, plan: StepPlan) -> None:
        """Sets the slots of a step's tokens, before it is computed."""
        self.bank.begin(np.repeat(self._slots[plan.rows], plan.num_scheduled_tokens))

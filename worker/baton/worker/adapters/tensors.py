"""The adapters of an executor that computes: folders become tensors of its device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from baton.worker.adapters.adapter import Adapter
from baton.worker.adapters.bank import AdapterBank
from baton.worker.adapters.base_model import BaseModel
from baton.worker.adapters.memory import HostAdapter
from baton.worker.adapters.reading import read_adapter, read_digest
from baton.worker.adapters.rows import NO_SLOT, AdapterRows, rows_of
from baton.worker.core import Int64, RowInit, StepPlan


class TensorAdapters:
    """Implements AdapterMemory over a bank, and knows the slots of the batch's rows."""

    def __init__(self, base: BaseModel, bank: AdapterBank, num_rows: int, dtype: torch.dtype) -> None:
        self.base = base
        self.bank = bank
        self.num_slots = bank.num_slots
        self.dtype = dtype
        self._slots = np.full(num_rows, NO_SLOT, np.int32)  # by row
        # Slots whose adapters change the head, and empty ones, whose steps of a start compile its kernels.
        self._headed = np.full(bank.num_slots, bool(base.head))

    def digest(self, path: str) -> bytes:
        return read_digest(Path(path))

    def read(self, path: str) -> Adapter:
        return read_adapter(Path(path), self.base, self.bank.max_rank, self.dtype, expert_rank=self.bank.expert_rank)

    def write(self, slot: int, adapter: HostAdapter) -> None:
        written = cast(Adapter, adapter)
        self.bank.write(slot, written)
        self._headed[slot] = self.base.head in written.weights

    def admit(self, inits: Sequence[RowInit]) -> None:
        """Stores the slots of admitted rows."""
        for init in inits:
            self._slots[init.row] = init.adapter_slot

    def slots_of(self, plan: StepPlan) -> NDArray[np.int32] | None:
        """Returns the slot of each of a step's tokens. None: no row has an adapter."""
        slots = self._slots[plan.rows]
        return np.repeat(slots, plan.num_scheduled_tokens) if (slots != NO_SLOT).any() else None

    def head_slots(self, rows: Int64) -> NDArray[np.int32] | None:
        """Returns the slots of states of these rows (-1: of none). None: no adapter of theirs changes the head."""
        slots = np.where(rows < 0, NO_SLOT, self._slots[rows])
        used = slots[slots != NO_SLOT]
        return slots if self._headed[used].any() else None


class HostAdapters(TensorAdapters):
    """The adapters of an executor on a CPU."""

    def used(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Has a step computed with the updates of its rows."""
        return self._used(self.slots_of(plan))

    def head_used(self, rows: Int64) -> AbstractContextManager[None]:
        """Has logits computed with the updates of `rows`, one for each state; -1: of none."""
        return self._used(self.head_slots(rows))

    def _used(self, slots: NDArray[np.int32] | None) -> AbstractContextManager[None]:
        return nullcontext() if slots is None else self._tiled(slots)

    @contextmanager
    def _tiled(self, slots: NDArray[np.int32]) -> Iterator[None]:
        """Sets these rows: one tile for each slot."""
        rows = rows_of(slots, len(slots))
        self.bank.rows = AdapterRows(torch.from_numpy(rows.order), torch.from_numpy(rows.tiles), len(slots))
        self.bank.row_slots = torch.from_numpy(slots)
        try:
            yield
        finally:
            self.bank.rows = self.bank.row_slots = None

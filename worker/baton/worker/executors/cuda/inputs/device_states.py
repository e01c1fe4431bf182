"""The states of the batch's rows in one KV group: on the device, which of a row's two a step reads and writes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from baton.rpc.errors import InternalError
from baton.worker.core import MoreBlocks, StepPlan
from baton.worker.executors.cuda.inputs.uploads import Patches
from baton.worker.kv_spec import KvSpec
from baton.worker.layers.cuda.recurrence import PagedStates
from baton.worker.layers.cuda.step import StateRun

_NO_NUMBER = -2
_USUAL_UPLOAD = 1 << 14


class DeviceStates:
    """A record for each row, updated by plans: the numbers of the blocks at whose ends its two states are, -2: no
    state; then the pages of both."""

    def __init__(self, group: int, spec: KvSpec, num_rows: int, paged: PagedStates, device: torch.device) -> None:
        self.group = group
        self.paged = paged
        self._num_pages = spec.pages_each(spec.groups[group])
        self._block_size = spec.block_size
        self._records = np.zeros((num_rows, 2 + 2 * self._num_pages), np.int32)
        self._records[:, :2] = _NO_NUMBER
        self._words = torch.from_numpy(self._records.copy()).to(device)
        self._patches = Patches(self._words.view(-1), _USUAL_UPLOAD)

    def apply(self, plan: StepPlan) -> None:
        """Applies the plan's rows and states."""
        changed = [init.row for init in plan.admitted]
        self._records[changed, :2] = _NO_NUMBER
        for blocks in plan.more_blocks:
            if blocks.group == self.group:
                self._set(blocks)
                changed.append(blocks.row)
        if changed:
            rows = np.unique(np.array(changed, np.int64))
            width = self._records.shape[1]
            self._patches.write((rows[:, None] * width + np.arange(width)).ravel(), self._records[rows].ravel())

    def check(self, plan: StepPlan) -> None:
        """Raises InternalError for a row without a state that the step reads or writes."""
        numbers = self._records[plan.rows, :2]
        after = plan.num_computed_tokens + plan.num_scheduled_tokens
        for tokens in (plan.num_computed_tokens, after):
            wanted = ((tokens - 1) // self._block_size)[:, None]
            missing = (tokens > 0) & (numbers != wanted).all(1)
            if missing.any():
                index = int(missing.argmax())
                raise InternalError(
                    f"step {plan.step} needs the state of row {plan.rows[index]} after {tokens[index]} tokens; "
                    "it has none"
                )

    def runs(
        self, rows: Tensor, computed: Tensor, seq_lens: Tensor, query_starts: Tensor, num_decodes: int, num_tokens: int
    ) -> list[StateRun]:
        """Returns the decodes, then the chunks of a step. Never synchronizes with the host."""
        ids, num_seqs = self.paged.ids(self._words, rows, computed, seq_lens), len(rows)
        return list(_runs(ids, query_starts, num_decodes, num_seqs, num_tokens))

    def _set(self, blocks: MoreBlocks) -> None:
        """Stores a state. Of earlier ones the row keeps the last, which its next step reads."""
        if len(blocks.block_ids) != self._num_pages:
            raise InternalError(
                f"row {blocks.row} gets a state of {len(blocks.block_ids)} pages; it has {self._num_pages}"
            )
        record = self._records[blocks.row]
        known = np.flatnonzero(record[:2] == blocks.start)
        slot = int(known[0]) if len(known) else int(record[:2].argmin())
        record[slot] = blocks.start
        record[2 + slot * self._num_pages :][: self._num_pages] = blocks.block_ids


def _runs(
    ids: list[tuple[Tensor, Tensor]], query_starts: Tensor, num_decodes: int, num_seqs: int, num_tokens: int
) -> Iterator[StateRun]:
    if num_decodes:
        yield StateRun(0, num_decodes, 0, num_decodes, query_starts[: num_decodes + 1].clone(), ids, True)
    if num_seqs > num_decodes:
        bounds = query_starts[num_decodes:] - num_decodes
        yield StateRun(num_decodes, num_seqs, num_decodes, num_tokens, bounds, ids, False)

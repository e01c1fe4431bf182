"""The pages of each row's states, updated by plans. Knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import InternalError
from baton.worker.core import MoreBlocks, StepPlan
from baton.worker.kv_spec import KvKind, KvSpec


class StateTables:
    """The states of all rows in one group: the one that the row's next step reads, and the one that it writes."""

    def __init__(self, group: int, spec: KvSpec) -> None:
        self.group = group
        self._num_pages = spec.pages_each(spec.groups[group])
        self._block_size = spec.block_size
        self._pages: dict[int, dict[int, list[int]]] = {}  # by row, and by the number of the block at whose end it is

    def apply(self, plan: StepPlan) -> None:
        """Applies the plan's rows, before its blocks."""
        for row in plan.freed:
            self._pages.pop(row, None)
        for init in plan.admitted:
            self._pages[init.row] = {}

    def set(self, blocks: MoreBlocks) -> None:
        """Stores a state of this group. Of earlier ones the row keeps the last, which its next step reads."""
        if len(blocks.block_ids) != self._num_pages:
            raise InternalError(
                f"row {blocks.row} gets a state of {len(blocks.block_ids)} pages; it has {self._num_pages}"
            )
        states = self._pages[blocks.row]
        states[blocks.start] = list(blocks.block_ids)
        for number in sorted(number for number in states if number < blocks.start)[:-1]:
            del states[number]

    def pages(self, plan: StepPlan, rows: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the pages that some of the plan's rows read and write, [num_rows, pages] each; -1: none.

        Raises InternalError for a row without them.
        """
        starts = plan.num_computed_tokens[rows].tolist()
        counts = plan.num_scheduled_tokens[rows].tolist()
        read, write = [], []
        for row, start, count in zip(plan.rows[rows].tolist(), starts, counts, strict=True):
            read.append(self._at(plan, row, start) if start else [-1] * self._num_pages)
            write.append(self._at(plan, row, start + count))
        return _array(read, self._num_pages), _array(write, self._num_pages)

    def _at(self, plan: StepPlan, row: int, num_tokens: int) -> list[int]:
        pages = self._pages.get(row, {}).get((num_tokens - 1) // self._block_size)
        if pages is None:
            raise InternalError(f"step {plan.step} needs the state of row {row} after {num_tokens} tokens; it has none")
        return pages


def state_tables(spec: KvSpec) -> dict[int, StateTables]:
    """Returns the tables of a spec's groups of states."""
    return {index: StateTables(index, spec) for index, group in enumerate(spec.groups) if group.kind is KvKind.STATE}


def _array(rows: Sequence[Sequence[int]], width: int) -> NDArray[np.int64]:
    return np.array(rows, np.int64).reshape(-1, width)

"""A device whose KV has a full group and windows: it fails where a step reads what its row did not write there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from baton.worker.core import BlockId, HeadKind, HostSlot, Int32, ModelSpec, RowInit, StepPlan, StepResult, TokenMasks
from baton.worker.executors.base import LandedCopies, RestoreCopy
from baton.worker.kv_spec import KvGroup, KvKind, KvSpec
from baton.worker.sampling.processors.processor_set import NO_PROCESSORS

BLOCK_SIZE, VOCAB_SIZE = 4, 50


def next_token(token_ids: list[int]) -> int:
    """Returns the token that follows these."""
    return _chain_of(token_ids)[-1] % VOCAB_SIZE


def _chain_of(token_ids: list[int]) -> list[int]:
    """Returns a number for each prefix."""
    chain = [17]
    for token_id in token_ids:
        chain.append((chain[-1] * 1_000_003 + token_id + 1) % (2**61 - 1))
    return chain[1:]


class _Row:
    """The tokens and block tables of a request."""

    def __init__(self, init: RowInit, num_groups: int) -> None:
        self.token_ids = init.token_ids.tolist()
        self.tables: list[dict[int, BlockId]] = [{} for _ in range(num_groups)]


class WindowExecutor:
    """Implements Executor. Computes a step when it is collected, as late as a device may."""

    max_step_tokens = 1
    processors = NO_PROCESSORS
    kv = kv_bytes = None

    def __init__(
        self,
        num_blocks: int,
        windows: tuple[int, ...],
        depth: int = 1,
        max_model_len: int = 200,
        num_slots: int = 0,
    ) -> None:
        full = KvGroup(KvKind.FULL, (0,), "float32", 1, 1)
        more = [KvGroup(KvKind.WINDOW, (i,), "float32", 1, 1, window=window) for i, window in enumerate(windows, 1)]
        self.kv_spec = KvSpec(bytes(16), BLOCK_SIZE, (full, *more))
        self.model = ModelSpec(bytes(16), VOCAB_SIZE, max_model_len, ())
        self.num_blocks = num_blocks
        self.depth = depth
        self._rows: dict[int, _Row] = {}
        self._cells: dict[tuple[BlockId, int], tuple[int, int]] = {}  # (block, offset): (group, prefix)
        self._launched: deque[StepPlan | Callable[[], None]] = deque()  # steps, and copies in their order
        self.host = WindowHost(self._cells, self._launched, num_slots) if num_slots else None

    def launch(self, plan: StepPlan) -> None:
        assert plan.head is HeadKind.GENERATE
        self._launched.append(plan)

    def draw(self, masks: TokenMasks | None, undrawn: Int32) -> None:
        raise AssertionError("no request has a mask")

    def collect(self) -> StepResult:
        run_copies(self._launched)
        plan = self._launched.popleft()
        assert isinstance(plan, StepPlan)
        self._apply(plan)
        spans = list(
            zip(plan.rows.tolist(), plan.num_computed_tokens.tolist(), plan.num_scheduled_tokens.tolist(), strict=True)
        )
        for row, start, count in spans:
            self._write(self._rows[row], start, start + count)
        tokens = []
        for (row, start, count), samples in zip(spans, plan.samples.tolist(), strict=True):
            self._read(self._rows[row], start, start + count)
            if samples:
                token_ids = self._rows[row].token_ids
                assert start + count == len(token_ids)
                tokens.append(next_token(token_ids))
                token_ids.append(tokens[-1])
        return StepResult(plan.step, np.array(tokens, np.int32), plan.samples.astype(np.int32))

    def ended(self) -> bool:
        return True

    def watch(self, wake: Callable[[], None] | None) -> None:
        """Ignores `wake`: no step ends before it is collected."""

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.freed:
            self._rows.pop(row, None)
        for init in plan.admitted:
            self._rows[init.row] = _Row(init, len(self.kv_spec.groups))
        for row, block_ids in plan.new_blocks:
            table = self._rows[row].tables[0]
            table.update(enumerate(block_ids, len(table)))
        for row, group, first, block_ids in plan.more_blocks:
            self._rows[row].tables[group].update(enumerate(block_ids, first))

    def _write(self, row: _Row, start: int, stop: int) -> None:
        chain = _chain_of(row.token_ids)
        for group, table in enumerate(row.tables):
            for position in range(start, stop):
                self._cells[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = (group, chain[position])

    def _read(self, row: _Row, start: int, stop: int) -> None:
        chain = _chain_of(row.token_ids)
        for group, table in enumerate(row.tables):
            window = self.kv_spec.groups[group].window
            for position in range(max(0, start - window + 1) if window else 0, stop):
                cell = self._cells[table[position // BLOCK_SIZE], position % BLOCK_SIZE]
                assert cell == (group, chain[position]), f"group {group} at {position}"


class WindowHost:
    """Implements HostCopies. A copy reads as late as it may; a block that is restored has no contents until then."""

    def __init__(
        self,
        cells: dict[tuple[BlockId, int], tuple[int, int]],
        launched: deque[StepPlan | Callable[[], None]],
        num_slots: int,
    ) -> None:
        self.num_slots = num_slots
        self._cells = cells
        self._launched = launched
        self._slots: dict[HostSlot, list[tuple[int, int] | None]] = {}
        self._landed = LandedCopies()
        self._restores: list[RestoreCopy] = []  # that wait for no step

    def capacity(self) -> int:
        return 3 + self.num_slots // 5

    def offload(self, copies: Sequence[tuple[BlockId, HostSlot]]) -> None:
        def read() -> None:
            for block_id, slot in copies:
                self._slots[slot] = [self._cells.get((block_id, offset)) for offset in range(BLOCK_SIZE)]
            self._landed.slots += [slot for _, slot in copies]

        self._launched.append(read)

    def restore(self, restore: RestoreCopy) -> None:
        if restore.fenced:
            self._launched.append(lambda: self._write(restore))
            return
        for _, block_id in restore.copies:
            for offset in range(BLOCK_SIZE):
                self._cells.pop((block_id, offset), None)
        self._restores.append(restore)

    def hurry(self) -> None:
        """Does nothing: a step is computed when it is collected."""

    def poll(self) -> LandedCopies:
        run_copies(self._launched)
        landed, self._landed = self._landed, LandedCopies()
        for restore in self._restores:
            self._write(restore)
        self._restores.clear()
        return landed

    def wait(self, seconds: float) -> None:
        """Returns at once: the next poll ends every copy."""

    def _write(self, restore: RestoreCopy) -> None:
        for slot, block_id in restore.copies:
            for offset, cell in enumerate(self._slots[slot]):
                assert cell is not None, "a full block is in the slot"
                self._cells[block_id, offset] = cell
        self._landed.restores.append((restore.restore_id, 1e-3))


def run_copies(launched: deque[StepPlan | Callable[[], None]]) -> None:
    """Runs the copies before the next step."""
    while launched and not isinstance(launched[0], StepPlan):
        copy = launched.popleft()
        assert not isinstance(copy, StepPlan)
        copy()

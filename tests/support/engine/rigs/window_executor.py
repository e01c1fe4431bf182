"""A device whose KV has a full group, windows and states: it fails where a step reads what its row did not write."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from baton.worker.core import BlockId, HeadKind, HostSlot, Int32, ModelSpec, RowInit, StepPlan, StepResult, TokenMasks
from baton.worker.executors.base import LandedCopies, LayerHook, RestoreCopy
from baton.worker.executors.host.kv_memory import KvMemory
from baton.worker.kv_spec import KvGroup, KvKind, KvSpec
from baton.worker.sampling.processors.processor_set import NO_PROCESSORS
from baton.worker.state_pieces import StateMatrix

BLOCK_SIZE, VOCAB_SIZE = 4, 50
_NO_WORD = 0xA5A5A5A5  # in blocks without contents


def next_token(token_ids: list[int]) -> int:
    """Returns the token that follows these."""
    return _chain_of(token_ids)[-1] % VOCAB_SIZE


def _chain_of(token_ids: list[int]) -> list[int]:
    """Returns a number for each prefix."""
    chain = [17]
    for token_id in token_ids:
        chain.append((chain[-1] * 1_000_003 + token_id + 1) % (2**61 - 1))
    return chain[1:]


def _words_of(token_ids: list[int]) -> NDArray[np.uint32]:
    """Returns the two words of each token, [tokens, 2]."""
    return np.array(_chain_of(token_ids), np.uint64).view(np.uint32).reshape(-1, 2)


class _Row:
    """The tokens and block tables of a request."""

    def __init__(self, init: RowInit, num_groups: int) -> None:
        self.token_ids = init.token_ids.tolist()
        self.tables: list[dict[int, BlockId]] = [{} for _ in range(num_groups)]
        self.states: list[dict[int, list[BlockId]]] = [{} for _ in range(num_groups)]  # pages of states


class WindowExecutor:
    """Implements Executor, with one layer a group. Computes a step when it is collected, as late as a device may."""

    max_step_tokens = 1
    max_masked_tokens = 1
    processors = NO_PROCESSORS
    kv = None
    adapters = None

    def __init__(
        self,
        num_blocks: int,
        windows: tuple[int, ...],
        depth: int = 1,
        max_model_len: int = 200,
        num_slots: int = 0,
        block_size: int = BLOCK_SIZE,
        state_pages: tuple[int, ...] = (),  # of a state in further groups
    ) -> None:
        full = KvGroup(KvKind.FULL, (0,), "float32", 1, 1)
        more = [KvGroup(KvKind.WINDOW, (i,), "float32", 1, 1, window=window) for i, window in enumerate(windows, 1)]
        states = [
            KvGroup(
                KvKind.STATE,
                (i,),
                "float32",
                1,
                pages * 2 * block_size,
                matrices=(StateMatrix(1, 2 * block_size, pages),),
            )
            for i, pages in enumerate(state_pages, 1 + len(windows))
        ]
        self.kv_spec = KvSpec(bytes(16), block_size, (full, *more, *states))
        self.model = ModelSpec(bytes(16), VOCAB_SIZE, max_model_len, ())
        self.num_blocks = num_blocks
        self.depth = depth
        self._rows: dict[int, _Row] = {}
        self._memory = KvMemory(self.kv_spec, num_blocks, torch.float32)
        self.kv_bytes = self._memory.layers
        # Blocks of every group: of each token the group and its prefix, in two words.
        self._words = self.kv_bytes[0].view(np.uint32).reshape(num_blocks + 1, 2, block_size)
        self._words[:] = _NO_WORD
        self._hook: LayerHook | None = None
        self._launched: deque[StepPlan | Callable[[], None]] = deque()  # steps, and copies in their order
        most = max(map(self.kv_spec.pages_each, self.kv_spec.groups))
        self.host = WindowHost(self._words, self._launched, num_slots, most) if num_slots else None

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
        for row, start, _ in spans:
            self._read_states(self._rows[row], start)
        for row, start, count in spans:
            self._write(self._rows[row], start, start + count)
            self._write_states(self._rows[row], start + count)
        if self._hook is not None:
            for layer in range(self.kv_spec.num_layers):
                self._hook(plan, layer)
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

    def watch_layers(self, hook: LayerHook | None) -> None:
        self._hook = hook

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> bytearray:
        return self._memory.read(layer, block_ids)

    def write_blocks(
        self, layer: int, block_ids: Sequence[BlockId], data: memoryview, heads: tuple[int, int] | None = None
    ) -> None:
        self._memory.write(layer, block_ids, data, heads)

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.freed:
            self._rows.pop(row, None)
        for init in plan.admitted:
            self._rows[init.row] = _Row(init, len(self.kv_spec.groups))
        for row, block_ids in plan.new_blocks:
            table = self._rows[row].tables[0]
            table.update(enumerate(block_ids, len(table)))
        for row, group, first, block_ids in plan.more_blocks:
            if self.kv_spec.groups[group].kind is KvKind.STATE:
                assert len(block_ids) == self.kv_spec.pages_each(self.kv_spec.groups[group])
                self._rows[row].states[group][first] = block_ids
            else:
                self._rows[row].tables[group].update(enumerate(block_ids, first))

    def _write(self, row: _Row, start: int, stop: int) -> None:
        words = _words_of(row.token_ids)
        size = self.kv_spec.block_size
        for group, table in enumerate(row.tables):
            if self.kv_spec.groups[group].kind is KvKind.STATE:
                continue
            for position in range(start, stop):
                self._words[table[position // size], :, position % size] = words[position] ^ group

    def _read(self, row: _Row, start: int, stop: int) -> None:
        words = _words_of(row.token_ids)
        size = self.kv_spec.block_size
        for group, table in enumerate(row.tables):
            if self.kv_spec.groups[group].kind is KvKind.STATE:
                continue
            window = self.kv_spec.groups[group].window
            positions = range(max(0, start - window + 1) if window else 0, stop)
            blocks = [table[position // size] for position in positions]
            found = self._words[blocks, :, [position % size for position in positions]]
            wrong = (found != words[positions.start : stop] ^ group).any(axis=1)
            assert not wrong.any(), f"group {group} at {positions[int(wrong.argmax())]}"

    def _read_states(self, row: _Row, start: int) -> None:
        """Reads the state after the tokens before `start`, which the row or an equal prefix has written."""
        if not start:
            return
        words = _words_of(row.token_ids[:start])[-1]
        for group, states in enumerate(row.states):
            if self.kv_spec.groups[group].kind is KvKind.STATE:
                pages = states[(start - 1) // self.kv_spec.block_size]
                marks = np.arange(len(pages), dtype=np.uint32)[:, None, None] * 8 + group
                assert (self._words[pages] == words[None, :, None] ^ marks).all(), f"group {group} at {start}"

    def _write_states(self, row: _Row, stop: int) -> None:
        words = _words_of(row.token_ids[:stop])[-1]
        for group, states in enumerate(row.states):
            if self.kv_spec.groups[group].kind is KvKind.STATE:
                pages = states[(stop - 1) // self.kv_spec.block_size]
                marks = np.arange(len(pages), dtype=np.uint32)[:, None, None] * 8 + group
                self._words[pages] = words[None, :, None] ^ marks


class WindowHost:
    """Implements HostCopies. A copy reads as late as it may; a block that is restored has no contents until then."""

    def __init__(
        self,
        words: NDArray[np.uint32],  # [blocks, 2, tokens]
        launched: deque[StepPlan | Callable[[], None]],
        num_slots: int,
        num_pages: int,  # of the largest block
    ) -> None:
        self.num_slots = num_slots
        self._num_pages = num_pages
        self._words = words
        self._launched = launched
        self._slots: dict[HostSlot, NDArray[np.uint32]] = {}
        self._landed = LandedCopies()
        self._restores: list[RestoreCopy] = []  # that wait for no step

    def capacity(self) -> int:
        return 2 + self._num_pages + self.num_slots // 5

    def offload(self, copies: Sequence[tuple[BlockId, HostSlot]]) -> None:
        def read() -> None:
            for block_id, slot in copies:
                self._slots[slot] = self._words[block_id].copy()
            self._landed.slots += [slot for _, slot in copies]

        self._launched.append(read)

    def restore(self, restore: RestoreCopy) -> None:
        if restore.fenced:
            self._launched.append(lambda: self._write(restore))
            return
        for _, block_id in restore.copies:
            self._words[block_id] = _NO_WORD
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
            self._words[block_id] = self._slots[slot]
        self._landed.restores.append((restore.restore_id, 1e-3))


def run_copies(launched: deque[StepPlan | Callable[[], None]]) -> None:
    """Runs the copies before the next step."""
    while launched and not isinstance(launched[0], StepPlan):
        copy = launched.popleft()
        assert not isinstance(copy, StepPlan)
        copy()

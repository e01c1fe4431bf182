"""What a request holds of one KV group besides the full one: what it reads next, and what it writes. Holds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.worker.core import BlockId
from baton.worker.kv.block_pool import BlockPool
from baton.worker.kv_spec import KvGroup
from baton.worker.requests.state import (
    GroupSpan,
    PartialBlocks,
    RequestState,
    StateBlocks,
    WindowBlocks,
    num_blocks_for,
)


@dataclass(frozen=True, slots=True)
class GroupRules:
    """What all kinds have in common: a token reads the blocks of some tokens before it, and passes those before."""

    index: int  # of the worker's groups
    group: KvGroup
    block_size: int
    max_step_tokens: int
    pages: int = 1  # of a block

    def first(self, position: int) -> int:
        """Returns the first block that the token at `position` reads."""
        return self.group.first_block(position, self.block_size)

    def first_held(self, state: RequestState, position: int) -> int:
        """Returns the first block to hold before that token: the worker that gets the KV may need earlier ones."""
        return min(self.first(position), self.first_moved(state)) if state.receiver_block_size else self.first(position)

    def first_moved(self, state: RequestState) -> int:
        """Returns the first block of those that the receiver of a prompt's KV gets."""
        size = state.receiver_block_size
        return self.group.first_moved(len(state.token_ids.given), size) * size // self.block_size


@dataclass(frozen=True, slots=True)
class WindowRules(GroupRules):
    """A request holds blocks [first, stop) of its chain: of the window, and as far ahead as one step computes."""

    def most(self, state: RequestState, num_blocks: int) -> int:
        """Returns the most blocks that a request of `num_blocks` ever holds."""
        most = self.group.most_blocks(num_blocks, self.block_size, self.max_step_tokens)
        if state.receiver_block_size:
            most += num_blocks_for(2 * state.receiver_block_size, self.block_size) + 1
        return min(num_blocks, most)

    def start(self, pool: BlockPool, first: int, found: Sequence[BlockId]) -> PartialBlocks:
        """Returns what a request begins with: findable blocks from `first` on."""
        return WindowBlocks(self.index, first, list(found))

    def landed(self, pool: BlockPool, span: GroupSpan) -> PartialBlocks:
        """Returns the blocks that another worker has sent, which are held."""
        return WindowBlocks(self.index, *span)

    def num_ahead(self, blocks: PartialBlocks, position: int, num_blocks: int) -> int:
        """Returns how many more blocks a request of `num_blocks` needs for a step from `position` on."""
        return max(0, self._stop(position, num_blocks) - blocks.stop)

    def append(self, pool: BlockPool, blocks: PartialBlocks, pages: Sequence[BlockId]) -> None:
        """Appends blocks."""
        assert isinstance(blocks, WindowBlocks)
        blocks.block_ids += pages

    def append_next(self, pool: BlockPool, blocks: PartialBlocks, pages: Sequence[BlockId]) -> None:
        """Appends the block of a decode's next token."""
        self.append(pool, blocks, pages)

    def is_kept(self, state: RequestState, number: int) -> bool:
        """Returns whether a passed block is worth as much as others."""
        return True

    def _stop(self, position: int, num_blocks: int) -> int:
        """Returns the end of the blocks to hold before this token, of a request that has `num_blocks`."""
        first = self.first(position)
        return first + self.group.most_blocks(num_blocks - first, self.block_size, self.max_step_tokens)


@dataclass(frozen=True, slots=True)
class StateRules(GroupRules):
    """A request holds the state that its next step reads, and one that it writes.

    A state at the end of a block is a snapshot: it can be found after the request has passed it. Snapshots where no
    later request is expected to continue are evicted first. `snapshot_blocks`: others are this many blocks apart.
    """

    snapshot_blocks: int = 1

    def first_held(self, state: RequestState, position: int) -> int:
        """Returns the first state to hold before that token. The worker that gets the KV needs the newest one only."""
        return self.first(position)

    def most(self, state: RequestState, num_blocks: int) -> int:
        """Returns the most states that a request of `num_blocks` ever holds."""
        return self.group.most_blocks(num_blocks, self.block_size, self.max_step_tokens)

    def start(self, pool: BlockPool, first: int, found: Sequence[BlockId]) -> PartialBlocks:
        """Returns what a request begins with: a snapshot, or nothing."""
        numbers = list(range(first, first + len(found)))
        return StateBlocks(self.index, numbers, [pool.pages_of(block_id) for block_id in found])

    def landed(self, pool: BlockPool, span: GroupSpan) -> PartialBlocks:
        """Returns the state that another worker has sent, in these held pages."""
        assert len(span.block_ids) == self.pages, f"{len(span.block_ids)} pages for one state of {self.pages}"
        pool.join(span.block_ids)
        return StateBlocks(self.index, [span.first], [span.block_ids])

    def num_ahead(self, blocks: PartialBlocks, position: int, num_blocks: int) -> int:
        """Returns 1 if a step needs memory for another state: it may end behind the block of the newest one."""
        assert isinstance(blocks, StateBlocks)
        return int(not blocks.has_spare and blocks.stop < num_blocks)

    def append(self, pool: BlockPool, blocks: PartialBlocks, pages: Sequence[BlockId]) -> None:
        """Appends states without numbers, which the step's chunks decide."""
        assert isinstance(blocks, StateBlocks)
        for start in range(0, len(pages), self.pages):
            state = list(pages[start : start + self.pages])
            pool.join(state)
            blocks.states.append(state)

    def append_next(self, pool: BlockPool, blocks: PartialBlocks, pages: Sequence[BlockId]) -> None:
        """Appends the state of the next block, which a decode begins."""
        assert isinstance(blocks, StateBlocks)
        self.append(pool, blocks, pages)
        blocks.numbers.append(blocks.stop)

    def is_kept(self, state: RequestState, number: int) -> bool:
        """Returns whether a passed snapshot is worth as much as other blocks."""
        return (number + 1) % self.snapshot_blocks == 0 or number in state.snapshots

    def chunk_end(self, state: RequestState, start: int, stop: int) -> int:
        """Returns where a chunk [start, stop) of a prompt ends, so that it leaves snapshots where they are wanted.

        Other chunks end with a block, where that is possible.
        """
        size, known = self.block_size, len(state.token_ids)
        every = self.snapshot_blocks * size
        ends = [(start // every + 1) * every, *((number + 1) * size for number in state.snapshots)]
        stop = min([stop, *(end for end in ends if end > start)])
        if stop < known and stop // size * size > start:
            return stop // size * size
        return stop


PartialRules = WindowRules | StateRules

"""The blocks of layers with windows, beside those of the full group: what a request needs, finds and passes.

In each window group a request holds blocks [first, stop) of its chain: from the first token that its next one attends
to, and as far ahead as one step computes. Blocks that the window has passed are freed while the request runs. A prefix
is found if its last tokens, which the next one attends to, are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from baton.rpc.errors import Unsupported
from baton.worker.core import BlockHash, BlockId
from baton.worker.kv.block_pool import BlockPool
from baton.worker.kv.group_keys import keys_in
from baton.worker.kv_spec import KvGroup, KvKind
from baton.worker.requests.state import GroupSpan, RequestState, WindowBlocks, num_blocks_for

HasBlock = Callable[[Sequence[BlockHash]], object]  # given one key; true if its block can be had


@dataclass(frozen=True, slots=True)
class _WindowGroup:
    """Says which blocks one group's window covers."""

    index: int  # of the worker's groups
    group: KvGroup
    block_size: int
    max_step_tokens: int

    def first(self, position: int) -> int:
        """Returns the first block that the token at `position` attends to."""
        return self.group.first_block(position, self.block_size)

    def first_held(self, state: RequestState, position: int) -> int:
        """Returns the first block to hold before that token: the worker that gets the KV may need earlier ones."""
        return min(self.first(position), self.first_moved(state)) if state.receiver_block_size else self.first(position)

    def first_moved(self, state: RequestState) -> int:
        """Returns the first block of those that the receiver of a prompt's KV gets."""
        size = state.receiver_block_size
        return self.group.first_moved(len(state.token_ids.given), size) * size // self.block_size

    def most(self, state: RequestState, num_blocks: int) -> int:
        """Returns the most blocks that a request of `num_blocks` ever holds."""
        most = self.group.most_blocks(num_blocks, self.block_size, self.max_step_tokens)
        if state.receiver_block_size:
            most += num_blocks_for(2 * state.receiver_block_size, self.block_size) + 1
        return min(num_blocks, most)

    def stop(self, position: int, num_blocks: int) -> int:
        """Returns the end of the blocks to hold before this token, of a request that has `num_blocks`."""
        first = self.first(position)
        return first + self.group.most_blocks(num_blocks - first, self.block_size, self.max_step_tokens)


@dataclass(slots=True)
class PartialNeeds:
    """The window blocks of a request that is about to run."""

    found: list[WindowBlocks] = field(default_factory=list)  # findable ones, in each group
    missing: list[int] = field(default_factory=list)  # blocks after those, in each group

    @property
    def num_missing(self) -> int:
        return sum(self.missing)

    @property
    def found_ids(self) -> list[BlockId]:
        """The findable blocks of all groups."""
        return [block_id for blocks in self.found for block_id in blocks.block_ids]

    def completed(self, block_ids: Sequence[BlockId]) -> list[WindowBlocks]:
        """Returns the blocks to hold, with these as the missing ones."""
        append_each(self.found, block_ids, self.missing)
        return self.found


class PartialGroups:
    """The window groups of a worker; none where every layer keeps every token."""

    def __init__(self, groups: Sequence[KvGroup], block_size: int, max_step_tokens: int) -> None:
        """`max_step_tokens`: of one request. Raises Unsupported for groups other than a full one and windows."""
        kinds = [group.kind for group in groups]
        if kinds and (kinds[0] is not KvKind.FULL or set(kinds[1:]) - {KvKind.WINDOW}):
            names = ", ".join(kind.value for kind in kinds)
            raise Unsupported(f"KV groups {names}: the first must be full, and others windows", field="model")
        self._groups = [
            _WindowGroup(index, group, block_size, max_step_tokens)
            for index, group in enumerate(groups)
            if group.kind is KvKind.WINDOW
        ]
        self._block_size = block_size

    def __len__(self) -> int:
        return len(self._groups)

    # Prefixes.

    def usable(self, has: HasBlock, state: RequestState, num_hits: int) -> int:
        """Returns the blocks of the longest prefix, of at most `num_hits`, whose last tokens all groups have."""
        before = -1
        while num_hits != before:
            before = num_hits
            for group in self._groups:
                num_hits = self._usable_in(group, has, state, num_hits)
        return num_hits

    def _usable_in(self, group: _WindowGroup, has: HasBlock, state: RequestState, num_hits: int) -> int:
        block = num_hits
        while block > group.first_held(state, num_hits * self._block_size):
            block -= 1
            if not has(keys_in(group.index, state.block_hashes[block : block + 1])):
                num_hits = block
        return num_hits

    def keys_before(self, state: RequestState, num_blocks: int) -> Iterator[BlockHash]:
        """Yields the keys of the blocks to hold in all groups after the first `num_blocks` blocks of its chain."""
        for group in self._groups:
            first = group.first_held(state, num_blocks * self._block_size)
            yield from keys_in(group.index, state.block_hashes[first:num_blocks])

    # Blocks of one request.

    def needs(self, pool: BlockPool, state: RequestState, num_hits: int, num_computed: int) -> PartialNeeds:
        """Returns what a request that starts after `num_computed` tokens needs. Holds nothing.

        Its prefix of `num_hits` blocks is usable.
        """
        needs = PartialNeeds()
        if not self._groups:
            return needs
        num_blocks = num_blocks_for(len(state.token_ids), self._block_size)
        for group in self._groups:
            first = group.first_held(state, num_computed)
            found = pool.lookup(keys_in(group.index, state.block_hashes[first:num_hits]))
            assert len(found) == max(0, num_hits - first), "the prefix is usable"
            needs.found.append(WindowBlocks(group.index, first, found))
            needs.missing.append(group.stop(num_computed, num_blocks) - first - len(found))
        return needs

    def passed(self, state: RequestState, position: int) -> list[BlockId]:
        """Takes from the request the blocks that tokens from `position` on do not attend to."""
        block_ids: list[BlockId] = []
        for group, blocks in zip(self._groups, state.partial, strict=True):
            block_ids += blocks.cut(group.first_held(state, position))
        return block_ids

    def most_blocks(self, state: RequestState) -> int:
        """Returns the most blocks that the request can ever hold in all groups."""
        num_blocks = state.lifetime_blocks(self._block_size)
        return sum(group.most(state, num_blocks) for group in self._groups)

    def num_ahead(self, state: RequestState, position: int, num_blocks: int) -> list[int]:
        """Returns how many more blocks a request of `num_blocks` needs in each group for a step from `position` on."""
        columns = zip(self._groups, state.partial, strict=True)
        return [max(0, group.stop(position, num_blocks) - blocks.stop) for group, blocks in columns]

    def leased_spans(self, state: RequestState) -> list[GroupSpan]:
        """Returns the leased blocks of a remote prefill in all groups, those of the full one first."""
        stop = num_blocks_for(state.num_remote_tokens, self._block_size)
        firsts = [group.group.first_moved(state.num_remote_tokens, self._block_size) for group in self._groups]
        num_full = len(state.leased) - sum(stop - first for first in firsts)
        spans, start = [GroupSpan(stop - num_full, state.leased[:num_full])], num_full
        for first in firsts:
            spans.append(GroupSpan(first, state.leased[start : start + stop - first]))
            start += stop - first
        return spans

    def num_leased(self, num_tokens: int) -> int:
        """Returns the blocks of all groups that a lease for a prompt's KV has."""
        stop = num_blocks_for(num_tokens, self._block_size)
        return sum(stop - group.group.first_moved(num_tokens, self._block_size) for group in self._groups)

    def keys_of(self, state: RequestState, start: int, stop: int) -> tuple[list[BlockId], list[BlockHash]]:
        """Returns the held ones of its blocks [start, stop) in all groups, and their keys."""
        block_ids: list[BlockId] = []
        keys: list[BlockHash] = []
        for blocks in state.partial:
            first = max(start, blocks.first)
            held = blocks.block_ids[first - blocks.first : max(0, stop - blocks.first)]
            block_ids += held
            keys += keys_in(blocks.group, state.block_hashes[first : first + len(held)])
        return block_ids, keys


def spans_of(partial: Iterable[WindowBlocks]) -> list[GroupSpan]:
    """Returns a copy of the blocks in each group."""
    return [GroupSpan(blocks.first, list(blocks.block_ids)) for blocks in partial]


def append_each(partial: Iterable[WindowBlocks], block_ids: Iterable[BlockId], counts: Iterable[int]) -> None:
    """Appends the next so many of these blocks in each group."""
    rest = iter(block_ids)
    for blocks, count in zip(partial, counts, strict=True):
        blocks.block_ids += islice(rest, count)


def by_position(block_ids: Sequence[BlockId], partial: Iterable[WindowBlocks]) -> list[BlockId]:
    """Returns a request's blocks in the prompt's order, so that those of one prefix are evicted together."""
    columns = [[block_id] for block_id in block_ids]
    for blocks in partial:
        for place, block_id in enumerate(blocks.block_ids, blocks.first):
            columns[place].append(block_id)
    return list(chain.from_iterable(columns))

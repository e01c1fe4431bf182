"""The blocks of groups in which a request holds a part of its chain, beside those of the full group.

In each such group a request holds what its next token reads, and what the next step writes; what it has passed is freed
while it runs. A prefix is found if what its next token reads is: a window's last tokens, or the state at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from baton.rpc.errors import Unsupported
from baton.worker.core import BlockHash, BlockId
from baton.worker.kv.block_pool import BlockPool
from baton.worker.kv.group_keys import keys_in
from baton.worker.kv.group_rules import PartialRules, StateRules, WindowRules
from baton.worker.kv_spec import KvKind, KvSpec
from baton.worker.requests.state import GroupSpan, PartialBlocks, RequestState, num_blocks_for

_SNAPSHOT_TOKENS = 2048  # of a prompt from one kept state to the next, at least, unless steps have fewer

HasBlock = Callable[[Sequence[BlockHash]], object]  # given one key; true if its block can be had


@dataclass(slots=True)
class PartialNeeds:
    """The blocks of a request that is about to run, in its partial groups."""

    found: list[PartialBlocks] = field(default_factory=list)  # findable ones, in each group
    missing: list[int] = field(default_factory=list)  # blocks after those, in each group
    num_missing: int = 0  # pages of those

    @property
    def found_ids(self) -> list[BlockId]:
        """The findable blocks of all groups."""
        return [block_id for blocks in self.found for block_id in blocks.block_ids]


class PartialGroups:
    """The groups of windows and states of a worker; none where every layer keeps every token."""

    def __init__(self, spec: KvSpec | None, block_size: int, max_step_tokens: int, snapshot_blocks: int = 0) -> None:
        """`spec`: None of one full group. `max_step_tokens`: of one request.

        `snapshot_blocks`: blocks from one state of a prompt that is kept to the next; 0: those of 2048 tokens or of a
        step, and at least as many as a state takes. Raises Unsupported for groups other than a full or latent one,
        windows and states.
        """
        groups = () if spec is None else spec.groups
        kinds = [group.kind for group in groups]
        if kinds and (kinds[0] not in (KvKind.FULL, KvKind.LATENT) or set(kinds[1:]) - {KvKind.WINDOW, KvKind.STATE}):
            names = ", ".join(kind.value for kind in kinds)
            raise Unsupported(
                f"KV groups {names}: the first must be full or latent, and others windows or states", field="model"
            )
        self._groups: list[PartialRules] = []
        self._states: list[StateRules] = []
        self._block_size = block_size
        for index, group in enumerate(groups[1:], 1):
            assert spec is not None
            common = (index, group, block_size, max_step_tokens, spec.pages_each(group))
            if group.kind is KvKind.STATE:
                every = snapshot_blocks or max(
                    common[-1], num_blocks_for(min(max_step_tokens, _SNAPSHOT_TOKENS), block_size)
                )
                self._states.append(StateRules(*common, snapshot_blocks=every))
            self._groups.append(self._states[-1] if group.kind is KvKind.STATE else WindowRules(*common))
        self.pages = [group.pages for group in self._groups]  # of a block in each group

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def has_states(self) -> bool:
        """Whether some groups hold states."""
        return bool(self._states)

    @property
    def largest_state(self) -> int:
        """The pages of the largest state; 0: there are none."""
        return max((group.pages for group in self._states), default=0)

    def num_pages(self, counts: Iterable[int]) -> int:
        """Returns the pages of so many blocks in each group."""
        return sum(count * pages for count, pages in zip(counts, self.pages, strict=True))

    def append(
        self, pool: BlockPool, partial: Iterable[PartialBlocks], pages: Iterable[BlockId], counts: Iterable[int]
    ) -> None:
        """Appends the next so many blocks, of these held pages, in each group."""
        rest = iter(pages)
        for group, blocks, count in zip(self._groups, partial, counts, strict=True):
            group.append(pool, blocks, list(islice(rest, count * group.pages)))

    def append_next(self, pool: BlockPool, state: RequestState, pages: Iterable[BlockId]) -> None:
        """Appends one block in each group, of the token that a decode computes next."""
        rest = iter(pages)
        for group, blocks in zip(self._groups, state.partial, strict=True):
            group.append_next(pool, blocks, list(islice(rest, group.pages)))

    def chunk_end(self, state: RequestState, start: int, stop: int) -> int:
        """Returns where a prompt's chunk [start, stop) ends: states are kept where steps end."""
        if state.caching:
            for group in self._states:
                stop = group.chunk_end(state, start, stop)
        return stop

    def want_snapshot(self, state: RequestState, num_blocks: int) -> None:
        """Keeps the states of the request after `num_blocks`, if it computes that: another one continues there."""
        if self._states and num_blocks:
            state.snapshots.add(num_blocks - 1)

    # Prefixes.

    def usable(self, has: HasBlock, state: RequestState, num_hits: int) -> int:
        """Returns the blocks of the longest prefix, of at most `num_hits`, whose last tokens all groups have."""
        before = -1
        while num_hits != before:
            before = num_hits
            for group in self._groups:
                num_hits = self._usable_in(group, has, state, num_hits)
        return num_hits

    def _usable_in(self, group: PartialRules, has: HasBlock, state: RequestState, num_hits: int) -> int:
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
            blocks = group.start(pool, first, found)
            needs.found.append(blocks)
            needs.missing.append(group.num_ahead(blocks, num_computed, num_blocks))
        needs.num_missing = self.num_pages(needs.missing)
        return needs

    def passed(self, state: RequestState, position: int) -> tuple[list[BlockId], list[BlockId]]:
        """Takes from the request the blocks that tokens from `position` on do not read.

        Returns those that are worth as much as other blocks, and those that are not.
        """
        kept: list[BlockId] = []
        others: list[BlockId] = []
        for group, blocks in zip(self._groups, state.partial, strict=True):
            for number, block_id in blocks.cut(group.first_held(state, position)):
                (kept if group.is_kept(state, number) else others).append(block_id)
        return kept, others

    def most_blocks(self, state: RequestState) -> int:
        """Returns the most pages that the request can ever hold in all groups."""
        num_blocks = state.lifetime_blocks(self._block_size)
        return sum(group.most(state, num_blocks) * group.pages for group in self._groups)

    def num_ahead(self, state: RequestState, position: int, num_blocks: int) -> list[int]:
        """Returns how many more blocks a request of `num_blocks` needs in each group for a step from `position` on."""
        columns = zip(self._groups, state.partial, strict=True)
        return [group.num_ahead(blocks, position, num_blocks) for group, blocks in columns]

    def leased_spans(self, state: RequestState) -> list[GroupSpan]:
        """Returns the leased blocks of a remote prefill in all groups, those of the full one first."""
        stop = num_blocks_for(state.num_remote_tokens, self._block_size)
        firsts = [group.group.first_moved(state.num_remote_tokens, self._block_size) for group in self._groups]
        counts = [(stop - first) * pages for first, pages in zip(firsts, self.pages, strict=True)]
        num_full = len(state.leased) - sum(counts)
        rest = iter(state.leased)
        spans = [GroupSpan(stop - num_full, list(islice(rest, num_full)))]
        spans += [GroupSpan(first, list(islice(rest, count))) for first, count in zip(firsts, counts, strict=True)]
        return spans

    def landed(self, pool: BlockPool, spans: Iterable[GroupSpan]) -> list[PartialBlocks]:
        """Returns what a request holds in each group once another worker has sent these blocks, which are held."""
        return [group.landed(pool, span) for group, span in zip(self._groups, spans, strict=True)]

    def num_leased(self, num_tokens: int) -> int:
        """Returns the pages of all groups that a lease for a prompt's KV has."""
        stop = num_blocks_for(num_tokens, self._block_size)
        return self.num_pages(stop - group.group.first_moved(num_tokens, self._block_size) for group in self._groups)

    def keys_of(self, state: RequestState, start: int, stop: int) -> tuple[list[BlockId], list[BlockHash]]:
        """Returns the held ones of its blocks [start, stop) in all groups, and their keys."""
        block_ids: list[BlockId] = []
        keys: list[BlockHash] = []
        for blocks in state.partial:
            for number, block_id in blocks.findable(start, stop):
                block_ids.append(block_id)
                keys += keys_in(blocks.group, state.block_hashes[number : number + 1])
        return block_ids, keys


def spans_of(partial: Iterable[PartialBlocks]) -> list[GroupSpan]:
    """Returns a copy of the blocks in each group that another worker may get; of states, of the newest one."""
    return [blocks.movable() for blocks in partial]


def by_position(block_ids: Sequence[BlockId], partial: Iterable[PartialBlocks]) -> list[BlockId]:
    """Returns a request's blocks in the prompt's order, so that those of one prefix are evicted together."""
    columns = [[block_id] for block_id in block_ids]
    for blocks in partial:
        for place, block_id in blocks.placed():
            columns[place].append(block_id)
    return list(chain.from_iterable(columns))

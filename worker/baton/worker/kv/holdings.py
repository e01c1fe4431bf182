"""The blocks that each request holds, until the last step that may write them, and which of them are findable.

Blocks that become findable may wake waiting requests: such calls return them, in no particular order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from baton.worker.core import BlockHash, BlockId
from baton.worker.kv.block_origins import BlockOrigins
from baton.worker.kv.block_pool import BlockPool
from baton.worker.kv.host_tier.eviction.table import POLICIES
from baton.worker.kv.host_tier.offloads import Offloads
from baton.worker.kv.host_tier.restorable import Restorable, find_restorable
from baton.worker.kv.host_tier.slots import HostTier
from baton.worker.kv.partial_groups import PartialGroups, by_position
from baton.worker.kv.pinned_blocks import PinnedBlocks
from baton.worker.kv.prefixes import PrefixesInProgress
from baton.worker.kv.residency import ResidencyMeter
from baton.worker.requests.state import Phase, RequestState, num_blocks_for

# Storing all blocks of a long prompt at once would delay the step.
_STORED_A_STEP = 512
_EVICTED_A_STEP = 256


class Holdings:
    """The pool, and the holder of each block in it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        num_host_slots: int,
        num_ahead: int,
        residency: ResidencyMeter | None = None,
        origins: BlockOrigins | None = None,
        min_host_uses: int = 1,
        partial: PartialGroups | None = None,  # None: every layer keeps every token
        most_cached_states: float = 1.0,  # part of the pool
        host_eviction_policy: str = "lru",
    ) -> None:
        self.partial = partial or PartialGroups(None, block_size, 0)
        num_groups = 1 + len(self.partial)
        policy = POLICIES[host_eviction_policy](num_host_slots)
        self.offloads = Offloads(HostTier(num_host_slots, num_groups, policy), num_ahead, min_host_uses)
        offloads = self.offloads if num_host_slots else None
        self.pool = BlockPool(num_blocks, offloads, num_groups, residency, int(num_blocks * most_cached_states))
        self.origins = origins
        self.prefixes = PrefixesInProgress()
        self.pinned = PinnedBlocks(num_blocks, block_size, max_model_len, self.partial)
        self.collected_step = 0
        self.block_size = block_size
        self.watermark = max(1, num_blocks // 100)  # blocks kept for decodes at an admission
        self._fence_step = 0  # until this step is collected, blocks that were freed early may still be written
        self._retired: deque[tuple[int, list[BlockId]]] = deque()  # (step, blocks): free once the step is collected
        self._unstored: dict[RequestState, int] = {}  # received tokens that are not all findable yet

    @property
    def fenced(self) -> bool:
        """Whether steps in flight may still write free blocks."""
        return self.collected_step < self._fence_step

    @property
    def storing(self) -> bool:
        """Whether store_some has more to store."""
        return bool(self._unstored)

    def check_integrity(self, states: Iterable[RequestState], restoring: list[list[BlockId]]) -> None:
        """Raises DataLoss unless exactly these requests and restores hold and lease the pool's blocks."""
        known = list(states)
        holds = [state.block_ids for state in known] + [block_ids for _, block_ids in self._retired]
        holds += [blocks.block_ids for state in known for blocks in state.partial]
        self.pool.check_references(holds + restoring, [state.leased for state in known])

    # Holds.

    def allocate(self, count: int, in_order: bool = True) -> list[BlockId]:
        """Holds blocks that are known to be free."""
        block_ids = self.pool.allocate(count, in_order)
        assert block_ids is not None, f"{count} blocks should be free, {self.pool.num_free} are"
        return block_ids

    def free_passed(self, state: RequestState, num_computed: int, step: int) -> None:
        """Frees the blocks that the request has passed. Steps up to `step`, the last launched one, may still use them.

        `num_computed` may count tokens that a step in flight does not return.
        """
        kept, others = self.partial.passed(state, min(num_computed, len(state.token_ids) - 1))
        if kept or others:
            self._fence_step = max(self._fence_step, step)
            self.pool.free(kept)
            self.pool.free(others, first=True)

    def advance(self, state: RequestState, num_computed: int, step: int) -> bool:
        """Prepares a prompt's partial groups for its next chunk. False: the blocks for it are not free."""
        self.free_passed(state, num_computed, step)
        missing = self.partial.num_ahead(state, num_computed, len(state.block_ids))
        block_ids = self.pool.allocate(self.partial.num_pages(missing))
        if block_ids is None:
            return False
        self.partial.append(self.pool, state.partial, block_ids, missing)
        if state.request.prefill_only:
            self.pin(state)
        return True

    def free(self, state: RequestState, step: int) -> list[RequestState]:
        """Frees the request's blocks once no step up to `step`, the last launched one, writes them."""
        woken = self._store_rest(state)
        block_ids = self._take_from(state)
        if state.last_step > self.collected_step:
            self._retired.append((step, block_ids))
        else:
            self.pool.free(block_ids)
        return woken

    def free_early(self, state: RequestState) -> list[RequestState]:
        """Frees them at once: local steps run in order. A remote peer must wait for the fence."""
        woken = self._store_rest(state)
        if state.last_step > self.collected_step:
            self._fence_step = max(self._fence_step, state.last_step)
        self.pool.free(self._take_from(state))
        return woken

    def collected(self, step: int) -> None:
        """Records that the device no longer writes blocks of this step or earlier ones."""
        self.collected_step = step
        while self._retired and self._retired[0][0] <= step:
            self.pool.free(self._retired.popleft()[1])

    def pin(self, state: RequestState) -> None:
        """Pins the request's blocks for its phase."""
        pinned = state.phase in (Phase.REMOTE, Phase.READY, Phase.HOLDING) or (
            state.phase is Phase.RUNNING and state.request.prefill_only
        )
        block_ids = [*(state.block_ids if pinned else ()), *state.leased]
        num_later = 0
        if pinned and state.partial:
            block_ids += [block_id for blocks in state.partial for block_id in blocks.pages]
            if state.phase is Phase.RUNNING:
                num_later = max(0, self.pinned.lifetime_blocks(state) - len(block_ids))
        if block_ids:
            self.pinned.set(state, block_ids, num_later)
        else:
            self.pinned.remove(state)

    def evict_ahead(self, remote: Iterable[RequestState]) -> None:
        """Evicts blocks for the next expected lease, if that loses no copy in host memory."""
        if self.offloads.tier.num_slots:
            return
        for state in remote:
            if not state.leased:
                self.pool.evict_ahead(self.num_to_lease(state), _EVICTED_A_STEP)
                return

    # Leases.

    def num_to_lease(self, state: RequestState) -> int:
        """Returns the blocks of all groups that a remote prefill needs beside those that the request has."""
        num_full = num_blocks_for(state.num_remote_tokens, self.block_size) - len(state.block_ids)
        return num_full + self.partial.num_leased(state.num_remote_tokens)

    def settle(self, state: RequestState) -> None:
        """Turns leased blocks into valid ones, which follow the request's own.

        Its windows, and a state at a block's end, are findable at once.
        """
        full, *others = self.partial.leased_spans(state)
        self.pool.settle(state.leased)
        state.leased = []
        state.block_ids += full.block_ids
        state.partial = self.partial.landed(self.pool, others)
        if others and state.caching:
            state.hash_up_to(state.num_remote_tokens, self.block_size)
            self.pool.store(*self.partial.keys_of(state, 0, len(state.block_hashes)))

    def settle_ended(self, state: RequestState) -> None:
        """Does the same for a request that has ended: makes the blocks of its prompt's end findable, and frees them."""
        first = self.partial.leased_spans(state)[0].first
        self.settle(state)
        if state.caching:
            stop = first + len(state.block_ids)
            hashes = self._hashes(state, first, stop, state.num_remote_tokens)
            self.pool.store(state.block_ids[: len(hashes)], hashes)
        self.pool.free([*state.block_ids, *(one for blocks in state.partial for one in blocks.block_ids)])
        state.block_ids, state.partial = [], []

    # Findable blocks.

    def num_blocks_of(self, state: RequestState) -> int:
        """Returns the blocks of all its known tokens."""
        return num_blocks_for(len(state.token_ids), self.block_size)

    def num_reusable(self, state: RequestState) -> int:
        """Returns the blocks worth looking up.

        The last known token is computed even if all are cached: it yields the next.
        """
        request = state.request
        if request.sampling.prompt_logprobs is not None or (request.pooling is not None and request.pooling.reads_all):
            return 0
        return (len(state.token_ids) - 1) // self.block_size

    def cached_prefix(self, state: RequestState) -> list[BlockId]:
        """Returns the findable blocks at the request's front, not held."""
        hits = self.pool.lookup(state.block_hashes[: self.num_reusable(state)])
        if not self.partial:
            return hits
        usable = self.partial.usable(self.pool.lookup, state, len(hits))
        if usable < len(hits):
            self.partial.want_snapshot(state, len(hits))  # another request has gone on from there
        return hits[:usable]

    def restorable(self, state: RequestState, hits: list[BlockId]) -> Restorable | None:
        """Returns the prefix to restore from host memory, longer than `hits`. None: there is none."""
        return find_restorable(self.pool, self.offloads.tier, self.partial, state, hits, self.num_reusable(state))

    def store(self, state: RequestState, num_computed: int) -> list[RequestState]:
        """Makes the request's full blocks findable, up to `num_computed` tokens."""
        if state in self._unstored:
            self._unstored[state] = num_computed
            return []
        return self._store([(state, num_computed)])

    def store_each(self, computed: Iterable[tuple[RequestState, int]]) -> list[RequestState]:
        """Does the same for several requests and their numbers of computed tokens."""
        ready: list[tuple[RequestState, int]] = []
        for state, num_computed in computed:
            if state in self._unstored:
                self._unstored[state] = num_computed
            else:
                ready.append((state, num_computed))
        return self._store(ready)

    def store_soon(self, state: RequestState, num_computed: int) -> None:
        """Does the same in parts, in store_some."""
        self._unstored[state] = num_computed

    def store_some(self) -> list[RequestState]:
        """Stores one step's part of it."""
        for state, num_computed in self._unstored.items():
            stop = (state.num_stored_blocks + _STORED_A_STEP) * self.block_size
            if stop >= num_computed or not state.caching:
                return self._store_rest(state)
            return self._store([(state, stop)])
        return []

    def note_origins(self, state: RequestState, start: int, stop: int) -> None:
        """Records the tokens of the request's blocks [start, stop), which are about to be stored."""
        if self.origins is not None:
            self.origins.note(state.block_hashes, start, stop, state.token_ids)

    def _take_from(self, state: RequestState) -> list[BlockId]:
        block_ids, state.block_ids = state.block_ids, []
        state.num_stored_blocks = 0
        if state.partial:
            block_ids = by_position(block_ids, state.partial)
            state.partial = []
        return block_ids

    def _store_rest(self, state: RequestState) -> list[RequestState]:
        num_computed = self._unstored.pop(state, None)
        if num_computed is None:
            return []
        return [*self._store([(state, num_computed)]), *self.prefixes.end(state)]

    def _store(self, computed: Iterable[tuple[RequestState, int]]) -> list[RequestState]:
        """Makes full blocks of these requests findable, with one change of the pool."""
        block_ids: list[BlockId] = []
        block_hashes: list[BlockHash] = []
        ends: list[tuple[RequestState, int]] = []  # blocks from the front that are findable then
        has_partial = bool(self.partial)
        for state, num_computed in computed:
            start, num_full = state.num_stored_blocks, num_computed // self.block_size
            if not state.caching or num_full <= start:
                continue
            state.num_stored_blocks = num_full
            hashes = self._hashes(state, start, num_full, num_computed)
            end = start + len(hashes)
            block_ids += state.block_ids[start:end]
            block_hashes += hashes
            if has_partial:
                window_ids, keys = self.partial.keys_of(state, start, end)
                block_ids += window_ids
                block_hashes += keys
            ends.append((state, end))
        self.pool.store(block_ids, block_hashes)
        woken: list[RequestState] = []
        for state, end in ends:
            woken += self.prefixes.computed(state, end)
        return woken

    def _hashes(self, state: RequestState, start: int, stop: int, num_computed: int) -> list[BlockHash]:
        """Returns the hashes of the request's blocks [start, stop), without those that are never found."""
        state.hash_up_to(num_computed, self.block_size)
        hashes = state.block_hashes[start:stop]
        self.note_origins(state, start, start + len(hashes))
        return hashes

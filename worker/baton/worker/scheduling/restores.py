"""Prefixes on their way back from host memory: whether that pays, which blocks they take, who waits for them.

A request whose prefix is in host memory waits, without a row, until the copy has landed; others go on meanwhile. The
restore holds the blocks, not the request: one that ends earlier leaves them to the cache. What landed is ordinary
cached prefix, and the request is placed again and finds it; it is restored for once, so that it cannot wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.rpc.errors import DataLoss
from baton.worker.core import BlockHash, BlockId, HostSlot
from baton.worker.executors.base import RestoreCopy
from baton.worker.kv.host_tier.slots import HostTier
from baton.worker.requests.state import RequestState
from baton.worker.scheduling.rates import Rates

_WEIGHT = 0.2  # of one restore in what is believed of the next
_FORGETTING = 0.98  # a refusal makes the next try likelier: what was measured may not hold any more


@dataclass(slots=True, eq=False)
class Restore:
    """One prefix that comes back."""

    restore_id: int
    state: RequestState | None  # None: it ended
    block_ids: list[BlockId]  # held: the cached prefix on the device, then those that are written
    slots: list[HostSlot]  # pinned
    block_hashes: list[BlockHash]  # of the slots
    wanted: bool = True  # the cache was not reset since

    @property
    def fresh(self) -> list[BlockId]:
        """The blocks that are written."""
        return self.block_ids[-len(self.slots) :]


class RestoreCost:
    """What restoring costs against computing, by measurement; by length until both are measured."""

    def __init__(self, rates: Rates, min_tokens: int) -> None:
        self.seconds_per_block = 0.0  # 0: not known yet
        self._rates = rates
        self._min_tokens = min_tokens

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Learns from one restore."""
        seconds /= num_blocks
        known = self.seconds_per_block or seconds
        self.seconds_per_block = known + _WEIGHT * (seconds - known)

    def pays(self, num_tokens: int, num_blocks: int, num_ahead: int) -> bool:
        """Whether to restore so many tokens, behind `num_ahead` other blocks, instead of computing them."""
        rate = self._rates.prefill_tokens_per_second
        if self._min_tokens == 0 or not rate or not self.seconds_per_block:
            return num_tokens >= self._min_tokens
        # The request misses the step that is under way, and what is left of it takes a step as well.
        seconds = (num_blocks + num_ahead) * self.seconds_per_block + 2 * self._rates.decode_step_seconds
        if seconds < num_tokens / rate:
            return True
        self.seconds_per_block *= _FORGETTING
        return False


class Restores:
    """Those under way, and those to be started."""

    def __init__(self, tier: HostTier, cost: RestoreCost, block_size: int) -> None:
        self.cost = cost
        self._tier = tier
        self._block_size = block_size
        self._restores: dict[int, Restore] = {}
        self._begun: list[RestoreCopy] = []
        self._num_begun = 0
        self._num_blocks = 0  # of all under way

    def __len__(self) -> int:
        """Copies under way, for whomever."""
        return len(self._restores)

    @property
    def states(self) -> list[RequestState]:
        """The requests that wait."""
        return [restore.state for restore in self._restores.values() if restore.state is not None]

    @property
    def holds(self) -> list[list[BlockId]]:
        """The blocks that restores hold."""
        return [restore.block_ids for restore in self._restores.values()]

    def find(self, state: RequestState, start: int, stop: int) -> list[HostSlot]:
        """The slots of the request's blocks from `start` on, before `stop`. Empty: none, or it does not pay."""
        if state.restored or not self._tier.num_kept:
            return []
        slots = self._tier.lookup(state.block_hashes[start:stop])
        num_tokens = len(slots) * self._block_size
        return slots if slots and self.cost.pays(num_tokens, len(slots), self._num_blocks) else []

    def begin(
        self, state: RequestState, hits: list[BlockId], fresh: list[BlockId], slots: list[HostSlot], fenced: bool
    ) -> None:
        """Takes the hold of all these blocks over. `fenced`: steps in flight may still write the fresh ones."""
        self._num_begun += 1
        block_hashes = state.block_hashes[len(hits) : len(hits) + len(slots)]
        restore = Restore(self._num_begun, state, hits + fresh, slots, block_hashes)
        self._restores[restore.restore_id] = restore
        self._num_blocks += len(slots)
        self._tier.pin(slots)
        for block_hash in reversed(block_hashes):
            self._tier.touch(block_hash)
        copies = tuple(zip(slots, fresh, strict=True))
        self._begun.append(RestoreCopy(restore.restore_id, copies, fenced))

    def take(self) -> list[RestoreCopy]:
        """The copies to start now."""
        begun, self._begun = self._begun, []
        return begun

    def end(self, restore_id: int) -> Restore:
        """The copy is over, well or not. Its blocks are the caller's."""
        restore = self._restores.pop(restore_id)
        self._num_blocks -= len(restore.slots)
        self._tier.unpin(restore.slots)
        return restore

    def leave(self, state: RequestState) -> None:
        """The request waits no more."""
        for restore in self._restores.values():
            if restore.state is state:
                restore.state = None

    def reset(self) -> None:
        """What is under way must not be found."""
        for restore in self._restores.values():
            restore.wanted = False

    def audit(self) -> None:
        """Raises DataLoss where restores and host memory contradict each other."""
        reading: Sequence[Sequence[HostSlot]] = [restore.slots for restore in self._restores.values()]
        self._tier.audit(reading)
        if self._num_blocks != sum(map(len, reading)):
            raise DataLoss(f"{self._num_blocks} blocks count as being restored, {sum(map(len, reading))} are")

"""Restores of prefixes from host memory: whether they pay, their blocks, and the requests that wait.

A request whose prefix is in host memory waits without a row until the copy has landed; others continue meanwhile. The
restore holds the blocks, not the request: if the request ends earlier, the blocks stay in the cache. A landed prefix is
cached as any other, and the request is placed again and finds it. It is restored only once, so that it cannot wait for
ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.rpc.errors import DataLoss
from baton.worker.core import BlockId, HostSlot
from baton.worker.executors.base import RestoreCopy
from baton.worker.kv.host_tier.restorable import Restorable
from baton.worker.kv.host_tier.slots import HostTier
from baton.worker.requests.state import RequestState
from baton.worker.scheduling.rates import Rates

_WEIGHT = 0.2  # of one restore in the estimate
_FORGETTING = 0.98  # each refusal makes the next try likelier, since measurements age


@dataclass(slots=True, eq=False)
class Restore:
    """The restore of one prefix."""

    restore_id: int
    state: RequestState | None  # None: the request has ended
    prefix: Restorable  # its blocks are held, its slots pinned
    fresh: list[BlockId]  # held, and written from the slots; of states the first block
    wanted: bool = True  # False: the cache was reset since

    @property
    def block_ids(self) -> list[BlockId]:
        """The blocks that it holds."""
        return self.prefix.held + self.fresh

    @property
    def slots(self) -> list[HostSlot]:
        """The slots that it reads."""
        return self.prefix.slots


class RestoreCost:
    """Compares restoring with computing, by measurements; by length until both are measured."""

    def __init__(self, rates: Rates, min_tokens: int) -> None:
        self.seconds_per_block = 0.0  # 0: unknown
        self.rates = rates
        self._min_tokens = min_tokens

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Updates the estimate from one restore."""
        seconds /= num_blocks
        known = self.seconds_per_block or seconds
        self.seconds_per_block = known + _WEIGHT * (seconds - known)

    def pays(self, num_tokens: int, num_blocks: int, num_ahead: int) -> bool:
        """Returns whether to restore `num_tokens`, after `num_ahead` other blocks, instead of computing them."""
        rate = self.rates.prefill_tokens_per_second
        if self._min_tokens == 0 or not rate or not self.seconds_per_block:
            return num_tokens >= self._min_tokens
        # The request misses the step in progress, and the rest of its prompt takes a step as well.
        seconds = (num_blocks + num_ahead) * self.seconds_per_block + 2 * self.rates.decode_step_seconds
        if seconds < num_tokens / rate:
            return True
        self.seconds_per_block *= _FORGETTING
        return False


class Restores:
    """Restores in progress, and those to start."""

    def __init__(self, tier: HostTier, cost: RestoreCost, block_size: int) -> None:
        self.cost = cost
        self._tier = tier
        self._block_size = block_size
        self._restores: dict[int, Restore] = {}
        self._begun: list[RestoreCopy] = []
        self._num_begun = 0
        self._num_blocks = 0  # of all restores in progress

    def __len__(self) -> int:
        """Copies in progress, including those of ended requests."""
        return len(self._restores)

    @property
    def states(self) -> list[RequestState]:
        """The waiting requests."""
        return [restore.state for restore in self._restores.values() if restore.state is not None]

    @property
    def holds(self) -> list[list[BlockId]]:
        """Returns the blocks that restores hold."""
        return [restore.block_ids for restore in self._restores.values()]

    def possible(self, state: RequestState) -> bool:
        """Returns whether any prefix may be restored for the request."""
        return not state.restored and self._tier.num_kept > 0

    def pays(self, prefix: Restorable) -> bool:
        """Returns whether to restore this prefix now, instead of computing it."""
        num_tokens = (prefix.stop - prefix.start) * self._block_size
        return self.cost.pays(num_tokens, len(prefix.slots), self._num_blocks)

    def begin(
        self, state: RequestState, prefix: Restorable, fresh: list[BlockId], pages: list[BlockId], fenced: bool
    ) -> None:
        """Begins a restore, which takes over the hold of the prefix's blocks and of the fresh ones.

        `pages`: the fresh ones, with all blocks of states. `fenced`: steps may still write these.
        """
        self._num_begun += 1
        restore = Restore(self._num_begun, state, prefix, fresh)
        self._restores[restore.restore_id] = restore
        self._num_blocks += len(prefix.slots)
        self._tier.pin(prefix.slots)
        for key in reversed(prefix.keys):
            self._tier.use(key)
        copies = tuple(zip(prefix.slots, pages, strict=True))
        self._begun.append(RestoreCopy(restore.restore_id, copies, fenced))

    def take(self) -> list[RestoreCopy]:
        """Returns the copies to start now."""
        begun, self._begun = self._begun, []
        return begun

    def end(self, restore_id: int) -> Restore:
        """Ends a copy, successful or not. The caller takes over its blocks."""
        restore = self._restores.pop(restore_id)
        self._num_blocks -= len(restore.slots)
        self._tier.unpin(restore.slots)
        return restore

    def leave(self, state: RequestState) -> None:
        """Ends a request's wait."""
        for restore in self._restores.values():
            if restore.state is state:
                restore.state = None

    def reset(self) -> None:
        """Marks restores in progress: their blocks must not be found."""
        for restore in self._restores.values():
            restore.wanted = False

    def audit(self, written: Sequence[Sequence[HostSlot]] = ()) -> None:
        """Raises DataLoss if restores and host memory are inconsistent. `written`: slots that are written to disk."""
        reading: list[Sequence[HostSlot]] = [restore.slots for restore in self._restores.values()]
        self._tier.audit([*reading, *written])
        if self._num_blocks != sum(map(len, reading)):
            raise DataLoss(f"{self._num_blocks} blocks count as being restored, {sum(map(len, reading))} are")

"""The prefix of a request that the device and host memory hold together, in every group. Holds and copies nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.worker.core import BlockHash, BlockId, HostSlot
from baton.worker.kv.block_pool import BlockPool
from baton.worker.kv.host_tier.slots import HostTier
from baton.worker.kv.partial_groups import PartialGroups
from baton.worker.requests.state import RequestState


@dataclass(frozen=True, slots=True)
class Restorable:
    """A prefix that is usable once its part in host memory is on the device too."""

    start: int  # blocks of the prefix that is usable now
    stop: int  # blocks of this one
    held: list[BlockId]  # its blocks on the device, in all groups
    slots: list[HostSlot]  # the others, in host memory
    keys: list[BlockHash]  # of those
    sizes: list[int]  # slots of each: of a state there are several


def find_restorable(
    pool: BlockPool, tier: HostTier, partial: PartialGroups, state: RequestState, hits: Sequence[BlockId], most: int
) -> Restorable | None:
    """Returns the longest such prefix of at most `most` blocks. None: it is no longer than `hits`, usable now."""
    start, block_hashes = len(hits), state.block_hashes[:most]
    held = pool.lookup(block_hashes) if partial else list(hits)
    slots = tier.lookup(block_hashes[len(held) :])
    stop = len(held) + len(slots)
    if partial:
        stop = partial.usable(lambda key: bool(pool.lookup(key) or tier.lookup(key)), state, stop)
    if stop <= start:
        return None
    keys = list(block_hashes[len(held) : stop])
    found = Restorable(start, stop, held[:stop], slots[: len(keys)], keys, [1] * len(keys))
    for key in partial.keys_before(state, stop):
        if on_device := pool.lookup([key]):
            found.held.extend(on_device)
        else:
            in_host = tier.lookup([key])
            found.slots.extend(in_host)
            found.keys.append(key)
            found.sizes.append(len(in_host))
    return found if found.slots else None

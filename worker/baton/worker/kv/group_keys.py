"""The keys of blocks in the pool: the hash, followed by the group from the second group on.

With these keys the pool, its events and the host tier are the same for one group and for several, and one group costs
nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.rpc.block_hash import HASH_BYTES
from baton.worker.core import BlockHash


def keys_in(group: int, block_hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
    """Returns the keys of blocks in a group."""
    if group == 0:
        return block_hashes
    suffix = bytes([group])
    return [BlockHash(block_hash + suffix) for block_hash in block_hashes]


def split_key(key: BlockHash) -> tuple[BlockHash, int]:
    """Returns a key's hash and group."""
    return BlockHash(key[:HASH_BYTES]), key[HASH_BYTES] if len(key) > HASH_BYTES else 0


def is_key(key: BlockHash) -> bool:
    """Returns whether these bytes are a key."""
    return HASH_BYTES <= len(key) <= HASH_BYTES + 1

"""The worker's KV blocks: who holds them, which are reusable, which go first. Knows nothing of tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """These blocks can be found from now on."""

    block_hashes: bytes  # 16 bytes a block


@dataclass(frozen=True, slots=True)
class RemovedEvent:
    """These blocks are gone."""

    block_hashes: bytes  # 16 bytes a block


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """Every block is in exactly one of these states."""

    num_blocks: int
    num_held_blocks: int  # by requests, cached or not
    num_leased_blocks: int  # a remote peer may write them
    num_cached_blocks: int  # held by nobody, reusable
    num_empty_blocks: int

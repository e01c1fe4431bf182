"""The cache's changes in the form of vLLM's KVEventBatch. Knows no socket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from baton.rpc.block_hash import HASH_BYTES
from baton.worker.core import BlockHash, Tier
from baton.worker.kv.block_origins import BlockOrigin
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent
from baton.worker.kv_events_settings import KvEventsSettings
from baton.worker.requests.state import split_hashes

_MEDIUMS = {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}

Event = Mapping[str, Any]  # by field, in the order of the array form


class EventForm:
    """Writes events as a subscriber reads them."""

    def __init__(self, settings: KvEventsSettings, block_size: int) -> None:
        self._as_arrays = settings.event_format == "array"
        self._as_bytes = settings.hash_format == "bytes"
        self._block_size = block_size

    def batch(self, time: float, events: Iterable[Event]) -> list[Any]:
        """Returns a batch: time, events, rank."""
        return [time, [self._shaped(event) for event in events], 0]

    def cleared(self) -> Event:
        """Returns the event of an emptied cache."""
        return {"type": "AllBlocksCleared"}

    def events(
        self, changes: Iterable[StoredEvent | RemovedEvent], origins: Mapping[BlockHash, BlockOrigin]
    ) -> Iterator[Event]:
        """Yields the events of changes, in order; of stored blocks one for each chain."""
        for change in changes:
            hashes = split_hashes(change.block_hashes)
            if isinstance(change, RemovedEvent):
                names = [self._name(one) for one in hashes]
                yield {"type": "BlockRemoved", "block_hashes": names, "medium": _MEDIUMS[change.tier], "group_idx": 0}
                continue
            for group in change.groups or (0,):
                for chain in _chains(hashes, origins):
                    yield self._stored(chain, origins, change.tier, group)

    def _stored(
        self, chain: Sequence[BlockHash], origins: Mapping[BlockHash, BlockOrigin], tier: Tier, group: int
    ) -> Event:
        known = [origins[one] for one in chain if one in origins]
        parent = known[0].parent if known else None
        return {
            "type": "BlockStored",
            "block_hashes": [self._name(one) for one in chain],
            "parent_block_hash": None if parent is None else self._name(parent),
            "token_ids": [token for origin in known for token in origin.token_ids],
            "block_size": self._block_size,
            "lora_id": None,
            "medium": _MEDIUMS[tier],
            "lora_name": None,
            "extra_keys": [None] * len(chain),
            "group_idx": group,
        }

    def _name(self, block_hash: BlockHash) -> int | bytes:
        return bytes(block_hash) if self._as_bytes else int.from_bytes(block_hash[HASH_BYTES - 8 :], "big")

    def _shaped(self, event: Event) -> Any:
        return list(event.values()) if self._as_arrays else event


def _chains(hashes: Sequence[BlockHash], origins: Mapping[BlockHash, BlockOrigin]) -> Iterator[list[BlockHash]]:
    """Divides stored blocks where one does not follow the one before it. Those without origin follow each other."""
    chain: list[BlockHash] = []
    for one in hashes:
        origin = origins.get(one)
        follows = (
            origin is None
            if not chain or chain[-1] not in origins
            else (origin is not None and origin.parent == chain[-1])
        )
        if chain and not follows:
            yield chain
            chain = []
        chain.append(one)
    if chain:
        yield chain

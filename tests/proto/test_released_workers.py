"""A worker of a release and a current one: hand-overs in both directions, and each one's events at the other's readers.

The old worker stands for one that knows the release's messages only: of what it sends and receives, every field that
the release does not have is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine.engine_harness import expected_for, make_request, prompt_of
from support.fleet.released import RELEASES, old
from support.transfer.handover_harness import Network, Node, finished, idle, make_node, run_until

from baton.kvstore.index.packed_blocks import Home
from baton.kvstore.index.worker_blocks import WorkerBlocks
from baton.rpc.errors import Mismatch
from baton.v1 import kv_pb2
from baton.worker.core import Tier
from baton.worker.kv.cache_events import StoredEvent
from baton.worker.kv.event_log import EventLog
from baton.worker.kv_spec import KvGroup, KvKind, KvSpec
from baton.worker.link.frames import Kind
from baton.worker.transfer.layout import layout_message, spec_of


def as_released(image: Path, name: str, payload: bytes) -> bytes:
    """Returns the message without fields that the release does not have."""
    message = old(image, name).FromString(payload)
    message.DiscardUnknownFields()
    return message.SerializeToString()


@pytest.fixture
def network(image: Path) -> Iterator[Network]:
    """Yields two workers that exchange only the release's fields."""
    network = Network()

    def tap(node: Node, kind: int, payload: bytes) -> bytes:
        return as_released(image, "PrefillStreamRequest" if kind == Kind.PEER else "PrefillStreamResponse", payload)

    network.tap = tap
    yield network
    for node in network.nodes.values():
        node.handover.close()


@RELEASES
def test_prompts_are_handed_over_both_ways(image: Path, network: Network):
    pair = make_node(network, "old"), make_node(network, "new")
    for number, (decode, prefill) in enumerate((pair, pair[::-1])):
        request = make_request(prompt_of(60, number), 8)
        decode.submit(request, prefill)
        run_until(pair, finished(decode, request))
        assert decode.seen.tokens[request.request_id] == expected_for(request)
        assert decode.seen.finishes[request.request_id].num_transferred_tokens == 60
    run_until(pair, idle(*pair))
    for node in pair:
        assert (node.handover.counters().num_transfers, node.handover.counters().num_mismatches) == (1, 0)
        node.assert_nothing_held()


@RELEASES
def test_a_worker_of_the_release_refuses_groups_it_does_not_know(image: Path):
    groups = (
        KvGroup(KvKind.FULL, (1, 3), "bfloat16", num_kv_heads=8, head_dim=128),
        KvGroup(KvKind.WINDOW, (0, 2), "bfloat16", num_kv_heads=8, head_dim=128, window=512),
    )
    message = layout_message(KvSpec(bytes(16), 16, groups))
    heard = kv_pb2.KvLayout.FromString(as_released(image, "KvLayout", message.SerializeToString()))
    with pytest.raises(Mismatch):
        spec_of(heard)


class Cache:
    """One block in all groups, one in the first alone."""

    epoch = 5

    def take_events(self) -> list[StoredEvent]:
        return [StoredEvent(b"a" * 16), StoredEvent(b"b" * 16, groups=(0,))]

    def cached_by_groups(self, tier: Tier) -> dict[tuple[int, ...], bytes]:
        return {(): b"a" * 16, (0,): b"b" * 16} if tier is Tier.DEVICE else {}


@RELEASES
def test_a_reader_of_the_release_counts_every_block_that_some_group_holds(image: Path):
    sent: list[Any] = []
    log = EventLog(Cache(), "new", lambda kind, channel, payload: sent.append(payload), lambda: 0.0)
    log.open(1)
    log.collect()
    log.snapshot()
    requests = [old(image, "PublishRequest").FromString(payload) for payload in sent]
    stored = [event.stored for request in requests for event in request.batch.events]
    assert [change.block_hashes for change in stored[:2]] == [b"a" * 16, b"b" * 16]
    parts = [request.snapshot for request in requests if request.WhichOneof("message") == "snapshot"]
    assert b"".join(part.block_hashes for part in parts) == b"a" * 16 + b"b" * 16
    assert [(part.first, part.last) for part in parts] == [(True, False), (False, True)]


@RELEASES
def test_a_kvstore_of_today_takes_the_events_of_the_release_for_all_groups(image: Path):
    tier = kv_pb2.KV_TIER_DEVICE
    batch = old(image, "KvEventBatch")(worker_id="old", epoch=1, sequence=1)
    batch.events.add().stored.MergeFrom(old(image, "BlocksStored")(block_hashes=b"a" * 16 + b"b" * 16, tier=tier))
    batch.events.add().removed.MergeFrom(old(image, "BlocksRemoved")(block_hashes=b"b" * 16, tier=tier))
    worker = WorkerBlocks("old", 1, 0)
    encoded = batch.SerializeToString()
    worker.apply(kv_pb2.KvEventBatch.FromString(encoded), encoded)
    assert worker.homes() == {Home(tier): b"a" * 16}

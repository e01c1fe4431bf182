"""The prefix that routers predict for a worker with windows is the one that its admission finds."""

from __future__ import annotations

import random

import pytest
from support.engine.engine_harness import make_request, make_rig
from support.engine.rigs.window_executor import BLOCK_SIZE, VOCAB_SIZE, WindowExecutor

from baton.router.index.prefix_index import HeldPrefix, PrefixIndex
from baton.v1 import kv_pb2
from baton.worker.core import Tier
from baton.worker.engine.engine import Engine
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent
from baton.worker.requests.state import RequestState

DEVICE = kv_pb2.KV_TIER_DEVICE


def prompt_of(length: int, salt: int, shared: int) -> list[int]:
    return [(i * 7 + i * i + (salt * 31 if i >= shared else 0)) % VOCAB_SIZE for i in range(length)]


def event_of(change: StoredEvent | RemovedEvent) -> kv_pb2.KvEvent:
    if isinstance(change, RemovedEvent):
        return kv_pb2.KvEvent(removed=kv_pb2.BlocksRemoved(block_hashes=change.block_hashes, tier=DEVICE))
    stored = kv_pb2.BlocksStored(block_hashes=change.block_hashes, tier=DEVICE, groups=change.groups)
    return kv_pb2.KvEvent(stored=stored)


def snapshot_of(engine: Engine, sequence: int) -> list[kv_pb2.KvSnapshot]:
    homes = list(engine.cached_by_groups(Tier.DEVICE).items()) or [((), b"")]
    return [
        kv_pb2.KvSnapshot(
            worker_id="a", epoch=1, barrier=sequence, tier=DEVICE, block_hashes=hashes, groups=groups,
            first=place == 0, last=place == len(homes) - 1,
        )
        for place, (groups, hashes) in enumerate(homes)
    ]  # fmt: skip


def predicted(index: PrefixIndex, hashes: bytes, most: int, window: int) -> int:
    held = index.find(hashes).get("a")
    return 0 if held is None else index.usable("a", held, hashes, most, BLOCK_SIZE, window).device


@pytest.mark.parametrize("windows", [(), (9,), (14, 14), (30,)])
def test_predicted_prefixes_are_found(windows: tuple[int, ...]) -> None:
    rng = random.Random(len(windows))
    executor = WindowExecutor(70, windows)
    rig = make_rig(executor, max_num_batched_tokens=32, max_num_requests=4)  # type: ignore[arg-type]
    index, num_shorter = PrefixIndex(), 0
    assert index.receive(kv_pb2.KvSnapshot(worker_id="a", epoch=1, tier=DEVICE, first=True, last=True))
    for sequence in range(1, 61):
        rig.run(make_request(prompt_of(rng.randint(5, 90), rng.randint(0, 3), rng.randint(0, 60)), rng.randint(1, 9)))
        events = [event_of(change) for change in rig.engine.take_events()]
        assert index.apply(kv_pb2.KvEventBatch(worker_id="a", epoch=1, sequence=sequence, events=events))
        if sequence % 20 == 0:
            assert all(index.receive(part) for part in snapshot_of(rig.engine, sequence))
        holdings = rig.engine._scheduler._holdings
        for salt in range(4):
            state = RequestState(make_request(prompt_of(97, salt, 40)), (0, 0.0, 0), 10**6, frozenset(), 0.0)
            state.hash_up_to(97, BLOCK_SIZE)
            hashes, most = b"".join(state.block_hashes), holdings.num_reusable(state)
            found = len(holdings.cached_prefix(state))
            assert predicted(index, hashes, most, max(windows, default=0)) == found
            held = index.find(hashes).get("a", HeldPrefix(0, 0))
            num_shorter += found < min(most, held.device)
    assert (num_shorter > 0) == bool(windows)
    index.drop("a")
    assert not index._gaps._gaps


def test_windows_in_host_memory_fill_gaps() -> None:
    index = PrefixIndex()
    hashes = bytes(range(16)) + bytes(range(16, 32))
    assert index.receive(kv_pb2.KvSnapshot(worker_id="a", epoch=1, tier=DEVICE, first=True, last=True))

    def stored(tier: kv_pb2.KvTier.ValueType, *groups: int) -> kv_pb2.KvEvent:
        return kv_pb2.KvEvent(stored=kv_pb2.BlocksStored(block_hashes=hashes, tier=tier, groups=groups))

    held = HeldPrefix(2, 0)
    steps = [(stored(DEVICE), 2), (stored(DEVICE, 0), 0), (stored(kv_pb2.KV_TIER_HOST, 1), 2)]
    for sequence, (event, expected) in enumerate(steps, 1):
        index.apply(kv_pb2.KvEventBatch(worker_id="a", epoch=1, sequence=sequence, events=[event]))
        assert index.find(hashes) == {"a": held}
        assert index.usable("a", held, hashes, 2, 4, 9) == HeldPrefix(expected, 0)
    removed = kv_pb2.KvEvent(removed=kv_pb2.BlocksRemoved(block_hashes=hashes, tier=DEVICE))
    index.apply(kv_pb2.KvEventBatch(worker_id="a", epoch=1, sequence=4, events=[removed]))
    assert index.find(hashes) == {}, "host memory has the windows' part only"

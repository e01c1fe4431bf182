"""The pure index, against the naive reading of the same events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvstore_node import block, blocks, removed, stored

from baton.kvstore.index import Applied, Index
from baton.kvstore.worker_blocks import WorkerBlocks
from baton.rpc.errors import InvalidRequest
from baton.v1 import kv_pb2

DEVICE, HOST = kv_pb2.KV_TIER_DEVICE, kv_pb2.KV_TIER_HOST


def batch(sequence, *events, epoch=1, worker_id="w"):
    return kv_pb2.KvEventBatch(worker_id=worker_id, epoch=epoch, sequence=sequence, events=events)


def part(barrier, *numbers, epoch=1, worker_id="w", first=True, last=True, tier=DEVICE):
    return kv_pb2.KvSnapshot(
        worker_id=worker_id, epoch=epoch, barrier=barrier, block_hashes=blocks(*numbers), tier=tier,
        first=first, last=last,
    )  # fmt: skip


@pytest.fixture
def index():
    index = Index()
    index.receive(part(0))
    return index


class Recorder:
    def __init__(self):
        self.heard = []

    def on_batch(self, batch):
        self.heard.append(("batch", batch.worker_id, batch.sequence))

    def on_replaced(self, worker):
        self.heard.append(("replaced", worker.worker_id, worker.sequence))

    def on_forgotten(self, worker_id, epoch):
        self.heard.append(("forgotten", worker_id, epoch))


def held(index, worker_id="w", tier=DEVICE):
    worker = index.get(worker_id)
    return None if worker is None else worker.blocks(tier)


def test_batches_in_order_are_applied(index):
    assert index.apply(batch(1, stored(1, 2, 3))) is Applied.YES
    assert index.apply(batch(2, removed(2), stored(4))) is Applied.YES
    assert held(index) == {block(1), block(3), block(4)}


@pytest.mark.parametrize("wrong", [batch(3, stored(9)), batch(1, stored(9)), batch(2, stored(9), epoch=2)])
def test_gap_reorder_and_unknown_epoch_drop_the_worker(index, wrong):
    index.apply(batch(1, stored(1)))
    assert index.apply(wrong) is Applied.OUT_OF_STEP
    assert held(index) is None
    assert index.apply(batch(2, stored(2))) is Applied.OUT_OF_STEP


def test_an_unknown_worker_is_out_of_step():
    assert Index().apply(batch(1, stored(1))) is Applied.OUT_OF_STEP


def test_a_hello_confirms_only_the_very_same_place(index):
    index.apply(batch(1, stored(1)))
    assert index.confirm("w", 1, 1) is Applied.YES
    assert index.confirm("w", 1, 2) is Applied.OUT_OF_STEP
    assert held(index) is None


def test_a_snapshot_replaces_everything_at_its_last_part(index):
    index.apply(batch(1, stored(1, 2)))
    assert index.receive(part(5, 10, last=False)) is Applied.PARTLY
    assert held(index) == {block(1), block(2)}
    assert index.receive(part(5, 11, first=False)) is Applied.YES
    assert held(index) == {block(10), block(11)}
    assert index.apply(batch(6, stored(12))) is Applied.YES


def test_the_first_part_of_a_new_epoch_ends_the_old_one(index):
    index.apply(batch(1, stored(1)))
    index.receive(part(0, 2, epoch=2, last=False))
    assert held(index) is None


@pytest.mark.parametrize("wrong", [part(6, 1, first=False), part(5, 1, first=False, epoch=2)])
def test_parts_of_different_snapshots_do_not_mix(index, wrong):
    index.receive(part(5, 10, last=False))
    assert index.receive(wrong) is Applied.OUT_OF_STEP
    assert held(index) is None


def test_tiers_are_kept_apart(index):
    index.apply(batch(1, stored(1), stored(1, tier=HOST)))
    index.apply(batch(2, removed(1)))
    assert held(index) == frozenset()
    assert held(index, tier=HOST) == {block(1)}
    assert index.num_blocks == 1


def test_listeners_hear_every_change_in_order(index):
    recorder = Recorder()
    index.listen(recorder)
    index.apply(batch(1, stored(1)))
    index.receive(part(0, 2, epoch=2))
    index.forget("w")
    index.ignore(recorder)
    index.receive(part(0, 2, epoch=3))
    assert recorder.heard == [
        ("batch", "w", 1), ("forgotten", "w", 1), ("replaced", "w", 0), ("forgotten", "w", 2),
    ]  # fmt: skip


def test_forgetting_who_is_unknown_tells_nobody():
    index, recorder = Index(), Recorder()
    index.listen(recorder)
    assert not index.forget("nobody")
    assert recorder.heard == []


@pytest.mark.parametrize(
    "event",
    [
        kv_pb2.KvEvent(stored=kv_pb2.BlocksStored(block_hashes=b"x" * 17, tier=DEVICE)),
        kv_pb2.KvEvent(stored=kv_pb2.BlocksStored(block_hashes=b"x" * 16)),
    ],
)
def test_malformed_events_are_refused(index, event):
    with pytest.raises(InvalidRequest):
        index.apply(batch(1, event))


@given(st.sets(st.integers(0, 2**100), max_size=50), st.sets(st.integers(0, 2**100), max_size=50))
def test_a_snapshot_says_what_is_held(device, host):
    worker = WorkerBlocks("w", 3, 9)
    worker.add(part(9, *device, epoch=3))
    worker.add(part(9, *host, epoch=3, tier=HOST))
    copy = Index()
    parts = list(worker.snapshot())
    assert [one.first for one in parts].count(True) == [one.last for one in parts].count(True) == 1
    assert [copy.receive(one) for one in parts][-1] is Applied.YES
    assert held(copy) == set(map(block, device))
    assert held(copy, tier=HOST) == set(map(block, host))
    assert copy.get("w").sequence == 9


operations = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "gap", "repeat", "epoch", "snapshot", "partial"]),
        st.lists(st.integers(0, 20), max_size=5),
    ),
    max_size=30,
)


@given(operations)
def test_the_index_equals_a_naive_reading_of_any_history(history):
    index, expected, epoch, sequence = Index(), None, 1, 0
    for kind, numbers in history:
        if kind in ("store", "remove"):
            sequence += 1
            event = (stored if kind == "store" else removed)(*numbers)
            applied = index.apply(batch(sequence, event, epoch=epoch))
            if expected is not None:
                expected = expected | set(numbers) if kind == "store" else expected - set(numbers)
            assert (applied is Applied.YES) == (expected is not None)
        elif kind in ("gap", "repeat"):
            sequence += 1 if kind == "gap" else -1 if sequence else 0
            sequence = max(sequence, 0)
            index.apply(batch(sequence + (1 if kind == "gap" else 0), stored(*numbers), epoch=epoch))
            expected = None
        elif kind == "epoch":
            epoch, sequence = epoch + 1, 1
            index.apply(batch(sequence, stored(*numbers), epoch=epoch))
            expected = None
        else:
            whole = kind == "snapshot"
            index.receive(part(sequence, *numbers, epoch=epoch, last=whole))
            if whole:
                expected = set(numbers)
            else:
                index.confirm("w", epoch + 1, 0)
                expected = None
        got = held(index)
        assert got == (None if expected is None else set(map(block, expected)))

"""The pure index, against the naive reading of the same events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleet.kvstore_node import block, blocks, removed, split, stored

from baton.kvstore.index.index import Applied, Index, IndexListener
from baton.kvstore.index.packed_blocks import Home, join_parts
from baton.kvstore.index.worker_blocks import WorkerBlocks, restore
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


class Recorder(IndexListener):
    def __init__(self):
        self.heard = []

    def on_batch(self, worker, encoded):
        sequence = kv_pb2.KvEventBatch.FromString(encoded).sequence
        assert sequence == worker.sequence
        self.heard.append(("batch", worker.worker_id, sequence))

    def on_replaced(self, worker):
        self.heard.append(("replaced", worker.worker_id, worker.sequence))

    def on_silent(self, worker):
        self.heard.append(("silent", worker.worker_id))

    def on_heard(self, worker):
        self.heard.append(("heard", worker.worker_id))

    def on_forgotten(self, worker_id, epoch):
        self.heard.append(("forgotten", worker_id, epoch))


def held(index, worker_id="w", tier=DEVICE):
    worker = index.get(worker_id)
    return None if worker is None else split(worker.homes().get(Home(tier), b""))


def test_batches_in_order_are_applied(index):
    assert index.apply(batch(1, stored(1, 2, 3))) is Applied.YES
    assert index.apply(batch(2, removed(2), stored(4))) is Applied.YES
    assert held(index) == {block(1), block(3), block(4)}


@pytest.mark.parametrize("wrong", [batch(3, stored(9)), batch(2, stored(9), epoch=2)])
def test_gap_and_unknown_epoch_drop_the_worker(index, wrong):
    index.apply(batch(1, stored(1)))
    assert index.apply(wrong) is Applied.OUT_OF_STEP
    assert held(index) is None
    assert index.apply(batch(2, stored(2))) is Applied.OUT_OF_STEP


def test_a_batch_that_was_taken_before_is_acknowledged_and_changes_nothing(index):
    index.apply(batch(1, stored(1)))
    index.apply(batch(2, removed(1)))
    assert index.apply(batch(1, stored(1))) is Applied.YES
    assert held(index) == set()
    assert index.get("w").sequence == 2


def test_batches_that_come_in_the_wrong_order_drop_the_worker(index):
    assert index.apply(batch(2, stored(2))) is Applied.OUT_OF_STEP
    assert index.apply(batch(1, stored(1))) is Applied.OUT_OF_STEP
    assert held(index) is None


def test_an_unknown_worker_is_out_of_step():
    assert Index().apply(batch(1, stored(1))) is Applied.OUT_OF_STEP


@pytest.mark.parametrize(
    ("epoch", "sequence", "first_kept", "follows"),
    [
        (1, 2, 0, True),
        (1, 5, 3, True),
        (1, 5, 1, True),
        (1, 5, 4, False),  # batch 3 is lost
        (1, 5, 0, False),
        (1, 1, 1, False),  # the index is ahead of the worker
        (2, 2, 1, False),
    ],
)
def test_a_hello_confirms_a_position_that_the_worker_can_resume(index, epoch, sequence, first_kept, follows):
    index.apply(batch(1, stored(1)))
    index.apply(batch(2, stored(2)))
    applied = index.confirm("w", epoch, sequence, first_kept)
    assert applied is (Applied.YES if follows else Applied.OUT_OF_STEP)
    assert (held(index) is not None) == follows


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
    assert held(index) == set()
    assert held(index, tier=HOST) == {block(1)}
    assert index.num_blocks == 1


def test_listeners_get_every_change_in_order(index):
    recorder = Recorder()
    index.listen(recorder)
    index.apply(batch(1, stored(1)))
    index.receive(part(0, 2, epoch=2))
    assert index.mark_silent("w")
    assert not index.mark_silent("w")
    index.mark_heard("w")
    index.forget("w")
    index.ignore(recorder)
    index.receive(part(0, 2, epoch=3))
    assert recorder.heard == [
        ("batch", "w", 1), ("forgotten", "w", 1), ("replaced", "w", 0),
        ("silent", "w"), ("heard", "w"), ("forgotten", "w", 2),
    ]  # fmt: skip


def test_forgetting_an_unknown_worker_notifies_no_listener():
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


def numbered(sequence, event):
    return batch(sequence, event, epoch=3).SerializeToString()


@given(
    st.sets(st.integers(0, 2**128 - 1), max_size=50),
    st.sets(st.integers(0, 2**128 - 1), max_size=50),
    st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from([5, 6, 5 + 2**64, 7 + 2**70]), max_size=4))),
)
def test_a_base_with_its_log_equals_the_folded_base(device, host, changes):
    parts = [part(9, *device, epoch=3, last=False), part(9, *host, epoch=3, tier=HOST, first=False)]
    log = [numbered(10 + n, (stored if kind else removed)(*some)) for n, (kind, some) in enumerate(changes)]
    worker = restore(parts, log)
    expected = set(device)
    for kind, some in changes:
        expected = expected | set(some) if kind else expected - set(some)
    index = Index()
    index.restore(worker)
    assert held(index) == set(map(block, expected))
    assert held(index, tier=HOST) == set(map(block, host))
    assert index.rebase(worker, worker.compaction()())
    assert held(index) == set(map(block, expected))
    assert worker.base.num_blocks == len(worker) == len(expected) + len(host)
    assert worker.base.barrier == worker.sequence == 9 + len(changes)


def test_a_fold_takes_batches_that_come_meanwhile():
    worker = restore([part(0, *range(10), epoch=3)], [])
    worker.apply(batch(1, stored(100), removed(3), epoch=3), numbered(1, stored(100)))
    make = worker.compaction()
    worker.apply(batch(2, stored(200), epoch=3), numbered(2, stored(200)))
    worker.rebase(make())
    assert worker.base.barrier == 1
    assert worker.since(1) == [numbered(2, stored(200))]
    assert worker.since(0) is not None, "readers that are a little behind need no snapshot"
    assert block(200) in split(worker.homes()[Home(DEVICE)])


def in_groups(groups, *numbers):
    change = kv_pb2.BlocksStored(block_hashes=blocks(*numbers), tier=DEVICE, groups=groups)
    return kv_pb2.KvEvent(stored=change)


def test_a_fold_keeps_which_groups_hold_a_block():
    worker = restore([part(0, 1, 2, epoch=3)], [])
    events = [
        in_groups([0], 2, 3, 4),  # of block 2 group 0 is left; 3 and 4 are new
        in_groups([], 4),
        in_groups([1], 5),
        removed(5),
        stored(6, tier=HOST),
        kv_pb2.KvEvent(stored=kv_pb2.BlocksStored(block_hashes=blocks(6), tier=HOST, groups=[0])),
    ]
    changes = batch(1, *events, epoch=3)
    worker.apply(changes, changes.SerializeToString())
    wanted = {
        Home(DEVICE): {block(1), block(4)},
        Home(DEVICE, (0,)): {block(2), block(3)},
        Home(HOST, (0,)): {block(6)},
    }
    assert {home: split(packed) for home, packed in worker.homes().items() if packed} == wanted
    worker.rebase(worker.compaction()())
    parts = [kv_pb2.KvSnapshot.FromString(encoded) for encoded in worker.base.parts]
    assert {home: split(packed) for home, packed in join_parts(parts).items()} == wanted
    assert len(worker) == 5


def test_a_worker_replaced_meanwhile_takes_no_base(index):
    worker = index.get("w")
    make = worker.compaction()
    index.receive(part(5, 1))
    assert not index.rebase(worker, make())
    assert held(index) == {block(1)}


def test_old_batches_are_kept_up_to_a_size():
    worker = WorkerBlocks("w", 3, 0)
    for sequence in range(1, 200):
        encoded = numbered(sequence, stored(*range(sequence * 1000, sequence * 1000 + 500)))
        worker.apply(kv_pb2.KvEventBatch.FromString(encoded), encoded)
    assert worker.is_log_long
    worker.rebase(worker.compaction()())
    assert worker.since(0) is None
    assert len(worker.since(190)) == 9
    assert not worker.is_log_long


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
        elif kind == "repeat":
            applied = index.apply(batch(sequence, stored(*numbers), epoch=epoch))
            assert (applied is Applied.YES) == (expected is not None)
        elif kind == "gap":
            sequence += 2
            index.apply(batch(sequence, stored(*numbers), epoch=epoch))
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

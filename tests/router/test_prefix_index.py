"""The bit-mask index against a naive dict of sets."""

from hypothesis import given
from hypothesis import strategies as st
from kvstore_node import blocks, removed, stored

from baton.router.prefix_index import PrefixIndex
from baton.v1 import kv_pb2

DEVICE, HOST = kv_pb2.KV_TIER_DEVICE, kv_pb2.KV_TIER_HOST


def batch(worker_id, sequence, *events, epoch=1):
    return kv_pb2.KvEventBatch(worker_id=worker_id, epoch=epoch, sequence=sequence, events=events)


def part(worker_id, *numbers, epoch=1, barrier=0, first=True, last=True, tier=DEVICE):
    return kv_pb2.KvSnapshot(
        worker_id=worker_id, epoch=epoch, barrier=barrier, tier=tier, block_hashes=blocks(*numbers),
        first=first, last=last,
    )  # fmt: skip


def index_of(**workers):
    index = PrefixIndex()
    for worker_id, numbers in workers.items():
        assert index.receive(part(worker_id, *numbers))
    return index


def test_a_lookup_counts_the_first_blocks_without_a_gap():
    index = index_of(a=[1, 2, 3], b=[1, 2], c=[2, 3], d=[1, 3])
    assert index.lookup(blocks(1, 2, 3, 4)) == {"a": 3, "b": 2, "d": 1}


def test_nothing_is_found_in_nothing():
    assert PrefixIndex().lookup(blocks(1)) == {}
    assert index_of(a=[1]).lookup(b"") == {}
    assert index_of(a=[1]).lookup(blocks(2)) == {}


def test_a_whole_prompt_is_found():
    assert index_of(a=range(100), b=range(100)).lookup(blocks(*range(100))) == {"a": 100, "b": 100}


def test_a_snapshot_counts_from_its_last_part_on():
    index = index_of(a=[1])
    index.receive(part("a", 2, barrier=5, last=False))
    assert index.lookup(blocks(1)) == {"a": 1}
    index.receive(part("a", 3, barrier=5, first=False))
    assert index.lookup(blocks(1)) == {}
    assert index.lookup(blocks(2, 3)) == {"a": 2}


def test_the_first_part_of_a_new_epoch_ends_the_old_entries():
    index = index_of(a=[1])
    index.receive(part("a", 2, epoch=2, last=False))
    assert index.lookup(blocks(1)) == {}
    assert index.epoch("a") is None


def test_a_gap_drops_the_worker_and_nobody_else():
    index = index_of(a=[1], b=[1])
    assert not index.apply(batch("a", 2, stored(2)))
    assert index.lookup(blocks(1)) == {"b": 1}
    assert index.num_blocks("a") == 0


def test_dropping_counts_at_once_and_cleaning_comes_in_pieces():
    index = index_of(a=range(100), b=range(50))
    assert index.drop("a") == 100
    assert index.lookup(blocks(*range(100))) == {"b": 50}
    assert len(index) == 100
    pieces = 1
    while index.clean(7):
        pieces += 1
    assert 100 / 7 <= pieces <= 100 / 7 + 2
    assert len(index) == 50
    assert index.num_dying_blocks == 0


def test_a_slot_is_given_away_only_when_it_is_clean():
    index = index_of(a=range(10))
    index.drop("a")
    index.receive(part("b", 100))
    assert index.lookup(blocks(*range(10))) == {}
    index.clean(1000)
    index.receive(part("c", 200))
    assert index.lookup(blocks(*range(10))) == {}
    assert index.lookup(blocks(200)) == {"c": 1}
    assert index.lookup(blocks(100)) == {"b": 1}


def test_a_block_counts_while_any_tier_has_it():
    index = index_of(a=[1])
    index.apply(batch("a", 1, stored(1, tier=HOST), removed(1)))
    assert index.lookup(blocks(1)) == {"a": 1}
    index.apply(batch("a", 2, removed(1, tier=HOST)))
    assert index.lookup(blocks(1)) == {}
    assert len(index) == 0


def test_more_workers_than_a_machine_word_has_bits():
    index = index_of(**{f"w{number}": range(number) for number in range(1, 200)})
    found = index.lookup(blocks(*range(300)))
    assert found == {f"w{number}": number for number in range(1, 200)}


workers = st.sampled_from("abc")
numbers = st.lists(st.integers(0, 15), max_size=6)
step = st.one_of(
    st.tuples(st.just("stored"), workers, numbers, st.sampled_from([DEVICE, HOST])),
    st.tuples(st.just("removed"), workers, numbers, st.sampled_from([DEVICE, HOST])),
    st.tuples(st.just("snapshot"), workers, numbers, st.sampled_from([DEVICE, HOST])),
    st.tuples(st.just("partial"), workers, numbers, st.just(DEVICE)),
    st.tuples(st.sampled_from(["gap", "drop", "epoch", "clean"]), workers, st.just([]), st.just(DEVICE)),
)


@given(st.lists(step, max_size=40), st.lists(st.integers(0, 15), max_size=10))
def test_any_history_equals_a_naive_index(history, prompt):
    index = PrefixIndex()
    naive = {}  # worker -> tier -> set
    at = dict.fromkeys("abc", (1, 0))  # epoch, sequence
    for kind, worker, some, tier in history:
        epoch, sequence = at[worker]
        if kind in ("stored", "removed"):
            event = stored(*some, tier=tier) if kind == "stored" else removed(*some, tier=tier)
            applied = index.apply(batch(worker, sequence + 1, event, epoch=epoch))
            assert applied == (worker in naive)
            if applied:
                held = naive[worker].setdefault(tier, set())
                held |= set(some) if kind == "stored" else set()
                held -= set(some) if kind == "removed" else set()
                at[worker] = (epoch, sequence + 1)
        elif kind == "snapshot":
            index.receive(part(worker, *some, epoch=epoch, barrier=sequence + 3, tier=tier))
            naive[worker], at[worker] = {tier: set(some)}, (epoch, sequence + 3)
        elif kind == "partial":
            index.receive(part(worker, *some, epoch=epoch + 1, barrier=9, last=False))
            naive.pop(worker, None)
            at[worker] = (epoch + 1, 0)
        elif kind == "epoch":
            index.apply(batch(worker, 1, stored(1), epoch=epoch + 1))
            naive.pop(worker, None)
        elif kind == "gap":
            index.apply(batch(worker, sequence + 2, stored(1), epoch=epoch))
            naive.pop(worker, None)
        elif kind == "drop":
            index.drop(worker)
            naive.pop(worker, None)
        else:
            index.clean(3)
    expected = {}
    for worker, tiers in naive.items():
        held = set().union(*tiers.values())
        depth = next((place for place, number in enumerate(prompt) if number not in held), len(prompt))
        if depth:
            expected[worker] = depth
    assert index.lookup(blocks(*prompt)) == expected
    for worker in "abc":
        assert index.num_blocks(worker) == sum(map(len, naive.get(worker, {}).values()))
    while index.clean(100):
        pass
    arriving = index._arriving.values()
    everything = set().union(*(held for tiers in naive.values() for held in tiers.values()))
    if not arriving:
        assert len(index) == len(everything)

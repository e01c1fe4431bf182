"""The packed index against a naive dict of sets."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleet.kvstore_node import blocks, removed, stored

from baton.router.index.changes import sorted_set
from baton.router.index.holders import MAX_SLOTS, Holders
from baton.router.index.prefix_index import HeldPrefix, PrefixIndex
from baton.rpc.errors import NoCapacity
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


def test_an_empty_prompt_has_no_prefix():
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


def test_a_gap_drops_only_its_worker():
    index = index_of(a=[1], b=[1])
    assert not index.apply(batch("a", 2, stored(2)))
    assert index.lookup(blocks(1)) == {"b": 1}
    assert index.num_blocks("a") == 0


def test_dropping_counts_at_once_and_cleaning_comes_in_pieces():
    index = index_of(a=range(10_000), b=range(5000))
    assert index.drop("a") == 10_000
    assert index.lookup(blocks(*range(100))) == {"b": 100}
    assert len(index) == index.num_dying_blocks == 10_000
    left = [index.num_dying_blocks]
    while index.clean(1024):
        left.append(index.num_dying_blocks)
        assert left[-2] - left[-1] <= 1024
    assert len(left) > 5
    assert len(index) == 5000
    assert index.num_dying_blocks == 0


def test_a_drop_while_another_is_cleaned_is_cleaned_too():
    index = index_of(a=range(9000), b=range(9000), c=range(10))
    index.drop("a")
    index.clean(100)
    index.drop("b")
    index.receive(part("d", *range(20_000, 40_000)))
    while index.clean(1000):
        pass
    assert len(index) == 10 + 20_000
    assert index.lookup(blocks(1, 2)) == {"c": 2}


def test_a_slot_is_given_away_only_when_it_is_clean():
    index = index_of(a=range(10))
    index.drop("a")
    index.receive(part("b", 100))
    assert index.lookup(blocks(*range(10))) == {}
    index.clean(100_000)
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


def test_the_tiers_of_a_prefix_are_distinguished():
    index = index_of(a=[1, 2, 3, 4], b=[1])
    index.apply(batch("a", 1, stored(2, 3, 5, tier=HOST), removed(3)))
    index.apply(batch("b", 1, stored(2, tier=HOST)))
    assert index.find(blocks(1, 2, 3, 4, 5)) == {"a": HeldPrefix(device=3, host=2), "b": HeldPrefix(1, 1)}
    index.apply(batch("a", 2, removed(3, tier=HOST)))
    assert index.find(blocks(1, 2, 3, 4, 5))["a"] == HeldPrefix(2, 0)
    assert index.find(blocks(9)) == {}


def test_a_silent_workers_entries_are_kept_and_do_not_count():
    index = index_of(a=[1, 2], b=[1])
    index.mark_silent("a")
    assert index.lookup(blocks(1, 2)) == {"b": 1}
    assert index.apply(batch("a", 1, stored(3)))
    assert index.num_blocks("a") == 0
    assert index.is_silent("a")
    index.mark_heard("a")
    assert index.num_blocks("a") == 3
    assert index.lookup(blocks(1, 2, 3)) == {"a": 3, "b": 1}


def test_a_batch_that_was_taken_before_changes_nothing():
    index = index_of(a=[1])
    assert index.apply(batch("a", 1, stored(2)))
    assert index.apply(batch("a", 2, removed(2)))
    assert index.apply(batch("a", 1, stored(2)))
    assert index.lookup(blocks(1, 2)) == {"a": 1}
    assert index.position("a") == (1, 2)


def test_batches_of_many_workers_at_once_equal_one_after_the_other():
    one, other = (index_of(**{f"w{n}": range(n) for n in range(70)}) for _ in range(2))
    batches = [
        batch(f"w{n}", sequence, stored(*range(sequence, 90, 1 + n % 3)), removed(*range(n % 7, 60, 5)))
        for sequence in (1, 2, 3)
        for n in range(70)
    ]
    batches.insert(100, batch("w5", 9, stored(1)))
    assert one.apply_all(batches).keys() == {"w5"}
    for each in batches:
        other.apply(each)
    prompt = blocks(*range(3, 60))
    assert one.find(prompt) == other.find(prompt)
    assert "w5" not in one.worker_ids
    for n in range(70):
        assert one.num_blocks(f"w{n}") == other.num_blocks(f"w{n}")


def test_a_gap_after_a_batch_leaves_nothing_to_the_next_worker():
    index = index_of(a=[])
    assert index.apply_all([batch("a", 1, stored(1, 2)), batch("a", 3, stored(4))]) == {"a": 2}
    index.receive(part("b", 9))
    assert index.lookup(blocks(1, 2)) == {}
    while index.clean(10_000):
        pass
    index.receive(part("c", 8))
    assert index.lookup(blocks(1, 2)) == {}


def test_a_snapshot_is_absorbed_in_pieces_and_counts_after_the_last():
    index = index_of(a=[1])
    assert index.collect(part("a", *range(100, 200), barrier=5))
    assert index.absorb(60)
    assert index.lookup(blocks(1)) == {"a": 1}
    assert not index.absorb(60)
    assert index.lookup(blocks(*range(100, 200))) == {"a": 100}
    assert index.lookup(blocks(1)) == {}


def test_a_batch_waits_for_the_snapshot_before_it():
    index = PrefixIndex()
    index.collect(part("a", *range(100), barrier=5))
    assert index.apply(batch("a", 6, removed(3), stored(200)))
    assert index.num_blocks("a") == 100


def test_a_drop_ends_a_snapshot_that_is_being_absorbed():
    index = PrefixIndex()
    index.collect(part("a", *range(100)))
    index.absorb(60)
    index.drop("a")
    assert not index.absorb(60)
    assert index.lookup(blocks(*range(100))) == {}
    while index.clean(10_000):
        pass
    assert len(index) == 0


def test_growth_keeps_every_block():
    numbers = range(200_000)
    index = PrefixIndex()
    for start in range(0, 200_000, 8192):
        end = min(200_000, start + 8192)
        index.receive(part("a", *range(start, end), first=start == 0, last=end == 200_000))
    assert index.num_blocks("a") == len(index) == 200_000
    assert index.lookup(blocks(*numbers)) == {"a": 200_000}
    assert index.num_bytes / 200_000 < 40
    assert index.apply(batch("a", 1, removed(*range(0, 200_000, 2))))
    assert len(index) == 100_000
    assert index.lookup(blocks(1, 3, 5, 6)) == {"a": 3}


@pytest.mark.parametrize("size", [1, 7, 16, 17])
def test_blocks_that_come_in_small_batches_are_found_and_can_go(size):
    index, whole = index_of(a=[], b=[]), index_of(a=[], b=[])
    numbers = list(range(7000))
    pieces = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    for sequence, piece in enumerate(pieces, 1):
        assert index.apply(batch("a", sequence, stored(*piece)))
        if sequence % 3 == 0:
            assert index.apply(batch("b", sequence // 3, stored(*piece[1:], 10_000 + sequence, 10_000 + sequence)))
    assert whole.apply(batch("a", 1, stored(*numbers)))
    for prompt in (numbers, numbers[100:140], pieces[2]):
        assert index.lookup(blocks(*prompt))["a"] == whole.lookup(blocks(*prompt))["a"] == len(prompt)
    assert index.lookup(blocks(*pieces[2][1:], 10_003)) == {"a": size - 1, "b": size} if size > 1 else {"b": 1}
    assert index.num_blocks("a") == len(numbers)
    for sequence, piece in enumerate(pieces, len(pieces) + 1):
        assert index.apply(batch("a", sequence, removed(*piece)))
    assert index.num_blocks("a") == 0
    assert index.lookup(blocks(10_003)) == {"b": 1}


def test_workers_that_come_and_go_leave_no_rows_behind():
    index = index_of(a=range(1000))
    sizes = set()
    for _ in range(20):
        index.receive(part("b", *range(1000)))
        index.drop("b")
        while index.clean(100_000):
            pass
        sizes.add(index.num_bytes)
    assert len(sizes) == 1


def test_too_many_workers_are_refused_by_number():
    holders = Holders()
    holders._num_slots = MAX_SLOTS
    with pytest.raises(NoCapacity, match=f"the index has {MAX_SLOTS} workers"):
        holders.add_slot()


workers = st.sampled_from("abc")
numbers = st.lists(st.integers(0, 15), max_size=6)
step = st.one_of(
    st.tuples(st.just("stored"), workers, numbers, st.sampled_from([DEVICE, HOST])),
    st.tuples(st.just("removed"), workers, numbers, st.sampled_from([DEVICE, HOST])),
    st.tuples(st.just("snapshot"), workers, numbers, st.sampled_from([DEVICE, HOST])),
    st.tuples(st.just("partial"), workers, numbers, st.just(DEVICE)),
    st.tuples(
        st.sampled_from(["gap", "drop", "epoch", "clean", "silence", "hear"]), workers, st.just([]), st.just(DEVICE)
    ),
)


@given(st.lists(step, max_size=40), st.lists(st.integers(0, 15), max_size=10))
def test_any_history_equals_a_naive_index(history, prompt):
    index = PrefixIndex()
    naive = {}  # worker -> tier -> set
    silent = set()
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
        elif kind == "silence":
            index.mark_silent(worker)
            silent.add(worker)
        elif kind == "hear":
            index.mark_heard(worker)
            silent.discard(worker)
        else:
            index.clean(700)
    expected, by_tier = {}, {}
    for worker, tiers in naive.items():
        if worker in silent:
            continue
        held = set().union(*tiers.values())
        depth = next((place for place, number in enumerate(prompt) if number not in held), len(prompt))
        if depth:
            expected[worker] = depth
            on_device = sum(number in tiers.get(DEVICE, ()) for number in prompt[:depth])
            by_tier[worker] = HeldPrefix(on_device, depth - on_device)
    assert index.find(blocks(*prompt)) == by_tier
    assert index.lookup(blocks(*prompt)) == expected
    for worker in "abc":
        assert index.num_blocks(worker) == (worker not in silent) * sum(map(len, naive.get(worker, {}).values()))
    while index.clean(1000):
        pass
    arriving = index._arriving.values()
    everything = set().union(*(held for tiers in naive.values() for held in tiers.values()))
    if not arriving:
        assert len(index) == len(everything)


def test_a_long_prompt_is_found_however_it_came():
    draw = random.Random(1)
    prompt = list(range(1, 1201))
    orders = {
        "in order": [prompt],
        "backwards": [prompt[::-1]],
        "one by one, between others": [[one] for one in prompt],
        "in shuffled pieces": draw.sample([prompt[at : at + 7] for at in range(0, 1200, 7)], 172),
        "at random": [draw.sample(prompt, 1200)],
    }
    for name, pieces in orders.items():
        index = index_of(a=[], other=[])
        for number, piece in enumerate(pieces):
            index.apply(batch("a", number + 1, stored(*piece)))
            index.apply(batch("other", number + 1, stored(10_000 + number)))
        assert index.lookup(blocks(*prompt)) == {"a": 1200}, name
        assert index.lookup(blocks(*prompt[:500], 9999, *prompt[500:])) == {"a": 500}, name
        for gap in (900, 450, 17, 0):
            index.apply(batch("a", len(pieces) + 1, removed(prompt[gap])))
            pieces.append([])
            assert index.lookup(blocks(*prompt)) == ({"a": gap} if gap else {}), name


def test_a_block_that_replaced_an_evicted_one_is_not_mistaken_for_it():
    index = index_of(a=range(100), b=[])
    for number in range(50, 100):
        index.apply(batch("a", number - 49, removed(number)))
    index.apply(batch("b", 1, stored(*range(1000, 1050))))
    assert index.lookup(blocks(*range(100))) == {"a": 50}
    assert index.lookup(blocks(*range(1000, 1050))) == {"b": 50}


def test_lines_that_a_snapshot_did_not_need_are_used_again():
    index = index_of(**{f"w{number}": range(5000) for number in range(8)})
    lines = index._store._table.lines
    assert lines.end == 10_000, "the second one needed none"
    index.collect(part("late", *range(10_000, 14_000)))
    assert index.absorb(100)
    index.drop("late")
    while index.clean(1000):
        pass
    index.receive(part("w9", *range(20_000, 25_000)))
    assert lines.end == 10_000
    assert index.lookup(blocks(*range(20_000, 25_000))) == {"w9": 5000}


@given(st.lists(st.integers(1, 2**64 - 1) | st.integers(1, 9).map(lambda low: (7 << 32) + low), max_size=60))
def test_a_set_is_sorted_whatever_it_shares(numbers):
    values = np.array(numbers, np.uint64)
    merged, order = sorted_set([values[:20], values[20:]])
    assert merged.tolist() == sorted(set(numbers))
    assert values[order].tolist() == merged.tolist()

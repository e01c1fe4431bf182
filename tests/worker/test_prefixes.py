from __future__ import annotations

from engine_harness import BLOCK_SIZE, make_request, prompt_of

from baton.worker.prefixes import PrefixesInProgress
from baton.worker.request_state import Phase, RequestState


def make_state(length: int = 5 * BLOCK_SIZE, phase: Phase = Phase.RUNNING) -> RequestState:
    state = RequestState(make_request(prompt_of(length)), (0, 0.0, 0), 100, frozenset(), 0.0, phase=phase)
    state.hash_up_to(length, BLOCK_SIZE)
    return state


def test_the_wait_is_for_the_last_block_in_common():
    prefixes = PrefixesInProgress()
    holder, other = make_state(3 * BLOCK_SIZE), make_state()
    prefixes.begin(holder, holder.block_hashes)
    assert prefixes.last_common(other, 0, 5) == other.block_hashes[2]
    assert prefixes.last_common(other, 0, 2) == other.block_hashes[1]
    assert prefixes.last_common(other, 3, 5) is None


def test_a_computed_block_wakes_those_who_wait_for_it_and_no_others():
    prefixes = PrefixesInProgress()
    holder, early, late = make_state(), make_state(), make_state()
    prefixes.begin(holder, holder.block_hashes)
    prefixes.park(early, holder.block_hashes[0])
    prefixes.park(late, holder.block_hashes[4])
    assert prefixes.computed(holder.block_hashes[0]) == [early]
    assert prefixes.parked == [late]


def test_the_end_of_a_holder_wakes_everyone_who_waits_for_it():
    prefixes = PrefixesInProgress()
    holder, first, second = make_state(), make_state(), make_state()
    prefixes.begin(holder, holder.block_hashes)
    prefixes.park(first, holder.block_hashes[1])
    prefixes.park(second, holder.block_hashes[4])
    assert set(prefixes.end(holder)) == {first, second}
    assert prefixes.num_parked == 0
    assert prefixes.last_common(first, 0, 5) is None
    assert prefixes.end(holder) == []


def test_a_block_has_one_holder():
    prefixes = PrefixesInProgress()
    first, second = make_state(2 * BLOCK_SIZE), make_state()
    prefixes.begin(first, first.block_hashes)
    prefixes.begin(second, second.block_hashes)
    prefixes.end(second)
    assert prefixes.last_common(second, 0, 5) == second.block_hashes[1]


def test_one_who_gives_up_waiting_is_not_woken():
    prefixes = PrefixesInProgress()
    holder, waiter = make_state(), make_state()
    prefixes.begin(holder, holder.block_hashes)
    prefixes.park(waiter, holder.block_hashes[0])
    prefixes.unpark(waiter)
    prefixes.unpark(waiter)
    assert prefixes.computed(holder.block_hashes[0]) == []


def test_only_those_who_want_a_remote_prefill_wait_for_one():
    prefixes = PrefixesInProgress()
    holder, local, remote = make_state(phase=Phase.REMOTE), make_state(), make_state()
    remote.wants_remote = True
    prefixes.begin(holder, holder.block_hashes)
    assert prefixes.last_common(local, 0, 5) is None
    assert prefixes.last_common(remote, 0, 5) == holder.block_hashes[4]

from __future__ import annotations

from support.engine.engine_harness import BLOCK_SIZE, make_request, prompt_of

from baton.worker.kv.prefixes import Common, PrefixesInProgress
from baton.worker.requests.state import Phase, RequestState


def make_state(num_blocks: int = 5, phase: Phase = Phase.RUNNING, salt: int = 0, num_common: int = 0) -> RequestState:
    """A request whose first num_common blocks are those of every other, and the rest of `salt`."""
    common = num_common * BLOCK_SIZE
    prompt = prompt_of(common) + prompt_of(num_blocks * BLOCK_SIZE, salt)[common:]
    state = RequestState(make_request(prompt), (0, 0.0, 0), 100, frozenset(), 0.0, phase=phase)
    state.hash_up_to(len(prompt), BLOCK_SIZE)
    return state


def test_the_wait_is_for_the_last_block_in_common():
    prefixes = PrefixesInProgress()
    holder, other = make_state(3), make_state()
    prefixes.begin(holder, 0, 3)
    assert prefixes.last_common(other, 0, 5) == Common(holder, 2)
    assert prefixes.last_common(other, 0, 2) == Common(holder, 1)
    assert prefixes.last_common(other, 3, 5) is None
    assert prefixes.last_common(other, 0, 0) is None


def test_chains_part_where_their_tokens_do():
    for num_common in range(1, 9):
        prefixes = PrefixesInProgress()
        holder, other = make_state(9), make_state(9, salt=3, num_common=num_common)
        prefixes.begin(holder, 0, 9)
        assert prefixes.last_common(other, 0, 9) == Common(holder, num_common - 1)
    stranger = make_state(9, salt=3)
    assert prefixes.last_common(stranger, 0, 9) is None


def test_of_several_the_one_with_more_in_common_is_waited_for():
    prefixes = PrefixesInProgress()
    near, far, other = make_state(6, salt=1, num_common=2), make_state(6, salt=2, num_common=4), make_state(6)
    prefixes.begin(near, 0, 6)
    prefixes.begin(far, 0, 6)
    assert prefixes.last_common(other, 0, 6) == Common(far, 3)
    prefixes.end(far)
    assert prefixes.last_common(other, 0, 6) == Common(near, 1)


def test_a_computed_block_wakes_only_requests_that_wait_for_it():
    prefixes = PrefixesInProgress()
    holder, early, late = make_state(), make_state(), make_state()
    prefixes.begin(holder, 0, 5)
    prefixes.park(early, Common(holder, 0))
    prefixes.park(late, Common(holder, 4))
    assert prefixes.computed(holder, 1) == [early]
    assert prefixes.parked == [late]
    assert prefixes.computed(holder, 1) == []
    assert prefixes.computed(holder, 5) == [late]
    assert prefixes.num_parked == 0


def test_requests_wait_only_for_uncomputed_blocks():
    prefixes = PrefixesInProgress()
    holder, other = make_state(), make_state()
    prefixes.begin(holder, 1, 5)
    prefixes.computed(holder, 3)
    assert prefixes.last_common(other, 1, 5) is None
    assert prefixes.last_common(other, 3, 5) == Common(holder, 4)
    prefixes.computed(holder, 5)
    assert prefixes.last_common(other, 3, 5) is None


def test_the_end_of_a_holder_wakes_all_requests_that_wait_for_it():
    prefixes = PrefixesInProgress()
    holder, first, second = make_state(), make_state(), make_state()
    prefixes.begin(holder, 0, 5)
    prefixes.park(first, Common(holder, 1))
    prefixes.park(second, Common(holder, 4))
    assert set(prefixes.end(holder)) == {first, second}
    assert prefixes.num_parked == 0
    assert prefixes.last_common(first, 0, 5) is None
    assert prefixes.end(holder) == []
    prefixes.begin(holder, 2, 5)  # preempted and admitted again


def test_two_may_compute_the_same_and_one_may_end():
    prefixes = PrefixesInProgress()
    first, second, other = make_state(2), make_state(), make_state()
    prefixes.begin(first, 0, 2)
    prefixes.begin(second, 0, 5)
    prefixes.end(second)
    assert prefixes.last_common(other, 0, 5) == Common(first, 1)


def test_an_aborted_waiting_request_is_not_woken():
    prefixes = PrefixesInProgress()
    holder, waiter = make_state(), make_state()
    prefixes.begin(holder, 0, 5)
    prefixes.park(waiter, Common(holder, 0))
    prefixes.unpark(waiter)
    prefixes.unpark(waiter)
    assert prefixes.computed(holder, 1) == []


def test_only_requests_with_a_remote_prefill_wait_for_one():
    prefixes = PrefixesInProgress()
    holder, local, remote = make_state(phase=Phase.REMOTE), make_state(), make_state()
    remote.wants_remote = True
    prefixes.begin(holder, 0, 5)
    assert prefixes.last_common(local, 0, 5) is None
    assert prefixes.last_common(remote, 0, 5) == Common(holder, 4)

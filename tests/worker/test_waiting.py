from __future__ import annotations

from engine_harness import make_request

from baton.worker.request_state import RequestState
from baton.worker.waiting import WaitingQueue


def make_state(number: int, priority: int = 0) -> RequestState:
    return RequestState(make_request([5]), (priority, float(number), number), 9, frozenset(), 0.0)


def pop_all(queue: WaitingQueue) -> list[RequestState]:
    found = []
    while (state := queue.peek()) is not None:
        queue.discard(state)
        found.append(state)
    return found


def test_the_best_rank_comes_first_however_it_was_pushed():
    queue = WaitingQueue()
    late, early, urgent = make_state(2), make_state(1), make_state(3, priority=-1)
    for state in (late, early, urgent):
        queue.push(state)
    assert pop_all(queue) == [urgent, early, late]


def test_what_is_discarded_never_comes_up():
    queue = WaitingQueue()
    states = [make_state(number) for number in range(6)]
    for state in states:
        queue.push(state)
    for state in states[::2]:
        queue.discard(state)
    assert len(queue) == 3
    assert pop_all(queue) == states[1::2]


def test_a_request_may_come_back():
    queue = WaitingQueue()
    first, second = make_state(1), make_state(2)
    queue.push(first)
    queue.push(second)
    queue.discard(second)
    queue.push(second)
    assert pop_all(queue) == [first, second]
    queue.push(first)
    assert queue.peek() is first


def test_what_was_discarded_does_not_pile_up_behind_a_request_that_waits():
    queue = WaitingQueue()
    queue.push(make_state(0))
    for number in range(1, 1000):
        state = make_state(number)
        queue.push(state)
        queue.discard(state)
    assert len(queue._heap) < 100

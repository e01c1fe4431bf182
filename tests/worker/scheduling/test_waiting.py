from __future__ import annotations

from support.engine.engine_harness import make_request

from baton.worker.requests.state import Line, RequestState
from baton.worker.scheduling.waiting_queue import WaitingQueue


def make_state(number: int, priority: int = 0, tenant: str = "") -> RequestState:
    return RequestState(make_request([5], tenant=tenant), (priority, float(number), number), 9, frozenset(), 0.0)


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


def test_discarded_requests_are_never_returned():
    queue = WaitingQueue()
    states = [make_state(number) for number in range(6)]
    for state in states:
        queue.push(state)
    for state in states[::2]:
        queue.discard(state)
    assert len(queue) == 3
    assert pop_all(queue) == states[1::2]


def test_a_request_may_be_queued_again():
    queue = WaitingQueue()
    first, second = make_state(1), make_state(2)
    queue.push(first)
    queue.push(second)
    queue.discard(second)
    queue.push(second)
    assert pop_all(queue) == [first, second]
    queue.push(first)
    assert queue.peek() is first


def test_discarded_requests_do_not_accumulate_in_the_queue():
    queue = WaitingQueue()
    queue.push(make_state(0))
    for number in range(1, 1000):
        state = make_state(number)
        queue.push(state)
        queue.discard(state)
    assert sum(len(heap.entries) for heap in queue._lines.values()) < 100


def test_each_tenant_and_priority_has_a_line_whose_front_is_its_best_rank():
    queue = WaitingQueue()
    first, second = make_state(1, tenant="a"), make_state(2, tenant="a")
    other, urgent = make_state(3, tenant="b"), make_state(4, priority=-1, tenant="b")
    for state in (second, other, first, urgent):
        queue.push(state)
    assert {line: queue.front(line) for line in queue.lines} == {
        Line(0, "a"): first, Line(0, "b"): other, Line(-1, "b"): urgent
    }  # fmt: skip
    assert queue.peek() is urgent
    queue.discard(urgent)
    assert Line(-1, "b") not in queue.lines
    assert queue.front(Line(-1, "b")) is None
    assert pop_all(queue) == [first, second, other]
    assert not queue.lines


def test_a_request_queued_repeatedly_is_in_the_queue_once():
    queue = WaitingQueue()
    queue.push(make_state(0))
    back = make_state(1)
    for _ in range(500):
        queue.push(back)
        queue.discard(back)
    queue.push(back)
    assert len(queue) == 2
    assert sum(len(heap.entries) for heap in queue._lines.values()) < 100
    assert len(pop_all(queue)) == 2

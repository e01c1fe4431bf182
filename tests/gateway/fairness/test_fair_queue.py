"""The order in which clients get the event loop: bounds on waiting, whatever others queue."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.fairness.fair_queue import FairQueue, Turns


def order_of(queue):
    """Runs everything that waits; the owners in their order."""
    while (work := queue.pop()) is not None:
        work()


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 50)), max_size=60),
    st.integers(0, 60),
)
def test_an_owner_waits_at_most_one_turn_of_each_other_beyond_its_share(pieces, cut):
    queue, ran = FairQueue(), []
    for number, (owner, cost) in enumerate(pieces):
        queue.push(owner, cost, lambda number=number, owner=owner, cost=cost: ran.append((number, owner, cost)))
        if number == cut:
            (queue.pop() or (lambda: None))()
    order_of(queue)
    assert sorted(number for number, _, _ in ran) == list(range(len(pieces)))
    for owner in "abcd":
        mine = [number for number, name, _ in ran if name == owner]
        assert mine == sorted(mine)
    # A newcomer's first piece starts before any other owner has used more than one piece beyond it.
    queue, ran = FairQueue(), []
    for owner, cost in pieces:
        queue.push(owner, cost, lambda owner=owner, cost=cost: ran.append((owner, cost)))
    queue.push("new", 1, lambda: ran.append(("new", 1)))
    order_of(queue)
    before = ran[: ran.index(("new", 1))]
    for owner in "abcd":
        costs = [cost for name, cost in before if name == owner]
        assert len(costs) <= 1


def test_an_owner_that_waited_for_nothing_has_saved_nothing_up():
    queue, ran = FairQueue(), []
    for _ in range(10):
        queue.push("busy", 10, lambda: ran.append("busy"))
    for _ in range(5):
        queue.pop()()
    for _ in range(5):
        queue.push("late", 10, lambda: ran.append("late"))
    ran.clear()
    order_of(queue)
    assert ran[:6].count("late") in (2, 3, 4)


def test_cancelled_work_is_skipped_without_a_turn():
    queue, ran = FairQueue(), []
    turns = [queue.push("a", 1, lambda number=number: ran.append(number)) for number in range(5)]
    for turn in turns[1:4]:
        turn.cancel()
        turn.cancel()
    order_of(queue)
    assert ran == [0, 4]


def test_ended_owners_leave_no_state():
    queue = FairQueue()
    queue.push("stays", 1, lambda: None)
    for number in range(10_000):
        queue.push("stays", 1, lambda: None)
        queue.push(f"owner {number}", 1, lambda: None)
        queue.pop()
        queue.pop()
    assert len(queue._used) < 200


def test_no_number_of_newcomers_outruns_an_owner_that_waits():
    queue, ran = FairQueue(), []
    for _ in range(3):
        queue.push("waits", 10, lambda: ran.append("waits"))
    for number in range(200):
        queue.push(f"{number}", 1, lambda: ran.append("newcomer"))
        queue.pop()()
    assert ran.count("waits") == 3


async def test_work_runs_at_once_where_nothing_waits_and_one_piece_a_loop_turn_otherwise():
    turns, ran = Turns(), []
    turns.take("a", 1, lambda: ran.append(1))
    assert ran == [1]
    turns.take("a", 1, lambda: ran.append(2))
    turns.take("a", 1, lambda: ran.append(3))
    assert ran == [1]
    await asyncio.sleep(0)
    assert ran == [1, 2]
    await asyncio.sleep(0)
    assert ran == [1, 2, 3]


async def test_pieces_that_begin_within_a_turns_seconds_share_a_loop_turn_in_fair_order():
    ran, now = [], [0.0]
    turns = Turns(2.0, clock=lambda: now[0])

    def work(name):
        ran.append(name)
        now[0] += 1.0

    turns.take("a", 1, lambda: work("a1"))
    for name in ("a2", "a3", "a4", "b1", "b2"):
        turns.take(name[0], 1, lambda name=name: work(name))
    assert ran == ["a1"]
    await asyncio.sleep(0)
    assert ran == ["a1", "a2", "b1"]
    await asyncio.sleep(0)
    assert ran == ["a1", "a2", "b1", "a3", "b2"]
    await asyncio.sleep(0)
    assert ran == ["a1", "a2", "b1", "a3", "b2", "a4"]


async def test_a_rest_ends_a_turn_that_has_seconds_left():
    turns, ran = Turns(60.0), []
    turns.take("a", 1, lambda: ran.append("first"))

    def heavy():
        ran.append("heavy")
        turns.rest(0.02)

    turns.take("a", 1, heavy)
    turns.take("b", 1, lambda: ran.append("b1"))
    turns.take("a", 1, lambda: ran.append("last"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert ran == ["first", "heavy"]
    await asyncio.sleep(0.05)
    assert ran == ["first", "heavy", "b1", "last"]


async def test_work_that_asks_for_a_rest_gets_it_before_anyones_next():
    turns, ran = Turns(), []

    def heavy():
        ran.append("heavy")
        turns.rest(0.02)

    turns.take("a", 1, heavy)
    turns.take("b", 1, lambda: ran.append("b"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert ran == ["heavy"]
    await asyncio.sleep(0.05)
    assert ran == ["heavy", "b"]


async def test_work_that_fails_ends_no_turns_of_others():
    turns, ran = Turns(), []
    turns.take("a", 1, lambda: None)

    def fail():
        raise ValueError("broken")

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    turns.take("a", 1, fail)
    turns.take("b", 1, lambda: ran.append("b"))
    await asyncio.sleep(0.01)
    assert ran == ["b"]

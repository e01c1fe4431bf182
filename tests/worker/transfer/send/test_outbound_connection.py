"""The order of a connection: the start of pieces, the end of pushes, and the reports of errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from baton.worker.core import BlockId
from baton.worker.transfer.base import Outbound, Piece, Pushed, PushFailed, PushFenced
from baton.worker.transfer.event_queue import EventQueue
from baton.worker.transfer.send.connection import OutboundConnection, Push

WAIT_SECONDS = 10.0


@dataclass
class Copy:
    piece: Piece
    num_bytes: int = 100
    ended: threading.Event = field(default_factory=threading.Event)


class Way:
    """A PieceSender whose copies end when the test ends them."""

    kind = "ipc"

    def __init__(self, *, at_once: bool = True, num_slots: int = 3) -> None:
        self.at_once = at_once
        self.copies: list[Copy] = []
        self.starters: list[threading.Thread] = []
        self.is_ended = False
        self.problem: OSError | None = None
        self.num_free = num_slots
        self.gives_back_early = False  # the test gives slots back
        self.ends_announce = False  # the receiver is notified of a piece at its end
        self.finished: list[Copy] = []

    def has_capacity(self) -> bool:
        return self.num_free > 0

    def starts_at_once(self, outbound: Outbound) -> bool:
        return self.at_once

    def wait_for_capacity(self) -> None:
        raise AssertionError("no test fills the slots without a copy under way")

    def start(self, outbound: Outbound, piece: Piece) -> Copy:
        self.starters.append(threading.current_thread())
        if self.problem is not None:
            raise self.problem
        self.num_free -= 1
        self.copies.append(Copy(piece))
        return self.copies[-1]

    def is_due(self, started_piece: Copy) -> bool:
        return self.ends_announce and started_piece.ended.is_set()

    def await_end(self, started_piece: Copy) -> bool:
        eventually(lambda: started_piece.ended.is_set() or self.has_capacity())
        return started_piece.ended.is_set()

    def finish(self, started_piece: Copy) -> None:
        assert started_piece.ended.wait(WAIT_SECONDS)
        self.finished.append(started_piece)
        if not self.gives_back_early:
            self.num_free += 1

    def settle(self, started_piece: Copy) -> None:
        assert started_piece.ended.wait(WAIT_SECONDS)

    def ended(self) -> bool:
        return self.is_ended

    def cut(self) -> None:
        self.is_ended = True

    def close(self) -> None:
        pass


def eventually(condition: Callable[[], object]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def push_of(number: int) -> Push:
    return Push(Outbound(number, [], number, 1, 1, False))


def piece(layer: int) -> Piece:
    return Piece(layer, 0, 1, [BlockId(5)])


class Rig:
    """A link over ways that are dialled one after the other."""

    def __init__(self, *ways: Way) -> None:
        self.events = EventQueue(lambda: None)
        self._ways = list(ways)
        self.num_dialled = 0
        self.link = OutboundConnection("there", self._open, self.events)

    def begin(self, number: int) -> Push:
        push = push_of(number)
        assert self.link.begin(push)
        return push

    def rested(self) -> None:
        """The link has dialled and found nothing else to do."""
        eventually(self._is_resting)

    def _is_resting(self) -> bool:
        with self.link._changed:
            return bool(self.num_dialled) and not (self.link._serving or self.link._queue)

    def _open(self, changed: threading.Condition, dialled: object) -> Way:
        self.num_dialled += 1
        return self._ways.pop(0)

    def told(self) -> list[object]:
        """Returns the next events."""
        found: list[object] = []
        eventually(lambda: found.extend(self.events.take()) or found)
        return found


@pytest.fixture
def way():
    return Way()


@pytest.fixture
def rig(way):
    made = Rig(way, Way())
    yield made
    for copy in way.copies:
        copy.ended.set()
    made.link.close()
    made.link.join()


def test_a_piece_without_predecessors_is_started_by_the_pushing_thread(rig, way):
    push = rig.begin(1)
    rig.rested()
    rig.link.send(push, piece(0))
    assert way.starters == [threading.current_thread()]


def test_a_piece_that_may_wait_is_started_by_the_links_thread(way, rig):
    way.at_once = False
    push = rig.begin(1)
    rig.rested()
    rig.link.send(push, piece(0))
    eventually(lambda: way.copies)
    assert threading.current_thread() not in way.starters


def test_pieces_keep_their_order_and_wait_for_capacity(rig, way):
    push = rig.begin(1)
    rig.rested()
    for layer in range(5):
        rig.link.send(push, piece(layer))
    rig.link.end(push)
    assert [copy.piece.layer for copy in way.copies] == [0, 1, 2]
    for index in range(5):
        eventually(lambda index=index: len(way.copies) > index)
        way.copies[index].ended.set()
    assert rig.told() == [Pushed(1, 5, 500)]
    assert [copy.piece.layer for copy in way.copies] == [0, 1, 2, 3, 4]


def test_a_piece_is_announced_before_the_next_is_copied(rig, way, monkeypatch):
    way.at_once, way.ends_announce = False, True
    start, num_finished = way.start, []

    def copied(outbound, piece):
        num_finished.append(len(way.finished))
        copy = start(outbound, piece)
        copy.ended.set()
        return copy

    monkeypatch.setattr(way, "start", copied)
    push = rig.begin(1)
    rig.rested()
    with rig.link._changed:  # all are there before the first is copied
        for layer in range(5):
            rig.link.send(push, piece(layer))
    rig.link.end(push)
    assert rig.told() == [Pushed(1, 5, 500)]
    assert num_finished == [0, 1, 2, 3, 4]


def test_a_returned_slot_is_used_while_another_copy_runs(rig, way):
    push = rig.begin(1)
    rig.rested()
    way.gives_back_early = True
    for layer in range(5):
        rig.link.send(push, piece(layer))
    way.copies[0].ended.set()
    time.sleep(0.02)  # the thread waits for the second copy by now, or for a slot
    way.num_free += 1
    eventually(lambda: len(way.copies) == 4)
    assert not way.copies[1].ended.is_set()


def test_a_push_with_its_last_piece_delays_no_other(rig, way):
    first, second = rig.begin(1), rig.begin(2)
    rig.rested()
    rig.link.send(first, piece(0))
    rig.link.end(first)
    rig.link.send(second, piece(1))
    rig.link.end(second)
    assert way.starters == [threading.current_thread()] * 2
    way.copies[0].ended.set()
    assert rig.told() == [Pushed(1, 1, 100)]
    way.copies[1].ended.set()
    assert rig.told() == [Pushed(2, 1, 100)]


def test_a_push_whose_last_piece_cannot_be_started_has_failed():
    way = Way(num_slots=1)
    rig = Rig(way)
    push = rig.begin(1)
    rig.rested()
    rig.link.send(push, piece(0))
    rig.link.send(push, piece(1))
    rig.link.end(push)
    way.problem = OSError("the device is gone")
    way.copies[0].ended.set()
    assert rig.told() == [PushFailed(1, "there: the device is gone")]
    rig.link.join()
    assert rig.events.take() == []


def test_a_push_that_ends_while_it_is_fenced_is_fenced_once(rig, way):
    push = rig.begin(1)
    rig.rested()
    for layer in range(4):
        rig.link.send(push, piece(layer))
    rig.link.fence(push)
    rig.link.end(push)
    for copy in way.copies:
        copy.ended.set()
    assert rig.told() == [PushFenced(1)]
    rig.link.end(push)
    time.sleep(0.05)
    assert rig.events.take() == []
    assert len(way.copies) == 3


def test_a_push_ends_with_its_own_pieces_whatever_else_is_under_way(rig, way):
    first, second = rig.begin(1), rig.begin(2)
    rig.rested()
    rig.link.send(first, piece(0))
    rig.link.end(first)
    rig.link.send(second, piece(1))
    eventually(lambda: len(way.copies) == 2)
    way.copies[0].ended.set()
    assert rig.told() == [Pushed(1, 1, 100)]


def test_a_push_does_not_end_before_its_last_piece(rig, way):
    push = rig.begin(1)
    rig.rested()
    rig.link.send(push, piece(0))
    rig.link.end(push)
    time.sleep(0.05)
    assert rig.events.take() == []
    way.copies[0].ended.set()
    assert rig.told() == [Pushed(1, 1, 100)]


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_error_of_a_piece_started_by_another_thread_fails_the_connection(rig, way, is_busy):
    push = rig.begin(1)
    rig.rested()
    if is_busy:
        rig.link.send(push, piece(0))
    way.problem = OSError("the cable is cut")
    rig.link.send(push, piece(1))  # raises nothing here
    for copy in way.copies:
        copy.ended.set()
    assert rig.told() == [PushFailed(1, "there: the cable is cut")]
    assert rig.link.ended


def test_a_fence_waits_for_pieces_of_any_thread(rig, way):
    push = rig.begin(1)
    rig.rested()
    rig.link.send(push, piece(0))
    rig.link.fence(push)
    rig.link.send(push, piece(1))
    time.sleep(0.05)
    assert rig.events.take() == []
    way.copies[0].ended.set()
    assert rig.told() == [PushFenced(1)]
    assert len(way.copies) == 1


def test_another_connection_is_opened_when_running_pushes_have_ended(rig, way):
    first = rig.begin(1)
    rig.rested()
    rig.link.send(first, piece(0))
    rig.link.end(first)
    way.is_ended = True  # the receiver was restarted
    rig.begin(2)
    time.sleep(0.05)
    assert rig.num_dialled == 1
    way.copies[0].ended.set()
    assert rig.told() == [Pushed(1, 1, 100)]
    eventually(lambda: rig.num_dialled == 2)


def test_following_pieces_are_started_by_the_pushing_thread_while_the_other_waits(rig, way):
    push = rig.begin(1)
    rig.rested()
    rig.link.send(push, piece(0))
    time.sleep(0.02)  # the thread waits for its end by now
    rig.link.send(push, piece(1))
    rig.link.send(push, piece(2))
    assert way.starters == [threading.current_thread()] * 3

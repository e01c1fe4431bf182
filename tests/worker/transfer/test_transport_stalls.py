"""A thread that is blocked in a device call, because bytes never arrive or are never taken."""

from __future__ import annotations

import threading
import time

import pytest
from support.transfer.transport_ends import SLOT_BYTES, Ends, HostKv, filled, hand_over, wait_until

from baton.rpc.errors import DataLoss
from baton.worker.transfer.base import InboundFailed, Landed, Pushed, PushFailed
from baton.worker.transfer.kinds.ipc.host import HostIpcPath
from baton.worker.transfer.receive import slot_pieces as incoming_slots
from baton.worker.transfer.send import pieces as outgoing
from baton.worker.transfer.wire import stall_watchdog

WAIT_SECONDS = 10.0


class StuckPath(HostIpcPath):
    """Records aborts. If it `sticks`, its first receiver or sender is blocked until then."""

    def __init__(self, executor, sticks=True):
        super().__init__(executor, SLOT_BYTES)
        self.moving = threading.Event()
        self.aborted = threading.Event()
        self._sticks = sticks

    def accept(self, offer):
        receiver = super().accept(offer)
        receiver.abort = self.aborted.set
        if self._sticks:
            self._sticks, receiver.take = False, self._take
        return receiver

    def connect(self, slots):
        sender = super().connect(slots)
        sender.abort = self.aborted.set
        if self._sticks:
            self._sticks, put = False, sender.put
            sender.put = lambda *values: self._wait() or put(*values)
        return sender

    def _take(self, slot, num_bytes):
        self._wait()
        raise DataLoss("it was aborted")

    def _wait(self):
        self.moving.set()
        assert self.aborted.wait(2 * WAIT_SECONDS)


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setattr(stall_watchdog, "_NAP_SECONDS", 0.02)
    made = Ends()
    yield made
    made.close()


def stalled_receiver(ends):
    """Returns a receiver that is stalled at its first piece, and its sender."""
    executor = HostKv()
    path = StuckPath(executor)
    receiver = ends.make(executor, paths={"ipc": path, "tcp": None})
    sender = ends.make(filled(HostKv()), "ipc")
    hand_over(sender, receiver)
    assert path.moving.wait(WAIT_SECONDS)
    return receiver, sender, path


def test_the_receiver_stops_waiting_for_a_lost_sender(ends, monkeypatch):
    monkeypatch.setattr(stall_watchdog, "_LOST_SECONDS", 0.05)
    receiver, sender, path = stalled_receiver(ends)
    time.sleep(0.3)
    assert not path.aborted.is_set(), "the sender is there"
    sender.transport.close()
    assert path.aborted.wait(WAIT_SECONDS)
    assert receiver.wait_for(InboundFailed).transfer_id == 1
    wait_until(lambda: not receiver.transport.num_connections)


def test_a_sender_that_is_there_is_not_waited_for_for_ever(ends, monkeypatch):
    monkeypatch.setattr(incoming_slots, "_STUCK_SECONDS", 0.1)
    receiver, sender, path = stalled_receiver(ends)
    assert path.aborted.wait(WAIT_SECONDS)
    assert receiver.wait_for(InboundFailed).transfer_id == 1
    wait_until(lambda: not receiver.transport.num_connections)
    hand_over(sender, receiver, 2)
    assert receiver.wait_for(Landed).transfer_id == 2


def test_the_wait_for_a_piece_that_is_never_taken_ends(ends, monkeypatch):
    monkeypatch.setattr(outgoing, "_STUCK_SECONDS", 0.1)
    executor = filled(HostKv())
    path = StuckPath(executor)
    sender = ends.make(executor, paths={"ipc": path, "tcp": None})
    receiver = ends.make(HostKv(), "ipc")
    hand_over(sender, receiver)
    assert path.moving.wait(WAIT_SECONDS)
    failed = sender.wait_for(PushFailed)
    assert failed.push_id == 1
    assert "its copy made no progress" in failed.reason
    hand_over(sender, receiver, 2)
    assert receiver.wait_for(Landed).transfer_id == 2


def test_a_connection_without_pieces_is_never_stalled(ends, monkeypatch):
    for module in (incoming_slots, outgoing):
        monkeypatch.setattr(module, "_STUCK_SECONDS", 0.5)
    executor, other = HostKv(), filled(HostKv())
    path = StuckPath(executor, sticks=False)
    receiver = ends.make(executor, paths={"ipc": path, "tcp": None})
    sender = ends.make(other, paths={"ipc": StuckPath(other, sticks=False), "tcp": None})
    for number in (1, 2):
        hand_over(sender, receiver, number)
        assert receiver.wait_for(Landed).transfer_id == number
        sender.wait_for(Pushed)
        time.sleep(1.0)
    (link,) = sender.transport._connections.values()
    assert not link._connection.ended()
    assert not path.aborted.is_set()

"""A connection's thread that is in a call of the device's, which waits for bytes that never come."""

from __future__ import annotations

import threading
import time

import pytest
from transport_ends import SLOT_BYTES, Ends, HostKv, filled, hand_over, wait_until

from baton.rpc.errors import DataLoss
from baton.worker.transfer import stuck as stuck_connections
from baton.worker.transfer.base import InboundFailed, Landed, Pushed
from baton.worker.transfer.host_ipc import HostIpcPath

WAIT_SECONDS = 10.0


class StuckPath(HostIpcPath):
    """Tells of aborts. Its first receiver, if it `sticks`, takes nothing until then."""

    def __init__(self, executor, sticks=True):
        super().__init__(executor, SLOT_BYTES)
        self.taking = threading.Event()
        self.aborted = threading.Event()
        self._sticks = sticks

    def accept(self, offer):
        receiver = super().accept(offer)
        receiver.abort = self.aborted.set
        if self._sticks:
            self._sticks, receiver.take = False, self._take
        return receiver

    def _take(self, slot, num_bytes):
        self.taking.set()
        assert self.aborted.wait(2 * WAIT_SECONDS)
        raise DataLoss("it was aborted")


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setattr(stuck_connections, "_NAP_SECONDS", 0.02)
    made = Ends()
    yield made
    made.close()


@pytest.fixture
def stuck(ends):
    """A sender, and a receiver that is stuck with its first piece."""
    executor = HostKv()
    path = StuckPath(executor)
    receiver = ends.make(executor, paths={"ipc": path, "tcp": None})
    sender = ends.make(filled(HostKv()), "ipc")
    hand_over(sender, receiver)
    assert path.taking.wait(WAIT_SECONDS)
    return sender, receiver, path


def test_a_sender_that_is_gone_is_waited_for_no_more(stuck, monkeypatch):
    monkeypatch.setattr(stuck_connections, "_LOST_SECONDS", 0.05)
    sender, receiver, path = stuck
    time.sleep(0.3)
    assert not path.aborted.is_set(), "the sender is there"
    sender.transport.close()
    assert path.aborted.wait(WAIT_SECONDS)
    assert receiver.wait_for(InboundFailed).transfer_id == 1
    wait_until(lambda: not receiver.transport.num_connections)


def test_a_sender_that_is_there_is_not_waited_for_for_ever(stuck, monkeypatch):
    monkeypatch.setattr(stuck_connections, "_STUCK_SECONDS", 0.1)
    sender, receiver, path = stuck
    assert path.aborted.wait(WAIT_SECONDS)
    assert receiver.wait_for(InboundFailed).transfer_id == 1
    wait_until(lambda: not receiver.transport.num_connections)
    hand_over(sender, receiver, 2)
    assert receiver.wait_for(Landed).transfer_id == 2


def test_a_connection_without_pieces_is_never_stuck(ends, monkeypatch):
    monkeypatch.setattr(stuck_connections, "_STUCK_SECONDS", 0.5)
    executor = HostKv()
    path = StuckPath(executor, sticks=False)
    receiver = ends.make(executor, paths={"ipc": path, "tcp": None})
    sender = ends.make(filled(HostKv()), "ipc")
    for number in (1, 2):
        hand_over(sender, receiver, number)
        assert receiver.wait_for(Landed).transfer_id == number
        sender.wait_for(Pushed)
        time.sleep(1.0)
    (link,) = sender.transport._links.values()
    assert not link._connection.ended()
    assert not path.aborted.is_set()

"""More peers than a kind of transport has room for: the connection that was not used for longest makes way."""

from __future__ import annotations

import time

import pytest
from support.transfer.transport_ends import (
    SLOT_BYTES,
    SOURCE,
    TARGET,
    Ends,
    HostKv,
    filled,
    hand_over,
    inbound,
    outbound,
    piece_of,
    push_all,
    wait_until,
)

from baton.rpc.errors import NoCapacity
from baton.worker.transfer.base import Landed, Pushed
from baton.worker.transfer.kinds.ipc.host import HostIpcPath
from baton.worker.transfer.receive.pieces import _MANY, ConnectionTransfers
from baton.worker.transfer.wire import connection_limit as room
from baton.worker.transfer.wire.connection_limit import retry_after_retiring

SETTLED_SECONDS = 0.05


@pytest.fixture
def many(monkeypatch):
    monkeypatch.setattr(room, "_SETTLED_SECONDS", SETTLED_SECONDS)
    made = Ends()
    yield made
    made.close()


class SeatedPath(HostIpcPath):
    """Has so many seats for its own pushes, too, as NCCL's communicators have."""

    def __init__(self, executor, num_seats):
        super().__init__(executor, SLOT_BYTES)
        self.num_seats = num_seats

    def connect(self, slots):
        if not self.num_seats:
            raise NoCapacity("no seat")
        self.num_seats -= 1
        sender = super().connect(slots)
        close = sender.close

        def close_and_stand_up():
            if sender._memory is not None:
                self.num_seats += 1
            close()

        sender.close = close_and_stand_up
        return sender


def receiver_for(many, num_senders):
    executor = HostKv()
    path = HostIpcPath(executor, SLOT_BYTES, max_senders=num_senders)
    return many.make(executor, paths={"ipc": path, "tcp": None}), path


def sender_of(many, **values):
    executor = filled(HostKv())
    path = SeatedPath(executor, **values) if values else HostIpcPath(executor, SLOT_BYTES)
    return many.make(executor, paths={"ipc": path, "tcp": None})


def landed(sender, receiver, number):
    hand_over(sender, receiver, number)
    assert receiver.wait_for(Landed).transfer_id == number
    sender.wait_for(Pushed)


def settle():
    time.sleep(1.5 * SETTLED_SECONDS)


def by_ipc(end):
    return end.transport.totals_by_kind()["ipc"]


def test_a_receiver_retires_its_least_recently_used_connection(many):
    receiver, path = receiver_for(many, 2)
    first, second, third = (sender_of(many) for _ in range(3))
    landed(first, receiver, 1)
    landed(second, receiver, 2)
    landed(first, receiver, 3)
    settle()
    landed(third, receiver, 4)
    assert path.num_senders == 2
    (gone,) = second.transport._connections.values()
    wait_until(lambda: gone._connection is None)
    (kept,) = first.transport._connections.values()
    assert not kept._connection.ended()
    settle()
    landed(second, receiver, 5)
    assert kept._connection is None or kept._connection.ended()
    assert all(by_ipc(sender).num_fallbacks == 0 for sender in (first, second, third))
    assert by_ipc(receiver).num_received_bytes == 5 * by_ipc(first).num_sent_bytes / 2


def test_a_connection_that_was_just_used_is_not_retired(many, monkeypatch):
    monkeypatch.setattr(room, "_SETTLED_SECONDS", 60.0)
    receiver, path = receiver_for(many, 1)
    first, second = sender_of(many), sender_of(many)
    landed(first, receiver, 1)
    landed(second, receiver, 2)  # over tcp
    assert by_ipc(second).num_fallbacks == 1
    assert path.num_senders == 1
    landed(first, receiver, 3)
    assert by_ipc(first).num_fallbacks == 0


def test_a_connection_with_a_running_transfer_is_not_retired(many):
    receiver, _ = receiver_for(many, 1)
    first, second = sender_of(many), sender_of(many)
    receiver.transport.open(inbound(TARGET))
    first.transport.connect(outbound(receiver))
    first.transport.push(1, piece_of(0, 0, SOURCE[:2]))
    wait_until(lambda: receiver.transport.num_landed_bytes(1))
    settle()
    landed(second, receiver, 2)
    assert by_ipc(second).num_fallbacks == 1
    first.transport.push(1, piece_of(0, 2, SOURCE[2:]))
    first.transport.push(1, piece_of(1, 0, SOURCE))
    first.transport.finish(1)
    assert receiver.wait_for(Landed).transfer_id == 1


def test_a_sender_retires_one_of_its_own_connections(many):
    sender = sender_of(many, num_seats=2)
    receivers = [many.make(HostKv(), "ipc") for _ in range(3)]
    for number, receiver in enumerate(receivers, 1):
        landed(sender, receiver, number)
        settle()
    assert by_ipc(sender).num_fallbacks == 0
    assert [link.ended for link in sender.transport._connections.values()].count(True) <= 1
    landed(sender, receivers[0], 4)
    assert by_ipc(sender).num_fallbacks == 0
    assert by_ipc(sender).num_sent_pieces == 16


def test_a_push_under_way_keeps_its_connection(many):
    sender = sender_of(many, num_seats=1)
    first, second = (many.make(HostKv(), "ipc") for _ in range(2))
    first.transport.open(inbound(TARGET))
    sender.transport.connect(outbound(first))
    wait_until(lambda: [link._connection for link in sender.transport._connections.values()] != [None])
    settle()
    landed(sender, second, 2)
    assert by_ipc(sender).num_fallbacks == 1
    push_all(sender, 1)
    assert first.wait_for(Landed).transfer_id == 1


def test_the_wait_for_a_blocked_send_is_bounded(monkeypatch):
    monkeypatch.setattr(room, "_GONE_SECONDS", 0.1)
    asked = []

    def make():
        raise NoCapacity("full")

    began = time.monotonic()
    with pytest.raises(NoCapacity, match="full"):
        retry_after_retiring(make, lambda: asked.append(1) or True)
    assert 0.1 <= time.monotonic() - began < 2.0
    assert asked == [1]


def test_a_connection_forgets_transfers_that_are_over():
    class Transfers:
        def is_open(self, transfer_id):
            return transfer_id % 1000 == 0

    involved = ConnectionTransfers(Transfers())
    for transfer_id in range(10 * _MANY):
        involved.add(transfer_id)
        assert len(involved._ids) <= _MANY
    assert involved.any_open()

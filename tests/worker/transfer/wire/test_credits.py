"""Slots that are returned by credits, for any split of their bytes and any reading thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from baton.rpc.errors import DataLoss
from baton.worker.transfer.send.free_slots import FreeSlots
from baton.worker.transfer.wire.frames import encode_credit

NUM_SLOTS = 3


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, peer = socket.socketpair()
    yield ours, peer
    ours.close()
    peer.close()


@pytest.fixture
def peer(ends: tuple[socket.socket, socket.socket]) -> socket.socket:
    return ends[1]


@pytest.fixture
def slots(ends: tuple[socket.socket, socket.socket]) -> FreeSlots:
    """All of them are in use."""
    made = FreeSlots(ends[0], NUM_SLOTS)
    assert [made.take() for _ in range(NUM_SLOTS)] == [0, 1, 2]
    return made


def test_slots_are_free_again_in_the_order_of_their_credits(slots: FreeSlots, peer: socket.socket) -> None:
    assert not slots.any()
    peer.sendall(encode_credit(2) + encode_credit(0))
    assert slots.any()
    assert [slots.take(), slots.take()] == [2, 0]
    assert not slots.any()


def test_a_credit_may_come_in_parts(slots: FreeSlots, peer: socket.socket) -> None:
    for byte in encode_credit(1)[:-1]:
        peer.sendall(bytes([byte]))
        assert not slots.any()
    peer.sendall(encode_credit(1)[-1:] + encode_credit(0)[:2])
    assert slots.any()
    assert slots.take() == 1
    assert not slots.any()
    peer.sendall(encode_credit(0)[2:])
    assert slots.any()


@pytest.mark.parametrize("slot", [NUM_SLOTS, 0xFFFF])
def test_an_unknown_slot_cannot_be_returned(slots: FreeSlots, peer: socket.socket, slot: int) -> None:
    peer.sendall(encode_credit(slot))
    with pytest.raises(DataLoss, match=f"received for slot {slot}, which is not in use"):
        slots.any()


def test_a_slot_is_returned_once(slots: FreeSlots, peer: socket.socket) -> None:
    peer.sendall(encode_credit(1) * 2)
    with pytest.raises(DataLoss, match="received for slot 1, which is not in use"):
        slots.any()


def test_the_end_of_the_connection_is_reported(slots: FreeSlots, peer: socket.socket) -> None:
    peer.sendall(encode_credit(1))
    peer.close()
    with pytest.raises(ConnectionError, match="the peer ended the connection"):
        slots.any()


def test_a_thread_does_not_wait_while_another_reads(
    slots: FreeSlots, peer: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    read = slots._read

    def slow_read() -> None:
        reading.set()
        assert go_on.wait(10.0)
        read()

    monkeypatch.setattr(slots, "_read", slow_read)
    peer.sendall(encode_credit(1))
    other = threading.Thread(target=slots.any)
    other.start()
    assert reading.wait(10.0)
    assert not slots.any()
    go_on.set()
    other.join(10.0)
    assert slots.any()

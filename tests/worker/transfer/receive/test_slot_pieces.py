"""When a receiver of pieces in slots waits awake for the next one, and when it sleeps."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.transfer.transport_ends import EPOCH, GENERATION, SLOT_BYTES, TARGET, HostKv, inbound, wait_until

from baton.worker.transfer.event_queue import EventQueue
from baton.worker.transfer.kinds.ipc.host import HostIpcPath
from baton.worker.transfer.receive import slot_pieces as incoming_slots
from baton.worker.transfer.receive.open_transfers import OpenTransfers
from baton.worker.transfer.receive.pieces import PieceAdmission
from baton.worker.transfer.receive.slot_pieces import SlotPieceReceiver
from baton.worker.transfer.totals import Totals
from baton.worker.transfer.wire.frames import CREDIT_BYTES, PieceHeader, encode_piece


class Receiver:
    """A connection's thread, its sender's messages, and the number of the thread's polls."""

    def __init__(self, writes_ahead: bool) -> None:
        executor = HostKv()
        self.piece_bytes = executor.kv_spec.layer_bytes(0)
        self._path = HostIpcPath(executor, SLOT_BYTES)
        bulk = self._path.accept(self._path.offer())
        bulk.writes_ahead = writes_ahead
        ours, self._peer = socket.socketpair()
        self._peer.settimeout(10.0)
        transfers = OpenTransfers(executor.kv_spec, EventQueue(lambda: None))
        transfers.open(inbound(TARGET, checksum=False))
        admission = PieceAdmission("a sender", transfers, Totals({"ipc": None}).of("ipc"))
        self._incoming = SlotPieceReceiver(ours, "a sender", bulk, admission)
        self._sock = ours
        self._thread = threading.Thread(target=self._incoming.receive, name="kv-from-test", daemon=True)
        self._thread.start()
        self.num_looks = 0

    def looked(self) -> None:
        """In place of giving the processor away."""
        self.num_looks += threading.current_thread() is self._thread
        time.sleep(1e-4)

    def take(self, layer: int, first_index: int, num_blocks: int) -> None:
        """A piece comes, and its slot goes back."""
        num_bytes = num_blocks * self.piece_bytes
        self._peer.sendall(
            encode_piece(PieceHeader(1, GENERATION, EPOCH, layer, first_index, num_blocks, num_bytes, slot=0))
        )
        assert len(self._peer.recv(CREDIT_BYTES, socket.MSG_WAITALL)) == CREDIT_BYTES

    def is_awake(self) -> bool:
        """Whether it looks, for a while."""
        before = self.num_looks
        time.sleep(0.05)
        return self.num_looks > before + 10

    def close(self) -> None:
        self._peer.close()
        self._thread.join(10.0)
        assert not self._thread.is_alive()
        self._incoming.fail("the test is over")
        self._incoming.close(sender_gone=True)
        self._sock.close()
        self._path.close()


Make = Callable[[bool], Receiver]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(incoming_slots, "_SPIN_SECONDS", 30.0)
    made: list[Receiver] = []

    def make_one(writes_ahead: bool) -> Receiver:
        made.append(Receiver(writes_ahead))
        monkeypatch.setattr(os, "sched_yield", made[-1].looked)
        return made[-1]

    yield make_one
    for receiver in made:
        receiver.close()


def test_it_waits_awake_for_the_next_piece_of_a_transfer_alone(make: Make) -> None:
    receiver = make(False)
    assert not receiver.is_awake(), "nothing has come"
    receiver.take(0, 0, 5)
    assert receiver.is_awake()
    receiver.take(1, 0, 2)
    assert receiver.is_awake()
    receiver.take(1, 2, 3)
    wait_until(lambda: not receiver.is_awake())


def test_it_waits_awake_for_a_bounded_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = make(False)
    receiver.take(0, 0, 5)
    assert receiver.is_awake()
    monkeypatch.setattr(incoming_slots, "_SPIN_SECONDS", 0.01)
    wait_until(lambda: not receiver.is_awake())
    receiver.take(1, 0, 5)  # it is woken up


def test_it_sleeps_where_a_device_copies(make: Make) -> None:
    """Its pieces are announced before their bytes, so the delay of waking up does not matter."""
    receiver = make(True)
    receiver.take(0, 0, 5)
    wait_until(lambda: not receiver.is_awake())

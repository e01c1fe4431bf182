"""The time when the receiver is notified of a piece through a slot, and the order around it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from baton.worker.core import BlockId
from baton.worker.executors.base import Executor
from baton.worker.transfer.base import KvConversion, Outbound, Piece
from baton.worker.transfer.bulk import Announce, EndedCopy, SlotCopy, Slots
from baton.worker.transfer.send import pieces as outgoing_pieces
from baton.worker.transfer.send.pieces import SlotPieceSender
from baton.worker.transfer.totals import Totals
from baton.worker.transfer.wire.checksum import checksum_of
from baton.worker.transfer.wire.frames import PIECE_BYTES, PieceHeader, decode_piece, encode_credit

BLOCK_BYTES = 64
DATA = bytes(range(BLOCK_BYTES))


class Sender:
    """A BulkSender that records whether a piece was announced when its bytes were sent."""

    def __init__(self, peer: socket.socket, announces_first: bool, copies: Iterable[SlotCopy] = ()) -> None:
        self.announces_first = announces_first
        self._pending = iter(copies)
        self.events: list[object] = []
        self.aborted = threading.Event()
        self._peer = peer

    def put(self, piece: Piece, slot: int, conversion: KvConversion | None, announce: Announce) -> SlotCopy:
        if self.announces_first:
            announce()
            self.events.append(heard(self._peer))
        self.events.append("moves")
        return next(self._pending, EndedCopy())

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        """Nothing is held."""


def heard(peer: socket.socket) -> PieceHeader:
    return decode_piece(peer.recv(PIECE_BYTES, socket.MSG_WAITALL))


PIECE = Piece(0, 0, 1, [BlockId(3)])


def outbound_of(checksum: bool) -> Outbound:
    return Outbound(1, [], 1, 1, 1, checksum)


def outgoing_of(ours: socket.socket, sender: Sender, executor: Executor, num_slots: int) -> SlotPieceSender:
    slots, totals = Slots(num_slots, 4096, b""), Totals({"ipc": None}).of("ipc")
    return SlotPieceSender("ipc", "a receiver", ours, sender, slots, executor, totals, threading.Condition())


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, peer = socket.socketpair()
    peer.settimeout(5.0)
    yield ours, peer
    ours.close()
    peer.close()


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("announces_first", [True, False])
def test_no_message_is_read_between_a_piece_and_its_announcement(
    ends: tuple[socket.socket, socket.socket], announces_first: bool, checksum: bool
) -> None:
    ours, peer = ends
    sender = Sender(peer, announces_first)

    def read_blocks(layer: int, block_ids: list[BlockId]) -> memoryview:
        sender.events.append("read")
        return memoryview(DATA)

    executor = SimpleNamespace(
        kv_spec=SimpleNamespace(layer_bytes=lambda layer: BLOCK_BYTES), kv_bytes=None, read_blocks=read_blocks
    )
    outgoing = outgoing_of(ours, sender, cast("Executor", executor), num_slots=2)
    started_piece = outgoing.start(outbound_of(checksum), PIECE)
    if not announces_first:
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        peer.settimeout(5.0)
    outgoing.finish(started_piece)
    if not announces_first:
        sender.events.append(heard(peer))
    (header,) = (event for event in sender.events if isinstance(event, PieceHeader))
    assert header.checksum == (checksum_of(memoryview(DATA)) if checksum else None)
    order = ["announced" if isinstance(event, PieceHeader) else event for event in sender.events]
    reads = ["read"] if checksum else []
    assert order == reads + (["announced", "moves"] if announces_first else ["moves", "announced"])
    peer.close()
    outgoing.close()


@pytest.mark.parametrize("announces_first", [True, False])
def test_a_piece_is_due_if_it_is_announced_only_when_finished(
    ends: tuple[socket.socket, socket.socket], announces_first: bool
) -> None:
    ours, peer = ends
    copy = Copy()
    spec = SimpleNamespace(layer_bytes=lambda layer: BLOCK_BYTES)
    executor = cast("Executor", SimpleNamespace(kv_spec=spec))
    outgoing = outgoing_of(ours, Sender(peer, announces_first, [copy]), executor, num_slots=2)
    started_piece = outgoing.start(outbound_of(False), PIECE)
    assert not outgoing.is_due(started_piece)
    copy.ended.set()
    assert outgoing.is_due(started_piece) == (not announces_first)
    outgoing.finish(started_piece)
    peer.close()
    outgoing.close()


class Copy:
    """A SlotCopy that ends when the test ends it."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, seconds: float) -> bool:
        return self.ended.wait(seconds)


@pytest.fixture
def copies() -> list[Copy]:
    return [Copy() for _ in range(4)]


@pytest.fixture
def outgoing(ends: tuple[socket.socket, socket.socket], copies: list[Copy]) -> Iterator[SlotPieceSender]:
    """With three slots."""
    ours, peer = ends
    spec = SimpleNamespace(layer_bytes=lambda layer: BLOCK_BYTES)
    made = outgoing_of(ours, Sender(peer, True, copies), cast("Executor", SimpleNamespace(kv_spec=spec)), num_slots=3)
    yield made
    for copy in copies:
        copy.ended.set()
    peer.close()
    made.close()


def later(act: Callable[[], object]) -> None:
    threading.Timer(0.05, act).start()


def test_a_returned_slot_is_free_while_a_copy_is_in_progress(
    ends: tuple[socket.socket, socket.socket], outgoing: SlotPieceSender, copies: list[Copy]
) -> None:
    _, peer = ends
    first, second, _ = [outgoing.start(outbound_of(False), PIECE) for _ in range(3)]
    copies[0].ended.set()
    assert outgoing.await_end(first)
    outgoing.finish(first)
    assert not outgoing.has_capacity()
    later(lambda: peer.sendall(encode_credit(0)))
    assert not outgoing.await_end(second)
    assert outgoing.has_capacity()


def test_a_slot_is_free_only_when_its_piece_is_finished(
    ends: tuple[socket.socket, socket.socket], outgoing: SlotPieceSender, copies: list[Copy]
) -> None:
    """The copy's pending serves the slot's next piece, and would wait for that one, too."""
    _, peer = ends
    first, *_ = [outgoing.start(outbound_of(False), PIECE) for _ in range(3)]
    peer.sendall(encode_credit(0))
    later(copies[0].ended.set)
    assert outgoing.await_end(first)
    assert not outgoing.has_capacity()
    outgoing.finish(first)
    outgoing.wait_for_capacity()
    assert outgoing.has_capacity()


def test_the_end_of_a_copy_is_detected_with_or_without_its_credit(
    outgoing: SlotPieceSender, copies: list[Copy]
) -> None:
    first, *_ = [outgoing.start(outbound_of(False), PIECE) for _ in range(3)]
    later(copies[0].ended.set)
    assert outgoing.await_end(first)


def test_no_thread_waits_for_a_receiver_that_has_gone(
    ends: tuple[socket.socket, socket.socket], outgoing: SlotPieceSender
) -> None:
    first, *_ = [outgoing.start(outbound_of(False), PIECE) for _ in range(3)]
    later(ends[1].close)
    assert outgoing.await_end(first)
    assert outgoing.ended()


@pytest.mark.parametrize("num_done", [1, 3])
def test_a_thread_that_waits_for_a_slot_sleeps_until_one_returns(
    ends: tuple[socket.socket, socket.socket],
    outgoing: SlotPieceSender,
    copies: list[Copy],
    monkeypatch: pytest.MonkeyPatch,
    num_done: int,
) -> None:
    """With copies under way or without: the credit itself wakes it."""
    monkeypatch.setattr(outgoing_pieces, "_SPIN_SECONDS", 0.0)
    monkeypatch.setattr(outgoing_pieces, "_CHECK_SECONDS", 4.0)
    shipments = [outgoing.start(outbound_of(False), PIECE) for _ in range(3)]
    for copy, started_piece in zip(copies[:num_done], shipments, strict=False):
        copy.ended.set()
        outgoing.finish(started_piece)
    any_free, num_looks = outgoing._free.any, 0

    def look() -> bool:
        nonlocal num_looks
        num_looks += 1
        return any_free()

    monkeypatch.setattr(outgoing._free, "any", look)
    began = time.monotonic()
    later(lambda: ends[1].sendall(encode_credit(0)))
    if num_done == 3:
        outgoing.wait_for_capacity()
    else:
        assert not outgoing.await_end(shipments[num_done])
    assert time.monotonic() - began < 3.0
    assert num_looks < 5


def test_a_credit_that_makes_no_sense_ends_the_connection_and_every_copy(
    ends: tuple[socket.socket, socket.socket], copies: list[Copy]
) -> None:
    ours, peer = ends
    spec = SimpleNamespace(layer_bytes=lambda layer: BLOCK_BYTES)
    sender = Sender(peer, True, copies)
    outgoing = outgoing_of(ours, sender, cast("Executor", SimpleNamespace(kv_spec=spec)), num_slots=1)
    started_piece = outgoing.start(outbound_of(False), PIECE)
    peer.sendall(encode_credit(7))
    assert outgoing.await_end(started_piece)
    assert outgoing.ended()
    assert sender.aborted.wait(5.0)
    with pytest.raises(ConnectionError, match="received for slot 7, which is not in use"):
        outgoing.wait_for_capacity()
    copies[0].ended.set()
    outgoing.settle(started_piece)
    peer.close()
    outgoing.close()

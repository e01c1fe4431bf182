"""When the receiver hears of a piece that goes through a slot, and what happens before and after."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from baton.worker.core import BlockId
from baton.worker.executor.base import Executor
from baton.worker.transfer.base import KvConversion, Outbound, Piece
from baton.worker.transfer.bulk import Announce, Done, Slots
from baton.worker.transfer.checksum import checksum_of
from baton.worker.transfer.frames import PIECE_BYTES, PieceHeader, decode_piece
from baton.worker.transfer.outgoing import SlotOutgoing
from baton.worker.transfer.totals import Totals

BLOCK_BYTES = 64
DATA = bytes(range(BLOCK_BYTES))


class Sender:
    """A BulkSender that notes what was heard of a piece when its bytes were on their way."""

    def __init__(self, peer: socket.socket, announces_first: bool) -> None:
        self.announces_first = announces_first
        self.events: list[object] = []
        self._peer = peer

    def put(self, piece: Piece, slot: int, conversion: KvConversion | None, announce: Announce) -> Done:
        if self.announces_first:
            announce()
            self.events.append(heard(self._peer))
        self.events.append("moves")
        return Done()

    def abort(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is held."""


def heard(peer: socket.socket) -> PieceHeader:
    return decode_piece(peer.recv(PIECE_BYTES, socket.MSG_WAITALL))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, peer = socket.socketpair()
    peer.settimeout(5.0)
    yield ours, peer
    ours.close()
    peer.close()


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("announces_first", [True, False])
def test_nothing_is_read_between_a_piece_and_its_announcement(
    ends: tuple[socket.socket, socket.socket], announces_first: bool, checksum: bool
) -> None:
    ours, peer = ends
    sender = Sender(peer, announces_first)

    def read_blocks(layer: int, block_ids: list[BlockId]) -> memoryview:
        sender.events.append("read")
        return memoryview(DATA)

    executor = SimpleNamespace(
        layout=SimpleNamespace(bytes_per_block_layer=BLOCK_BYTES), kv_bytes=None, read_blocks=read_blocks
    )
    outgoing = SlotOutgoing(
        "ipc",
        "a receiver",
        ours,
        sender,
        Slots(2, 4096, b""),
        cast("Executor", executor),
        Totals({"ipc": None}).of("ipc"),
        threading.Condition(),
    )
    shipment = outgoing.start(Outbound(1, [], 1, 1, 1, checksum), Piece(0, 0, 1, [BlockId(3)]))
    if not announces_first:
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        peer.settimeout(5.0)
    outgoing.finish(shipment)
    if not announces_first:
        sender.events.append(heard(peer))
    (header,) = (event for event in sender.events if isinstance(event, PieceHeader))
    assert header.checksum == (checksum_of(memoryview(DATA)) if checksum else None)
    order = ["announced" if isinstance(event, PieceHeader) else event for event in sender.events]
    reads = ["read"] if checksum else []
    assert order == reads + (["announced", "moves"] if announces_first else ["moves", "announced"])
    peer.close()
    outgoing.close()

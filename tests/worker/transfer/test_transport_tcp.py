"""Pieces whose bytes follow their headers: wrong messages of a peer, and its silence."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from support.engine.engine_harness import make_executor
from support.transfer.transport_ends import (
    EPOCH,
    GENERATION,
    NUM_LAYERS,
    SOURCE,
    TARGET,
    Ends,
    HostKv,
    connected,
    ended,
    inbound,
    make_kv,
    piece_of,
    tcp_address,
    wait_until,
)

from baton.worker.transfer.base import InboundFailed, InboundFenced, Landed, Outbound, PushFenced
from baton.worker.transfer.bulk import Slots
from baton.worker.transfer.receive.coverage import Coverage, Grid
from baton.worker.transfer.wire.checksum import checksum_of
from baton.worker.transfer.wire.frames import PieceHeader, encode_piece, encode_welcome


@pytest.fixture
def many():
    made = Ends()
    yield made
    made.close()


@pytest.fixture(params=["tcp", "direct"])
def receiver(many, request):
    return many.make(make_kv(request.param), request.param)


def piece(receiver, layer=0, first_index=0, num_blocks=1, body=None, checksum=False, **values):
    """A piece as it goes over the wire."""
    body = bytes(range(256)) * num_blocks * 2 if body is None else body
    body = body[: num_blocks * receiver.piece_bytes]
    known = checksum_of(body) if checksum else None
    return (
        encode_piece(PieceHeader(1, GENERATION, EPOCH, layer, first_index, num_blocks, len(body), known, **values))
        + body
    )


def test_a_damaged_piece_fails_the_transfer_and_is_not_written(receiver):
    before = receiver.read(TARGET)
    receiver.transport.open(inbound(TARGET))
    damaged = bytearray(piece(receiver, checksum=True))
    damaged[-1] ^= 1
    with connected(receiver) as sock:
        sock.sendall(damaged)
        failed = receiver.wait_for(InboundFailed)
    assert failed.corrupt
    assert receiver.read(TARGET) == before
    assert receiver.transport.totals().num_corrupt_pieces == 1


def test_a_piece_without_the_checksum_that_was_asked_for_fails_the_transfer(receiver):
    before = receiver.read(TARGET)
    receiver.transport.open(inbound(TARGET))
    with connected(receiver) as sock:
        sock.sendall(piece(receiver))
        assert "checksum" in receiver.wait_for(InboundFailed).reason
    assert receiver.read(TARGET) == before


@pytest.mark.parametrize("checksum", [True, False])
def test_a_piece_of_the_wrong_size_fails_the_transfer(receiver, checksum):
    receiver.transport.open(inbound(TARGET, checksum=checksum))
    body = bytes(receiver.piece_bytes - 1)
    with connected(receiver) as sock:
        sock.sendall(piece(receiver, body=body, checksum=checksum))
        assert f"expected {receiver.piece_bytes}" in receiver.wait_for(InboundFailed).reason
        # What follows is still understood.
        sock.sendall(piece(receiver, checksum=checksum))
        wait_until(lambda: receiver.transport.totals().num_stray_pieces == 1)


@pytest.mark.parametrize("heads", [(0, 9), (9, 1), (0xFFFF, 1)])
def test_a_piece_of_heads_that_this_rank_has_not_fails_the_transfer(receiver, heads):
    receiver.transport.open(inbound(TARGET, checksum=False))
    num_bytes = receiver.piece_bytes // receiver.executor.kv_spec.groups[0].num_kv_heads * heads[1]
    header = PieceHeader(1, GENERATION, EPOCH, 0, 0, 1, num_bytes, heads=heads)
    with connected(receiver) as sock:
        sock.sendall(encode_piece(header) + bytes(num_bytes))
        assert "heads" in receiver.wait_for(InboundFailed).reason


def test_a_header_with_a_wrong_length_is_dropped(receiver):
    header = PieceHeader(1, GENERATION, EPOCH, 0, 0, 1, (256 << 20) + 1)
    with connected(receiver) as sock:
        sock.sendall(encode_piece(header))
        assert ended(sock)


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("missing", [1, 5, 40])
def test_a_connection_that_ends_within_a_piece_fails_its_transfers(receiver, checksum, missing):
    receiver.transport.open(inbound(TARGET, checksum=checksum))
    second = piece(receiver, layer=1, checksum=checksum)
    with connected(receiver) as sock:
        sock.sendall(piece(receiver, checksum=checksum))
        sock.sendall(second[:-missing])
    assert "within a" in receiver.wait_for(InboundFailed).reason
    receiver.transport.fence_inbound(1)
    receiver.wait_for(InboundFenced)
    wait_until(lambda: receiver.transport.num_connections == 0)


@pytest.mark.parametrize("checksum", [True, False])
def test_a_fence_never_waits_for_a_peer_that_stopped_within_a_piece(receiver, checksum):
    receiver.transport.open(inbound(TARGET, checksum=checksum))
    whole = piece(receiver, num_blocks=5, checksum=checksum)
    with connected(receiver) as sock:
        sock.sendall(whole[:-20])
        wait_until(lambda: checksum or receiver.executor.kv_bytes is None or receiver.transport.num_landed_bytes(1) > 0)
        receiver.transport.fence_inbound(1)
        receiver.wait_for(InboundFenced)
        before = receiver.read(TARGET)
        sock.sendall(whole[-20:])
        wait_until(lambda: receiver.transport.totals().num_stray_pieces == 1)
        assert receiver.read(TARGET) == before
        # The connection is as good as before.
        receiver.transport.open(inbound(TARGET, checksum=checksum))
        for layer in range(NUM_LAYERS):
            sock.sendall(piece(receiver, layer=layer, num_blocks=5, checksum=checksum))
        receiver.wait_for(Landed)


def test_a_piece_may_come_a_byte_at_a_time(receiver):
    receiver.transport.open(inbound(TARGET[:1], checksum=False))
    with connected(receiver) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for layer in range(NUM_LAYERS):
            for byte in piece(receiver, layer=layer):
                sock.sendall(bytes([byte]))
        receiver.wait_for(Landed)
    expected = (bytes(range(256)) * 2)[: receiver.piece_bytes]
    assert receiver.read(TARGET[:1]) == [expected] * NUM_LAYERS


def test_more_blocks_than_a_call_takes_arrive(many):
    num_blocks = 3000
    sender, receiver = (many.make(HostKv(num_blocks)) for _ in range(2))
    ids = list(range(num_blocks))
    for layer in range(NUM_LAYERS):
        sender.executor.kv_bytes[layer, :num_blocks] = layer + 7
    receiver.transport.open(inbound(ids, checksum=False))
    sender.transport.connect(Outbound(1, receiver.transport.addresses, 1, EPOCH, GENERATION, False))
    for layer in range(NUM_LAYERS):
        sender.transport.push(1, piece_of(layer, 0, ids[::-1]))
    receiver.wait_for(Landed)
    assert receiver.read(ids) == sender.read(ids)


def test_a_peer_that_takes_no_bytes_never_holds_up_the_engine_thread(many):
    executor = make_executor(num_blocks=64)
    executor.read_blocks = lambda layer, block_ids: bytearray(16 << 20)
    sender = many.make(executor)
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        thread = threading.Thread(target=welcome_and_read_nothing, args=(deaf, stop))
        thread.start()
        address = tcp_address(f"127.0.0.1:{deaf.getsockname()[1]}")
        began = time.monotonic()
        sender.transport.connect(Outbound(1, address, 1, EPOCH, GENERATION, False))
        for _ in range(8):
            sender.transport.push(1, piece_of(0, 0, SOURCE))
        ((_, link),) = sender.transport._pushes.values()
        wait_until(lambda: link._started)
        time.sleep(0.2)  # until it is half sent
        sender.transport.fence_outbound(1)
        assert time.monotonic() - began < 4
        time.sleep(0.1)
        assert sender.transport.poll() == []
        sender.transport.cut_outbound(1)
        sender.wait_for(PushFenced)
        stop.set()
        thread.join(10)


def welcome_and_read_nothing(listener, stop):
    sock, _ = listener.accept()
    with sock:
        sock.sendall(encode_welcome(Slots(0, 0, b"")))
        stop.wait(30)


def test_coverage_is_complete_when_every_cell_has_landed():
    coverage = Coverage([Grid(range(2), num_blocks=3, num_heads=2)])
    for layer, num_layers, first, count, heads in (
        (0, 1, 0, 3, None),
        (1, 1, 2, 1, (1, 1)),
        (1, 1, 2, 1, (0, 1)),
        (1, 1, 0, 2, None),
    ):
        assert not coverage.complete
        part = coverage.part(layer, num_layers, first, count, heads)
        coverage.claim(part)
        coverage.land(part)
    assert coverage.complete
    assert coverage.num_pieces == 4

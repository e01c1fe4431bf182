"""The TCP transport over loopback: what is written, what never is, and that no peer holds the engine thread up."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest
from engine_harness import make_executor

from baton.rpc.errors import DataLoss, InvalidRequest, Unavailable
from baton.v1 import kv_pb2
from baton.worker.core import BlockId
from baton.worker.transfer.base import (
    Inbound,
    InboundFailed,
    InboundFenced,
    Landed,
    Outbound,
    Piece,
    Pushed,
    PushFailed,
    PushFenced,
)
from baton.worker.transfer.bulk import Slots
from baton.worker.transfer.checksum import checksum_of
from baton.worker.transfer.coverage import Coverage
from baton.worker.transfer.frames import (
    GREETING_BYTES,
    PIECE_BYTES,
    Open,
    PieceHeader,
    decode_piece,
    encode_open,
    encode_piece,
    encode_welcome,
)
from baton.worker.transfer.transports import Transports

NUM_LAYERS = 2
BYTES_PER_BLOCK_LAYER = 32
GENERATION = 0xFEED
EPOCH = 7


def filled_executor(seed=0):
    executor = make_executor(num_blocks=64)
    rng = np.random.default_rng(seed)
    for layer in range(NUM_LAYERS):
        data = rng.integers(0, 256, 64 * BYTES_PER_BLOCK_LAYER, np.uint8).tobytes()
        executor.write_blocks(layer, [BlockId(i) for i in range(64)], memoryview(data))
    return executor


class End:
    """A transport, its device, and what it told."""

    def __init__(self, executor):
        self.executor = executor
        self.woken = threading.Event()
        self.transport = Transports(executor, "127.0.0.1", 0, "127.0.0.1", self.woken.set)
        self.events = []

    def wait_for(self, kind, seconds=5.0):
        deadline = time.monotonic() + seconds
        while True:
            self.woken.clear()
            self.events += self.transport.poll()
            found = [event for event in self.events if isinstance(event, kind)]
            if found:
                self.events.remove(found[0])
                return found[0]
            assert time.monotonic() < deadline, f"no {kind.__name__}: {self.events}"
            self.woken.wait(0.05)

    def read(self, block_ids):
        return [bytes(self.executor.read_blocks(layer, block_ids)) for layer in range(NUM_LAYERS)]


@pytest.fixture
def make_end():
    ends = []

    def make(executor=None):
        ends.append(End(executor or make_executor(num_blocks=64)))
        return ends[-1]

    yield make
    for end in ends:
        began = time.monotonic()
        end.transport.close()
        assert time.monotonic() - began < 1.0
    time.sleep(0.01)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")] == []


@pytest.fixture
def ends(make_end):
    return make_end(filled_executor()), make_end()


def inbound(block_ids, transfer_id=1, generation=GENERATION, epoch=EPOCH, checksum=True):
    return Inbound(transfer_id, epoch, generation, tuple(BlockId(i) for i in block_ids), checksum)


def outbound(receiver, push_id=1, transfer_id=1, generation=GENERATION, epoch=EPOCH, checksum=True):
    return Outbound(push_id, receiver.transport.addresses, transfer_id, epoch, generation, checksum)


SOURCE = [BlockId(i) for i in (3, 9, 4, 20, 21)]
TARGET = [BlockId(i) for i in (50, 2, 7, 33, 8)]


def piece_of(layer, first_index, block_ids):
    return Piece(layer, first_index, len(block_ids), block_ids)


def tcp_address(address):
    return [kv_pb2.TransportAddress(kind=kv_pb2.TRANSPORT_KIND_TCP, address=address)]


def push_all(sender, push_id=1, source=SOURCE):
    for layer in range(NUM_LAYERS):
        sender.transport.push(push_id, piece_of(layer, 0, source[:2]))
        sender.transport.push(push_id, piece_of(layer, 2, source[2:]))
    sender.transport.finish(push_id)


@pytest.mark.parametrize("checksum", [True, False])
def test_blocks_arrive_where_the_descriptor_says(ends, checksum):
    sender, receiver = ends
    receiver.transport.open(inbound(TARGET, checksum=checksum))
    sender.transport.connect(outbound(receiver, checksum=checksum))
    push_all(sender)
    num_bytes = NUM_LAYERS * len(SOURCE) * BYTES_PER_BLOCK_LAYER
    assert sender.wait_for(Pushed) == Pushed(1, 4, num_bytes)
    assert receiver.wait_for(Landed) == Landed(1, 4, num_bytes)
    assert receiver.read(TARGET) == sender.read(SOURCE)
    totals = receiver.transport.totals()
    assert (totals.num_received_pieces, totals.num_received_bytes, totals.num_stray_pieces) == (4, num_bytes, 0)
    assert sender.transport.totals().num_sent_bytes == num_bytes


@pytest.mark.parametrize("wrong", [{"generation": 1}, {"epoch": 6}, {"transfer_id": 2}])
def test_a_piece_without_the_right_stamp_is_never_written(ends, wrong):
    sender, receiver = ends
    before = receiver.read(TARGET)
    receiver.transport.open(inbound(TARGET))
    sender.transport.connect(outbound(receiver, **wrong))
    push_all(sender)
    sender.wait_for(Pushed)
    wait_until(lambda: receiver.transport.totals().num_stray_pieces == 4)
    assert receiver.read(TARGET) == before
    assert receiver.transport.poll() == []
    # The transfer that the stray pieces were not of goes on, on the same connection.
    sender.transport.connect(outbound(receiver, push_id=2))
    push_all(sender, 2)
    receiver.wait_for(Landed)
    assert receiver.read(TARGET) == sender.read(SOURCE)


def test_nothing_is_written_after_the_fence(ends):
    sender, receiver = ends
    receiver.transport.open(inbound(TARGET))
    sender.transport.connect(outbound(receiver))
    sender.transport.push(1, piece_of(0, 0, SOURCE))
    wait_until(lambda: receiver.transport.num_landed_bytes(1) > 0)
    receiver.transport.fence_inbound(1)
    receiver.wait_for(InboundFenced)
    before = receiver.read(TARGET)
    sender.transport.push(1, piece_of(1, 0, SOURCE))
    wait_until(lambda: receiver.transport.totals().num_stray_pieces == 1)
    assert receiver.read(TARGET) == before


def test_a_fence_waits_for_the_piece_that_is_being_written(make_end):
    executor = make_executor(num_blocks=64)
    writing, go_on = threading.Event(), threading.Event()
    write = executor.write_blocks

    def slow_write(layer, block_ids, data):
        writing.set()
        assert go_on.wait(5)
        write(layer, block_ids, data)

    executor.write_blocks = slow_write
    sender, receiver = make_end(filled_executor()), make_end(executor)
    receiver.transport.open(inbound(TARGET))
    sender.transport.connect(outbound(receiver))
    sender.transport.push(1, piece_of(0, 0, SOURCE))
    assert writing.wait(5)
    began = time.monotonic()
    receiver.transport.fence_inbound(1)
    assert time.monotonic() - began < 0.1
    assert receiver.transport.poll() == []
    go_on.set()
    receiver.wait_for(InboundFenced)


def test_fencing_what_is_not_open_is_answered(ends):
    sender, receiver = ends
    receiver.transport.fence_inbound(99)
    assert receiver.wait_for(InboundFenced) == InboundFenced(99)
    sender.transport.fence_outbound(99)
    assert sender.wait_for(PushFenced) == PushFenced(99)


def test_a_fenced_push_sends_nothing_more_and_leaves_others_alone(ends):
    sender, receiver = ends
    receiver.transport.open(inbound(TARGET))
    receiver.transport.open(inbound([10, 11, 12, 13, 14], transfer_id=2))
    sender.transport.connect(outbound(receiver))
    sender.transport.connect(outbound(receiver, push_id=2, transfer_id=2))
    sender.transport.push(1, piece_of(0, 0, SOURCE))
    sender.transport.fence_outbound(1)
    sender.wait_for(PushFenced)
    num_pieces = sender.transport.totals().num_sent_pieces
    sender.transport.push(1, piece_of(1, 0, SOURCE))
    sender.transport.finish(1)
    push_all(sender, 2)
    assert receiver.wait_for(Landed).transfer_id == 2
    assert sender.wait_for(Pushed).push_id == 2
    assert sender.transport.totals().num_sent_pieces == num_pieces + 4


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([(0, 0, 2), (0, 1, 2)], "came twice"),
        ([(2, 0, 1)], "2 layers of 5 blocks"),
        ([(0, 4, 2)], "2 layers of 5 blocks"),
    ],
)
def test_pieces_that_overlap_or_lie_outside_fail_the_transfer(ends, pieces, problem):
    _, receiver = ends
    receiver.transport.open(inbound(TARGET))
    with connected(receiver) as sock:
        for layer, first, count in pieces:
            sock.sendall(piece(layer=layer, first_index=first, num_blocks=count))
        failed = receiver.wait_for(InboundFailed)
    assert problem in failed.reason
    assert not failed.corrupt


def test_a_damaged_piece_fails_the_transfer_and_is_not_written(ends):
    _, receiver = ends
    before = receiver.read(TARGET)
    receiver.transport.open(inbound(TARGET))
    damaged = bytearray(piece())
    damaged[-1] ^= 1
    with connected(receiver) as sock:
        sock.sendall(damaged)
        failed = receiver.wait_for(InboundFailed)
    assert failed.corrupt
    assert receiver.read(TARGET) == before
    assert receiver.transport.totals().num_corrupt_pieces == 1


def test_a_piece_without_the_checksum_that_was_asked_for_fails_the_transfer(ends):
    _, receiver = ends
    receiver.transport.open(inbound(TARGET))
    with connected(receiver) as sock:
        sock.sendall(piece(checksum=False))
        assert "checksum" in receiver.wait_for(InboundFailed).reason


def test_a_piece_of_the_wrong_size_fails_the_transfer(ends):
    _, receiver = ends
    receiver.transport.open(inbound(TARGET))
    with connected(receiver) as sock:
        sock.sendall(piece(body=bytes(BYTES_PER_BLOCK_LAYER - 1)))
        assert "expected 32" in receiver.wait_for(InboundFailed).reason


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + bytes(100), bytes(PIECE_BYTES), b"\xff" * 4096],
    ids=["http", "zeros", "ones"],
)
def test_a_connection_that_speaks_something_else_is_dropped(ends, garbage):
    _, receiver = ends
    with connected(receiver) as sock:
        sock.sendall(garbage)
        assert ended(sock)
    wait_until(lambda: receiver.transport.totals().num_bad_connections == 1)


def test_a_header_that_lies_about_its_length_is_dropped(ends):
    _, receiver = ends
    header = PieceHeader(1, GENERATION, EPOCH, 0, 0, 1, (256 << 20) + 1, None)
    with connected(receiver) as sock:
        sock.sendall(encode_piece(header))
        assert ended(sock)


def test_a_connection_that_ends_within_a_piece_fails_its_transfers(ends):
    _, receiver = ends
    receiver.transport.open(inbound(TARGET))
    with connected(receiver) as sock:
        sock.sendall(piece(layer=0))
        sock.sendall(piece(layer=1)[:-5])
    assert "within a piece" in receiver.wait_for(InboundFailed).reason


def test_a_peer_that_takes_no_bytes_never_holds_up_the_engine_thread(make_end):
    executor = make_executor(num_blocks=64)
    executor.read_blocks = lambda layer, block_ids: bytearray(16 << 20)
    sender = make_end(executor)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        threading.Thread(target=welcome_and_read_nothing, args=(deaf,)).start()
        began = time.monotonic()
        sender.transport.connect(Outbound(1, tcp_address(address), 1, EPOCH, GENERATION, False))
        for _ in range(8):
            sender.transport.push(1, piece_of(0, 0, SOURCE))
        time.sleep(0.2)
        sender.transport.fence_outbound(1)
        assert time.monotonic() - began < 0.4
        time.sleep(0.1)
        assert sender.transport.poll() == []  # a piece is half sent
        sender.transport.cut_outbound(1)
        sender.wait_for(PushFenced, 1.0)


def test_an_unreachable_receiver_fails_the_push(ends):
    sender, _ = ends
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    sender.transport.connect(Outbound(1, tcp_address(f"127.0.0.1:{port}"), 1, EPOCH, GENERATION, True))
    push_all(sender)
    assert f"127.0.0.1:{port}" in sender.wait_for(PushFailed).reason
    sender.transport.fence_outbound(1)
    sender.wait_for(PushFenced)


def test_blocks_that_cannot_be_read_fail_the_push(make_end, caplog):
    executor = make_executor(num_blocks=64)

    def broken(layer, block_ids):
        raise RuntimeError("device lost")

    executor.read_blocks = broken
    sender, receiver = make_end(executor), make_end()
    sender.transport.connect(outbound(receiver))
    push_all(sender)
    assert "device lost" in sender.wait_for(PushFailed).reason


def test_blocks_that_cannot_be_written_fail_the_transfer(make_end, caplog):
    executor = make_executor(num_blocks=64)

    def broken(layer, block_ids, data):
        raise RuntimeError("device lost")

    executor.write_blocks = broken
    sender, receiver = make_end(filled_executor()), make_end(executor)
    receiver.transport.open(inbound(TARGET))
    sender.transport.connect(outbound(receiver))
    push_all(sender)
    assert "device lost" in receiver.wait_for(InboundFailed).reason
    receiver.transport.fence_inbound(1)
    receiver.wait_for(InboundFenced)


def test_a_receiver_that_was_restarted_at_its_address_is_dialled_anew(make_end):
    sender, receiver = make_end(filled_executor()), make_end()
    receiver.transport.open(inbound(TARGET))
    sender.transport.connect(outbound(receiver))
    push_all(sender)
    receiver.wait_for(Landed)
    port = int(receiver.transport.addresses[0].address.rpartition(":")[2])
    receiver.transport.close()
    executor = make_executor(num_blocks=64)
    again = Transports(executor, "127.0.0.1", port, "127.0.0.1", lambda: None)
    try:
        again.open(inbound(TARGET, transfer_id=5))
        sender.transport.connect(outbound(receiver, push_id=2, transfer_id=5))
        push_all(sender, 2)
        wait_until(lambda: any(isinstance(event, Landed) for event in again.poll()))
        assert executor.read_blocks(0, TARGET) == sender.executor.read_blocks(0, SOURCE)
    finally:
        again.close()


@pytest.mark.parametrize("address", ["", "nohost", "host:", "host:0", "host:99999", ":80"])
def test_an_address_that_is_none_is_refused(ends, address):
    with pytest.raises(InvalidRequest, match="transport address"):
        ends[0].transport.connect(Outbound(1, tcp_address(address), 1, EPOCH, GENERATION, True))


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"transfer_listen=127.0.0.1:{port}"):
            Transports(make_executor(), "127.0.0.1", port, "127.0.0.1", lambda: None)


def test_a_header_survives_the_wire_and_no_bit_of_it_can_change():
    header = PieceHeader(2**64 - 1, 2**63, EPOCH, 31, 4095, 512, 4 << 20, 0xDEADBEEF, 3, (1, 2), 5, 9)
    encoded = encode_piece(header)
    assert len(encoded) == PIECE_BYTES
    assert decode_piece(encoded) == header
    for bit in range(len(encoded) * 8):
        damaged = bytearray(encoded)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DataLoss):
            decode_piece(damaged)


def test_coverage_is_complete_when_every_cell_has_landed():
    coverage = Coverage(2, 3, 2)
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


def connected(receiver, greet=True):
    port = int(receiver.transport.addresses[0].address.rpartition(":")[2])
    sock = socket.create_connection(("127.0.0.1", port), timeout=5)
    if greet:
        sock.sendall(encode_open(Open(kv_pb2.TRANSPORT_KIND_TCP, 0, 3, b"")))
        sock.recv(GREETING_BYTES + 12, socket.MSG_WAITALL)
    return sock


def piece(layer=0, first_index=0, num_blocks=1, body=None, checksum=True):
    body = bytes(num_blocks * BYTES_PER_BLOCK_LAYER) if body is None else body
    crc = checksum_of(body) if checksum else None
    return encode_piece(PieceHeader(1, GENERATION, EPOCH, layer, first_index, num_blocks, len(body), crc)) + body


def welcome_and_read_nothing(listener):
    sock, _ = listener.accept()
    sock.sendall(encode_welcome(Slots(0, 0, b"")))
    with sock:
        time.sleep(1)


def wait_until(done, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def ended(sock):
    """Whether the other end closes the connection, politely or not."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True

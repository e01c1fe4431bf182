"""How two ends come to a connection: the kinds they have in common, refusals, and the next kind where one fails."""

from __future__ import annotations

import logging
import socket
import threading

import pytest
from support.transfer.transport_ends import (
    EPOCH,
    GENERATION,
    SLOT_BYTES,
    TARGET,
    Ends,
    HostKv,
    connected,
    dialled,
    ended,
    filled,
    hand_over,
    key_of,
    outbound,
    push_all,
    tcp_address,
    wait_until,
)

from baton.rpc.errors import DataLoss, InvalidRequest, Mismatch, NoCapacity, Unavailable, Unsupported
from baton.v1 import kv_pb2
from baton.worker.config import WorkerConfig
from baton.worker.transfer.base import Landed, Outbound, Pushed, PushFailed, PushFenced
from baton.worker.transfer.bulk import Slots
from baton.worker.transfer.kinds.factory import make_paths
from baton.worker.transfer.kinds.ipc.host import HostIpcPath
from baton.worker.transfer.routes import Route, address_of, routes_to
from baton.worker.transfer.send.dialer import Dialer
from baton.worker.transfer.totals import Totals
from baton.worker.transfer.wire.frames import (
    GREETING_BYTES,
    PIECE_BYTES,
    Greeting,
    Open,
    PieceHeader,
    check_greeting_body,
    decode_credit,
    decode_greeting,
    decode_open,
    decode_piece,
    decode_refused,
    decode_welcome,
    encode_credit,
    encode_greeting,
    encode_open,
    encode_piece,
    encode_refused,
    encode_welcome,
)
from baton.worker.transport_kinds import NAMES, parse_order

HOST = "boot.1"


@pytest.fixture
def many():
    made = Ends()
    yield made
    made.close()


# The choice.


def test_the_order_is_the_operators():
    assert parse_order("auto") == tuple(NAMES)
    assert parse_order("tcp, ipc") == ("tcp", "ipc")


@pytest.mark.parametrize("value", ["", "udp", "tcp,udp", "tcp,tcp", "auto,tcp", "TCP"])
def test_names_that_are_none_are_refused_with_those_that_are(value):
    for parse in (parse_order, lambda value: WorkerConfig(transports=value).validate()):
        with pytest.raises(InvalidRequest, match="ipc, nccl, rdma, tcp") as caught:
            parse(value)
        assert caught.value.field == "transports"


def test_the_best_kind_of_both_ends_comes_first():
    addresses = [address_of(name, 0, "h", 5, HOST) for name in ("tcp", "rdma", "ipc")]
    routes = routes_to(addresses, ("ipc", "nccl", "rdma", "tcp"), HOST)
    assert routes == (Route("ipc", "h", 5), Route("rdma", "h", 5), Route("tcp", "h", 5))
    assert routes_to(addresses, ("tcp", "ipc"), HOST) == (Route("tcp", "h", 5), Route("ipc", "h", 5))


@pytest.mark.parametrize("ours", ["boot.2", "other.1", ""])
def test_ipc_is_for_one_host(ours):
    theirs = [address_of(name, 0, "h", 5, HOST if ours else "") for name in ("ipc", "tcp")]
    assert [route.name for route in routes_to(theirs, ("ipc", "tcp"), ours)] == ["tcp"]
    with pytest.raises(Mismatch, match="no transport in common"):
        routes_to(theirs, ("ipc",), ours)


def test_no_common_transport_is_an_error_with_both_sides():
    unknown = kv_pb2.TransportAddress(address="h:1")
    unknown.kind = 99
    with pytest.raises(Mismatch, match=r"this worker has nccl, ipc, the peer has tcp, 99") as caught:
        routes_to([*tcp_address("h:5"), unknown], ("nccl", "ipc"), HOST)
    assert caught.value.field == "transfer.transports"


@pytest.mark.parametrize("address", ["", "nohost", "host:", "host:0", "host:99999", ":80"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(InvalidRequest, match="transport address"):
        routes_to(tcp_address(address), ("tcp",), HOST)


def test_a_worker_offers_all_available_transports_and_at_least_the_required_ones():
    assert list(make_paths("auto", HostKv(), SLOT_BYTES, None)) == ["ipc", "tcp"]
    assert list(make_paths("tcp,ipc", HostKv(), SLOT_BYTES, None)) == ["tcp", "ipc"]
    with pytest.raises(Unsupported, match="transports=nccl,tcp: nccl cannot be used: nccl needs executor=cuda"):
        make_paths("nccl,tcp", HostKv(), SLOT_BYTES, None)


def test_every_address_names_its_listener_and_only_ipc_the_host(many):
    (ipc, tcp) = many.make(HostKv(), "ipc", identity=HOST).transport.addresses
    assert (ipc.kind, tcp.kind) == (kv_pb2.TRANSPORT_KIND_IPC, kv_pb2.TRANSPORT_KIND_TCP)
    assert ipc.address == f"{tcp.address}/{HOST}"


# Greetings.


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + bytes(100), bytes(PIECE_BYTES), b"\xff" * 4096],
    ids=["http", "zeros", "ones"],
)
@pytest.mark.parametrize("greeted", [False, True])
def test_a_connection_that_speaks_something_else_is_dropped(many, garbage, greeted):
    receiver = many.make(kind="tcp")
    with (connected if greeted else dialled)(receiver) as sock:
        sock.sendall(garbage)
        assert ended(sock)
    wait_until(lambda: receiver.transport.totals().num_bad_connections == 1)


def test_a_greeting_that_is_not_the_senders_is_dropped(many):
    receiver = many.make(kind="tcp")
    with dialled(receiver) as sock:
        sock.sendall(encode_welcome(Slots(1, 1, b"")))
        assert ended(sock)


@pytest.mark.parametrize("kind", ["ipc", "nccl", "rdma"])
def test_a_kind_that_a_receiver_does_not_take_is_refused_by_name(many, kind):
    receiver = many.make(kind="tcp")
    with dialled(receiver) as sock:
        sock.sendall(encode_open(Open(NAMES[kind], 0, 3, b"", key_of(receiver))))
        error = refusal(sock)
        assert ended(sock)
    assert isinstance(error, Unsupported)
    assert error.message == f"KV over {kind} is not received here, only over tcp"
    assert receiver.transport.totals().num_refused == 1


def test_a_sender_of_another_host_is_refused(many):
    receiver = many.make(HostKv(), "ipc")
    with dialled(receiver) as sock:
        sock.sendall(encode_open(Open(kv_pb2.TRANSPORT_KIND_IPC, 0, 3, b"host-memory:elsewhere.1", key_of(receiver))))
        assert isinstance(refusal(sock), Mismatch)
    assert receiver.transport.totals_by_kind()["ipc"].num_refused == 1


def refusal(sock):
    what, num_bytes, crc = decode_greeting(sock.recv(GREETING_BYTES, socket.MSG_WAITALL))
    assert what is Greeting.REFUSED
    body = sock.recv(num_bytes, socket.MSG_WAITALL)
    check_greeting_body(body, crc)
    return decode_refused(body)


# The next kind.


def full(kind="ipc"):
    """Returns an executor, and paths without free slots."""
    executor = HostKv()
    return executor, {kind: HostIpcPath(executor, SLOT_BYTES, max_senders=0), "tcp": None}


def test_a_refused_kind_is_replaced_once_logged_and_remembered(many, caplog):
    executor, paths = full()
    sender, receiver = many.make(filled(HostKv()), "ipc"), many.make(executor, paths=paths)
    with caplog.at_level(logging.WARNING):
        hand_over(sender, receiver)
        receiver.wait_for(Landed)
        sender.wait_for(Pushed)
    assert receiver.read(TARGET) == sender.read((3, 9, 4, 20, 21))
    assert "sending KV to 127.0.0.1:" in caplog.text
    assert "over tcp, since ipc failed: 0 senders have ipc slots, the maximum" in caplog.text
    # A new connection does not ask again.
    sender.transport.cut_outbound(1)
    wait_until(lambda: receiver.transport.num_connections == 0)
    hand_over(sender, receiver, number=2)
    receiver.wait_for(Landed)
    assert sender.wait_for(Pushed).push_id == 2
    sent, taken = sender.transport.totals_by_kind(), receiver.transport.totals_by_kind()
    assert (sent["ipc"].num_fallbacks, sent["ipc"].num_sent_pieces, sent["tcp"].num_sent_pieces) == (1, 0, 8)
    assert (taken["ipc"].num_refused, taken["tcp"].num_received_pieces) == (1, 8)


def test_a_kind_that_was_refused_is_asked_again_after_a_while(many):
    executor, paths = full()
    receiver = many.make(executor, paths=paths)
    ours = HostKv()
    mine, clock = {"ipc": HostIpcPath(ours, SLOT_BYTES), "tcp": None}, [100.0]
    totals = Totals(mine)
    dialer = Dialer(ours, mine, EPOCH, 0, totals, lambda kind: False, clock=lambda: clock[0])
    routes = [Route(name, "127.0.0.1", receiver.port, key_of(receiver)) for name in ("ipc", "tcp")]
    for passed, num_fallbacks in ((0, 1), (59, 1), (2, 2)):
        clock[0] += passed
        dialer.open(routes, threading.Condition(), lambda sock: None).close()
        assert totals.by_kind()["ipc"].num_fallbacks == num_fallbacks


def test_without_another_kind_a_refusal_fails_the_push(many):
    executor, paths = full()
    only = HostKv()
    sender = many.make(filled(only), paths={"ipc": HostIpcPath(only, SLOT_BYTES)})
    receiver = many.make(executor, paths=paths)
    hand_over(sender, receiver)
    assert "have ipc slots, the maximum" in sender.wait_for(PushFailed).reason
    sender.transport.fence_outbound(1)
    sender.wait_for(PushFenced)


class Broken(HostIpcPath):
    """Slots that cannot be reached."""

    def connect(self, slots):
        raise RuntimeError("no driver")


def test_slots_that_cannot_be_reached_are_given_back(many, caplog):
    executor, theirs = HostKv(), HostKv()
    path = HostIpcPath(theirs, SLOT_BYTES)
    sender = many.make(filled(executor), paths={"ipc": Broken(executor, SLOT_BYTES), "tcp": None})
    receiver = many.make(theirs, paths={"ipc": path, "tcp": None})
    hand_over(sender, receiver)
    receiver.wait_for(Landed)
    assert "ipc cannot be used: RuntimeError: no driver" in caplog.text
    wait_until(lambda: path.num_senders == 0)
    assert sender.transport.totals_by_kind()["ipc"].num_fallbacks == 1


def test_slots_smaller_than_a_piece_are_not_used(many, caplog):
    sender = many.make(filled(HostKv()), "ipc", max_piece_bytes=SLOT_BYTES + 1)
    receiver = many.make(HostKv(), "ipc")
    hand_over(sender, receiver)
    receiver.wait_for(Landed)
    assert f"4 slots of {SLOT_BYTES} bytes; a piece has up to {SLOT_BYTES + 1}" in caplog.text


class Exhausted(HostIpcPath):
    """Whose library fails."""

    def accept(self, offer):
        raise MemoryError("out of device memory")


def test_a_defect_of_the_receivers_library_is_reported_to_the_sender(many, caplog):
    theirs = HostKv()
    sender = many.make(filled(HostKv()), "ipc")
    receiver = many.make(theirs, paths={"ipc": Exhausted(theirs, SLOT_BYTES), "tcp": None})
    hand_over(sender, receiver)
    receiver.wait_for(Landed)
    assert "slots for ipc could not be made: out of device memory" in caplog.text


@pytest.mark.parametrize("answer", ["nothing", "silence", "garbage", "damaged"])
def test_an_answer_that_is_none_fails_the_push(many, answer, monkeypatch):
    monkeypatch.setattr("baton.worker.transfer.send.dialer.SEND_SECONDS", 0.5)
    sender = many.make(filled(HostKv()), "tcp")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()
        thread = threading.Thread(target=answer_with, args=(listener, answer, stop))
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        sender.transport.connect(Outbound(1, tcp_address(address), 1, EPOCH, GENERATION, True))
        push_all(sender)
        assert address in sender.wait_for(PushFailed).reason
        stop.set()
        thread.join(10)


def answer_with(listener, answer, stop):
    sock, _ = listener.accept()
    with sock:
        if answer == "silence":
            stop.wait(30)
        if answer == "garbage":
            sock.sendall(b"\x00" * 100)
        if answer == "damaged":
            damaged = bytearray(encode_welcome(Slots(4, 4096, b"blob")))
            damaged[-1] ^= 1
            sock.sendall(damaged)


def test_closing_does_not_wait_for_a_receiver_that_never_answers(many):
    sender = many.make(filled(HostKv()), "tcp")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        sender.transport.connect(Outbound(1, tcp_address(address), 1, EPOCH, GENERATION, True))
        sock, _ = listener.accept()
        with sock:
            assert sock.recv(GREETING_BYTES, socket.MSG_WAITALL)
            sender.transport.close()
            while sock.recv(4096):
                pass
            sender.wait_for(PushFailed)


def test_an_unreachable_receiver_is_no_fallback(many):
    sender, receiver = many.make(filled(HostKv()), "ipc"), many.make(HostKv(), "ipc")
    known = outbound(receiver)
    receiver.transport.close()
    sender.transport.connect(known)
    sender.wait_for(PushFailed)
    assert sender.transport.totals().num_fallbacks == 0


# Frames.


def test_frames_survive_the_wire():
    slots, opened = Slots(4, 1 << 40, b"blob"), Open(3, 2, 2**64 - 1, b"offer", bytes(range(16)))
    for encoded, decode, value in (
        (encode_open(opened), decode_open, opened),
        (encode_welcome(slots), decode_welcome, slots),
    ):
        _, num_bytes, crc = decode_greeting(encoded)
        body = encoded[GREETING_BYTES:]
        assert len(body) == num_bytes
        check_greeting_body(body, crc)
        assert decode(body) == value
    error = decode_refused(encode_refused(NoCapacity("full", field="x", retry_after_ms=5))[GREETING_BYTES:])
    assert (type(error), error.message, error.field, error.retry_after_ms) == (NoCapacity, "full", "x", 5)
    assert decode_credit(encode_credit(7)) == 7


@pytest.mark.parametrize(
    "header",
    [
        PieceHeader(2**64 - 1, 2**63, EPOCH, 31, 4095, 512, 4 << 20, 2**64 - 1, 32, (3, 5), 7, 1 << 20),
        PieceHeader(0, 0, 0, 0, 0, 0, 0),
    ],
)
def test_a_piece_header_survives_the_wire_and_no_bit_of_it_can_change(header):
    encoded = encode_piece(header)
    assert len(encoded) == PIECE_BYTES
    assert decode_piece(encoded) == header
    for bit in range(len(encoded) * 8):
        with pytest.raises(DataLoss):
            decode_piece(flipped(encoded, bit))


def test_no_bit_of_a_greeting_or_a_credit_can_change():
    encoded = encode_welcome(Slots(4, 4096, b"blob"))
    for bit in range(len(encoded) * 8):
        with pytest.raises(DataLoss):
            check_greeting(flipped(encoded, bit))
    for bit in range(64):
        with pytest.raises(DataLoss):
            decode_credit(flipped(encode_credit(5), bit))


def check_greeting(data):
    _, _, crc = decode_greeting(data)
    check_greeting_body(bytes(data[GREETING_BYTES:]), crc)


@pytest.mark.parametrize("decode", [decode_open, decode_welcome])
def test_a_too_short_greeting_is_reported(decode):
    with pytest.raises(DataLoss, match="must have at least"):
        decode(b"abc")


def test_a_greeting_too_long_is_none():
    with pytest.raises(DataLoss, match="invalid first frame"):
        decode_greeting(encode_greeting(Greeting.OPEN, bytes((4 << 20) + 1)))


def test_a_malformed_refusal_is_reported():
    with pytest.raises(DataLoss, match="REFUSED"):
        decode_refused(b"\xff\xff\xff")


def flipped(data, bit):
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return damaged


def test_a_port_in_use_is_named(many):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"transfer_listen=127.0.0.1:{port}"):
            many.make(HostKv(), port=port)

"""KV over TLS: workers of the fleet alone, nothing in the clear, and no worse than without it."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time

import numpy as np
import pytest
from support.network.byte_proxy import ByteProxy
from support.network.tls_rig import EXPIRED, make_certs, replace_files
from support.transfer.transport_ends import (
    EPOCH,
    GENERATION,
    NUM_LAYERS,
    SLOT_BYTES,
    SOURCE,
    TARGET,
    Ends,
    HostKv,
    certificates,
    dialled,
    ended,
    filled,
    hand_over,
    inbound,
    kv_tls,
    make_kv,
    outbound,
    piece_of,
    push_all,
    wait_until,
)

from baton.rpc.errors import PermissionDenied, Unsupported
from baton.rpc.identity.identity import GATEWAY, KVSTORE, OPERATOR, ROUTER, WORKER
from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId
from baton.worker.transfer.base import InboundFailed, Landed, Outbound, PushFailed
from baton.worker.transfer.kinds.factory import make_paths
from baton.worker.transfer.wire import tls as tls_socket
from baton.worker.transfer.wire.frames import (
    GREETING_BYTES,
    Greeting,
    Open,
    decode_greeting,
    decode_refused,
    encode_open,
)
from baton.worker.transfer.wire.sockets import readable, receive_exactly
from baton.worker.transfer.wire.tls import KvTls, TlsSocket
from baton.worker.transport_kinds import NAMES

KINDS = ["tcp+tls", "direct+tls"]


@pytest.fixture
def many():
    made = Ends()
    yield made
    made.close()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Certificates of another CA."""
    return make_certs(tmp_path_factory.mktemp("stranger"))


@pytest.fixture
def proxied():
    """Makes proxies in front of receivers."""
    made = []

    def make(receiver):
        made.append(ByteProxy(("127.0.0.1", receiver.port)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def key_of(receiver):
    return receiver.transport.addresses[0].key


def through(proxy, receiver, number=1):
    """A push that goes by way of a proxy."""
    (address,) = receiver.transport.addresses
    address.address = proxy.address
    return Outbound(number, [address], number, EPOCH, GENERATION, True, None)


@pytest.mark.parametrize("kind", KINDS)
def test_no_data_in_transit_is_readable(many, kind, proxied):
    sender, receiver = many.make(filled(make_kv(kind)), kind), many.make(None, kind)
    proxy = proxied(receiver)
    proxy.listens = True
    receiver.transport.open(inbound(TARGET))
    sender.transport.connect(through(proxy, receiver))
    push_all(sender)
    receiver.wait_for(Landed)
    seen = bytes(proxy.seen)
    assert receiver.read(TARGET) == sender.read(SOURCE)
    assert len(seen) > sum(map(len, sender.read(SOURCE)))
    assert key_of(receiver) not in seen
    for layer in sender.read(SOURCE):
        assert layer[:32] not in seen
        assert layer[-32:] not in seen


@pytest.mark.parametrize("service", [GATEWAY, ROUTER, KVSTORE, OPERATOR])
def test_other_services_are_refused_with_a_reason_for_any_key(many, service):
    receiver = many.make(kind="direct+tls")
    with dialled(receiver) as plain:
        sock = kv_tls(service).connect(plain, 10)
        sock.sendall(encode_open(Open(NAMES["tcp"], 0, 3, b"", key_of(receiver))))
        what, num_bytes, _ = decode_greeting(receive_exactly(sock, GREETING_BYTES))
        assert what is Greeting.REFUSED
        error = decode_refused(bytes(receive_exactly(sock, num_bytes)))
    assert isinstance(error, PermissionDenied)
    assert f"/{service}/" in error.message
    assert receiver.transport.totals().num_strangers == 1


@pytest.mark.parametrize("what", ["another CA", "another fleet", "expired", "plain"])
def test_a_push_to_a_receiver_of_another_fleet_fails_with_that_error(many, what, stranger, tmp_path):
    sender = many.make(filled(HostKv()), "direct+tls")
    if what == "plain":
        receiver = many.make(kind="direct")
    else:
        ca = None if what == "another CA" else certificates()
        values = {"fleet": "other"} if what == "another fleet" else {}
        folder = make_certs(tmp_path / "theirs", ca=ca, **values)
        theirs = kv_tls(WORKER, folder)
        if what == "expired":
            replace_files(folder, make_certs(tmp_path / "old", ca=certificates(), **EXPIRED), WORKER)
            theirs = Unchecked(folder)
        receiver = many.make(kind="direct+tls", tls=theirs)
    hand_over(sender, receiver)
    reason = sender.wait_for(PushFailed).reason
    assert f"127.0.0.1:{receiver.port}" in reason
    assert not receiver.transport.totals().num_received_pieces
    if what != "plain":
        assert "certificate" in reason.lower()


class Unchecked(KvTls):
    """Presents certificates that no service would start with."""

    def __init__(self, folder):
        self._folder = folder

    def accept(self, sock, seconds):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(str(self._folder / "worker.crt"), str(self._folder / "worker.key"))
        secured = TlsSocket(sock, context)
        secured.handshake(seconds)
        return secured


@pytest.mark.parametrize("how", ["no certificate", "another CA", "plain", "garbage", "nothing"])
def test_a_sender_that_is_no_worker_writes_nothing(many, how, stranger, caplog, monkeypatch):
    monkeypatch.setattr("baton.worker.transfer.receive.connection._GREETING_SECONDS", 1.0)
    receiver = many.make(kind="direct+tls")
    receiver.transport.open(inbound(TARGET))
    before = receiver.read(TARGET)
    with dialled(receiver) as sock:
        if how == "plain":
            sock.sendall(encode_open(Open(NAMES["tcp"], 0, 3, b"", key_of(receiver))))
        elif how == "garbage":
            sock.sendall(b"\x16\x03\x03\xff\xff" + os.urandom(70000))
        elif how != "nothing":
            context = ssl._create_unverified_context()
            if how == "another CA":
                context.load_cert_chain(str(stranger / "worker.crt"), str(stranger / "worker.key"))
            with pytest.raises(OSError, match=r"(?i)alert|certificate|reset|eof"), context.wrap_socket(sock) as secured:
                # In TLS 1.3 a client gets the error when it reads.
                secured.recv(1)
        if how in ("plain", "garbage", "nothing"):
            while not ended(sock):
                pass
    wait_until(lambda: receiver.transport.num_connections == 0)
    assert receiver.transport.totals().num_bad_connections == 1
    assert "the TLS handshake failed" in caplog.text
    assert receiver.read(TARGET) == before


def test_a_plain_sender_does_not_fall_back_to_the_clear(many):
    sender, receiver = many.make(filled(HostKv()), "direct"), many.make(kind="direct+tls")
    hand_over(sender, receiver)
    sender.wait_for(PushFailed)
    assert not receiver.transport.totals().num_received_pieces


def test_new_files_are_used_by_the_next_connection_and_old_ones_continue(many, tmp_path):
    in_use = make_certs(tmp_path / "in-use")
    tls = kv_tls(WORKER, in_use)
    sender, receiver = many.make(filled(HostKv()), "direct", tls=tls), many.make(kind="direct", tls=tls)
    hand_over(sender, receiver)
    receiver.wait_for(Landed)
    replace_files(in_use, make_certs(tmp_path / "new", ca=in_use), WORKER)
    hand_over(sender, receiver, number=2)
    receiver.wait_for(Landed)
    again = many.make(filled(HostKv()), "direct", tls=tls)
    hand_over(again, receiver, number=3)
    receiver.wait_for(Landed)
    assert receiver.transport.num_connections == 2


@pytest.mark.parametrize("kind", KINDS)
def test_large_pieces_arrive_whole_and_quickly(many, kind):
    """No wait of the low-water mark ends a piece: twenty of them would take a second."""
    num_blocks = 4096
    sender, receiver = (many.make(HostKv(num_blocks), kind) for _ in range(2))
    ids = [BlockId(i) for i in range(num_blocks)]
    rng = np.random.default_rng(5)
    for layer in range(NUM_LAYERS):
        data = rng.integers(0, 256, num_blocks * sender.piece_bytes, np.uint8).tobytes()
        sender.executor.write_blocks(layer, ids, memoryview(data))
    began = time.monotonic()
    for number in range(1, 11):
        receiver.transport.open(inbound(ids, transfer_id=number, checksum=False))
        sender.transport.connect(outbound(receiver, push_id=number, transfer_id=number, checksum=False))
        for layer in range(NUM_LAYERS):
            sender.transport.push(number, piece_of(layer, 0, ids))
        sender.transport.finish(number)
        receiver.wait_for(Landed)
    seconds = time.monotonic() - began
    assert receiver.read(ids) == sender.read(ids)
    assert seconds < 60, seconds


def test_a_connection_with_a_worn_key_is_replaced_when_idle(many, monkeypatch):
    sender, receiver = many.make(filled(HostKv()), "direct+tls"), many.make(kind="direct+tls")
    hand_over(sender, receiver)
    receiver.wait_for(Landed)
    monkeypatch.setattr(tls_socket, "_REKEY_BYTES", 1)
    made = []
    monkeypatch.setattr(KvTls, "connect", lambda *a, real=KvTls.connect: made.append(1) or real(*a))
    hand_over(sender, receiver, number=2)
    receiver.wait_for(Landed)
    assert made
    monkeypatch.setattr(tls_socket, "_MAX_BYTES", 1)
    hand_over(sender, receiver, number=3)
    assert "under one key" in sender.wait_for(PushFailed).reason


@pytest.mark.parametrize("name", ["nccl", "rdma"])
def test_unencrypted_transports_must_be_allowed(name):
    with pytest.raises(Unsupported, match=f"{name} encrypts nothing.*kv_plain") as caught:
        make_paths(f"{name},tcp", HostKv(), SLOT_BYTES, None, encrypted=True)
    assert caught.value.field == "transports"
    assert list(make_paths("auto", HostKv(), SLOT_BYTES, None, encrypted=True)) == ["ipc", "tcp"]
    assert not WorkerConfig().kv_plain


def pair():
    """Two ends of one TLS connection."""
    a, b = socket.socketpair()
    made = []
    thread = threading.Thread(target=lambda: made.append(kv_tls().accept(b, 10)))
    thread.start()
    client = kv_tls().connect(a, 10)
    thread.join(10)
    return client, made[0]


def test_buffered_data_counts_as_readable():
    client, server = pair()
    try:
        assert not readable(client, 0)
        assert not readable(server, 0)
        client.sendall(b"one" * 20000)
        assert receive_exactly(server, 3) == b"one"
        assert readable(server, 0)
        assert len(receive_exactly(server, 59997)) == 59997
        assert not readable(server, 0)
        client.close()
        assert readable(server, 10)
        assert server.recv_into(bytearray(1)) == 0
    finally:
        client.close()
        server.close()


def test_two_threads_of_each_end_may_speak_at_once():
    client, server = pair()
    size, heard = 8 << 20, {}
    data = {client: os.urandom(size), server: os.urandom(size)}

    def hear(sock):
        heard[sock] = bytes(receive_exactly(sock, size))

    threads = [threading.Thread(target=sock.sendall, args=(data[sock],)) for sock in data]
    threads += [threading.Thread(target=hear, args=(sock,)) for sock in data]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert heard[client] == data[server]
        assert heard[server] == data[client]
    finally:
        client.close()
        server.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_changed_on_the_way_fails_the_transfer_and_is_written_nowhere(many, kind, proxied):
    sender, receiver = many.make(filled(make_kv(kind)), kind), many.make(None, kind)
    proxy = proxied(receiver)
    receiver.transport.open(inbound(TARGET))
    sender.transport.connect(through(proxy, receiver))
    sender.transport.push(1, piece_of(0, 0, SOURCE))
    wait_until(lambda: receiver.transport.totals().num_received_pieces == 1)
    before = receiver.read(TARGET)
    proxy.flip_next(100)
    sender.transport.push(1, piece_of(1, 0, SOURCE))
    assert "broke" in receiver.wait_for(InboundFailed).reason
    assert proxy.num_flipped == 1
    assert receiver.read(TARGET)[1] == before[1]

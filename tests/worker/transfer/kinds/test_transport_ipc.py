"""Slots in host memory: permitted writers, their lifetime, and the cleanup after a process ended."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from support.processes.child import Child
from support.transfer.ipc_sender import IpcSender
from support.transfer.transport_ends import (
    EPOCH,
    GENERATION,
    NUM_LAYERS,
    SLOT_BYTES,
    SOURCE,
    TARGET,
    Ends,
    HostKv,
    connected,
    dialled,
    ended,
    filled,
    hand_over,
    inbound,
    key_of,
    make_kv,
    outbound,
    piece_of,
    wait_until,
)

from baton.rpc.errors import InvalidRequest, Mismatch, NoCapacity, Unavailable, Unsupported
from baton.worker.core import BlockId
from baton.worker.transfer.base import InboundFailed, InboundFenced, Landed, Piece, Pushed, PushFailed, PushFenced
from baton.worker.transfer.bulk import Slots
from baton.worker.transfer.kinds.ipc.host import HostIpcPath
from baton.worker.transfer.routes import Route
from baton.worker.transfer.send import pieces as outgoing
from baton.worker.transfer.send.dialer import Dialer
from baton.worker.transfer.totals import Totals
from baton.worker.transfer.wire.checksum import checksum_of
from baton.worker.transfer.wire.frames import CREDIT_BYTES, Open, PieceHeader, encode_open, encode_piece
from baton.worker.transfer.wire.greetings import receive_welcome
from baton.worker.transfer.wire.sockets import receive_exactly
from baton.worker.transport_kinds import NAMES

OTHER_TARGET = [BlockId(i) for i in (10, 11, 12, 13, 14)]


@pytest.fixture
def many():
    made = Ends()
    yield made
    made.close()


def receiving_end(many, executor=None, **values):
    """A receiver, and its path."""
    executor = executor or HostKv()
    path = HostIpcPath(executor, SLOT_BYTES, **values)
    return many.make(executor, paths={"ipc": path, "tcp": None}), path


# Slots.


def test_a_corrupt_byte_in_a_slot_fails_the_transfer_and_is_not_written(many):
    class Corrupting(HostIpcPath):
        def connect(self, slots):
            sender = super().connect(slots)
            put = sender.put

            def put_and_spoil(*piece_and_slot):
                pending = put(*piece_and_slot)
                slot = piece_and_slot[1]
                sender._memory[slot * SLOT_BYTES + 3] ^= 1
                return pending

            sender.put = put_and_spoil
            return sender

    executor = filled(HostKv())
    sender = many.make(executor, paths={"ipc": Corrupting(executor, SLOT_BYTES)})
    receiver = many.make(HostKv(), "ipc")
    before = receiver.read(TARGET)
    hand_over(sender, receiver)
    failed = receiver.wait_for(InboundFailed)
    assert failed.corrupt
    assert "checksum of layer 0, block 0" in failed.reason
    sender.wait_for(Pushed)  # its slots came back nevertheless
    assert receiver.read(TARGET) == before
    assert receiver.transport.totals_by_kind()["ipc"].num_corrupt_pieces >= 1


@pytest.mark.parametrize(("slot", "num_bytes"), [(4, 128), (0xFFFF, 128), (None, 128), (0, SLOT_BYTES + 1)], ids=str)
def test_a_header_that_names_a_slot_that_is_not_the_senders_ends_its_connection(many, slot, num_bytes):
    receiver, path = receiving_end(many)
    receiver.transport.open(inbound(TARGET))
    before = receiver.read(TARGET)
    header = PieceHeader(1, GENERATION, EPOCH, 0, 0, 1, num_bytes, checksum_of(b""), slot=slot)
    with connected(receiver, "ipc", path.offer()) as sock:
        sock.sendall(encode_piece(header))
        while not ended(sock):  # the rest of the welcome comes first
            pass
        assert path.num_senders == 1  # until our end is closed
    wait_until(lambda: path.num_senders == 0)
    assert receiver.read(TARGET) == before
    assert receiver.transport.totals_by_kind()["ipc"].num_bad_connections == 1


def test_slots_are_returned_at_once_for_any_acknowledgement_of_the_kernel(many):
    """Held back until the frame before is acknowledged, a small one comes 40 ms late."""
    receiver, path = receiving_end(many)
    headers = [PieceHeader(9, GENERATION, EPOCH, 0, 0, 1, 128, slot=slot) for slot in range(3)]  # of no transfer
    waits = []
    with dialled(receiver) as sock:
        sock.sendall(encode_open(Open(NAMES["ipc"], 0, 3, path.offer(), key_of(receiver))))
        receive_welcome(sock)
        for _ in range(5):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
            began = time.monotonic()
            for header in headers:
                sock.sendall(encode_piece(header))
            receive_exactly(sock, len(headers) * CREDIT_BYTES)
            waits.append(time.monotonic() - began)
    assert min(waits) < 0.03, waits


def test_a_slot_that_was_not_given_back_is_not_the_senders(many):
    executor, go_on = slow(HostKv())
    receiver, path = receiving_end(many, executor)
    receiver.transport.open(inbound(TARGET, checksum=False))
    one = encode_piece(PieceHeader(1, GENERATION, EPOCH, 0, 0, 1, receiver.piece_bytes, slot=0))
    with connected(receiver, "ipc", path.offer()) as sock:
        sock.sendall(one * 3)
        go_on.set()
        assert "announced in slot 0, which was not returned yet" in receiver.wait_for(InboundFailed).reason
        while not ended(sock):
            pass
    wait_until(lambda: path.num_senders == 0)


def test_a_slot_on_a_connection_that_has_none_ends_it(many):
    receiver = many.make(make_kv("tcp"), "tcp")
    with connected(receiver) as sock:
        sock.sendall(encode_piece(PieceHeader(1, GENERATION, EPOCH, 0, 0, 1, 32, slot=0)))
        assert ended(sock)
    wait_until(lambda: receiver.transport.totals().num_bad_connections == 1)


def slow(executor):
    """The executor, whose writes wait for an event."""
    go_on, write = threading.Event(), executor.write_blocks

    def slow_write(*arguments):
        assert go_on.wait(30)
        write(*arguments)

    executor.write_blocks, executor.kv_bytes = slow_write, None
    return executor, go_on


def test_a_sender_without_credits_waits_and_continues(many):
    executor, go_on = slow(HostKv())
    sender, (receiver, _) = many.make(filled(HostKv()), "ipc"), receiving_end(many, executor, num_slots=2)
    receiver.transport.open(inbound(TARGET))
    sender.transport.connect(outbound(receiver))
    for layer in range(NUM_LAYERS):
        for index, block_id in enumerate(SOURCE):
            sender.transport.push(1, Piece(layer, index, 1, [block_id]))
    sender.transport.finish(1)
    wait_until(lambda: sender.transport.totals().num_sent_pieces == 2)
    sender.transport.push(99, piece_of(0, 0, SOURCE))  # of nobody: verbs return at once
    assert sender.transport.totals().num_sent_pieces == 2
    assert sender.transport.poll() == []
    go_on.set()
    receiver.wait_for(Landed)
    assert receiver.read(TARGET) == sender.read(SOURCE)
    assert sender.wait_for(Pushed).num_pieces == 2 * len(SOURCE)


def test_a_receiver_that_gives_no_slot_back_fails_the_push(many, monkeypatch):
    monkeypatch.setattr(outgoing, "SEND_SECONDS", 0.2)
    executor, go_on = slow(HostKv())
    sender, (receiver, _) = many.make(filled(HostKv()), "ipc"), receiving_end(many, executor, num_slots=1)
    hand_over(sender, receiver)
    assert "returned none of 1 slots in 0.2 s" in sender.wait_for(PushFailed).reason
    sender.transport.fence_outbound(1)
    sender.wait_for(PushFenced)
    receiver.transport.fence_inbound(1)
    go_on.set()
    receiver.wait_for(InboundFenced)


def test_a_piece_larger_than_a_slot_fails_the_push(many):
    sender, receiver = many.make(filled(HostKv()), "ipc"), many.make(HostKv(), "ipc")
    many_blocks = [BlockId(i) for i in range(40)]
    receiver.transport.open(inbound(range(40)))
    sender.transport.connect(outbound(receiver))
    sender.transport.push(1, piece_of(0, 0, many_blocks))
    assert f"the receiver's slots have {SLOT_BYTES}" in sender.wait_for(PushFailed).reason


def test_one_sender_too_many_is_reported(many):
    path = HostIpcPath(HostKv(), SLOT_BYTES, max_senders=1)
    first = path.accept(path.offer())
    with pytest.raises(NoCapacity, match="1 senders have ipc slots"):
        path.accept(path.offer())
    first.close(True)
    first.close(True)
    path.accept(path.offer()).close(False)
    assert path.num_senders == 0


def test_ends_of_two_hosts_do_not_meet():
    here, there = (HostIpcPath(HostKv(), SLOT_BYTES, identity=name) for name in ("boot.1", "boot.2"))
    with pytest.raises(Mismatch, match="one host"):
        here.accept(there.offer())
    with pytest.raises(Unsupported, match="Linux"):
        HostIpcPath(HostKv(), SLOT_BYTES, identity="")


def test_slots_that_are_not_there_are_not_mapped():
    path = HostIpcPath(HostKv(), SLOT_BYTES)
    receiver = path.accept(path.offer())
    good = receiver.slots
    with pytest.raises(InvalidRequest, match="expected"):
        path.connect(Slots(4, SLOT_BYTES, b"x"))
    with pytest.raises(InvalidRequest, match="in all"):
        path.connect(Slots(5, SLOT_BYTES, good.blob))
    wrong = bytearray(good.blob)
    wrong[16] ^= 1  # another inode
    with pytest.raises(Unavailable, match="are not at"):
        path.connect(Slots(4, SLOT_BYTES, bytes(wrong)))
    receiver.close(True)
    with pytest.raises(Unavailable):
        path.connect(good)


# Senders that stop and die.


@contextlib.contextmanager
def child(port, key):
    """A sender that has pushed a piece."""
    sender = Child(IpcSender, port, key)
    try:
        sender.wait_ready()
        yield sender
    finally:
        sender.kill()


def test_a_sender_that_was_stopped_keeps_its_slots_and_its_late_writes_reach_nothing(many):
    receiver, path = receiving_end(many)
    receiver.transport.open(inbound(TARGET))
    with child(receiver.port, key_of(receiver)) as sender:
        wait_until(lambda: receiver.transport.totals().num_received_pieces == 1)
        sender.begin("stop")
        wait_until(lambda: stopped(sender.process.pid), 30)
        receiver.transport.fence_inbound(1)  # as when its lease ends
        receiver.wait_for(InboundFenced)
        # Its blocks and a new sender serve another transfer.
        other = many.make(filled(HostKv(), seed=9), "ipc")
        hand_over(other, receiver, number=2)
        receiver.wait_for(Landed)
        assert path.num_senders == 2
        os.kill(sender.process.pid, signal.SIGCONT)
        sender.result()
        hand_over(other, receiver, number=3, target=OTHER_TARGET)
        receiver.wait_for(Landed)
        assert receiver.read(TARGET) == receiver.read(OTHER_TARGET) == other.read(SOURCE)
    wait_until(lambda: path.num_senders == 1)


def test_slots_of_a_connection_that_was_given_up_wait_for_the_senders_end(many):
    executor, go_on = slow(HostKv())
    receiver, path = receiving_end(many, executor)
    receiver.transport.open(inbound(TARGET))
    with child(receiver.port, key_of(receiver)) as sender:
        # The receiver is busy with the piece while the sender says something wrong, and is stopped.
        sender.call("spoil")
        sender.begin("stop")
        wait_until(lambda: stopped(sender.process.pid), 30)
        go_on.set()
        assert "begins with" in receiver.wait_for(InboundFailed).reason
        receiver.transport.fence_inbound(1)
        receiver.wait_for(InboundFenced)
        assert (path.num_senders, receiver.transport.num_connections) == (1, 1)
        before = receiver.read(TARGET)
        os.kill(sender.process.pid, signal.SIGCONT)
        sender.result()
        sender.call("close_transport")
        wait_until(lambda: (path.num_senders, receiver.transport.num_connections) == (0, 0))
        assert receiver.read(TARGET) == before


def test_a_sender_that_was_killed_gives_its_slots_back(many):
    receiver, path = receiving_end(many)
    receiver.transport.open(inbound(TARGET))
    with child(receiver.port, key_of(receiver)) as sender:
        wait_until(lambda: receiver.transport.totals().num_received_pieces == 1)
        sender.kill()
        reason = receiver.wait_for(InboundFailed).reason
        assert reason.endswith(("the connection ended", "Connection reset by peer"))  # it may not have read its credit
        wait_until(lambda: path.num_senders == 0)
    assert kv_mappings() == []


def stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


# Nothing is left.


def kv_mappings():
    gc.collect()
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:baton-kv" in line]


def test_a_thousand_connections_leave_no_descriptor_memory_or_thread_behind(many):
    executor = HostKv()
    receiver, path = receiving_end(many)
    paths = {"ipc": HostIpcPath(executor, SLOT_BYTES), "tcp": None}
    dialer = Dialer(executor, paths, EPOCH, 0, Totals(paths), lambda kind: False)
    changed = threading.Condition()

    def connect(number):
        route = Route(("ipc", "tcp")[number % 2], "127.0.0.1", receiver.port, key_of(receiver))
        connection = dialer.open([route], changed, lambda sock: None)
        connection.cut()
        connection.close()

    for number in range(20):
        connect(number)
    wait_until(lambda: receiver.transport.num_connections == 0)
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    shared = set(os.listdir("/dev/shm"))
    for number in range(1000):
        connect(number)
    wait_until(lambda: receiver.transport.num_connections == 0)
    assert path.num_senders == 0
    assert kv_mappings() == []
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before and threading.active_count() <= threads)
    wait_until(lambda: shared.issuperset(os.listdir("/dev/shm")))  # other processes' come and go: UCX makes some


def test_closing_a_transport_gives_its_slots_up(many):
    sender, (receiver, path) = many.make(filled(HostKv()), "ipc"), receiving_end(many)
    hand_over(sender, receiver)
    receiver.wait_for(Landed)
    assert path.num_senders == 1
    assert len(kv_mappings()) == 2
    receiver.transport.close()
    sender.transport.close()
    wait_until(lambda: path.num_senders == 0)
    assert kv_mappings() == []


def test_an_idle_sender_is_notified_of_a_connection_that_was_given_up(many):
    sender, (receiver, path) = many.make(filled(HostKv()), "ipc"), receiving_end(many)
    hand_over(sender, receiver)
    receiver.wait_for(Landed)
    sender.wait_for(Pushed)
    (connection,) = receiver.transport._receiver._connections
    connection._sock.shutdown(socket.SHUT_WR)
    wait_until(lambda: path.num_senders == 0)
    hand_over(sender, receiver, number=2)
    receiver.wait_for(Landed)

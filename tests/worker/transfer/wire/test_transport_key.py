"""KV connections must present the key from the control stream, so that a guessed port is not enough."""

from __future__ import annotations

import socket

import pytest
from support.transfer.transport_ends import (
    TARGET,
    Ends,
    dialled,
    ended,
    hand_over,
    inbound,
    key_of,
    outbound,
    push_all,
    wait_until,
)

from baton.rpc.errors import PermissionDenied
from baton.worker.transfer.base import Landed, PushFailed
from baton.worker.transfer.wire.frames import (
    GREETING_BYTES,
    Greeting,
    Open,
    decode_greeting,
    decode_refused,
    encode_open,
)
from baton.worker.transport_kinds import NAMES


@pytest.fixture
def many():
    made = Ends()
    yield made
    made.close()


def refusal(sock):
    what, num_bytes, _ = decode_greeting(sock.recv(GREETING_BYTES, socket.MSG_WAITALL))
    assert what is Greeting.REFUSED
    return decode_refused(sock.recv(num_bytes, socket.MSG_WAITALL))


def test_every_receiver_has_a_key_of_its_own_in_all_of_its_addresses(many):
    first, second = many.make(kind="ipc"), many.make(kind="tcp")
    assert len({address.key for address in first.transport.addresses}) == 1
    assert len(key_of(first)) == len(key_of(second)) == 16
    assert key_of(first) != key_of(second)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("wrong", ["none", "one bit", "another receiver's"])
def test_a_connection_without_the_key_is_refused_before_its_offer_is_looked_at(many, kind, wrong):
    receiver, other = many.make(kind="tcp"), many.make(kind="tcp")
    right = key_of(receiver)
    key = {
        "none": bytes(16),
        "one bit": right[:-1] + bytes([right[-1] ^ 1]),
        "another receiver's": key_of(other),
    }[wrong]
    with dialled(receiver) as sock:
        sock.sendall(encode_open(Open(NAMES[kind], 0, 3, b"an offer that would not be understood", key)))
        error = refusal(sock)
        assert ended(sock)
    assert isinstance(error, PermissionDenied)
    totals = receiver.transport.totals()
    assert (totals.num_strangers, totals.num_refused, totals.num_bad_connections) == (1, 1, 0)


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_push_with_a_wrong_key_fails_and_writes_nothing(many, kind):
    sender, receiver = many.pair(kind)
    before = receiver.read(TARGET)
    receiver.transport.open(inbound(TARGET))
    forged = outbound(receiver)
    for address in forged.addresses:
        address.key = bytes(16)
    sender.transport.connect(forged)
    push_all(sender)
    failed = sender.wait_for(PushFailed)
    assert "does not present this receiver's key" in failed.reason
    assert receiver.read(TARGET) == before
    assert receiver.transport.totals().num_received_pieces == 0
    wait_until(lambda: receiver.transport.totals().num_strangers >= 1)


def test_the_key_is_asked_for_again_on_every_connection(many):
    sender, receiver = many.pair("tcp")
    hand_over(sender, receiver)
    receiver.wait_for(Landed)
    with dialled(receiver) as sock:
        sock.sendall(encode_open(Open(NAMES["tcp"], 0, 3, b"")))
        assert isinstance(refusal(sock), PermissionDenied)


def test_the_key_is_not_printed(many):
    receiver = many.make(kind="tcp")
    assert repr(key_of(receiver)) not in repr(Open(1, 0, 3, b"", key_of(receiver)))

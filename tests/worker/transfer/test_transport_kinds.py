"""Invariants of all transports: allowed and forbidden writes, and that the engine thread is never blocked."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from support.transfer.transport_ends import (
    EPOCH,
    GENERATION,
    NUM_LAYERS,
    SOURCE,
    TARGET,
    Ends,
    HostKv,
    bare,
    filled,
    hand_over,
    inbound,
    make_kv,
    outbound,
    piece_of,
    push_all,
    wait_until,
)

from baton.rpc.errors import DataLoss, Mismatch
from baton.worker.core import BlockId
from baton.worker.transfer.base import (
    InboundFailed,
    InboundFenced,
    Landed,
    Outbound,
    Piece,
    Pushed,
    PushFailed,
    PushFenced,
)

KINDS = ["tcp", "direct", "ipc", "tcp+tls", "direct+tls", "ipc+tls"]


@pytest.fixture
def many():
    made = Ends()
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def ends(many, kind):
    return many.pair(kind)


def name_of(kind):
    return "ipc" if bare(kind) == "ipc" else "tcp"


@pytest.mark.parametrize("checksum", [True, False])
def test_blocks_arrive_at_the_descriptors_positions(ends, kind, checksum):
    sender, receiver = ends
    hand_over(sender, receiver, checksum=checksum)
    num_bytes = NUM_LAYERS * len(SOURCE) * sender.piece_bytes
    assert sender.wait_for(Pushed) == Pushed(1, 4, num_bytes)
    assert receiver.wait_for(Landed) == Landed(1, 4, num_bytes)
    assert receiver.read(TARGET) == sender.read(SOURCE)
    totals = receiver.transport.totals_by_kind()[name_of(kind)]
    assert (totals.num_received_pieces, totals.num_received_bytes, totals.num_stray_pieces) == (4, num_bytes, 0)
    assert totals.receive_seconds > 0
    assert receiver.transport.totals() == totals
    assert sender.transport.totals_by_kind()[name_of(kind)].num_sent_bytes == num_bytes


@pytest.mark.parametrize("checksum", [True, False])
def test_a_piece_of_several_layers_is_laid_out_block_by_block(ends, checksum):
    sender, receiver = ends
    receiver.transport.open(inbound(TARGET, checksum=checksum))
    sender.transport.connect(outbound(receiver, checksum=checksum))
    sender.transport.push(1, piece_of(0, 0, SOURCE, num_layers=NUM_LAYERS))
    sender.transport.finish(1)
    assert receiver.wait_for(Landed).num_pieces == 1
    assert receiver.read(TARGET) == sender.read(SOURCE)


@pytest.mark.parametrize("wrong", [{"generation": 1}, {"epoch": 6}, {"transfer_id": 2}])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_piece_without_the_right_stamp_is_never_written(ends, wrong, checksum):
    sender, receiver = ends
    before = receiver.read(TARGET)
    receiver.transport.open(inbound(TARGET, checksum=checksum))
    sender.transport.connect(outbound(receiver, checksum=checksum, **wrong))
    push_all(sender)
    sender.wait_for(Pushed)
    wait_until(lambda: receiver.transport.totals().num_stray_pieces == 4)
    assert receiver.read(TARGET) == before
    assert receiver.transport.poll() == []
    # The transfer that the stray pieces were not of goes on, on the same connection.
    sender.transport.connect(outbound(receiver, push_id=2, checksum=checksum))
    push_all(sender, 2)
    receiver.wait_for(Landed)
    assert receiver.read(TARGET) == sender.read(SOURCE)
    assert receiver.transport.num_connections == 1


@pytest.mark.parametrize("checksum", [True, False])
def test_nothing_is_written_after_the_fence(ends, checksum):
    sender, receiver = ends
    receiver.transport.open(inbound(TARGET, checksum=checksum))
    sender.transport.connect(outbound(receiver, checksum=checksum))
    sender.transport.push(1, piece_of(0, 0, SOURCE))
    wait_until(lambda: receiver.transport.totals().num_received_pieces == 1)
    receiver.transport.fence_inbound(1)
    receiver.wait_for(InboundFenced)
    before = receiver.read(TARGET)
    sender.transport.push(1, piece_of(1, 0, SOURCE))
    wait_until(lambda: receiver.transport.totals().num_stray_pieces == 1)
    assert receiver.read(TARGET) == before


@pytest.mark.parametrize("kind", ["tcp", "ipc"], indirect=True)
def test_a_fence_waits_for_the_piece_that_is_being_written(many, kind):
    executor = make_kv(kind)
    writing, go_on = threading.Event(), threading.Event()
    write = executor.write_blocks

    def slow_write(layer, block_ids, data):
        writing.set()
        assert go_on.wait(10)
        write(layer, block_ids, data)

    executor.write_blocks, executor.kv_bytes = slow_write, None
    sender, receiver = many.make(filled(make_kv(kind)), kind), many.make(executor, kind)
    receiver.transport.open(inbound(TARGET))
    sender.transport.connect(outbound(receiver))
    sender.transport.push(1, piece_of(0, 0, SOURCE))
    assert writing.wait(10)
    receiver.transport.fence_inbound(1)
    assert receiver.transport.poll() == []
    go_on.set()
    receiver.wait_for(InboundFenced)


def test_fencing_an_unknown_transfer_is_answered(ends):
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


@pytest.mark.parametrize("wrong", ["twice", "layer", "block", "heads"])
@pytest.mark.parametrize("checksum", [True, False])
def test_pieces_that_overlap_or_lie_outside_fail_the_transfer(ends, wrong, checksum):
    sender, receiver = ends
    pieces = {
        "twice": [piece_of(0, 0, SOURCE[:2]), piece_of(0, 1, SOURCE[:2])],
        "layer": [piece_of(NUM_LAYERS, 0, SOURCE[:1])],
        "block": [piece_of(0, 4, SOURCE[:2])],
        "heads": [piece_of(0, 0, SOURCE[:1])],
    }[wrong]
    conversion = Rest(sender.executor) if wrong == "heads" else None
    if wrong == "layer":
        sender.executor.read_blocks = lambda layer, block_ids: bytearray(sender.piece_bytes)
        sender.executor.kv_bytes = None
    receiver.transport.open(inbound(TARGET, checksum=checksum))
    sender.transport.connect(outbound(receiver, checksum=checksum, conversion=conversion))
    for one in pieces:
        sender.transport.push(1, one)
    failed = receiver.wait_for(InboundFailed)
    outside = "2 layers, 5 blocks"
    expected = {"twice": "received before", "layer": outside, "block": outside, "heads": "heads"}
    assert expected[wrong] in failed.reason
    assert not failed.corrupt


class Rest:
    """A conversion whose first head is after the last."""

    def __init__(self, executor):
        spec = executor.kv_spec
        self._num_bytes = spec.layer_bytes(0) // spec.groups[0].num_kv_heads

    def heads(self, layer):
        return 7, 1

    def layer_bytes(self, layer):
        return self._num_bytes

    def on_host(self, data, piece):
        return data[: self._num_bytes * piece.num_blocks]


class OneHead:
    """A conversion to the second of two heads."""

    head = 1

    def __init__(self, executor):
        self._num_bytes = executor.kv_spec.layer_bytes(0) // 2

    def heads(self, layer):
        return self.head, 1

    def layer_bytes(self, layer):
        return self._num_bytes

    def on_host(self, data, piece):
        blocks = np.frombuffer(data, np.uint8).reshape(len(piece.block_ids), piece.num_layers, 2, 2, -1)
        return np.ascontiguousarray(blocks[:, :, :, 1]).reshape(-1).data


class OtherHead(OneHead):
    """And the first of two others, taken from where the second was."""

    head = 0


@pytest.mark.parametrize("kind", ["direct", "ipc"], indirect=True)
@pytest.mark.parametrize("checksum", [True, False])
def test_two_senders_of_different_heads_fill_a_transfer_together(many, kind, checksum):
    receiver = many.make(None, kind)
    receiver.transport.open(inbound(TARGET, checksum=checksum))
    senders = [many.make(filled(HostKv(), seed), kind) for seed in range(2)]
    for number, (sender, conversion) in enumerate(zip(senders, (OneHead, OtherHead), strict=True)):
        made = conversion(sender.executor)
        sender.transport.connect(outbound(receiver, checksum=checksum, conversion=made))
        sender.transport.push(1, piece_of(0, 0, SOURCE, num_layers=NUM_LAYERS))
        sender.transport.finish(1)
        if number == 0:
            sender.wait_for(Pushed)
            assert receiver.transport.poll() == []
    receiver.wait_for(Landed)
    for layer in range(NUM_LAYERS):
        heads = [np.frombuffer(end.read(ids)[layer], np.uint8).reshape(5, 2, 2, -1) for end, ids in
                 ((receiver, TARGET), (senders[0], SOURCE), (senders[1], SOURCE))]  # fmt: skip
        assert (heads[0][:, :, 1] == heads[1][:, :, 1]).all()
        assert (heads[0][:, :, 0] == heads[2][:, :, 1]).all()


def test_an_unreachable_receiver_fails_the_push(many, kind):
    sender, receiver = many.pair(kind)
    sent = outbound(receiver)
    receiver.transport.close()
    sender.transport.connect(sent)
    push_all(sender)
    assert f"127.0.0.1:{receiver.port}" in sender.wait_for(PushFailed).reason
    assert sender.transport.totals().num_fallbacks == 0
    sender.transport.fence_outbound(1)
    sender.wait_for(PushFenced)


def test_a_lost_receiver_fails_its_pushes(many, kind):
    sender, receiver = many.pair(kind)
    receiver.transport.open(inbound(TARGET))
    sender.transport.connect(outbound(receiver))
    sender.transport.push(1, piece_of(0, 0, SOURCE))
    wait_until(lambda: receiver.transport.totals().num_received_pieces == 1)
    receiver.transport.close()
    deadline = time.monotonic() + 10
    while not any(isinstance(event, PushFailed) for event in sender.transport.poll()):
        assert time.monotonic() < deadline
        sender.transport.push(1, piece_of(1, 0, SOURCE))
        time.sleep(0.01)


def test_a_receiver_restarted_at_its_address_is_dialled_again(many, kind):
    sender, receiver = many.pair(kind)
    hand_over(sender, receiver)
    receiver.wait_for(Landed)
    receiver.transport.close()
    again = many.make(None, kind, port=receiver.port)
    hand_over(sender, again, number=5)
    again.wait_for(Landed)
    assert again.read(TARGET) == sender.read(SOURCE)


def test_a_lost_sender_fails_its_pushes(many, kind):
    sender, receiver = many.pair(kind)
    receiver.transport.open(inbound(TARGET))
    sender.transport.connect(outbound(receiver))
    sender.transport.push(1, piece_of(0, 0, SOURCE))
    wait_until(lambda: receiver.transport.totals().num_received_pieces == 1)
    sender.transport.close()
    assert "ended" in receiver.wait_for(InboundFailed).reason
    wait_until(lambda: receiver.transport.num_connections == 0)


def test_a_cut_push_is_fenced_and_the_next_one_has_a_new_connection(many, kind):
    sender, receiver = many.pair(kind)
    receiver.transport.open(inbound(TARGET))
    sender.transport.connect(outbound(receiver))
    sender.transport.push(1, piece_of(0, 0, SOURCE))
    wait_until(lambda: receiver.transport.totals().num_received_pieces == 1)
    sender.transport.cut_outbound(1)
    sender.transport.fence_outbound(1)
    sender.wait_for(PushFenced)
    receiver.wait_for(InboundFailed)
    hand_over(sender, receiver, number=3)
    receiver.wait_for(Landed)


def test_blocks_that_cannot_be_read_fail_the_push(many, kind, caplog):
    executor = make_kv(kind)
    executor.kv_bytes = None

    def broken(layer, block_ids):
        raise RuntimeError("device lost")

    executor.read_blocks = broken
    sender, receiver = many.make(executor, kind), many.make(None, kind)
    sender.transport.connect(outbound(receiver))
    push_all(sender)
    assert "device lost" in sender.wait_for(PushFailed).reason
    sender.transport.fence_outbound(1)
    sender.wait_for(PushFenced)


@pytest.mark.parametrize("error", [RuntimeError, DataLoss])
def test_blocks_that_cannot_be_written_fail_the_transfer(many, kind, error, caplog):
    executor = make_kv(kind)
    executor.kv_bytes = None

    def broken(layer, block_ids, data):
        raise error("device lost")

    executor.write_blocks = broken
    sender, receiver = many.make(filled(make_kv(kind)), kind), many.make(executor, kind)
    receiver.transport.open(inbound(TARGET))
    sender.transport.connect(outbound(receiver))
    push_all(sender)
    assert "device lost" in receiver.wait_for(InboundFailed).reason
    receiver.transport.fence_inbound(1)
    receiver.wait_for(InboundFenced)
    (record,) = (record for record in caplog.records if "could not be written" in record.message)
    assert "device lost" in record.message
    assert (record.exc_info is not None) == (error is RuntimeError)


def test_a_thousand_pieces_of_a_block_arrive(many, kind):
    sender, receiver = many.pair(kind)
    for number in range(1, 101):
        receiver.transport.open(inbound(TARGET, transfer_id=number))
        sender.transport.connect(outbound(receiver, push_id=number, transfer_id=number))
        for layer in range(NUM_LAYERS):
            for index, block_id in enumerate(SOURCE):
                sender.transport.push(number, Piece(layer, index, 1, [block_id]))
        sender.transport.finish(number)
    for number in range(1, 101):
        assert receiver.wait_for(Landed).transfer_id == number
        sender.transport.forget(number)
    assert receiver.read(TARGET) == sender.read(SOURCE)


def test_a_push_to_nowhere_that_is_known_is_refused_at_once(ends):
    sender, _ = ends
    with pytest.raises(Mismatch, match="no transport in common"):
        sender.transport.connect(Outbound(1, [], 1, EPOCH, GENERATION, True))


def test_block_ids_may_be_any_sequence(ends):
    sender, receiver = ends
    receiver.transport.open(inbound(range(8)))
    sender.transport.connect(outbound(receiver))
    ids = tuple(BlockId(i) for i in range(8))
    sender.transport.push(1, piece_of(0, 0, ids, num_layers=NUM_LAYERS))
    receiver.wait_for(Landed)
    assert receiver.read(ids) == sender.read(ids)

"""Room among NCCL's communicators: the one that was idle for longest goes, and its sender comes back."""

from __future__ import annotations

import time

import pytest
import torch
from support.transfer.gpu_pairs import other_end
from support.transfer.kv_pusher import (
    EPOCH,
    GENERATION,
    PIECE_BYTES,
    SOURCE,
    KvPusher,
    make_pool,
    make_transports,
    next_event,
)
from support.transfer.kv_taker import TARGET

from baton.worker.transfer.base import Inbound, Landed, Pushed
from baton.worker.transfer.kinds.nccl import path as nccl
from baton.worker.transfer.wire.connection_limit import _SETTLED_SECONDS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def test_a_sender_too_many_takes_the_place_of_the_one_idle_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_MAX_COMMUNICATORS", 2)
    pool, source = make_pool(2), make_pool(1).view(torch.int16)
    transports = make_transports("nccl", pool)
    (address,) = transports.addresses
    senders = [other_end(KvPusher, "nccl", address) for _ in range(3)]
    order = (0, 1, 0, 2, 1, 0)  # each of the last three has to make room first
    try:
        for sender in senders:
            sender.wait_ready()
        for number, which in enumerate(order, 1):
            pool[:, list(TARGET)] = 0
            torch.cuda.synchronize()
            transports.open(Inbound(number, EPOCH, GENERATION, TARGET, checksum=True))
            senders[which].begin("push", number, True)
            event = next_event(transports, number)
            assert isinstance(event, Landed), event
            assert torch.equal(pool.view(torch.int16)[:, list(TARGET)], source[:, list(SOURCE)])
            assert isinstance(senders[which].result(), Pushed)
            time.sleep(1.5 * _SETTLED_SECONDS)
        assert transports.totals_by_kind()["nccl"].num_received_bytes == len(order) * PIECE_BYTES
        for sender in senders:
            sender.close()
    finally:
        for sender in senders:
            sender.kill()
        transports.close()

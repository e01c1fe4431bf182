"""A worker with transports=none: it computes prompts itself, listens for no KV, and peers are refused at once."""

from __future__ import annotations

import psutil
import pytest
from support.processes.worker_harness import running_worker, submit

from baton.rpc.errors import InvalidRequest, Mismatch
from baton.v1 import types_pb2
from baton.worker.transfer.base import Inbound, InboundFenced, Outbound, PushFenced
from baton.worker.transfer.no_transports import NoTransports
from baton.worker.transport_kinds import parse_order


def test_none_is_an_order_of_its_own():
    assert parse_order("none") == ()
    with pytest.raises(InvalidRequest, match="'none' is unknown"):
        parse_order("none,tcp")


def test_fences_are_answered_and_pushes_are_refused():
    woken = []
    transport = NoTransports(lambda: woken.append(1))
    transport.open(Inbound(1, 2, 3, (4,), False))
    transport.fence_inbound(1)
    transport.cut_inbound(1)
    with pytest.raises(Mismatch, match="transports=none"):
        transport.connect(Outbound(5, [], 1, 2, 3, False))
    transport.fence_outbound(5)
    transport.cut_outbound(5)
    assert transport.poll() == [InboundFenced(1), InboundFenced(1), PushFenced(5), PushFenced(5)]
    assert len(woken) == 4
    assert (transport.poll(), transport.addresses, transport.totals_by_kind()) == ([], [], {})
    assert transport.num_landed_bytes(1) == 0
    transport.close()


async def test_a_worker_without_transports_serves_and_listens_once(free_port):
    before = listening()
    async with running_worker(free_port, transports="none") as worker:
        assert listening() - before == {free_port}
        nobody = types_pb2.Endpoint(worker_id="gone", address="127.0.0.1:9")
        (slot,) = await worker.stream().generate(submit(0, [5] * 200, prefill=nobody))
        assert slot.failure is None
        assert len(slot.tokens) == 8
        assert (await worker.until_idle()).num_leased_blocks == 0


def listening():
    own = psutil.Process().net_connections(kind="tcp")
    return {one.laddr.port for one in own if one.status == psutil.CONN_LISTEN}

"""Totals by sender, for a bounded number of senders."""

from __future__ import annotations

from baton.worker.handover.decode.peer_totals import PeerTotals


def test_bytes_and_transfers_add_up_by_sender():
    flows = PeerTotals()
    flows.received("p1", 100)
    flows.received("p2", 5)
    flows.received("p1", 20)
    told = {flow.sender_worker_id: (flow.num_bytes, flow.num_transfers) for flow in flows.messages()}
    assert told == {"p1": (120, 2), "p2": (5, 1)}


def test_of_many_senders_the_last_ones_to_send_are_remembered():
    flows = PeerTotals(max_senders=2)
    for sender in ("p1", "p2", "p1", "p3"):
        flows.received(sender, 1)
    assert {flow.sender_worker_id for flow in flows.messages()} == {"p1", "p3"}
    flows.received("p2", 7)
    assert {flow.sender_worker_id: flow.num_bytes for flow in flows.messages()} == {"p3": 1, "p2": 7}

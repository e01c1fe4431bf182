"""Counts the KV received from each sender."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from baton.v1 import worker_pb2

_MAX_SENDERS = 64


class PeerTotals:
    """Completed transfers by sender. Keeps the senders that sent last."""

    def __init__(self, max_senders: int = _MAX_SENDERS) -> None:
        self._max_senders = max_senders
        self._flows: OrderedDict[str, worker_pb2.KvFlow] = OrderedDict()

    def received(self, sender_worker_id: str, num_bytes: int) -> None:
        """Counts a completed transfer."""
        flow = self._flows.get(sender_worker_id)
        if flow is None:
            flow = self._flows[sender_worker_id] = worker_pb2.KvFlow(sender_worker_id=sender_worker_id)
            if len(self._flows) > self._max_senders:
                self._flows.popitem(last=False)
        self._flows.move_to_end(sender_worker_id)
        flow.num_bytes += num_bytes
        flow.num_transfers += 1

    def messages(self) -> Collection[worker_pb2.KvFlow]:
        """Returns all totals. The messages change later."""
        return self._flows.values()

"""Counts and records completed transfers at the receiver."""

from __future__ import annotations

from baton.worker.core import TransferTimes
from baton.worker.handover.counters import HandoverCounters
from baton.worker.handover.decode.peer_totals import PeerTotals
from baton.worker.handover.decode.remote_prefill import RemotePrefill
from baton.worker.handover.messages import public_id
from baton.worker.handover.records import TransferRecord
from baton.worker.transfer.base import Transport


class CompletedTransfers:
    """Updates the counters and the totals of each peer."""

    def __init__(self, transport: Transport, counters: HandoverCounters) -> None:
        self._transport = transport
        self._counters = counters
        self.peer_totals = PeerTotals()

    def count(self, prefill: RemotePrefill, now: float) -> TransferRecord:
        """Counts a transfer, and sets the request's times. Returns the record."""
        counters = self._counters
        counters.num_transfers += 1
        counters.num_transfer_bytes += prefill.num_landed_bytes
        counters.transfer_bytes.observe(prefill.num_landed_bytes)
        record = self._record_of(prefill, now)
        counters.transfer_seconds.observe(record.seconds)
        counters.exposed_seconds.observe(record.exposed_seconds)
        self.peer_totals.received(prefill.peer.endpoint.worker_id, record.num_bytes)
        prefill.request.transfer = TransferTimes(record.num_bytes, record.seconds, record.exposed_seconds)
        return record

    def _record_of(self, prefill: RemotePrefill, now: float) -> TransferRecord:
        kinds = self._transport.totals_by_kind().items()
        return TransferRecord(
            request_id=public_id(prefill.request),
            traceparent=prefill.request.traceparent,
            transport=",".join(name for name, totals in kinds if totals.num_received_bytes),
            num_bytes=prefill.num_landed_bytes,
            num_retries=prefill.num_retries,
            started_at=prefill.leased_at,
            first_token_at=prefill.first_token_at,
            landed_at=now,
        )

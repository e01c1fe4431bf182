"""Totals of a worker's hand-overs, and their contract message."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.v1 import control_pb2
from baton.worker.requests.histogram import BYTES, Histogram


@dataclass(slots=True)
class HandoverCounters:
    """Totals since the start, one for each field of TransferCounters. The engine counts local fallbacks."""

    # As the receiver (a decode worker).
    num_transfers: int = 0  # completed
    num_transfer_bytes: int = 0  # of completed ones
    num_failed_transfers: int = 0  # leases that ended without their blocks, for any cause
    num_retries: int = 0  # failed transfers that were requested from the same peer again
    num_refused_prefills: int = 0  # that a peer refused
    num_checksum_errors: int = 0
    transfer_bytes: Histogram = field(default_factory=lambda: Histogram(BYTES))
    transfer_seconds: Histogram = field(default_factory=Histogram)  # from the lease to the last block
    exposed_seconds: Histogram = field(default_factory=Histogram)  # from the first token to the last block
    # As the sender (a prefill worker).
    num_sent_transfers: int = 0  # completed
    num_sent_bytes: int = 0  # of completed ones
    num_failed_pushes: int = 0  # leases that ended without TransferComplete
    num_failed_prefills: int = 0  # that this worker refused
    tail_seconds: Histogram = field(default_factory=Histogram)  # from the last layer to TransferComplete
    # As either.
    num_expired_leases: int = 0  # ended by silence, at this end
    num_mismatches: int = 0  # peers with an incompatible layout
    num_stray_pieces: int = 0  # received for no open lease, and discarded
    num_strangers: int = 0  # connections without the receiver's key, which were refused

    def copy(self) -> HandoverCounters:
        return dataclasses.replace(
            self,
            transfer_bytes=self.transfer_bytes.copy(),
            transfer_seconds=self.transfer_seconds.copy(),
            exposed_seconds=self.exposed_seconds.copy(),
            tail_seconds=self.tail_seconds.copy(),
        )


def counters_message(
    counters: HandoverCounters, num_stranded_blocks: int, rates: Iterable[control_pb2.TransportRate]
) -> control_pb2.TransferCounters:
    """Returns the contract's message of the totals and the current values."""
    message = control_pb2.TransferCounters(num_stranded_blocks=num_stranded_blocks, rates=rates)
    for one in dataclasses.fields(counters):
        value = getattr(counters, one.name)
        if isinstance(value, Histogram):
            getattr(message, one.name).CopyFrom(value.message())
        else:
            setattr(message, one.name, value)
    return message

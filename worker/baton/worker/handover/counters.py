"""Totals of a worker's hand-overs, for its metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class HandoverCounters:
    """Since the start. Local fallbacks are the engine's to count."""

    # As the receiver (a decode worker).
    num_transfers: int = 0  # completed
    num_transfer_bytes: int = 0  # of completed ones
    num_failed_transfers: int = 0  # leases that ended without their blocks, whatever the cause
    num_refused_prefills: int = 0  # that a peer said it would not do
    num_checksum_errors: int = 0
    exposed_seconds: float = 0.0  # from the first token to the transfer's end, of completed ones
    # As the sender (a prefill worker).
    num_sent_transfers: int = 0  # completed
    num_sent_bytes: int = 0  # of completed ones
    num_failed_pushes: int = 0  # leases that ended without TransferComplete
    num_failed_prefills: int = 0  # that this worker said it would not do
    # As either.
    num_expired_leases: int = 0  # ended by silence, at this end
    num_mismatches: int = 0  # peers whose layout does not fit
    num_stray_pieces: int = 0  # arrived for no open lease, and were discarded

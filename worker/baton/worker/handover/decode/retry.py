"""Decides which failed transfers are requested again from the same peer. Pure."""

from __future__ import annotations

from baton.worker.handover.decode.backoff import PeerBackoff
from baton.worker.handover.decode.remote_prefill import RemotePrefill

MAX_RETRIES = 1  # of one request whose transfer broke midway
_RETRY_SECONDS = 1.0  # that a request must have left for a retry


def worth_a_retry(prefill: RemotePrefill, backoff: PeerBackoff, now: float) -> bool:
    """Returns whether a failed transfer is requested again: the peer must be alive, and time must be left."""
    endpoint, deadline = prefill.peer.endpoint, prefill.request.deadline
    return (
        prefill.broken
        and prefill.needed
        and not prefill.ended
        and prefill.num_retries < MAX_RETRIES
        and prefill.peer.open
        and backoff.allows(endpoint.address, endpoint.epoch, now)
        and (deadline is None or now + _RETRY_SECONDS < deadline)
    )

"""One prefill for another worker, the stream of that worker, and the record of a completed one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from baton.worker.core import Request
from baton.worker.handover.messages import public_id
from baton.worker.handover.prefill.push_progress import PushProgress
from baton.worker.handover.records import PushRecord
from baton.worker.kv_spec import KvSpec
from baton.worker.transfer.base import KvConversion
from baton.worker.transfer.lease import SenderLease


@dataclass(slots=True, eq=False)
class DecodePeer:
    """A stream from a decode worker."""

    channel: int
    last_message_at: float
    worker_id: str = ""
    greeted: bool = False
    kv_spec: KvSpec | None = None  # None before its hello
    conversion: KvConversion | None = None  # into its layout; None: the layouts are equal
    open: bool = True
    jobs: dict[int, PrefillJob] = field(default_factory=dict)  # by prefill id
    transfers: dict[int, PrefillJob] = field(default_factory=dict)  # by transfer id


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One prefill, from its submit until its blocks are free."""

    peer: DecodePeer
    prefill_id: int
    request: Request
    push_id: int
    progress: PushProgress | None = None  # None before it is computed
    lease: SenderLease | None = None  # None before the peer's accept
    transfer_id: int = 0
    started_at: float = 0.0
    num_cached_tokens: int = 0
    computed_at: float = 0.0
    computed: bool = False
    hold_until: float = math.inf  # for a computed prompt without a lease
    pushed: bool = False
    num_pieces: int = 0
    num_bytes: int = 0


def record_of(job: PrefillJob, now: float) -> PushRecord:
    """Returns the record of a job that completes now."""
    return PushRecord(
        request_id=public_id(job.request),
        traceparent=job.request.traceparent,
        num_tokens=len(job.request.token_ids),
        num_cached_tokens=job.num_cached_tokens,
        num_bytes=job.num_bytes,
        submitted_at=job.request.arrival,
        started_at=job.started_at,
        computed_at=job.computed_at if job.computed else now,
        completed_at=now,
    )

"""One prefill for another worker, and the stream of that worker. No behaviour."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from baton.worker.core import Request
from baton.worker.handover.prefill.push_progress import PushProgress
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

"""One prompt that a prefill worker computes for this one, and the stream to that worker. No behaviour."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.v1 import types_pb2
from baton.worker.core import Request
from baton.worker.requests.state import GroupSpan
from baton.worker.transfer.lease import ReceiverLease


class Stage(enum.Enum):
    """The progress of a prefill."""

    QUEUED = "queued"  # queued at the peer
    STARTED = "started"  # the peer computes it; waits for free blocks here
    LEASED = "leased"


@dataclass(slots=True, eq=False)
class PrefillPeer:
    """A stream to a prefill worker."""

    channel: int
    endpoint: types_pb2.Endpoint
    last_message_at: float
    silence_seconds: float  # the longest silence
    idle_since: float
    epoch: int = 0  # of the peer, from its hello
    greeted: bool = False
    open: bool = True
    prefills: dict[int, RemotePrefill] = field(default_factory=dict)  # by prefill id


@dataclass(slots=True, eq=False)
class RemotePrefill:
    """One prompt's hand-over, until the engine continues its request."""

    peer: PrefillPeer
    prefill_id: int
    request: Request
    num_cached_tokens: int
    num_tokens: int  # that the peer computes, including cached ones
    deadline: float  # of the current stage
    num_retries: int = 0
    stage: Stage = Stage.QUEUED
    lease: ReceiverLease | None = None
    transfer_id: int = 0
    spans: Sequence[GroupSpan] = ()  # the leased blocks of each group
    leased_at: float = 0.0
    num_landed_bytes: int = 0
    broken: bool = False  # the transfer failed midway, and may be retried
    first_token_at: float | None = None
    needed: bool = True  # False: the request was aborted
    ended: bool = False  # the first token was the last

    @property
    def num_leased_blocks(self) -> int:
        """Blocks that the peer may write."""
        return sum(len(span.block_ids) for span in self.spans)

    @property
    def computes_there(self) -> bool:
        """Whether the peer computes the prompt, and has not sent its first token."""
        return self.stage is not Stage.QUEUED and self.first_token_at is None

"""One prompt's way from a prefill worker to this one, and the stream that it takes. No behaviour."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.v1 import types_pb2
from baton.worker.core import BlockId, Request
from baton.worker.transfer.lease import ReceiverLease


class Stage(enum.Enum):
    """How far a prefill is that has no lease yet."""

    ASKED = "asked"  # waits in the peer's queue
    STARTED = "started"  # is being computed there; waits for room here
    LEASED = "leased"


@dataclass(slots=True, eq=False)
class PrefillPeer:
    """A stream to a prefill worker."""

    channel: int
    endpoint: types_pb2.Endpoint
    heard_at: float
    patience: float  # seconds of silence that are too many
    idle_since: float
    epoch: int = 0  # of the peer's transfers, once it said hello
    greeted: bool = False
    open: bool = True
    prefills: dict[int, RemotePrefill] = field(default_factory=dict)  # by prefill id


@dataclass(slots=True, eq=False)
class RemotePrefill:
    """One prompt's hand-over, until the engine has its request back."""

    peer: PrefillPeer
    prefill_id: int
    request: Request
    num_cached_tokens: int
    num_tokens: int  # that the peer computes, cached ones included
    deadline: float  # of the stage
    num_retries: int = 0
    stage: Stage = Stage.ASKED
    lease: ReceiverLease | None = None
    transfer_id: int = 0
    block_ids: tuple[BlockId, ...] = ()
    leased_at: float = 0.0
    num_landed_bytes: int = 0
    broken: bool = False  # what arrived was wrong or ended early, and may be sent again
    first_token_at: float | None = None
    wanted: bool = True  # False: its request was aborted
    ended: bool = False  # its first token was its last

    @property
    def computes_there(self) -> bool:
        """Whether the peer has begun with the prompt, and has not told its first token."""
        return self.stage is not Stage.ASKED and self.first_token_at is None

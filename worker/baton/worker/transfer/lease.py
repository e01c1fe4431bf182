"""A transfer's lease at both ends: a state machine of events and time, which returns actions and has no effects.

                    receiver (its blocks may be written by a peer)

               landed and sent, counts equal
     OPEN ───────────────────────────────────▶ COMPLETE   COMMIT, SEND_COMPLETE
      │
      │ cancelled, expired, stalled, piece wrong, counts differ, peer aborts, peer lost
      ▼
     ABORTING ──── aborted, lost, grace over ───▶ FENCING ──── fenced ────▶ FREED   FREE
      (the peer may still write; skipped where    (FENCE; FORCE_FENCE
       the transport fences without the peer)      when that takes long)

                    sender (its blocks are being read)

     OPEN ──── pushed ────▶ SENT ──── complete ────▶ COMPLETE   FREE
      │                      │
      │ cancelled, expired, stalled, push failed, peer aborts, peer lost
      ▼                      ▼
     FENCING ──── fenced ────▶ FREED   SEND_ABORTED, FREE

Blocks leave a lease by COMMIT or FREE, exactly once. If the transport cuts within FORCE_SECONDS of FORCE_FENCE, a lease
ends at most GRACE_SECONDS + FORCE_SECONDS after the event that broke it; silence breaks it within the lease's time.
"""

from __future__ import annotations

import enum
import math

GRACE_SECONDS = 0.5  # for a peer to stop
FORCE_SECONDS = 0.25  # for a transport to fence, before it is cut
SETTLE_SECONDS = 1.0  # for the last pieces to arrive after TransferSent


class State(enum.Enum):
    """The states of a lease, of either end."""

    OPEN = "open"
    SENT = "sent"
    ABORTING = "aborting"
    FENCING = "fencing"
    COMPLETE = "complete"
    FREED = "freed"


class Action(enum.Enum):
    """Actions for the owner of a lease, in the order given."""

    SEND_SENT = "send TransferSent"
    SEND_COMPLETE = "send TransferComplete"
    SEND_ABORT = "send TransferAbort"
    SEND_ABORTED = "send TransferAborted"
    FENCE = "fence the transport"
    FORCE_FENCE = "cut the transport"
    COMMIT = "the blocks are valid"
    FREE = "the blocks are no longer read or written"


Actions = tuple[Action, ...]


class Lease:
    """The part that both ends share: time, and how a lease ends early."""

    def __init__(self, now: float, lease_seconds: float, stall_seconds: float) -> None:
        self.state = State.OPEN
        self.reason = ""  # the cause of an early end
        self.expired = False  # the cause was silence
        self._broken_at = math.inf
        self._lease_seconds = lease_seconds
        self._stall_seconds = stall_seconds
        self._expires_at = now + lease_seconds
        self._stalls_at = now + stall_seconds
        self._due = math.inf  # of ABORTING and FENCING
        self._reachable = True
        self._answer = False  # the peer waits for TransferAborted

    @property
    def live(self) -> bool:
        """Whether the lease may still complete."""
        return self.state in (State.OPEN, State.SENT)

    @property
    def ended(self) -> bool:
        """Whether the blocks have left the lease."""
        return self.state in (State.COMPLETE, State.FREED)

    @property
    def deadline(self) -> float:
        """When `tick` must be called next. inf: never."""
        if self.live:
            return min(self._expires_at, self._stalls_at)
        return math.inf if self.ended else self._due

    def is_late(self, now: float, seconds: float) -> bool:
        """Returns whether the lease was broken more than `seconds` ago and still holds its blocks."""
        return not self.ended and now - self._broken_at > seconds

    def renew(self, now: float) -> None:
        """Renews the lease: a message of the peer was received."""
        self._expires_at = max(self._expires_at, now + self._lease_seconds)

    def progressed(self, now: float) -> None:
        """Postpones the stall deadline: bytes moved, or the prefill computed more."""
        self._stalls_at = max(self._stalls_at, now + self._stall_seconds)

    def ignore_gap(self, now: float, seconds: float) -> None:
        """Ignores silence and stalls during the last `seconds`, when this process read nothing."""
        self._expires_at = max(self._expires_at, min(self._expires_at + seconds, now + self._lease_seconds))
        self._stalls_at = max(self._stalls_at, min(self._stalls_at + seconds, now + self._stall_seconds))

    def tick(self, now: float) -> Actions:
        """Applies the passage of time."""
        if now < self.deadline:
            return ()
        if self.live:
            self.expired = now >= self._expires_at
            return self._break(now, "the peer is silent" if self.expired else "the transfer makes no progress")
        return self._overdue(now)

    def cancel(self, now: float, reason: str) -> Actions:
        """Ends a live lease: this end no longer needs the transfer, or cannot continue it."""
        return self._break(now, reason) if self.live else ()

    def peer_aborts(self, now: float, reason: str) -> Actions:
        """Handles TransferAbort."""
        if self.ended:
            return (Action.SEND_ABORTED,)
        self._answer = True
        return self._break(now, f"the peer aborted: {reason}", notify=False) if self.live else ()

    def peer_lost(self, now: float) -> Actions:
        """Handles the end of the stream to the peer: no more messages pass in either direction."""
        self._reachable = False
        return self._break(now, "the stream to the peer ended", notify=False) if self.live else ()

    def fenced(self) -> Actions:
        """Handles the transport's report that no more bytes move."""
        if self.state is not State.FENCING:
            return ()
        self.state = State.FREED
        return (Action.FREE, Action.SEND_ABORTED) if self._answers() else (Action.FREE,)

    def _break(self, now: float, reason: str, notify: bool = True) -> Actions:
        self.reason = reason
        self._broken_at = now
        return (Action.SEND_ABORT,) if notify and self._reachable else ()

    def _answers(self) -> bool:
        return self._reachable and self._answer

    def _fence(self, now: float) -> Actions:
        self.state = State.FENCING
        self._due = now + FORCE_SECONDS
        return (Action.FENCE,)

    def _overdue(self, now: float) -> Actions:
        self._due = now + FORCE_SECONDS
        return (Action.FORCE_FENCE,)


class ReceiverLease(Lease):
    """The receiver's end, whose blocks are written."""

    def __init__(self, now: float, lease_seconds: float, stall_seconds: float, fences_locally: bool) -> None:
        super().__init__(now, lease_seconds, stall_seconds)
        self._fences_locally = fences_locally
        self._landed: tuple[int, int] | None = None  # pieces, bytes
        self._sent: tuple[int, int] | None = None

    def landed(self, now: float, num_pieces: int, num_bytes: int) -> Actions:
        """Records that the transport has received and verified every block."""
        self._landed = num_pieces, num_bytes
        return self._complete(now)

    def sent(self, now: float, num_pieces: int, num_bytes: int) -> Actions:
        """Handles TransferSent."""
        self._sent = num_pieces, num_bytes
        self._stall_seconds = SETTLE_SECONDS
        self._stalls_at = now + SETTLE_SECONDS
        return self._complete(now)

    def aborted(self, now: float) -> Actions:
        """Handles TransferAborted: the sender has stopped."""
        if self.live:
            return self._break(now, "the peer has stopped", notify=False)
        return self._fence(now) if self.state is State.ABORTING else ()

    def peer_lost(self, now: float) -> Actions:
        """Handles the end of the stream to the peer, so that no TransferAborted will be received."""
        if self.state is State.ABORTING:
            self._reachable = False
            return self._fence(now)
        return super().peer_lost(now)

    def _complete(self, now: float) -> Actions:
        if not self.live or self._landed is None or self._sent is None:
            return ()
        if self._landed != self._sent:
            return self._break(now, f"{self._landed} (pieces, bytes) landed, expected {self._sent} as sent")
        self.state = State.COMPLETE
        return (Action.COMMIT, Action.SEND_COMPLETE)

    def _break(self, now: float, reason: str, notify: bool = True) -> Actions:
        actions = super()._break(now, reason, notify)
        if self._fences_locally or not self._reachable:
            return actions + self._fence(now)
        self.state = State.ABORTING
        self._due = now + GRACE_SECONDS
        return actions

    def _overdue(self, now: float) -> Actions:
        return self._fence(now) if self.state is State.ABORTING else super()._overdue(now)


class SenderLease(Lease):
    """The sender's end, whose blocks are read."""

    def pushed(self, now: float) -> Actions:
        """Records that the transport has sent everything."""
        if self.state is not State.OPEN:
            return ()
        self.state = State.SENT
        self.progressed(now)
        return (Action.SEND_SENT,)

    def completed(self) -> Actions:
        """Handles TransferComplete."""
        if self.state is not State.SENT:
            return ()
        self.state = State.COMPLETE
        return (Action.FREE,)

    def _break(self, now: float, reason: str, notify: bool = True) -> Actions:
        actions = super()._break(now, reason, notify)
        return actions + self._fence(now)

    def _answers(self) -> bool:
        # A receiver that cannot fence alone waits for the answer, whichever end broke the lease.
        return self._reachable

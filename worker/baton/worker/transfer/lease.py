"""A transfer's lease, at both of its ends: events and the time go in, actions come out. Does nothing itself.

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

Blocks leave a lease by COMMIT or FREE only, exactly once. With a transport that keeps FORCE_FENCE's promise every
lease ends at most GRACE_SECONDS + FORCE_SECONDS after whatever broke it, and that is noticed within the lease's time.
"""

from __future__ import annotations

import enum
import math

GRACE_SECONDS = 0.5  # how long a peer may take to stop
FORCE_SECONDS = 0.25  # how long a transport may take to fence before it is cut
SETTLE_SECONDS = 1.0  # how long the last pieces may take after the peer said that it sent them


class State(enum.Enum):
    """Where a lease stands."""

    OPEN = "open"
    SENT = "sent"
    ABORTING = "aborting"
    FENCING = "fencing"
    COMPLETE = "complete"
    FREED = "freed"


class Action(enum.Enum):
    """What the owner of a lease has to do, in the order given."""

    SEND_SENT = "send TransferSent"
    SEND_COMPLETE = "send TransferComplete"
    SEND_ABORT = "send TransferAbort"
    SEND_ABORTED = "send TransferAborted"
    FENCE = "fence the transport"
    FORCE_FENCE = "cut the transport"
    COMMIT = "the blocks are valid"
    FREE = "nobody touches the blocks any more"


Actions = tuple[Action, ...]


class Lease:
    """What both ends have in common: time, and the way out."""

    def __init__(self, now: float, lease_seconds: float, stall_seconds: float) -> None:
        self.state = State.OPEN
        self.reason = ""  # why it was broken
        self.expired = False  # broken by silence
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
        """Whether it may still complete."""
        return self.state in (State.OPEN, State.SENT)

    @property
    def ended(self) -> bool:
        """Whether the blocks have left it."""
        return self.state in (State.COMPLETE, State.FREED)

    @property
    def deadline(self) -> float:
        """When `tick` must be called next. inf: never."""
        if self.live:
            return min(self._expires_at, self._stalls_at)
        return math.inf if self.ended else self._due

    def late(self, now: float, seconds: float) -> bool:
        """Whether it was broken longer ago than that and the blocks are still not free."""
        return not self.ended and now - self._broken_at > seconds

    def heard(self, now: float) -> None:
        """The peer gave a sign of life."""
        self._expires_at = max(self._expires_at, now + self._lease_seconds)

    def progressed(self, now: float) -> None:
        """Bytes moved, or the prefill did."""
        self._stalls_at = max(self._stalls_at, now + self._stall_seconds)

    def excuse(self, now: float, seconds: float) -> None:
        """We did not listen ourselves for the last seconds: that is nobody's silence."""
        self._expires_at = max(self._expires_at, min(self._expires_at + seconds, now + self._lease_seconds))
        self._stalls_at = max(self._stalls_at, min(self._stalls_at + seconds, now + self._stall_seconds))

    def tick(self, now: float) -> Actions:
        """Time passed."""
        if now < self.deadline:
            return ()
        if self.live:
            self.expired = now >= self._expires_at
            return self._break(now, "the peer fell silent" if self.expired else "the transfer makes no progress")
        return self._overdue(now)

    def cancel(self, now: float, reason: str) -> Actions:
        """We do not want it any more, or cannot go on."""
        return self._break(now, reason) if self.live else ()

    def peer_aborts(self, now: float, reason: str) -> Actions:
        """TransferAbort came."""
        if self.ended:
            return (Action.SEND_ABORTED,)
        self._answer = True
        return self._break(now, f"the peer aborts: {reason}", tell=False) if self.live else ()

    def peer_lost(self, now: float) -> Actions:
        """The stream to the peer ended: no message passes any more, in either direction."""
        self._reachable = False
        return self._break(now, "the stream to the peer ended", tell=False) if self.live else ()

    def fenced(self) -> Actions:
        """The transport says that no byte moves any more."""
        if self.state is not State.FENCING:
            return ()
        self.state = State.FREED
        return (Action.FREE, Action.SEND_ABORTED) if self._answers() else (Action.FREE,)

    def _break(self, now: float, reason: str, tell: bool = True) -> Actions:
        self.reason = reason
        self._broken_at = now
        return (Action.SEND_ABORT,) if tell and self._reachable else ()

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
    """The end whose blocks are written."""

    def __init__(self, now: float, lease_seconds: float, stall_seconds: float, fences_locally: bool) -> None:
        super().__init__(now, lease_seconds, stall_seconds)
        self._fences_locally = fences_locally
        self._landed: tuple[int, int] | None = None  # pieces, bytes
        self._sent: tuple[int, int] | None = None

    def landed(self, now: float, num_pieces: int, num_bytes: int) -> Actions:
        """The transport has every block, verified."""
        self._landed = num_pieces, num_bytes
        return self._complete(now)

    def sent(self, now: float, num_pieces: int, num_bytes: int) -> Actions:
        """TransferSent came."""
        self._sent = num_pieces, num_bytes
        self._stall_seconds = SETTLE_SECONDS
        self._stalls_at = now + SETTLE_SECONDS
        return self._complete(now)

    def aborted(self, now: float) -> Actions:
        """TransferAborted came: the sender has stopped."""
        if self.live:
            return self._break(now, "the peer has stopped", tell=False)
        return self._fence(now) if self.state is State.ABORTING else ()

    def peer_lost(self, now: float) -> Actions:
        """The stream to the peer ended: it will not say that it stopped."""
        if self.state is State.ABORTING:
            self._reachable = False
            return self._fence(now)
        return super().peer_lost(now)

    def _complete(self, now: float) -> Actions:
        if not self.live or self._landed is None or self._sent is None:
            return ()
        if self._landed != self._sent:
            return self._break(now, f"landed are (pieces, bytes) {self._landed}, sent were {self._sent}")
        self.state = State.COMPLETE
        return (Action.COMMIT, Action.SEND_COMPLETE)

    def _break(self, now: float, reason: str, tell: bool = True) -> Actions:
        told = super()._break(now, reason, tell)
        if self._fences_locally or not self._reachable:
            return told + self._fence(now)
        self.state = State.ABORTING
        self._due = now + GRACE_SECONDS
        return told

    def _overdue(self, now: float) -> Actions:
        return self._fence(now) if self.state is State.ABORTING else super()._overdue(now)


class SenderLease(Lease):
    """The end whose blocks are read."""

    def pushed(self, now: float) -> Actions:
        """The transport has handed everything to the wire."""
        if self.state is not State.OPEN:
            return ()
        self.state = State.SENT
        self.progressed(now)
        return (Action.SEND_SENT,)

    def completed(self) -> Actions:
        """TransferComplete came."""
        if self.state is not State.SENT:
            return ()
        self.state = State.COMPLETE
        return (Action.FREE,)

    def _break(self, now: float, reason: str, tell: bool = True) -> Actions:
        told = super()._break(now, reason, tell)
        return told + self._fence(now)

    def _answers(self) -> bool:
        # A receiver that cannot fence alone waits for this, whoever broke the lease.
        return self._reachable

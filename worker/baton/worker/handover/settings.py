"""How long the hand-over of KV waits for what. Knows no flags."""

from __future__ import annotations

from dataclasses import dataclass

# Every end beats at least this often, so that leases of four times as long are safe between any two workers.
MAX_BEAT_SECONDS = 0.25

# Of a piece between devices: each costs both hosts a fifth of a millisecond, in which NVLink moves half as much.
DEVICE_PIECE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class HandoverSettings:
    """Limits of one worker's hand-overs."""

    lease_seconds: float = 1.0  # silence after which a lease ends
    verify: bool = False  # ask for a checksum on every piece
    connect_seconds: float = 5.0  # until a peer says hello
    idle_seconds: float = 10.0  # until a stream without prefills is closed
    start_seconds: float = 30.0  # until a peer starts a prompt that it took
    reserve_seconds: float = 5.0  # until there is room for a prompt that a peer has started
    accept_seconds: float = 10.0  # that a computed prompt waits for the decode worker to make room
    stall_seconds: float = 30.0  # of a transfer without progress, though the peer lives
    hang_seconds: float = 30.0  # that an engine may compute without a sign until its leases are not renewed
    piece_bytes: int = 4 << 20

    @property
    def silence_seconds(self) -> float:
        """How long a peer with work of ours may say nothing where no lease says so."""
        return max(self.lease_seconds, 4 * MAX_BEAT_SECONDS)

    @property
    def beat_seconds(self) -> float:
        """How often we say that we live."""
        return min(self.lease_seconds / 4, MAX_BEAT_SECONDS)

"""Time limits of KV hand-overs. Knows no flags."""

from __future__ import annotations

from dataclasses import dataclass

# Every end sends at least one heartbeat in this time, so leases of four times as long are safe between any workers.
MAX_BEAT_SECONDS = 0.25

# Size of a piece between devices. Each piece costs both hosts 0.2 ms, in which NVLink moves half as many bytes.
DEVICE_PIECE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class HandoverSettings:
    """Limits of one worker's hand-overs."""

    lease_seconds: float = 1.0  # of silence, after which a lease ends
    verify: bool = False  # request a checksum for every piece
    connect_seconds: float = 5.0  # until a peer's hello is received
    idle_seconds: float = 10.0  # until a stream without prefills is closed
    start_seconds: float = 30.0  # until a peer starts an accepted prompt
    reserve_seconds: float = 5.0  # until blocks are free for a prompt that a peer has started
    accept_seconds: float = 10.0  # that a computed prompt waits for the decode worker's blocks
    stall_seconds: float = 30.0  # of a transfer without progress, though the peer is alive
    hang_seconds: float = 30.0  # without progress of the engine, after which leases are not renewed
    piece_bytes: int = 4 << 20
    recompute: bool = True  # prompts whose KV does not arrive are computed here; False: their requests fail

    @property
    def silence_seconds(self) -> float:
        """The longest silence of a peer that computes for this worker, while no lease sets one."""
        return max(self.lease_seconds, 4 * MAX_BEAT_SECONDS)

    @property
    def beat_seconds(self) -> float:
        """The interval of heartbeats."""
        return min(self.lease_seconds / 4, MAX_BEAT_SECONDS)

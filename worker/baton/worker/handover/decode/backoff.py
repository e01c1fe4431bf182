"""Which prefill workers are not worth asking now: those that are gone, and those that do not fit."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_SECONDS = 0.5
_MAX_SECONDS = 8.0
_MISMATCH_SECONDS = 60.0
_MAX_STUMBLES = 3


@dataclass(slots=True)
class _Trouble:
    epoch: int  # of the worker, as the router knows it; another one is another chance
    until: float
    seconds: float


class PeerBackoff:
    """Remembers addresses that failed, for a while that grows. A worker with a new epoch starts afresh."""

    def __init__(self) -> None:
        self._troubles: dict[str, _Trouble] = {}
        self._stumbles: dict[str, int] = {}  # transfers that failed in a row

    def allows(self, address: str, epoch: int, now: float) -> bool:
        """Whether this worker may be asked."""
        trouble = self._troubles.get(address)
        return trouble is None or trouble.epoch != epoch or now >= trouble.until

    def failed(self, address: str, epoch: int, now: float) -> None:
        """It is unreachable, or broke off."""
        before = self._troubles.get(address)
        again = before is not None and before.epoch == epoch
        seconds = min(before.seconds * 2, _MAX_SECONDS) if before is not None and again else _FIRST_SECONDS
        self._troubles[address] = _Trouble(epoch, now + seconds, seconds)

    def stumbled(self, address: str, epoch: int, now: float) -> None:
        """One transfer failed. Several in a row, as behind a wall that lets only the stream through, are a failure."""
        self._stumbles[address] = self._stumbles.get(address, 0) + 1
        if self._stumbles[address] >= _MAX_STUMBLES:
            self._stumbles[address] = 0
            self.failed(address, epoch, now)

    def mismatched(self, address: str, epoch: int, now: float) -> None:
        """It serves another model or layout."""
        self._troubles[address] = _Trouble(epoch, now + _MISMATCH_SECONDS, _MAX_SECONDS)

    def succeeded(self, address: str) -> None:
        """It completed something."""
        self._troubles.pop(address, None)
        self._stumbles.pop(address, None)

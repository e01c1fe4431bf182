"""Backs off from prefill workers that failed or have an incompatible layout."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_SECONDS = 0.5
_MAX_SECONDS = 8.0
_MISMATCH_SECONDS = 60.0
_MAX_FAILED_TRANSFERS = 3


@dataclass(slots=True)
class _Failure:
    epoch: int  # of the worker, from the router; a new epoch is tried at once
    until: float
    seconds: float


class PeerBackoff:
    """Skips addresses that failed, for a growing time. A worker with a new epoch is tried at once."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}
        self._failed_transfers: dict[str, int] = {}  # transfers that failed in a row

    def allows(self, address: str, epoch: int, now: float) -> bool:
        """Returns whether prefills may be requested from this worker."""
        failure = self._failures.get(address)
        return failure is None or failure.epoch != epoch or now >= failure.until

    def failed(self, address: str, epoch: int, now: float) -> None:
        """Records that the worker cannot be reached, or ended its stream."""
        before = self._failures.get(address)
        again = before is not None and before.epoch == epoch
        seconds = min(before.seconds * 2, _MAX_SECONDS) if before is not None and again else _FIRST_SECONDS
        self._failures[address] = _Failure(epoch, now + seconds, seconds)

    def transfer_failed(self, address: str, epoch: int, now: float) -> None:
        """Records a failed transfer.

        Several in a row, as behind a firewall that passes only the stream, count as a failure.
        """
        self._failed_transfers[address] = self._failed_transfers.get(address, 0) + 1
        if self._failed_transfers[address] >= _MAX_FAILED_TRANSFERS:
            self._failed_transfers[address] = 0
            self.failed(address, epoch, now)

    def mismatched(self, address: str, epoch: int, now: float) -> None:
        """Records that the worker has another model or an incompatible layout."""
        self._failures[address] = _Failure(epoch, now + _MISMATCH_SECONDS, _MAX_SECONDS)

    def succeeded(self, address: str) -> None:
        """Records a completed transfer, which ends the backoff."""
        self._failures.pop(address, None)
        self._failed_transfers.pop(address, None)

"""The open remote prefills of one worker, by request and by transfer."""

from __future__ import annotations

from collections.abc import Iterator

from baton.worker.core import Request
from baton.worker.handover.decode.remote_prefill import PrefillPeer, RemotePrefill, Stage


class PrefillTable:
    """Each prefill is also listed at its peer. One with a lease has a transfer id."""

    def __init__(self) -> None:
        self._prefills: dict[Request, RemotePrefill] = {}
        self._transfers: dict[int, RemotePrefill] = {}
        self._reserving: list[RemotePrefill] = []  # in stage STARTED, oldest first

    def __len__(self) -> int:
        return len(self._prefills)

    def __iter__(self) -> Iterator[RemotePrefill]:
        return iter(list(self._prefills.values()))

    def add(self, prefill: RemotePrefill) -> None:
        """Adds a prefill that was requested."""
        prefill.peer.prefills[prefill.prefill_id] = self._prefills[prefill.request] = prefill

    def started(self, prefill: RemotePrefill) -> None:
        """Records that the peer has started a prefill, which now waits for blocks here."""
        prefill.stage = Stage.STARTED
        self._reserving.append(prefill)

    def next_reserving(self) -> RemotePrefill | None:
        """Returns the oldest prefill that waits for blocks."""
        return self._reserving[0] if self._reserving else None

    def leased(self, prefill: RemotePrefill) -> None:
        """Records that a prefill has blocks and a transfer id."""
        prefill.stage = Stage.LEASED
        self._reserving.remove(prefill)
        self._transfers[prefill.transfer_id] = prefill

    def remove(self, prefill: RemotePrefill, now: float) -> None:
        """Removes a prefill, in whichever stage it is."""
        del self._prefills[prefill.request]
        del prefill.peer.prefills[prefill.prefill_id]
        prefill.peer.idle_since = now
        self._transfers.pop(prefill.transfer_id, None)
        if prefill in self._reserving:
            self._reserving.remove(prefill)

    def of_request(self, request: Request) -> RemotePrefill | None:
        """Returns the prefill of a request."""
        return self._prefills.get(request)

    def of_transfer(self, transfer_id: int, peer: PrefillPeer | None = None) -> RemotePrefill | None:
        """Returns the prefill of a transfer, if it is `peer`'s. None: any peer's."""
        prefill = self._transfers.get(transfer_id)
        return prefill if prefill is not None and peer in (None, prefill.peer) else None

    def num_late_blocks(self, now: float, seconds: float) -> int:
        """Returns the blocks of leases that were broken more than `seconds` ago and are not free yet."""
        late = [one for one in self._transfers.values() if one.lease is not None and one.lease.is_late(now, seconds)]
        return sum(prefill.num_leased_blocks for prefill in late)

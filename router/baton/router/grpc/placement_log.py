"""The log of placements: one record for all of a moment, because a record costs as much as a placement."""

from __future__ import annotations

import asyncio
import logging

_log = logging.getLogger(__name__)

_GATHER_SECONDS = 0.25
_MAX_GATHERED = 256


class PlacementLog:
    """Gathers placements and logs them together; one that comes alone has a record of its own."""

    def __init__(self) -> None:
        self._placed: list[tuple[str, str, str]] = []  # request, decode worker, prefill worker
        self._timer: asyncio.TimerHandle | None = None

    def add(self, request_id: str, decode_id: str, prefill_id: str) -> None:
        """Records a placement. `prefill_id` is empty if the decode worker prefills."""
        if not _log.isEnabledFor(logging.INFO):
            return
        self._placed.append((request_id, decode_id, prefill_id))
        if len(self._placed) >= _MAX_GATHERED:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_GATHER_SECONDS, self.flush)

    def flush(self) -> None:
        """Logs the recorded placements."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        placed, self._placed = self._placed, []
        if len(placed) == 1:
            request_id, decode_id, prefill_id = placed[0]
            _log.info("placed on %s, prefill %s", decode_id, prefill_id or "there", extra={"request_id": request_id})
        elif placed:
            text = ", ".join(f"{r} on {d}, prefill {p or 'there'}" for r, d, p in placed)
            _log.info("placed %d requests: %s", len(placed), text)

"""Requests whose KV has landed, until the step that computes them is launched; then their transfer is recorded.

Recording earlier would delay that launch by tenths of a millisecond.
"""

from __future__ import annotations

from dataclasses import replace

from baton.worker.core import Request
from baton.worker.engine.engine import Engine
from baton.worker.handover.listener import HandoverListener
from baton.worker.handover.records import TransferRecord


class LandedRequests:
    """The landed requests of one engine. Used on its thread."""

    def __init__(self, engine: Engine, listener: HandoverListener) -> None:
        self._engine = engine
        self._listener = listener
        self._records: dict[Request, TransferRecord] = {}

    def add(self, request: Request, record: TransferRecord) -> None:
        """Adds a request whose last block has landed. It continues once it has a row."""
        self._records[request] = record

    def ended(self, request: Request) -> None:
        """Records the transfer of a request that ended, whether it continued or not."""
        if record := self._records.pop(request, None):
            self._listener.on_record(record)

    def launched(self, began: float) -> None:
        """Records the transfers of requests that the launched step computes."""
        if not self._records:
            return
        running = [request for request in self._records if self._engine.is_running(request.request_id)]
        for request in running:
            self._listener.on_record(replace(self._records.pop(request), launched_at=began))

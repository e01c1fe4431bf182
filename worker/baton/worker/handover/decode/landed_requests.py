"""Requests whose KV has landed, until a step is launched that computes them: then the hand-over is recorded.

Not before: a record takes tenths of a millisecond, which that step's launch would come later.
"""

from __future__ import annotations

from dataclasses import replace

from baton.worker.core import Request
from baton.worker.engine.engine import Engine
from baton.worker.handover.listener import HandoverListener
from baton.worker.handover.records import TransferRecord


class LandedRequests:
    """Of one engine, on its thread."""

    def __init__(self, engine: Engine, listener: HandoverListener) -> None:
        self._engine = engine
        self._listener = listener
        self._records: dict[Request, TransferRecord] = {}

    def add(self, request: Request, record: TransferRecord) -> None:
        """Its last block is there: it goes on as soon as it has a row."""
        self._records[request] = record

    def ended(self, request: Request) -> None:
        """The request will not go on, whether it was about to or not."""
        if record := self._records.pop(request, None):
            self._listener.on_record(record)

    def launched(self, began: float) -> None:
        """A step is launched."""
        if not self._records:
            return
        running = [request for request in self._records if self._engine.is_running(request.request_id)]
        for request in running:
            self._listener.on_record(replace(self._records.pop(request), launched_at=began))

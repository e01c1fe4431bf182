"""Requests whose KV has landed, until a step is launched that computes them: then the hand-over is recorded.

Not before: a record takes tenths of a millisecond, which that step's launch would come later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from baton.worker.core import Request
from baton.worker.engine import Engine
from baton.worker.handover.records import TransferRecord, log_record


class Landings:
    """Of one engine, on its thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._records: dict[Request, TransferRecord] = {}
        self.on_record: Callable[[TransferRecord], None] = log_record
        engine.on_launched = self._launched

    def add(self, request: Request, record: TransferRecord) -> None:
        """Its last block is there: it goes on as soon as it has a row."""
        self._records[request] = record

    def ended(self, request: Request) -> None:
        """The request will not go on, whether it was about to or not."""
        if record := self._records.pop(request, None):
            self.on_record(record)

    def _launched(self, began: float) -> None:
        if not self._records:
            return
        running = [request for request in self._records if self._engine.is_running(request.request_id)]
        for request in running:
            self.on_record(replace(self._records.pop(request), launched_at=began))

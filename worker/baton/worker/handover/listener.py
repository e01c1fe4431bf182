"""Reports of a worker's hand-overs, for the loop that drives them."""

from __future__ import annotations

from baton.worker.core import Request
from baton.worker.handover.records import PushRecord, TransferRecord, log_record


class HandoverListener:
    """Methods run on the engine's thread, and do nothing unless overridden."""

    def on_first_token(self) -> None:
        """The engine has a prefill worker's first token.

        Its outputs can be sent now; the next launch takes milliseconds.
        """

    def on_peer_died(self, request: Request, worker_id: str, reason: str) -> None:
        """A prefill worker ended its stream while it computed this request's prompt."""

    def on_record(self, record: TransferRecord | PushRecord) -> None:
        """A hand-over is complete on this worker."""


class HandoverListeners(HandoverListener):
    """Logs completed hand-overs, and calls every listener in the order in which they were added."""

    def __init__(self) -> None:
        self._listeners: list[HandoverListener] = []

    def add(self, listener: HandoverListener) -> None:
        """Adds a listener."""
        self._listeners.append(listener)

    def on_first_token(self) -> None:
        for listener in self._listeners:
            listener.on_first_token()

    def on_peer_died(self, request: Request, worker_id: str, reason: str) -> None:
        for listener in self._listeners:
            listener.on_peer_died(request, worker_id, reason)

    def on_record(self, record: TransferRecord | PushRecord) -> None:
        log_record(record)
        for listener in self._listeners:
            listener.on_record(record)

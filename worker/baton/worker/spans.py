"""A request's spans on this worker, as the engine sends them to its front: one at the end of each part, none a token.

    baton.worker.prefill     a prompt's computation, here for another worker or for this one's own request
    baton.worker.transfer    from the lease to the last block, at the decode worker
    baton.worker.decode      from the first token to the last

Only requests with a sampled W3C trace context have spans; each is a child of the caller's.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable

from baton.worker.handover.records import PushRecord, TransferRecord, log_record
from baton.worker.link import Kind
from baton.worker.outputs import Finish

_SAMPLED = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf](-.*)?")
_SERIAL = re.compile(r"#[ep]\d+$")

Send = Callable[[int, int, bytes], None]  # kind, channel, payload


def is_sampled(traceparent: str) -> bool:
    """Whether it is a trace context that asks for spans."""
    return _SAMPLED.fullmatch(traceparent) is not None


class SpanSender:
    """Used by the engine thread only."""

    def __init__(
        self, send: Send, clock: Callable[[], float] = time.monotonic, wall: Callable[[], int] = time.time_ns
    ) -> None:
        self._send = send
        self._clock = clock
        self._wall = wall

    def record(self, record: TransferRecord | PushRecord) -> None:
        """A hand-over ended. Logs it too."""
        log_record(record)
        if not is_sampled(record.traceparent):
            return
        if isinstance(record, TransferRecord):
            attributes: dict[str, object] = {
                "baton.transport": record.transport,
                "baton.bytes": record.num_bytes,
                "baton.gigabytes_per_second": record.num_bytes / 1e9 / record.seconds if record.seconds > 0 else 0.0,
                "baton.exposed_ms": record.exposed_seconds * 1e3,
                "baton.retries": record.num_retries,
            }
            self._span("baton.worker.transfer", record, record.started_at, record.landed_at, attributes)
        else:
            attributes = {
                "baton.prompt_tokens": record.num_tokens,
                "baton.cached_tokens": record.num_cached_tokens,
                "baton.bytes": record.num_bytes,
                "baton.remote": True,
            }
            self._span("baton.worker.prefill", record, record.started_at, record.computed_at, attributes)

    def finished(self, finishes: Iterable[Finish]) -> None:
        """Generations ended a moment ago."""
        for finish in finishes:
            request = finish.request
            if not request.prefill_only and is_sampled(request.traceparent):
                self._finish(finish)

    def _finish(self, finish: Finish) -> None:
        request, now = finish.request, self._clock()
        started = request.arrival + finish.queue_seconds
        first_token = min(now, started + finish.prefill_seconds)
        if not finish.num_transferred_tokens:
            attributes: dict[str, object] = {
                "baton.prompt_tokens": request.num_prompt_tokens,
                "baton.cached_tokens": finish.num_cached_tokens,
                "baton.remote": False,
            }
            self._span("baton.worker.prefill", request, started, first_token, attributes)
        attributes = {
            "baton.output_tokens": len(request.token_ids) - request.num_prompt_tokens,
            "baton.transferred_tokens": finish.num_transferred_tokens,
            "baton.preemptions": finish.num_preemptions,
            "baton.queue_ms": finish.queue_seconds * 1e3,
            "baton.finish_reason": finish.reason.value,
        }
        self._span("baton.worker.decode", request, first_token, now, attributes)

    def _span(self, name: str, of: object, began: float, ended: float, attributes: dict[str, object]) -> None:
        wall, now = self._wall(), self._clock()
        request_id = _SERIAL.sub("", str(getattr(of, "request_id", "")))
        span = {
            "name": name,
            "traceparent": getattr(of, "traceparent", ""),
            "start_ns": wall - round((now - began) * 1e9),
            "end_ns": wall - round((now - ended) * 1e9),
            "attributes": {"baton.request_id": request_id, **attributes},
        }
        self._send(Kind.SPAN, 0, json.dumps(span).encode())

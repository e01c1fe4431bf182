"""Spans of requests on this worker, which the engine sends to its front at the end of each part.

    baton.worker.queue       from the submission to the first step; where another worker prefills, to the lease
    baton.worker.adapter     within the queue: from the submission until the adapter was on the device, with its loads
    baton.worker.prefill     a prompt's computation, here for another worker or for this one's own request
    baton.worker.transfer    from the lease to the last block, at the decode worker
    baton.worker.decode      from the first token to the last
    baton.worker.failed      instead of the others: from the submission to the failure

Only requests with a sampled W3C trace context have spans, as children of the caller's span. The spans leave no gap,
and only the adapter's is within another.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from baton.rpc.tracing.context import sampled_context
from baton.rpc.tracing.tracer import Value
from baton.worker.handover.listener import HandoverListener
from baton.worker.handover.records import PushRecord, TransferRecord
from baton.worker.link.frames import Kind
from baton.worker.requests.outputs import AdapterWait, Failure, Finish

_SERIAL = re.compile(r"#[ep]\d+$")

Send = Callable[[int, int, bytes], None]  # kind, channel, payload


class _Span(NamedTuple):
    name: str
    began: float  # monotonic seconds
    ended: float
    attributes: Mapping[str, Value]
    error: str = ""


def is_sampled(traceparent: str) -> bool:
    """Returns whether the traceparent requests spans."""
    return sampled_context(traceparent) is not None


class SpanSender(HandoverListener):
    """Sends spans of completed parts. Only the engine thread uses it."""

    def __init__(
        self, send: Send, clock: Callable[[], float] = time.monotonic, wall: Callable[[], int] = time.time_ns
    ) -> None:
        self._send = send
        self._clock = clock
        self._wall = wall

    def on_record(self, record: TransferRecord | PushRecord) -> None:
        if is_sampled(record.traceparent):
            spans = _received(record) if isinstance(record, TransferRecord) else _sent(record)
            self._send_spans(record.traceparent, record.request_id, spans)

    def waited(self, waits: Iterable[AdapterWait]) -> None:
        """Sends the spans of requests that have just got their adapters."""
        for wait in waits:
            request = wait.request
            if is_sampled(request.traceparent):
                self._send_spans(request.traceparent, request.request_id, [_adapter(wait)])

    def finished(self, finishes: Iterable[Finish]) -> None:
        """Sends the spans of generations that have just ended."""
        for finish in finishes:
            request = finish.request
            if not request.prefill_only and is_sampled(request.traceparent):
                self._send_spans(request.traceparent, request.request_id, _generated(finish, self._clock()))

    def failed(self, failures: Iterable[Failure]) -> None:
        """Sends the spans of generations that have just failed."""
        for failure in failures:
            request = failure.request
            if is_sampled(request.traceparent):
                self._send_spans(request.traceparent, request.request_id, [_failed(failure, self._clock())])

    def _send_spans(self, traceparent: str, request_id: str, spans: Iterable[_Span]) -> None:
        wall, now = self._wall(), self._clock()
        of_request = {"baton.request_id": _SERIAL.sub("", request_id)}
        values = [
            (
                span.name,
                wall - round((now - span.began) * 1e9),
                wall - round((now - span.ended) * 1e9),
                {**of_request, **span.attributes},
                span.error,
            )
            for span in spans
        ]
        self._send(Kind.SPAN, 0, json.dumps((traceparent, values)).encode())


def _received(record: TransferRecord) -> list[_Span]:
    attributes: dict[str, Value] = {
        "baton.transport": record.transport,
        "baton.bytes": record.num_bytes,
        "baton.gigabytes_per_second": record.num_bytes / 1e9 / record.seconds if record.seconds > 0 else 0.0,
        "baton.exposed_ms": record.exposed_seconds * 1e3,
        "baton.retries": record.num_retries,
    }
    if record.until_launch_seconds is not None:
        attributes["baton.until_launch_ms"] = record.until_launch_seconds * 1e3
    return [_Span("baton.worker.transfer", record.started_at, record.landed_at, attributes)]


def _sent(record: PushRecord) -> list[_Span]:
    attributes: dict[str, Value] = {
        "baton.prompt_tokens": record.num_tokens,
        "baton.cached_tokens": record.num_cached_tokens,
        "baton.bytes": record.num_bytes,
        "baton.push_tail_ms": (record.completed_at - record.computed_at) * 1e3,
        "baton.remote": True,
    }
    return [
        _Span("baton.worker.queue", record.submitted_at, record.started_at, {"baton.remote": True}),
        _Span("baton.worker.prefill", record.started_at, record.computed_at, attributes),
    ]


def _generated(finish: Finish, now: float) -> list[_Span]:
    request = finish.request
    started = request.arrival + finish.queue_seconds
    first_token = min(now, started + finish.prefill_seconds)
    remote = finish.num_transferred_tokens > 0
    spans = [_Span("baton.worker.queue", request.arrival, started, {"baton.remote": remote})]
    if not remote:
        attributes: dict[str, Value] = {
            "baton.prompt_tokens": request.num_prompt_tokens,
            "baton.cached_tokens": finish.num_cached_tokens,
            "baton.remote": False,
        }
        spans.append(_Span("baton.worker.prefill", started, first_token, attributes))
    attributes = {
        "baton.output_tokens": len(request.token_ids) - request.num_prompt_tokens,
        "baton.cached_tokens": finish.num_cached_tokens,
        "baton.transferred_tokens": finish.num_transferred_tokens,
        "baton.preemptions": finish.num_preemptions,
        "baton.queue_ms": finish.queue_seconds * 1e3,
        "baton.finish_reason": finish.reason.value,
    }
    if finish.num_draft_tokens:
        attributes["baton.draft_tokens"] = finish.num_draft_tokens
        attributes["baton.accepted_tokens"] = finish.num_accepted_tokens
    return [*spans, _Span("baton.worker.decode", first_token, now, attributes)]


def _adapter(wait: AdapterWait) -> _Span:
    adapter = wait.request.adapter
    assert adapter is not None, "only requests with an adapter wait for one"
    attributes: dict[str, Value] = {
        "baton.adapter": adapter.name,
        "baton.adapter_source": wait.source,
        "baton.adapter_read_ms": wait.read_seconds * 1e3,
        "baton.adapter_copy_ms": wait.copy_seconds * 1e3,
        "baton.remote": wait.request.prefill_only,
    }
    return _Span("baton.worker.adapter", wait.began, wait.ended, attributes)


def _failed(failure: Failure, now: float) -> _Span:
    request = failure.request
    attributes: dict[str, Value] = {
        "baton.prompt_tokens": request.num_prompt_tokens,
        "baton.output_tokens": len(request.token_ids) - request.num_prompt_tokens,
        "baton.remote": request.prefill_only,
    }
    return _Span("baton.worker.failed", request.arrival, now, attributes, failure.error.log_text)

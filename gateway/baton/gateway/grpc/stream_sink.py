"""The sink of a gRPC generation: a queue of responses that a stream reads at its client's speed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from baton.gateway.core import Delta, Generation, Usage
from baton.gateway.grpc.deltas import responses_of, usage_response
from baton.gateway.resume.journal import Journal
from baton.rpc.errors import ServiceError
from baton.v1 import inference_pb2

# Responses that are queued for a slow client before deltas are merged.
_MAX_WAITING = 16


class StreamSink:
    """Implements Sink as a queue of responses that a gRPC stream reads at its client's speed."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.traceparent = ""  # of the generation's trace
        self.journal: Journal | None = None
        self.prompt_token_ids: list[int] = []  # sent with the first response of choice 0
        self._waiting: deque[inference_pb2.GenerateResponse] = deque()
        self._changed = asyncio.Event()
        self._done = False
        self._error: ServiceError | None = None

    @property
    def writable(self) -> bool:
        # Deltas that the client already has are not sent, and must not be merged with new ones.
        return len(self._waiting) < _MAX_WAITING or (self.journal is not None and self.journal.cursor.behind)

    @property
    def outcome(self) -> str:
        """Returns the name of the call's final status."""
        if self._error is not None:
            return self._error.code.name
        return "OK" if self._done else "CANCELLED"

    def end_journal(self) -> None:
        """Ends the journal. Idempotent."""
        if self.journal is not None:
            self.journal.end()

    def on_delta(self, delta: Delta) -> None:
        responses = responses_of(self.request_id, delta)
        if self.journal is not None:
            if not self.journal.cursor.advance(delta.index, len(delta.token_ids), delta.finish_reason is not None):
                return
            _count_last(responses)
        if delta.index == 0 and self.prompt_token_ids:
            responses[0].prompt_token_ids.extend(self.prompt_token_ids)
            self.prompt_token_ids = []
        self._waiting.extend(responses)
        self._changed.set()

    def on_done(self, usage: Usage) -> None:
        self._waiting.append(usage_response(self.request_id, usage))
        self._done = True
        self._changed.set()

    def on_error(self, error: ServiceError) -> None:
        self._error = error
        self._done = True
        self._changed.set()

    async def responses(self, generation: Generation) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Yields all responses in order. Raises the error that ended the generation."""
        while True:
            while self._waiting:
                was_full = not self.writable
                yield self._waiting.popleft()
                if was_full and self.writable:
                    generation.resume()
            if self._done:
                break
            await self._changed.wait()
            self._changed.clear()
        if self._error is not None:
            raise self._error


def _count_last(responses: list[inference_pb2.GenerateResponse]) -> None:
    """Moves the tokens to the last of a delta's responses, so that a client that has them has all of the delta."""
    first, last = responses[0], responses[-1]
    if last is not first:
        last.token_ids.extend(first.token_ids)
        last.logprobs.extend(first.logprobs)
        del first.token_ids[:], first.logprobs[:]

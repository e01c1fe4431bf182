"""The placements of one PlaceStream: which wait, which are too late, and which go into the next message."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from baton.rpc.errors import DeadlineExceeded, InternalError, InvalidRequest, NoCapacity, ServiceError
from baton.v1 import router_pb2

_log = logging.getLogger(__name__)

MAX_WAITING = 4096  # on one stream: about a second of decisions
_MAX_REFUSED = 1024  # answers that wait for a slow reader; more is not read until they are taken
_SLICE_SECONDS = 0.002  # of decisions, then others have their turn
_RETRY_AFTER_MS = 1000

Place = Callable[[router_pb2.PlaceRequest], router_pb2.PlaceResponse]


class _Waiting(NamedTuple):
    request: router_pb2.PlaceRequest
    deadline: float  # in the clock's seconds


class PlacementQueue:
    """The entries of one stream. Delays answers until they are sent, so that queued requests can still be cancelled.

    `place` does not wait; `on_refusal` is called with failures that are not the queue's own.
    """

    def __init__(
        self,
        place: Place,
        on_refusal: Callable[[ServiceError], None],
        max_waiting: int = MAX_WAITING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = place
        self._on_refusal = on_refusal
        self._max_waiting = max_waiting
        self._clock = clock
        self._waiting: dict[int, _Waiting] = {}  # by call_id, in order
        self._refused: deque[router_pb2.PlaceAnswer] = deque()
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._closed = False
        self._error: ServiceError | None = None

    async def read(self, messages: AsyncIterator[router_pb2.PlaceStreamRequest]) -> None:
        """Takes messages until they end, and drops what then waits. Reads no faster than refusals are taken."""
        try:
            async for message in messages:
                self.receive(message)
                while len(self._refused) > _MAX_REFUSED:
                    self._taken.clear()
                    await self._taken.wait()
        finally:
            self.end()

    def receive(self, message: router_pb2.PlaceStreamRequest) -> None:
        """Takes one message. Ignores it if the stream is closed."""
        if self._closed:
            return
        for entry in message.entries:
            kind = entry.WhichOneof("entry")
            if kind == "cancel":
                self._waiting.pop(entry.call_id, None)
            elif kind is None:
                field = f"entries[call_id={entry.call_id}]"
                self._refuse(entry.call_id, InvalidRequest(f"{field}: give place or cancel", field="entries"))
            elif entry.call_id in self._waiting:
                problem = f"entries: call_id {entry.call_id} is used again while it waits"
                self.end(InvalidRequest(problem, field="entries.call_id"))
                return
            elif len(self._waiting) >= self._max_waiting:
                problem = f"{self._max_waiting} placements wait on this stream"
                self._refuse(entry.call_id, NoCapacity(problem, retry_after_ms=_RETRY_AFTER_MS))
            else:
                deadline = self._clock() + entry.timeout_ms / 1000 if entry.timeout_ms else float("inf")
                self._waiting[entry.call_id] = _Waiting(entry.place, deadline)
        self._changed.set()

    def close(self) -> None:
        """Stops taking messages. Queued requests are still answered."""
        self._closed = True
        self._changed.set()

    def end(self, error: ServiceError | None = None) -> None:
        """Drops what waits. The stream ends, with `error` if there is one."""
        self._waiting.clear()
        self._error = self._error or error
        self.close()

    async def take(self) -> router_pb2.PlaceStreamResponse | None:
        """Waits for answers and returns them as one message, at most one turn's worth. Returns None at the end."""
        while not self._waiting and not self._refused:
            if self._closed:
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()
        answers = [*self._refused, *self._decide()]
        self._refused.clear()
        self._taken.set()
        return router_pb2.PlaceStreamResponse(answers=answers)

    def _decide(self) -> list[router_pb2.PlaceAnswer]:
        answers = []
        until = self._clock() + _SLICE_SECONDS
        while self._waiting:
            call_id = next(iter(self._waiting))
            answers.append(self._answer(call_id, self._waiting.pop(call_id)))
            if self._clock() >= until:
                break
        return answers

    def _answer(self, call_id: int, waiting: _Waiting) -> router_pb2.PlaceAnswer:
        if self._clock() >= waiting.deadline:
            error = DeadlineExceeded("the caller no longer waits for this placement")
            self._on_refusal(error)
            return _failure(call_id, error)
        try:
            return router_pb2.PlaceAnswer(call_id=call_id, placed=self._place(waiting.request))
        except ServiceError as error:
            return _failure(call_id, error)
        except Exception as error:
            _log.exception("unexpected error in a placement")
            return _failure(call_id, InternalError(f"unexpected {type(error).__name__}; see the router's log"))

    def _refuse(self, call_id: int, error: ServiceError) -> None:
        self._on_refusal(error)
        self._refused.append(_failure(call_id, error))


def _failure(call_id: int, error: ServiceError) -> router_pb2.PlaceAnswer:
    failure = router_pb2.PlaceFailure(code=error.code.value[0], message=error.message, detail=error.detail)
    return router_pb2.PlaceAnswer(call_id=call_id, failure=failure)

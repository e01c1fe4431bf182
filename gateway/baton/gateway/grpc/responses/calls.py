"""The methods for responses in the public gRPC API. Responses are shared with REST."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence

from baton.gateway.access.identity import Identity
from baton.gateway.errors.http import HttpError
from baton.gateway.grpc.responses.messages import event_of, item_of, response_of
from baton.gateway.grpc.responses.request import name_field, request_of, requested_constraint
from baton.gateway.grpc.rpc_call import RpcCall
from baton.gateway.responses.conversations.store import ConversationStore
from baton.gateway.responses.items import Item
from baton.gateway.responses.pages import DEFAULT_PAGE, MAX_PAGE, page_of
from baton.gateway.responses.running import RunningResponse
from baton.gateway.responses.service import ResponseService
from baton.gateway.responses.types import ItemList
from baton.rpc.errors import InvalidRequest, ServiceError
from baton.rpc.server.server import Context
from baton.v1 import inference_pb2, response_pb2

# Events that are queued for a slow client before the generation is paused.
_MAX_WAITING = 16
_ORDERS: Mapping[int, str] = {
    response_pb2.ITEM_ORDER_UNSPECIFIED: "desc",
    response_pb2.ITEM_ORDER_NEWEST_FIRST: "desc",
    response_pb2.ITEM_ORDER_OLDEST_FIRST: "asc",
}


class EventQueue:
    """Implements Follower: a queue of events from `first` on, read at a gRPC client's speed."""

    def __init__(self, running: RunningResponse, first: int = 0) -> None:
        self._running = running
        self._next = first
        self._waiting: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._over = False

    @property
    def writable(self) -> bool:
        return len(self._waiting) < _MAX_WAITING

    def progressed(self) -> None:
        running = self._running
        self._waiting.extend(running.events[max(0, self._next - running.num_forgotten) :])
        self._next = max(self._next, running.num_events)
        if not running.response.background:
            running.forget_until(self._next)
        self._changed.set()

    def ended(self, error: HttpError | None) -> None:
        if error is None or self._running.begun or self._running.response.background:
            self.progressed()
        self._over = True
        self._changed.set()

    def leave(self) -> None:
        """Ends the queue after the client disconnected or received everything. Idempotent."""
        self._running.unfollow(self)
        if not self._running.response.background:
            self._running.abandon()

    async def events(self) -> AsyncIterator[response_pb2.ResponseEvent]:
        """Yields all events in order."""
        while True:
            while self._waiting:
                was_full = not self.writable
                event = event_of(self._waiting.popleft())
                if was_full and self.writable:
                    self._running.resume()
                if event is not None:
                    yield event
            if self._over:
                break
            await self._changed.wait()
            self._changed.clear()
        if self._running.response.status == "cancelled":
            yield _last(self._running)


class ResponseCalls:
    """Implements the RPCs for responses."""

    def __init__(self, service: ResponseService) -> None:
        self._service = service

    @property
    def conversations(self) -> ConversationStore:
        """Returns the store of conversations."""
        return self._service.conversations

    async def create(
        self, call: RpcCall, request: inference_pb2.CreateResponseRequest, context: Context
    ) -> AsyncIterator[response_pb2.ResponseEvent]:
        """Implements CreateResponse. Raises ServiceError that names the request's field."""
        # A call that is cancelled during a write leaves its iterator to the garbage collector.
        context.add_done_callback(lambda _: call.end())  # type: ignore[arg-type]
        try:
            async for event in self._events(call, request, context):
                yield event
            call.outcome = "OK"
        except ServiceError as error:
            name_field(error, request)
            call.outcome = error.code.name
            raise

    async def _events(
        self, call: RpcCall, request: inference_pb2.CreateResponseRequest, context: Context
    ) -> AsyncIterator[response_pb2.ResponseEvent]:
        with self._service.counting_rejections():
            wanted, requested = request_of(request), requested_constraint(request)
        begun = await self._service.begin(call, wanted, requested)
        running = begun.running
        queue = EventQueue(running)
        running.follow(queue)
        context.add_done_callback(lambda _: queue.leave())  # type: ignore[arg-type]
        if request.background:
            queue.progressed()  # sends the response's id before any output
        await self._service.start(call, begun)
        if call.limit_headers:
            await context.send_initial_metadata(tuple(call.limit_headers.items()))
        async for event in queue.events():
            yield event
        if running.failure is not None:
            raise running.failure

    async def get(self, identity: Identity, response_id: str) -> response_pb2.ModelResponse:
        """Implements GetResponse. Raises NotFound, Unavailable."""
        return response_of((await self._service.find(identity, _named(response_id))).response)

    async def watch(
        self, identity: Identity, response_id: str, first: int, context: Context
    ) -> AsyncIterator[response_pb2.ResponseEvent]:
        """Implements WatchResponse. Raises NotFound, InvalidRequest, Unavailable."""
        stored = await self._service.find(identity, _named(response_id))
        source = self._service.events_of(stored, "response_id")
        if isinstance(source, RunningResponse):
            queue = EventQueue(source, first)
            source.follow(queue)
            context.add_done_callback(lambda _: queue.leave())  # type: ignore[arg-type]
            queue.progressed()
            async for event in queue.events():
                yield event
            return
        for text in source[first:]:
            if (message := event_of(text)) is not None:
                yield message
        if stored.response.status == "cancelled":
            response = response_of(stored.response)
            yield response_pb2.ResponseEvent(sequence_number=len(source), response=response)

    async def cancel(self, identity: Identity, response_id: str) -> response_pb2.ModelResponse:
        """Implements CancelResponse. Raises NotFound, InvalidRequest, Unavailable."""
        return response_of((await self._service.cancel(identity, _named(response_id))).response)

    async def delete(self, identity: Identity, response_id: str) -> None:
        """Implements DeleteResponse. Raises NotFound, Unavailable."""
        await self._service.delete(identity, _named(response_id))

    async def list_input(
        self, identity: Identity, request: response_pb2.ListResponseInputRequest
    ) -> response_pb2.ListResponseInputResponse:
        """Implements ListResponseInput. Raises NotFound, InvalidRequest, Unavailable."""
        stored = await self._service.find(identity, _named(request.response_id))
        page = page_asked([*stored.context, *stored.input], request.limit, request.order, request.after)
        return response_pb2.ListResponseInputResponse(
            items=[item_of(item) for item in page.data], has_more=page.has_more
        )


def page_asked(items: Sequence[Item], limit: int, order: int, after: str) -> ItemList:
    """Returns the requested page of items. Raises InvalidRequest."""
    if limit > MAX_PAGE:
        raise InvalidRequest(f"limit is {limit}; at most {MAX_PAGE} is allowed", field="limit")
    if order not in _ORDERS:
        raise InvalidRequest(f"order {order} is unknown", field="order")
    return page_of(items, limit or DEFAULT_PAGE, _ORDERS[order], after)


def _named(response_id: str) -> str:
    if not response_id:
        raise InvalidRequest("response_id is missing", field="response_id")
    return response_id


def _last(running: RunningResponse) -> response_pb2.ResponseEvent:
    """Returns the final event of a cancelled response, which REST's streams do not have."""
    return response_pb2.ResponseEvent(sequence_number=running.num_events, response=response_of(running.response))

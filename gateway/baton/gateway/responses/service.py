"""Creates, finds, cancels and deletes responses for REST and gRPC. Knows neither of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from baton.gateway.access.identity import Identity
from baton.gateway.bodies.thread import BodyThread
from baton.gateway.core import GenerationRequest
from baton.gateway.errors.http import ContextTooLong
from baton.gateway.fields.chat import check_max_items
from baton.gateway.models.constraints.structured_output import RequestedConstraint
from baton.gateway.models.prompts.rendering import size_of
from baton.gateway.models.served import ServedModel
from baton.gateway.responses.conversations.store import ConversationStore
from baton.gateway.responses.items import Item, chat_messages, input_items, new_item_id
from baton.gateway.responses.output import OutputItems
from baton.gateway.responses.request import FIELDS, check_request, conversation_of, new_response, turn_of
from baton.gateway.responses.running import RunningResponse
from baton.gateway.responses.store import ResponseStore
from baton.gateway.responses.tools import ServedTools, ToolName, served_tools
from baton.gateway.responses.truncation import MANY_ITEMS, longest_that_fits, parted
from baton.gateway.responses.types import ResponsesRequest, StoredResponse
from baton.gateway.serving.chat import ChatTurn, check_turn, encode_turn, fields_named, generation_of
from baton.gateway.serving.context import Call, ServingContext
from baton.rpc.errors import InvalidRequest, NotFound

T = TypeVar("T")

_FINAL = ("completed", "incomplete", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that is ready to run."""

    request: ResponsesRequest
    model: ServedModel
    turn: ChatTurn
    token_ids: list[int]
    items: Sequence[Item]
    context: Sequence[Item]
    conversation_id: str  # empty: no conversation
    names: Mapping[str, ToolName]  # client's tools by the names that the model sees


@dataclass(frozen=True, slots=True)
class _Fitting:
    """A turn that fits into the context."""

    turn: ChatTurn
    token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class BegunResponse:
    """A response that can be followed; `start` starts its generation."""

    running: RunningResponse
    generation: GenerationRequest


class ResponseService:
    """The operations on responses. `field` parameters are the client's field with the response's id."""

    def __init__(self, serving: ServingContext, store: ResponseStore) -> None:
        self._serving = serving
        self._store = store
        self.conversations = ConversationStore(store.records)

    @property
    def bodies(self) -> BodyThread:
        """Returns the thread that reads large requests."""
        return self._serving.bodies

    def counting_rejections(self) -> AbstractContextManager[None]:
        """Counts requests that are refused within the context."""
        return self._serving.counting_rejections()

    async def begin(
        self, call: Call, request: ResponsesRequest, requested: RequestedConstraint | None = None
    ) -> BegunResponse:
        """Validates a request and admits it. `requested` is an additional constraint. Raises ServiceError."""
        serving = self._serving
        with serving.counting_rejections():
            model, served, items = await self._run_on_thread(
                call.identity.tenant.cache_owner,
                partial(self._check, call, request),
                request.input,
                request.tools,
                request.instructions,
            )
            if request.request_id:
                call.request_id = request.request_id
            admitted = serving.admission.admit(call.request_id, 1)
            try:
                with fields_named(FIELDS):
                    prepared = await self._prepare(call, request, model, served, items, requested)
                    running = self._running(call, prepared, admitted.end)
                    generation = generation_of(
                        serving, call, admitted.request_id, prepared.model, prepared.turn, prepared.token_ids
                    )
                if request.background:
                    await self._store.begin(running, prepared.items, prepared.context)
            except BaseException:
                admitted.end()
                raise
        return BegunResponse(running, generation)

    async def start(self, call: Call, begun: BegunResponse) -> None:
        """Starts the generation. A failure becomes the response's error."""
        serving, running = self._serving, begun.running
        try:
            generator = serving.admitted(call, serving.generator, [begun.generation])
            running.generation = await generator.start(begun.generation, running)
        except asyncio.CancelledError:
            running.abandon()
            raise
        except Exception as error:
            running.fail(error)
            return
        if running.ended:
            running.generation.abort()

    async def find(self, identity: Identity, response_id: str, field: str = "response_id") -> StoredResponse:
        """Returns a response of the client's tenant. Raises NotFound, also for responses of other tenants."""
        stored = await self._store.get(response_id, field)
        if stored.tenant != identity.tenant.name:
            raise NotFound(f"Response with id '{response_id}' not found.", field=field)
        return stored

    def events_of(self, stored: StoredResponse, field: str) -> RunningResponse | list[str]:
        """Returns the running response if it is on this gateway, or the stored events. Raises InvalidRequest."""
        running = self._store.running(stored.response.id)
        if running is not None and not running.num_forgotten:
            return running
        if stored.events is not None:
            return stored.events
        if stored.response.status in _FINAL:
            why = "only responses created with background and stream can be streamed again"
        else:
            why = "the response runs on another gateway and cannot be streamed here"
        raise InvalidRequest(f"{field}: {why}", field=field)

    async def delete(self, identity: Identity, response_id: str) -> None:
        """Deletes a response. Raises NotFound, Unavailable."""
        await self.find(identity, response_id)
        await self._store.delete(response_id)

    async def cancel(self, identity: Identity, response_id: str) -> StoredResponse:
        """Cancels a background response. Raises NotFound, InvalidRequest, Unavailable."""
        stored = await self.find(identity, response_id)
        if not stored.response.background:
            raise InvalidRequest("only background responses can be cancelled", field="background")
        return await self._store.cancel(response_id)

    def _check(self, call: Call, request: ResponsesRequest) -> tuple[ServedModel, ServedTools, list[Item]]:
        check_request(request, self._serving.config.max_logprobs)
        with fields_named(FIELDS):
            model = self._serving.model(call, request.model)
            check_max_items(0 if isinstance(request.input, str) else len(request.input))
            return model, served_tools(request.tools), input_items(request.input)

    async def _run_on_thread(self, owner: str, work: Callable[[], T], *values: object) -> T:
        """Runs `work` on these values; on another thread if they are large."""
        return await self._serving.bodies.run(work, size_of(values), owner)

    async def _prepare(
        self,
        call: Call,
        request: ResponsesRequest,
        model: ServedModel,
        served: ServedTools,
        items: Sequence[Item],
        requested: RequestedConstraint | None,
    ) -> _Prepared:
        context, conversation_id = await self._context(call, request)
        prepared = partial(_Prepared, request, model, items=items, context=context, conversation_id=conversation_id)

        made = partial(turn_of, request, [*context, *items], served)
        turn = await self._run_on_thread(model.owner, made, context, items, request.tools, request.instructions)
        turn = replace(turn, requested=requested)
        fitting = await self._fitting(model, request, turn, [*context, *items])
        return prepared(fitting.turn, fitting.token_ids, names=served.names)

    async def _context(self, call: Call, request: ResponsesRequest) -> tuple[Sequence[Item], str]:
        """Returns the items before the request's, and the conversation's id if there is one."""
        if request.previous_response_id:
            previous = await self.find(call.identity, request.previous_response_id, "previous_response_id")
            return _context_after(previous), ""
        conversation_id = conversation_of(request)
        if not conversation_id:
            return (), ""
        tenant = call.identity.tenant.name
        return await self.conversations.items(tenant, conversation_id, "conversation", for_more=True), conversation_id

    async def _encode(self, model: ServedModel, turn: ChatTurn) -> list[int]:
        await self._run_on_thread(model.owner, partial(check_turn, model, turn), turn.messages, turn.tools.tools)
        return await encode_turn(model, turn)

    async def _fitting(
        self, model: ServedModel, request: ResponsesRequest, turn: ChatTurn, items: Sequence[Item]
    ) -> _Fitting:
        """Returns the turn, truncated to the latest items if it is too long and truncation is enabled.

        Raises ContextTooLong.
        """
        truncates = request.truncation == "auto"
        if truncates and len(items) > MANY_ITEMS:
            found = await self._truncated(model, request, turn, items, 0)
            if found is not None:
                return found
            # Encode only the last unit, for its error: it is too long alone, and rendering all items is expensive.
            truncates, turn = False, await self._last_unit(model, request, turn, items)
        try:
            return _Fitting(turn, await self._encode(model, turn))
        except ContextTooLong:
            found = await self._truncated(model, request, turn, items, 1) if truncates else None
            if found is None:
                raise
            return found

    async def _last_unit(
        self, model: ServedModel, request: ResponsesRequest, turn: ChatTurn, items: Sequence[Item]
    ) -> ChatTurn:
        def last() -> ChatTurn:
            conversation = parted(items)
            kept = conversation.kept(len(conversation.starts) - 1)
            return replace(turn, messages=chat_messages(request.instructions, kept))

        return await self._run_on_thread(model.owner, last, items)

    async def _truncated(
        self, model: ServedModel, request: ResponsesRequest, turn: ChatTurn, items: Sequence[Item], fewest: int
    ) -> _Fitting | None:
        """Returns the turn over the latest items that leave room for the whole output, or else for one token.

        Drops at least `fewest` units.
        """
        context = model.require_info().max_model_len
        conversation = await self._run_on_thread(model.owner, partial(parted, items), items)
        wanted = min(request.max_output_tokens or context // 8, context // 2)
        for max_output in (wanted, 1):

            async def tried(kept: list[Item], max_output: int = max_output) -> _Fitting | None:
                messages = await self._run_on_thread(
                    model.owner, partial(chat_messages, request.instructions, kept), kept
                )
                shorter = replace(turn, messages=messages)
                try:
                    token_ids = await self._encode(model, shorter)
                except ContextTooLong:
                    return None
                least = max_output if len(kept) < len(items) else 1
                return _Fitting(shorter, token_ids) if len(token_ids) + least <= context else None

            found = await longest_that_fits(conversation, context - max_output, tried, fewest)
            if found is not None:
                return found
        return None

    def _running(self, call: Call, prepared: _Prepared, end_admission: Callable[[], None]) -> RunningResponse:
        request, turn = prepared.request, prepared.turn
        response_id = f"resp_{uuid.uuid4().hex}"
        store, conversations = self._store, self.conversations

        async def settle(running: RunningResponse) -> None:
            end_admission()
            unwanted = running.over
            if prepared.conversation_id and running.response.status in ("completed", "incomplete"):
                added = [*prepared.items, *running.response.output]
                await conversations.extend(running.tenant, prepared.conversation_id, added)
            if running.response.store and not unwanted and (running.response.background or running.error is None):
                with_events = running.response.background and bool(request.stream)
                await store.keep(running, prepared.items, prepared.context, with_events)

        running = RunningResponse(
            new_response(request, response_id, prepared.model.name, prepared.model.defaults),
            OutputItems(new_item_id, turn.logprobs, prepared.names),
            self._serving.meter(call, 1),
            settle,
            store.spawn,
        )
        running.tenant = call.identity.tenant.name
        return running


def _context_after(stored: StoredResponse) -> Sequence[Item]:
    if stored.response.status not in ("completed", "incomplete"):
        message = f"previous_response_id: the response is {stored.response.status}; it must be complete"
        raise InvalidRequest(message, field="previous_response_id")
    return [*stored.context, *stored.input, *stored.response.output]

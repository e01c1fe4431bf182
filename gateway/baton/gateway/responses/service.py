"""Creates, finds, cancels and deletes responses for REST and gRPC. Knows neither of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from baton.gateway.access.identity import Identity
from baton.gateway.bodies.thread import BodyThread
from baton.gateway.core import GenerationRequest
from baton.gateway.fields.chat import check_max_items
from baton.gateway.mcp.sessions import McpSessions
from baton.gateway.models.constraints.structured_output import RequestedConstraint
from baton.gateway.models.served import ServedModel
from baton.gateway.responses.conversations.store import ConversationStore
from baton.gateway.responses.fitting import TurnFitter
from baton.gateway.responses.items import Item, input_items, new_item_id
from baton.gateway.responses.mcp.loop import ToolLoop
from baton.gateway.responses.mcp.preparation import McpPlan, plan_of
from baton.gateway.responses.mcp.request import requested_servers
from baton.gateway.responses.mcp.rounds import ResponseRounds
from baton.gateway.responses.output import OutputItems
from baton.gateway.responses.request import (
    FIELDS,
    check_request,
    conversation_of,
    ignored_of,
    new_response,
    turn_of,
)
from baton.gateway.responses.running import RunningResponse
from baton.gateway.responses.store import ResponseStore
from baton.gateway.responses.tools import ServedTools, ToolName, served_tools
from baton.gateway.responses.types import ResponsesRequest, StoredResponse
from baton.gateway.serving.chat import ChatTurn, fields_named, generation_of
from baton.gateway.serving.context import Call, ServingContext
from baton.rpc.errors import InvalidRequest, NotFound

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
    session: str  # of the previous response or the conversation; empty: the response begins one
    names: Mapping[str, ToolName]  # client's tools by the names that the model sees
    plan: McpPlan | None  # None: no MCP server


@dataclass(frozen=True, slots=True)
class _Context:
    """What precedes a request's items."""

    items: Sequence[Item] = ()
    conversation_id: str = ""  # empty: no conversation
    session: str = ""  # empty: none


@dataclass(frozen=True, slots=True)
class BegunResponse:
    """A response that can be followed; `start` starts its generation."""

    running: RunningResponse
    generation: GenerationRequest
    loop: ToolLoop | None = None  # runs MCP tools between generations


class ResponseService:
    """The operations on responses. `field` parameters are the client's field with the response's id."""

    def __init__(self, serving: ServingContext, store: ResponseStore) -> None:
        self._serving = serving
        self._store = store
        self._fitter = TurnFitter(serving.bodies)
        self._mcp = serving.config.mcp
        self.conversations = ConversationStore(store.records)

    @property
    def bodies(self) -> BodyThread:
        """Returns the thread that reads large requests."""
        return self._serving.bodies

    def ignored_of(self, request: ResponsesRequest) -> list[str]:
        """Converts other servers' fields in place. Returns the names of all ignored fields. Raises InvalidRequest."""
        return [*ignored_of(request), *requested_servers(request.tools, self._mcp)[1]]

    def counting_rejections(self) -> AbstractContextManager[None]:
        """Counts requests that are refused within the context."""
        return self._serving.counting_rejections()

    async def begin(
        self, call: Call, request: ResponsesRequest, requested: RequestedConstraint | None = None
    ) -> BegunResponse:
        """Validates a request and admits it. `requested` is an additional constraint. Raises ServiceError."""
        serving = self._serving
        with serving.counting_rejections():
            if serving.names is not None:
                await serving.names.ensure(call.identity, request.model or "")
            model, served, items = await self._fitter.run(
                call.identity.tenant.cache_owner,
                partial(self._check, call, request),
                request.input,
                request.tools,
                request.instructions,
            )
            if request.request_id:
                call.request_id = request.request_id
            admitted = serving.admission.admit(call.request_id, 1)
            sessions = McpSessions(self._mcp)
            try:
                with fields_named(FIELDS):
                    prepared = await self._prepare(call, request, model, served, items, requested, sessions)
                    running = self._running(call, prepared, admitted.end)
                    turn = replace(prepared.turn, session=running.session)
                    generation = generation_of(
                        serving, call, admitted.request_id, prepared.model, turn, prepared.token_ids
                    )
                if request.background:
                    await self._store.begin(running, prepared.items, prepared.context)
            except BaseException:
                admitted.end()
                self._store.spawn(sessions.close())
                raise
        return BegunResponse(running, generation, self._loop(call, prepared, running, admitted.request_id))

    async def start(self, call: Call, begun: BegunResponse) -> None:
        """Starts the generation. A failure becomes the response's error."""
        serving, running = self._serving, begun.running
        try:
            if begun.loop is not None:
                running.generation = begun.loop
                await begun.loop.start(begun.generation, self._store.spawn)
            else:
                generator = serving.admitted(call, serving.generator, [begun.generation], running.response.id)
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
        check_request(request, self._serving.config.most_logprobs)
        with fields_named(FIELDS):
            model = self._serving.model(call, request.model)
            check_max_items(0 if isinstance(request.input, str) else len(request.input))
            return model, served_tools(request.tools), input_items(request.input)

    async def _prepare(
        self,
        call: Call,
        request: ResponsesRequest,
        model: ServedModel,
        served: ServedTools,
        items: Sequence[Item],
        requested: RequestedConstraint | None,
        sessions: McpSessions,
    ) -> _Prepared:
        before = await self._context(call, request)
        context = before.items
        prepared = partial(
            _Prepared,
            request,
            model,
            items=items,
            context=context,
            conversation_id=before.conversation_id,
            session=before.session,
        )
        servers, _ = requested_servers(request.tools, self._mcp)
        plan = None
        if servers:
            plan, served = await plan_of(servers, sessions, served, context, items)

        made = partial(turn_of, request, [*context, *items], served)
        turn = await self._fitter.run(model.owner, made, context, items, request.tools, request.instructions)
        turn = replace(turn, requested=requested)
        fitting = await self._fitter.fit(model, request, turn, [*context, *items])
        return prepared(fitting.turn, fitting.token_ids, names=served.names, plan=plan)

    async def _context(self, call: Call, request: ResponsesRequest) -> _Context:
        if request.previous_response_id:
            previous = await self.find(call.identity, request.previous_response_id, "previous_response_id")
            return _Context(_context_after(previous), session=previous.session or previous.response.id)
        conversation_id = conversation_of(request)
        if not conversation_id:
            return _Context()
        tenant = call.identity.tenant.name
        items = await self.conversations.items(tenant, conversation_id, "conversation", for_more=True)
        return _Context(items, conversation_id, session=conversation_id)

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
        running.session = prepared.session or (response_id if running.response.store else "")
        if prepared.plan is not None:
            running.show(prepared.plan.show(running.output), begin=False)
        return running

    def _loop(self, call: Call, prepared: _Prepared, running: RunningResponse, request_id: str) -> ToolLoop | None:
        plan = prepared.plan
        if plan is None:
            return None
        items = [*prepared.context, *prepared.items]
        rounds = ResponseRounds(
            self._serving, self._fitter, call, request_id, prepared.request, prepared.model, prepared.turn, items
        )
        observe = self._serving.metrics.tool_called
        return ToolLoop(running, plan.servers, plan.sessions, rounds, self._mcp, plan.approved, observe)


def _context_after(stored: StoredResponse) -> Sequence[Item]:
    if stored.response.status not in ("completed", "incomplete"):
        message = f"previous_response_id: the response is {stored.response.status}; it must be complete"
        raise InvalidRequest(message, field="previous_response_id")
    return [*stored.context, *stored.input, *stored.response.output]

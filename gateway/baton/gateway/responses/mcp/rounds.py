"""The generations of a response after its first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from baton.gateway.core import Generation, GenerationRequest, Sink
from baton.gateway.models.served import ServedModel
from baton.gateway.parsing.tool import ToolMode, ToolUse
from baton.gateway.responses.fitting import TurnFitter
from baton.gateway.responses.items import Item, chat_messages
from baton.gateway.responses.mcp.loop import Round
from baton.gateway.responses.types import ResponsesRequest
from baton.gateway.serving.chat import ChatTurn, generation_of
from baton.gateway.serving.context import Call, ServingContext


@dataclass(frozen=True, slots=True)
class ResponseRounds:
    """Implements Rounds. Each one is limited and counted as a request of the tenant."""

    serving: ServingContext
    fitter: TurnFitter
    call: Call
    request_id: str
    request_body: ResponsesRequest
    model: ServedModel
    turn: ChatTurn  # of the first round
    items: Sequence[Item]  # before the response

    async def request(self, wanted: Round) -> GenerationRequest:
        items = [*self.items, *wanted.output]
        written = partial(chat_messages, self.request_body.instructions, items)
        most = self.turn.max_tokens
        turn = replace(
            self.turn,
            messages=await self.fitter.run(self.model.owner, written, items),
            tools=_later(self.turn.tools, wanted.calls_tools),
            max_tokens=None if most is None else most - wanted.used_tokens,
        )
        fitting = await self.fitter.fit(self.model, self.request_body, turn, items)
        request_id = f"{self.request_id}-{wanted.number}"
        return generation_of(self.serving, self.call, request_id, self.model, fitting.turn, fitting.token_ids)

    async def start(self, request: GenerationRequest, sink: Sink) -> Generation:
        admitted = self.serving.admitted(self.call, self.serving.generator, [request])
        try:
            return await admitted.start(request, sink)
        finally:
            # The call of a background response has ended already.
            admitted.close()


def _later(use: ToolUse, calls_tools: bool) -> ToolUse:
    """Returns the choice for later rounds: a model that must call would never answer."""
    if not calls_tools:
        return replace(use, mode=ToolMode.NONE, name="")
    return use if use.mode is ToolMode.NONE else replace(use, mode=ToolMode.AUTO, name="")

"""Fits a turn into the model's context: as it is, or without its oldest items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from baton.gateway.bodies.thread import BodyThread
from baton.gateway.errors.http import ContextTooLong
from baton.gateway.models.prompts.rendering import size_of
from baton.gateway.models.served import ServedModel
from baton.gateway.responses.items import Item, chat_messages
from baton.gateway.responses.truncation import MANY_ITEMS, longest_that_fits, parted
from baton.gateway.responses.types import ResponsesRequest
from baton.gateway.serving.chat import ChatTurn, check_turn, encode_turn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fitting:
    """A turn that fits into the context."""

    turn: ChatTurn
    token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class TurnFitter:
    """Checks, truncates and encodes turns; large ones on a thread."""

    def __init__(self, bodies: BodyThread) -> None:
        self._bodies = bodies

    async def run(self, owner: str, work: Callable[[], T], *values: object) -> T:
        """Runs `work` on these values; on another thread if they are large."""
        return await self._bodies.run(work, size_of(values), owner)

    async def fit(
        self, model: ServedModel, request: ResponsesRequest, turn: ChatTurn, items: Sequence[Item]
    ) -> Fitting:
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
            return Fitting(turn, await self._encode(model, turn))
        except ContextTooLong:
            found = await self._truncated(model, request, turn, items, 1) if truncates else None
            if found is None:
                raise
            return found

    async def _encode(self, model: ServedModel, turn: ChatTurn) -> list[int]:
        await self.run(model.owner, partial(check_turn, model, turn), turn.messages, turn.tools.tools)
        return await encode_turn(model, turn)

    async def _last_unit(
        self, model: ServedModel, request: ResponsesRequest, turn: ChatTurn, items: Sequence[Item]
    ) -> ChatTurn:
        def last() -> ChatTurn:
            conversation = parted(items)
            kept = conversation.kept(len(conversation.starts) - 1)
            return replace(turn, messages=chat_messages(request.instructions, kept))

        return await self.run(model.owner, last, items)

    async def _truncated(
        self, model: ServedModel, request: ResponsesRequest, turn: ChatTurn, items: Sequence[Item], fewest: int
    ) -> Fitting | None:
        """Returns the turn over the latest items that leave room for the whole output, or else for one token.

        Drops at least `fewest` units.
        """
        context = model.require_info().max_model_len
        conversation = await self.run(model.owner, partial(parted, items), items)
        wanted = min(request.max_output_tokens or context // 8, context // 2)
        for max_output in (wanted, 1):

            async def tried(kept: list[Item], max_output: int = max_output) -> Fitting | None:
                messages = await self.run(model.owner, partial(chat_messages, request.instructions, kept), kept)
                shorter = replace(turn, messages=messages)
                try:
                    token_ids = await self._encode(model, shorter)
                except ContextTooLong:
                    return None
                least = max_output if len(kept) < len(items) else 1
                return Fitting(shorter, token_ids) if len(token_ids) + least <= context else None

            found = await longest_that_fits(conversation, context - max_output, tried, fewest)
            if found is not None:
                return found
        return None

"""Log-probabilities of a prompt's tokens, put together from the parts in which a worker sends them."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.core import TokenLogprob
from baton.gateway.generation.output.logprobs import NamedLogprobs
from baton.rpc.errors import InternalError
from baton.v1 import types_pb2


class PromptLogprobParts:
    """Of one prompt. Parts may come again after a preemption or a failover."""

    def __init__(self, token_ids: Sequence[int], name: NamedLogprobs) -> None:
        self._token_ids = token_ids
        self._name = name
        self._entries: list[TokenLogprob | None] = [None] * (len(token_ids) - 1)

    def take(self, first_position: int, entries: Sequence[types_pb2.TokenLogprobs]) -> None:
        """A part, from this place of the prompt on. Raises InternalError for places that the prompt does not have."""
        if not 1 <= first_position <= len(self._token_ids) - len(entries):
            raise InternalError(f"prompt log-probabilities from {first_position} on: the prompt is shorter")
        for position, entry in enumerate(entries, first_position):
            self._entries[position - 1] = self._name(self._token_ids[position], entry)

    def complete(self) -> list[TokenLogprob]:
        """All, in the prompt's order, without the first token's. Raises InternalError where some are missing."""
        entries = [entry for entry in self._entries if entry is not None]
        if len(entries) < len(self._entries):
            missing = len(self._entries) - len(entries)
            raise InternalError(f"the worker left out log-probabilities of {missing} tokens of the prompt")
        return entries

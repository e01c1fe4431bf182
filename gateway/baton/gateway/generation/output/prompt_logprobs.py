"""Assembles a prompt's log-probabilities from the parts that a worker sends."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.core import TokenLogprob
from baton.gateway.generation.output.logprobs import NamedLogprobs
from baton.rpc.errors import InternalError
from baton.v1 import types_pb2


class PromptLogprobParts:
    """The received parts for one prompt. A part may arrive again after a preemption or a failover."""

    def __init__(self, token_ids: Sequence[int], name: NamedLogprobs) -> None:
        self._token_ids = token_ids
        self._name = name
        self._entries: list[TokenLogprob | None] = [None] * (len(token_ids) - 1)

    def take(self, first_position: int, entries: Sequence[types_pb2.TokenLogprobs]) -> None:
        """Stores a part that starts at `first_position`. Raises InternalError for positions outside the prompt."""
        if not 1 <= first_position <= len(self._token_ids) - len(entries):
            raise InternalError(f"prompt log-probabilities from position {first_position} exceed the prompt")
        for position, entry in enumerate(entries, first_position):
            self._entries[position - 1] = self._name(self._token_ids[position], entry)

    def complete(self) -> list[TokenLogprob]:
        """Returns all entries in the prompt's order, without the first token.

        Raises InternalError if some are missing.
        """
        entries = [entry for entry in self._entries if entry is not None]
        if len(entries) < len(self._entries):
            missing = len(self._entries) - len(entries)
            raise InternalError(f"the worker sent no log-probabilities for {missing} prompt tokens")
        return entries

"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway import openai_types as types
from baton.gateway.generation import TokenLogprob

# Minus infinity is no JSON.
_FLOOR = -9999.0


def chat_logprobs(entries: Sequence[TokenLogprob], num_top: int) -> types.ChatLogprobs:
    """One object a token."""
    return types.ChatLogprobs(content=[_chat_entry(entry, num_top) for entry in entries])


def _chat_entry(entry: TokenLogprob, num_top: int) -> types.TokenLogprob:
    top = [
        types.TopLogprob(token=one.token, logprob=max(one.logprob, _FLOOR), bytes=list(one.token_bytes))
        for one in entry.top[:num_top]
    ]
    return types.TokenLogprob(
        token=entry.token,
        logprob=max(entry.logprob, _FLOOR),
        bytes=list(entry.token_bytes),
        top_logprobs=top,
    )


def prompt_logprobs(entries: Sequence[TokenLogprob]) -> types.PromptLogprobs:
    """Every token of a prompt, the first one without: the most likely ones, and the prompt's own."""
    return [None, *map(_prompt_entry, entries)]


def _prompt_entry(entry: TokenLogprob) -> dict[str, types.PromptLogprob]:
    found = {
        str(one.token_id): types.PromptLogprob(max(one.logprob, _FLOOR), rank, one.token)
        for rank, one in enumerate(entry.top, 1)
    }
    found[str(entry.token_id)] = types.PromptLogprob(max(entry.logprob, _FLOOR), entry.rank, entry.token)
    return found


class CompletionLogprobColumns:
    """One choice's columns, or pieces of them; text offsets go on from piece to piece."""

    def __init__(self, num_top: int, first_offset: int) -> None:
        self._num_top = num_top
        self._offset = first_offset

    def columns(self, entries: Sequence[TokenLogprob]) -> types.CompletionLogprobs:
        """The columns of the next tokens."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry.token)
        return types.CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[max(entry.logprob, _FLOOR) for entry in entries],
            tokens=[entry.token for entry in entries],
            top_logprobs=[self._top(entry) for entry in entries],
        )

    def prompt(self, first_token: str, entries: Sequence[TokenLogprob]) -> types.CompletionLogprobs:
        """The columns of a prompt that is part of the text; its first token has no log-probability."""
        self._offset = len(first_token)
        columns = self.columns(entries)
        columns.text_offset.insert(0, 0)
        columns.token_logprobs.insert(0, None)
        columns.tokens.insert(0, first_token)
        columns.top_logprobs.insert(0, None)
        return columns

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        top = {one.token: max(one.logprob, _FLOOR) for one in reversed(entry.top[: self._num_top])}
        top.setdefault(entry.token, max(entry.logprob, _FLOOR))
        return dict(sorted(top.items(), key=lambda item: -item[1]))

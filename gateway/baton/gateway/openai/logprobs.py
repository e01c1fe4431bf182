"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.gateway.core import TokenLogprob, TopLogprob
from baton.gateway.schemas import answers
from baton.gateway.schemas import requests as types

# JSON has no negative infinity.
FLOOR = -9999.0


@dataclass(frozen=True, slots=True)
class LogprobForm:
    """How log-probabilities are written."""

    num_top: int = 0  # alternatives per token
    as_ids: bool = False  # whether tokens are written as "token_id:N"

    def name_of(self, entry: TokenLogprob | TopLogprob) -> str:
        """Returns the name of a token."""
        return f"token_id:{entry.token_id}" if self.as_ids else entry.token


def form_of(request: types.GenerationFields, num_top: int | None) -> LogprobForm | None:
    """Returns the requested form, or None without log-probabilities. Named alternatives are all returned."""
    if num_top is None:
        return None
    named = request.logprob_token_ids
    return LogprobForm(len(named) if named else num_top, bool(request.return_tokens_as_token_ids))


def chat_logprobs(entries: Sequence[TokenLogprob], form: LogprobForm) -> answers.ChatLogprobs:
    """Returns one object per token."""
    return answers.ChatLogprobs(content=[_chat_entry(entry, form) for entry in entries])


def _chat_entry(entry: TokenLogprob, form: LogprobForm) -> answers.TokenLogprob:
    top = [
        answers.TopLogprob(token=form.name_of(one), logprob=max(one.logprob, FLOOR), bytes=list(one.token_bytes))
        for one in entry.top[: form.num_top]
    ]
    return answers.TokenLogprob(
        token=form.name_of(entry),
        logprob=max(entry.logprob, FLOOR),
        bytes=list(entry.token_bytes),
        top_logprobs=top,
    )


def prompt_logprobs(entries: Sequence[TokenLogprob]) -> answers.PromptLogprobs:
    """Returns one entry per prompt token: None for the first, then the most likely tokens and the prompt's own."""
    return [None, *map(_prompt_entry, entries)]


def _prompt_entry(entry: TokenLogprob) -> dict[str, answers.PromptLogprob]:
    found = {
        str(one.token_id): answers.PromptLogprob(max(one.logprob, FLOOR), rank, one.token)
        for rank, one in enumerate(entry.top, 1)
    }
    found[str(entry.token_id)] = answers.PromptLogprob(max(entry.logprob, FLOOR), entry.rank, entry.token)
    return found


class CompletionLogprobColumns:
    """Builds one choice's columns piece by piece; text offsets continue from piece to piece."""

    def __init__(self, form: LogprobForm, first_offset: int) -> None:
        self._form = form
        self._offset = first_offset

    def columns(self, entries: Sequence[TokenLogprob]) -> answers.CompletionLogprobs:
        """Returns the columns of the next tokens."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry.token)
        return answers.CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[max(entry.logprob, FLOOR) for entry in entries],
            tokens=[self._form.name_of(entry) for entry in entries],
            top_logprobs=[self._top(entry) for entry in entries],
        )

    def prompt(self, first_token: str, first_id: int, entries: Sequence[TokenLogprob]) -> answers.CompletionLogprobs:
        """Returns the columns of an echoed prompt, whose first token has no log-probability."""
        self._offset = len(first_token)
        columns = self.columns(entries)
        columns.text_offset.insert(0, 0)
        columns.token_logprobs.insert(0, None)
        columns.tokens.insert(0, f"token_id:{first_id}" if self._form.as_ids else first_token)
        columns.top_logprobs.insert(0, None)
        return columns

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        form = self._form
        top = {form.name_of(one): max(one.logprob, FLOOR) for one in reversed(entry.top[: form.num_top])}
        top.setdefault(form.name_of(entry), max(entry.logprob, FLOOR))
        return dict(sorted(top.items(), key=lambda item: -item[1]))

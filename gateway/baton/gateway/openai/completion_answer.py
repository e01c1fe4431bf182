"""The two forms of a text completion: streamed chunks, or one document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from baton.gateway.core import Delta, TokenLogprob
from baton.gateway.core import Usage as TokenCounts
from baton.gateway.http.exchange import Exchange
from baton.gateway.metrics.gateway import AnswerMeter
from baton.gateway.openai.logprob_json import columns_json, count_of, prompt_columns_json, prompt_json, raw
from baton.gateway.openai.logprobs import CompletionLogprobColumns, LogprobForm
from baton.gateway.rest.large_answer import LargeAnswer
from baton.gateway.rest.sse import Envelope, json_text
from baton.gateway.schemas.answers import Completion, CompletionChoice, Usage
from baton.gateway.serving.answer import Answer, StreamAnswer, usage_of


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """An encoded prompt."""

    token_ids: list[int]
    echo: str  # text before the output
    first_token: str  # text of the first token, if the prompt is echoed


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """The members of a response. Choice p * n + j is the j-th of prompt p."""

    prompts: Sequence[EncodedPrompt]
    n: int
    logprobs: LogprobForm | None  # None: no log-probabilities
    # return only the choices with the highest mean log-probability, this many of the n; None: all
    kept: int | None = None
    echo_logprobs: bool = False  # whether the log-probabilities include the prompt's
    prompt_logprobs: bool = False  # whether the prompt's log-probabilities are returned separately
    return_token_ids: bool = False
    scoring: bool = False  # whether only the prompt is scored and the output is dropped

    @property
    def num_choices(self) -> int:
        """Returns the number of choices of all prompts."""
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        """Returns the number of tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def prompt_of(self, index: int) -> EncodedPrompt:
        """Returns the prompt of a choice."""
        return self.prompts[index // self.n]

    def columns_of(self, index: int) -> CompletionLogprobColumns:
        """Returns new columns for a choice."""
        return CompletionLogprobColumns(self.logprobs or LogprobForm(), len(self.prompt_of(index).echo))

    def answered(self, delta: Delta) -> Delta:
        """Returns the part of a delta that the response contains."""
        if not self.scoring:
            return delta
        reason = "length" if delta.finish_reason is not None else None
        return Delta(delta.index, "", (), None, reason, None, None, delta.prompt_logprobs)

    def counted(self, counts: TokenCounts) -> TokenCounts:
        """Returns the token counts that the response contains."""
        return TokenCounts(counts.prompt_tokens, 0, counts.cached_tokens) if self.scoring else counts


class CompletionStream(StreamAnswer):
    """Streams chunks of text for all choices; an echoed prompt precedes its choice's first chunk."""

    def __init__(self, exchange: Exchange, meter: AnswerMeter, envelope: Envelope, form: CompletionForm) -> None:
        super().__init__(exchange, meter, envelope, form.num_choices)
        self._form = form
        self._num_output_tokens = 0
        choices = range(form.num_choices)
        self._unopened = {index for index in choices if form.prompt_of(index).echo or form.return_token_ids}
        self._logprobs = [form.columns_of(index) for index in choices]
        self._prompt_logprobs: list[list[TokenLogprob] | None] = [None] * len(form.prompts)
        # by prompt, deltas that wait for the prompt's log-probabilities
        self._waiting: dict[int, list[tuple[int, Delta]]] = {}
        self._before_text = [b'%b{"index":%d,"text":' % (self.head, index) for index in choices]
        self._after_text = b',"logprobs":null,"finish_reason":null,"stop_reason":null}' + self.tail

    def deliver(self, index: int, delta: Delta) -> None:
        prompt = index // self._form.n
        if not self._form.echo_logprobs or self._prompt_logprobs[prompt] is not None:
            super().deliver(index, self._form.answered(delta))
            return
        waiting = self._waiting.setdefault(prompt, [])
        waiting.append((index, delta))
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
            for one, held in self._waiting.pop(prompt):
                super().deliver(one, self._form.answered(held))

    def done(self, counts: TokenCounts) -> None:
        super().done(self._form.counted(counts))

    def piece(self, index: int, delta: Delta) -> bytes:
        opening = b""
        if index in self._unopened:
            self._unopened.remove(index)
            opening = self._opening(index)
        if self.envelope.continuous_usage or delta.logprobs is not None or self._form.return_token_ids:
            return opening + self._rich_piece(index, delta)
        text = delta.text
        return opening + self._before_text[index] + json_text(text) + self._after_text if text else opening

    def ending(self, index: int, delta: Delta) -> bytes:
        return self._chunk(index, b'""', b"null", json_text(delta.finish_reason), json_text(delta.stop_reason))

    def _opening(self, index: int) -> bytes:
        """Returns the chunk with the echoed prompt."""
        prompt = self._form.prompt_of(index)
        entries = self._prompt_logprobs[index // self._form.n]
        columns = None
        if entries is not None:
            columns = self._logprobs[index].prompt(prompt.first_token, prompt.token_ids[0], entries)
        more = b""
        if self._form.return_token_ids:
            more = b',"prompt_token_ids":%b' % msgspec.json.encode(prompt.token_ids)
        return self._chunk(index, json_text(prompt.echo), msgspec.json.encode(columns), b"null", b"null", more)

    def _rich_piece(self, index: int, delta: Delta) -> bytes:
        self._num_output_tokens += len(delta.token_ids)
        with_ids = self._form.return_token_ids and bool(delta.token_ids)
        if not delta.text and not delta.logprobs and not with_ids:
            return b""
        columns = self._logprobs[index].columns(delta.logprobs) if delta.logprobs else None
        more = b',"token_ids":%b' % msgspec.json.encode(list(delta.token_ids)) if with_ids else b""
        return self._chunk(index, json_text(delta.text), msgspec.json.encode(columns), b"null", b"null", more)

    def _chunk(self, index: int, text: bytes, logprobs: bytes, finish: bytes, stop: bytes, more: bytes = b"") -> bytes:
        tail = self.tail
        if self.envelope.continuous_usage:
            tail = self.envelope.tail_with(usage_of(self._form.num_prompt_tokens, self._num_output_tokens, 0))
        form = b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}%b'
        return form % (self.head, index, text, logprobs, finish, stop, more, tail)


class CompletionDocument(Answer):
    """Collects one text_completion document."""

    def __init__(self, exchange: Exchange, meter: AnswerMeter, envelope: Envelope, form: CompletionForm) -> None:
        super().__init__(exchange, meter)
        self._envelope = envelope
        self._form = form
        choices = range(form.num_choices)
        self._texts: list[list[str]] = [[form.prompt_of(index).echo] for index in choices]
        self._token_ids: list[list[int]] = [[] for _ in choices]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in choices]
        self._prompt_logprobs: list[list[TokenLogprob]] = [[] for _ in form.prompts]
        self._sums = [0.0] * form.num_choices  # of the log-probabilities
        self._counts_of = [0] * form.num_choices
        self._num_logprobs = 0
        self._large = LargeAnswer(exchange)
        self._ends: list[Delta | None] = [None] * form.num_choices

    def deliver(self, index: int, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[index // self._form.n] = delta.prompt_logprobs
            self._num_logprobs += self._form.n * count_of(delta.prompt_logprobs)
        delta = self._form.answered(delta)
        if delta.token_ids:
            self.meter.on_tokens(index, len(delta.token_ids))
            if self._form.return_token_ids:
                self._token_ids[index].extend(delta.token_ids)
        self._texts[index].append(delta.text)
        if delta.logprobs:
            self._take_logprobs(index, delta.logprobs)
        if delta.finish_reason is not None:
            self._ends[index] = delta

    def _take_logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> None:
        self._sums[index] += sum(entry.logprob for entry in entries)
        self._counts_of[index] += len(entries)
        if self._form.logprobs is not None:
            self._logprobs[index].extend(entries)
            self._num_logprobs += count_of(entries)

    def done(self, counts: TokenCounts) -> None:
        super().done(self._form.counted(counts))

    def finish(self, usage: Usage) -> None:
        self._large.respond(lambda: self._body(usage), self._num_logprobs)

    def _body(self, usage: Usage) -> bytes:
        envelope = self._envelope
        prompts = [self._prompt_json(entries) for entries in self._prompt_logprobs]
        document = Completion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            system_fingerprint=envelope.system_fingerprint,
            choices=[
                self._choice(place, index, prompts[index // self._form.n])
                for place, index in enumerate(self._returned_indices())
            ],
            usage=usage,
            metrics=self.metrics(envelope, usage),
        )
        return msgspec.json.encode(document)

    def _prompt_json(self, entries: Sequence[TokenLogprob]) -> bytes:
        """Returns one prompt's log-probabilities, encoded once for all its choices."""
        return prompt_json(entries) if self._form.prompt_logprobs else b""

    def _returned_indices(self) -> Sequence[int]:
        """Returns the indices of the returned choices, in order."""
        form = self._form
        if form.kept is None:
            return range(form.num_choices)
        indices: list[int] = []
        for first in range(0, form.num_choices, form.n):
            indices += sorted(range(first, first + form.n), key=self._mean_logprob, reverse=True)[: form.kept]
        return indices

    def _mean_logprob(self, index: int) -> float:
        return self._sums[index] / max(1, self._counts_of[index])

    def _choice(self, place: int, index: int, prompt_logprobs: bytes) -> CompletionChoice:
        form, end = self._form, self._ends[index]
        return CompletionChoice(
            index=place,
            text="".join(self._texts[index]),
            logprobs=raw(self._columns(index)) if form.logprobs is not None else None,
            finish_reason=end.finish_reason if end is not None else None,
            stop_reason=end.stop_reason if end is not None else None,
            token_ids=self._token_ids[index] if form.return_token_ids else UNSET,
            prompt_token_ids=form.prompt_of(index).token_ids if form.return_token_ids else UNSET,
            prompt_logprobs=raw(prompt_logprobs) if form.prompt_logprobs else UNSET,
        )

    def _columns(self, index: int) -> bytes:
        form, entries = self._form, self._logprobs[index]
        columns = form.columns_of(index)
        if not form.echo_logprobs:
            return columns_json(columns, entries)
        prompt = form.prompt_of(index)
        first = prompt.first_token, prompt.token_ids[0]
        return prompt_columns_json(columns, first, self._prompt_logprobs[index // form.n], entries)

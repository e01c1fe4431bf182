"""Collects a generation's deltas into vLLM's outputs. Implements the gateway's Sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from baton.gateway.core import Delta, TokenLogprob, Usage
from baton.gateway.errors.http import http_error_of
from baton.gateway.metrics.gateway import AnswerMeter
from baton.llm.parameters.sampling_params import RequestOutputKind
from baton.llm.results.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from baton.rpc.errors import ServiceError


class _Output:
    """One output so far. `sent_*`: how much of it the last snapshot had."""

    __slots__ = ("finish_reason", "logprobs", "sent_texts", "sent_tokens", "stop_reason", "texts", "token_ids", "total")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.total = 0.0  # of the log-probabilities
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.sent_texts = 0
        self.sent_tokens = 0

    def add(self, delta: Delta, ranked: bool) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(_by_token(entry, ranked) for entry in delta.logprobs)
            self.total += sum(entry.logprob for entry in delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def snapshot(self, index: int, only_new: bool) -> CompletionOutput:
        first_text, first = (self.sent_texts, self.sent_tokens) if only_new else (0, 0)
        logprobs = self.logprobs
        self.sent_texts, self.sent_tokens = len(self.texts), len(self.token_ids)
        return CompletionOutput(
            index=index,
            text="".join(self.texts[first_text:]),
            token_ids=self.token_ids[first:],
            cumulative_logprob=None if logprobs is None else self.total,
            logprobs=None if logprobs is None else logprobs[first:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class Collector:
    """The outputs of one request.

    `on_change` is called after each new output. The request has ended when `done` is true or `error` is set. With
    FINAL_ONLY, `on_change` is called only then.
    """

    writable = True

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], n: int, kind: RequestOutputKind,
        ranked: bool, meter: AnswerMeter, on_change: Callable[[], None],
    ) -> None:  # fmt: skip
        self.done = False
        self.error: ServiceError | None = None
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._outputs = [_Output() for _ in range(n)]
        self._kind = kind
        self._meter = meter
        self._ranked = ranked  # whether the alternatives are the most likely tokens
        self._on_change = on_change
        self._metrics = RequestMetrics(time.time())
        self._began = time.monotonic()
        self._num_cached_tokens: int | None = None

    def on_delta(self, delta: Delta) -> None:
        self._outputs[delta.index].add(delta, self._ranked)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *(_by_token(entry, True) for entry in delta.prompt_logprobs)]
        if delta.token_ids:
            self._meter.on_tokens(delta.index, len(delta.token_ids))
            self._count(delta.token_ids)
        if self._kind is not RequestOutputKind.FINAL_ONLY:
            self._on_change()

    def on_done(self, usage: Usage) -> None:
        self.done = True
        self._num_cached_tokens = usage.cached_tokens
        self._meter.on_done(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        self._on_change()

    def on_error(self, error: ServiceError) -> None:
        self.error = error
        answer = http_error_of(error)
        self._meter.on_error(answer.type, answer.status)
        self._on_change()

    def abort(self) -> None:
        """Ends the outputs that are not complete, with the reason "abort"."""
        for output in self._outputs:
            output.finish_reason = output.finish_reason or "abort"
        self._meter.on_abort()
        self.done = True
        self._on_change()

    def snapshot(self) -> RequestOutput:
        """Returns the outputs so far, or with DELTA what is new since the last call."""
        only_new = self._kind is RequestOutputKind.DELTA
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[output.snapshot(index, only_new) for index, output in enumerate(self._outputs)],
            finished=self.done,
            metrics=self._metrics,
            num_cached_tokens=self._num_cached_tokens,
        )

    def _count(self, token_ids: Sequence[int]) -> None:
        metrics = self._metrics
        metrics.last_token_ts = time.monotonic()
        metrics.num_generation_tokens += len(token_ids)
        if not metrics.first_token_ts:
            metrics.first_token_ts = metrics.last_token_ts
            metrics.first_token_latency = metrics.last_token_ts - self._began


def _by_token(entry: TokenLogprob, ranked: bool) -> TokenLogprobs:
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, entry.token)}
    for place, one in enumerate(entry.top, 1):
        found.setdefault(one.token_id, Logprob(one.logprob, place if ranked else None, one.token))
    return found

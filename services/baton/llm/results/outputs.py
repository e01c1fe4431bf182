"""vLLM's results of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Logprob:
    """A token's log-probability at a position."""

    logprob: float
    rank: int | None = None  # in the whole vocabulary; 1: the most likely. None: a token of logprob_token_ids
    decoded_token: str | None = None  # incomplete UTF-8 shows as U+FFFD


# By token id: the token itself first, then the most likely ones.
TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None  # None: no log-probabilities were requested
    logprobs: list[TokenLogprobs] | None  # one an output token
    routed_experts: None = None
    finish_reason: str | None = None  # "stop", "length", "repetition" or "abort"; None: it continues
    stop_reason: int | str | None = None  # the stop string or token that matched; None for end-of-sequence
    lora_request: None = None
    kv_transfer_params: None = None

    def finished(self) -> bool:
        """Returns whether the output is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When the request's tokens arrived."""

    arrival_time: float  # seconds since the epoch
    num_generation_tokens: int = 0  # over all outputs
    first_token_latency: float = 0.0  # seconds since the arrival; 0: no token yet
    first_token_ts: float = 0.0  # monotonic seconds
    last_token_ts: float = 0.0


@dataclass(slots=True)
class RequestOutput:
    """The outputs of one prompt."""

    request_id: str
    prompt: str | None  # None: the prompt was given as tokens
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None  # None for the first token
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    multi_modal_placeholders: None = None
    num_cached_tokens: int | None = None  # prompt tokens whose KV was cached; None before the end
    kv_transfer_params: None = None

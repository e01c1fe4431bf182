"""Limits the log-probabilities of responses that are held in memory until their end. Pure functions over values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.gateway.core import GenerationRequest
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

# Stored responses and those of the Responses API are kept as objects and encoded at once.
MAX_STORED_LOGPROBS = 128 << 10
# A streamed echo has all log-probabilities of its prompt in one event.
MAX_ECHOED_LOGPROBS = 64 << 10
MAX_ECHOED_CHARS = 16 << 20


def check_echo(num_chars: int) -> None:
    """Raises InvalidRequest if a response repeats too many characters of its prompts, over all choices."""
    if num_chars > MAX_ECHOED_CHARS:
        raise InvalidRequest(
            f"echo repeats {num_chars} characters of the prompt over all choices; at most {MAX_ECHOED_CHARS} are "
            "allowed; lower n, or leave out echo and return_token_ids",
            field="echo",
        )


def most_logprobs(most: int, sampling: types_pb2.SamplingParams, *, streams: bool, stores: bool) -> int:
    """Returns the limit of a request, where `most` is the limit of whole responses; 0: no limit."""
    if not (sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs")):
        return 0
    if stores:
        return min(most, MAX_STORED_LOGPROBS)
    if streams:
        return min(most, MAX_ECHOED_LOGPROBS) if sampling.HasField("prompt_logprobs") else 0
    return most


def limit_logprobs(requests: Sequence[GenerationRequest], max_model_len: int) -> list[GenerationRequest]:
    """Returns the requests of one response, with max_tokens set where unset so that the limit holds.

    Raises InvalidRequest if the requested log-probabilities exceed the limit.
    """
    most = max((request.most_logprobs for request in requests), default=0)
    if not most:
        return list(requests)
    max_outputs = [max(1, max_model_len - len(request.prompt_token_ids)) for request in requests]
    num_requested = sum(
        _requested_logprobs(request, max_output) for request, max_output in zip(requests, max_outputs, strict=True)
    )
    per_token = sum(request.n * _of_token(request.sampling) for request in requests if _is_open_ended(request))
    if num_requested + per_token > most:
        raise _too_many(num_requested + per_token, most, requests[0])
    max_tokens = (most - num_requested) // per_token if per_token else 0
    return [
        _ending(request, max_tokens) if 0 < max_tokens < max_output and _is_open_ended(request) else request
        for request, max_output in zip(requests, max_outputs, strict=True)
    ]


def _requested_logprobs(request: GenerationRequest, max_output: int) -> int:
    """Returns the log-probabilities of the prompt and of an output with a given length, over all choices."""
    sampling, stop = request.sampling, request.stop
    count = 0
    if sampling.HasField("prompt_logprobs"):
        count += (len(request.prompt_token_ids) - 1) * (1 + sampling.prompt_logprobs)
    if stop.HasField("max_tokens"):
        count += min(stop.max_tokens, max_output) * _of_token(sampling)
    return request.n * count


def _is_open_ended(request: GenerationRequest) -> bool:
    return not request.stop.HasField("max_tokens")


def _of_token(sampling: types_pb2.SamplingParams) -> int:
    if not sampling.HasField("logprobs"):
        return 0
    return 1 + max(sampling.logprobs, len(sampling.logprob_token_ids))


def _ending(request: GenerationRequest, max_tokens: int) -> GenerationRequest:
    stop = types_pb2.StopConditions()
    stop.CopyFrom(request.stop)
    stop.max_tokens = max_tokens
    return replace(request, stop=stop)


def _too_many(count: int, most: int, request: GenerationRequest) -> InvalidRequest:
    return InvalidRequest(
        f"the request asks for up to {count} log-probabilities over {request.n} choices; at most "
        f"{most} are allowed (--max-answer-logprobs); lower n, max_tokens or the alternatives, or stream the response",
        field="prompt_logprobs" if request.sampling.HasField("prompt_logprobs") else "logprobs",
    )

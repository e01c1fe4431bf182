"""Converts the engine's values to messages of the contract, and back, for hand-overs."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from google.protobuf.message import DecodeError

from baton.rpc.errors import InvalidRequest, ServiceError
from baton.v1 import types_pb2, worker_pb2
from baton.worker.core import ReasoningLimit, Request, SamplingParams, StopConditions, TokenLogprobs
from baton.worker.sampling.grammar.messages import constraint_message
from baton.worker.sampling.processors.messages import extra_args_message

StreamMessage = TypeVar("StreamMessage", worker_pb2.PrefillStreamRequest, worker_pb2.PrefillStreamResponse)

_BEFORE_HELLO = ("hello", "renewal")


def read_message(
    message_type: type[StreamMessage], payload: bytes, greeted: bool, kinds: Collection[str]
) -> tuple[str, StreamMessage]:
    """Returns a stream's message and its kind. Raises InvalidRequest if it is none of `kinds` or too early."""
    try:
        message = message_type.FromString(payload)
    except DecodeError as error:
        raise InvalidRequest(f"invalid {message_type.__name__}") from error
    kind = message.WhichOneof("message")
    if not greeted and kind not in _BEFORE_HELLO:
        raise InvalidRequest(f"message {kind!r} is not allowed before the hello")
    if kind is None or kind not in kinds:
        raise InvalidRequest(f"message {kind!r} is unknown")
    return kind, message


def prefill_submit(
    request: Request, prefill_id: int, num_cached_tokens: int, num_tokens: int, now: float
) -> worker_pb2.PrefillSubmit:
    """Returns a request for the KV of the first `num_tokens` tokens, and for the token that follows."""
    adapter = request.adapter
    return worker_pb2.PrefillSubmit(
        prefill_id=prefill_id,
        request_id=public_id(request),
        packed_prompt=request.token_ids.array(num_tokens).astype("<i4", copy=False).tobytes(),
        sampling=_sampling_message(request.sampling),
        stop=_stop_message(request.stop),
        cache_namespace=request.cache_namespace,
        num_cached_tokens=num_cached_tokens,
        priority=request.priority,
        timeout_ms=0 if request.deadline is None else max(1, round((request.deadline - now) * 1000)),
        num_output_tokens=num_tokens - request.num_prompt_tokens,
        traceparent=request.traceparent,
        constraint=None if request.constraint is None else constraint_message(request.constraint),
        tenant=request.tenant,
        adapter="" if adapter is None else adapter.name,
        adapter_info=None if adapter is None else types_pb2.AdapterInfo(**adapter._asdict()),
    )


def first_token_message(prefill_id: int, token_id: int, logprobs: TokenLogprobs | None) -> worker_pb2.PrefillFirstToken:
    """Returns the message of a sampled token."""
    message = worker_pb2.PrefillFirstToken(prefill_id=prefill_id, token_id=token_id)
    if logprobs is not None:
        message.logprobs.logprob = logprobs.logprob
        message.logprobs.rank = logprobs.rank
        message.logprobs.top_token_ids.extend(logprobs.top_token_ids)
        message.logprobs.top_logprobs.extend(logprobs.top_logprobs)
    return message


def logprobs_of(message: worker_pb2.PrefillFirstToken) -> TokenLogprobs | None:
    """Returns the token's log-probabilities; None if the request did not ask for them."""
    if not message.HasField("logprobs"):
        return None
    logprobs = message.logprobs
    return TokenLogprobs(logprobs.logprob, logprobs.rank, tuple(logprobs.top_token_ids), tuple(logprobs.top_logprobs))


def failed_message(prefill_id: int, error: ServiceError) -> worker_pb2.PrefillFailed:
    """Returns the message of a failed prefill."""
    return worker_pb2.PrefillFailed(prefill_id=prefill_id, code=error.code.value[0], message=error.message)


def public_id(request: Request) -> str:
    """Returns the request id as services log it. The engine's own id adds a serial number behind a '#'."""
    public, separator, _ = request.request_id.rpartition("#")
    return public if separator else request.request_id


def _sampling_message(sampling: SamplingParams) -> types_pb2.SamplingParams:
    limit = sampling.reasoning_limit
    return types_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias_token_ids=[token_id for token_id, _ in sampling.logit_bias],
        logit_bias_values=[value for _, value in sampling.logit_bias],
        logprobs=sampling.logprobs,
        allowed_token_ids=sampling.allowed_token_ids,
        forbidden_sequences=[types_pb2.TokenSequence(token_ids=each) for each in sampling.forbidden_sequences],
        logprob_token_ids=sampling.logprob_token_ids,
        reasoning_limit=None if limit is None else _limit_message(limit),
        extra_args=extra_args_message(sampling.extra_args),
    )


def _limit_message(limit: ReasoningLimit) -> types_pb2.ReasoningLimit:
    return types_pb2.ReasoningLimit(
        max_tokens=limit.max_tokens, end_token_ids=limit.end_token_ids, start_token_id=limit.start_token_id
    )


def _stop_message(stop: StopConditions) -> types_pb2.StopConditions:
    return types_pb2.StopConditions(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop_token_ids=sorted(stop.stop_token_ids),
        ignore_eos=not stop.eos_token_ids,
    )

"""Converts submit messages of the contract to requests of the engine, or refuses them.

The engine itself checks what depends on it: context length, vocabulary of the prompt, queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from baton.rpc.errors import InvalidRequest, Unsupported
from baton.v1 import types_pb2, worker_pb2
from baton.worker.core import (
    AdapterRef,
    Int32,
    ModelSpec,
    ReasoningLimit,
    Request,
    SamplingParams,
    StopConditions,
    TokenIds,
)
from baton.worker.engine.submit_pooled import pooled_of
from baton.worker.link.prompts import KnownPrompt
from baton.worker.requests.validation import check_token_ids
from baton.worker.sampling.grammar.messages import constraint_of
from baton.worker.sampling.processors.messages import extra_args_of

_MAX_LOGPROBS = 1024
_TOKEN_BYTES = 4
_UNKNOWN = KnownPrompt()
_MAX_SEQUENCES = 4096
_MAX_SEQUENCE_TOKENS = 64

_REQUIRED_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
# Inclusive bounds of the contract.
_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, math.inf),
}
_ABOVE_ZERO = ("top_p", "repetition_penalty")


class ParameterMemo:
    """The parameters that were read last: many requests in a row differ only in their seeds."""

    def __init__(self) -> None:
        self._key: tuple[bytes, bytes] | None = None
        self._read: tuple[SamplingParams, StopConditions] | None = None

    def read(self, submit: worker_pb2.SubmitRequest, model: ModelSpec) -> tuple[SamplingParams, StopConditions]:
        """Returns how tokens are sampled and when the request ends. Raises InvalidRequest."""
        sampling = submit.sampling
        if not sampling.HasField("seed"):
            return _parameters_of(submit, model)
        seed = sampling.seed
        sampling.ClearField("seed")
        key = (sampling.SerializeToString(), submit.stop.SerializeToString())
        sampling.seed = seed
        if key != self._key or self._read is None:
            self._read = _parameters_of(submit, model)
            self._key = key
        params, stop = self._read
        return (params if params.seed == seed else replace(params, seed=seed)), stop


def generation_of(
    submit: worker_pb2.SubmitRequest,
    model: ModelSpec,
    name: str,
    now: float,
    known: KnownPrompt = _UNKNOWN,
    memo: ParameterMemo | None = None,
    adapter: AdapterRef | None = None,
) -> Request:
    """Returns the request to run as `name`, which arrived at `now`. Raises InvalidRequest with the field.

    `known`: what this worker's front read of the prompt. `memo`: of requests to the same model. `adapter`: what the
    request names, by the worker's directory.
    """
    if submit.adapter and adapter is None:
        raise no_adapters(submit.adapter)
    given = known.token_ids
    prompt = unpacked_token_ids(given) if given else as_token_ids(submit.prompt_token_ids)
    if submit.HasField("pooling"):
        return replace(pooled_of(submit, model, name, now, prompt, known.block_hashes), adapter=adapter)
    output = submit.resume.output_token_ids
    if output:
        _check_tokens(output, model.vocab_size, "resume.output_token_ids")
    sampling, stop = (memo or ParameterMemo()).read(submit, model)
    # Exactly max_tokens is valid: only the Finish was lost with the other worker.
    if len(output) > stop.max_tokens:
        raise InvalidRequest(
            f"resume has {len(output)} output tokens, and max_tokens is {stop.max_tokens}",
            field="resume.output_token_ids",
        )
    return Request(
        request_id=name,
        token_ids=TokenIds(np.concatenate((prompt, as_token_ids(output))) if output else prompt),
        num_prompt_tokens=len(prompt),
        block_hashes=known.block_hashes,
        sampling=sampling,
        stop=stop,
        cache_namespace=submit.cache_namespace,
        priority=submit.priority,
        arrival=now,
        deadline=now + submit.timeout_ms / 1000 if submit.timeout_ms else None,
        # A prefill worker would not return the prompt's log-probabilities.
        remote_prefill=submit.HasField("prefill") and not submit.sampling.HasField("prompt_logprobs"),
        traceparent=submit.traceparent,
        tenant=submit.tenant,
        constraint=constraint_of(submit.constraint) if submit.HasField("constraint") else None,
        adapter=adapter,
    )


def prefill_of(
    submit: worker_pb2.PrefillSubmit,
    model: ModelSpec,
    name: str,
    now: float,
    known: KnownPrompt = _UNKNOWN,
    adapter: AdapterRef | None = None,
) -> Request:
    """Returns the prefill that another worker requests, to run as `name`. Raises InvalidRequest with the field.

    `known` and `adapter` are as in `generation_of`.
    """
    if submit.adapter and adapter is None:
        raise no_adapters(submit.adapter)
    token_ids = packed_token_ids(submit)
    if submit.num_output_tokens >= len(token_ids):
        raise InvalidRequest(
            f"num_output_tokens={submit.num_output_tokens} leaves no prompt of {len(token_ids)} tokens",
            field="num_output_tokens",
        )
    stop = stop_conditions_of(submit.stop, model)
    return Request(
        request_id=name,
        token_ids=TokenIds(token_ids),
        num_prompt_tokens=len(token_ids) - submit.num_output_tokens,
        block_hashes=known.block_hashes,
        sampling=sampling_of(submit.sampling, stop, model.vocab_size),
        stop=stop,
        cache_namespace=submit.cache_namespace,
        priority=submit.priority,
        arrival=now,
        deadline=now + submit.timeout_ms / 1000 if submit.timeout_ms else None,
        prefill_only=True,
        traceparent=submit.traceparent,
        tenant=submit.tenant,
        constraint=constraint_of(submit.constraint) if submit.HasField("constraint") else None,
        adapter=adapter,
    )


def no_adapters(name: str) -> Unsupported:
    """Returns the error for a request with an adapter on a worker without any."""
    return Unsupported(
        f"adapter {name!r} cannot be loaded: this worker was started without --enable-lora", field="adapter"
    )


def as_token_ids(token_ids: Sequence[int]) -> Int32:
    """Converts token ids of the contract; uint32 values above int32 become negative."""
    return np.array(token_ids, np.uint32).view(np.int32)


def packed_token_ids(submit: worker_pb2.PrefillSubmit) -> Int32:
    """Returns the tokens of a prefill. Raises InvalidRequest if their bytes are no whole number of tokens."""
    packed = submit.packed_prompt
    if len(packed) % _TOKEN_BYTES:
        raise InvalidRequest(
            f"packed_prompt has {len(packed)} bytes; it must have {_TOKEN_BYTES} for each token",
            field="packed_prompt",
        )
    return unpacked_token_ids(packed)


def unpacked_token_ids(packed: bytes) -> Int32:
    """Returns tokens from little-endian uint32; a view if memory has the same order."""
    return np.frombuffer(packed, "<i4").astype(np.int32, copy=False)


def stop_conditions_of(stop: types_pb2.StopConditions, model: ModelSpec) -> StopConditions:
    """Returns when the request ends. Raises InvalidRequest."""
    if not stop.max_tokens:
        raise InvalidRequest("max_tokens must be set, and at least 1", field="stop.max_tokens")
    if stop.min_tokens > stop.max_tokens:
        raise InvalidRequest(
            f"min_tokens={stop.min_tokens} is above max_tokens={stop.max_tokens}", field="stop.min_tokens"
        )
    _check_token_set(stop.stop_token_ids, model.vocab_size, "stop.stop_token_ids")
    return StopConditions(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        eos_token_ids=frozenset() if stop.ignore_eos else frozenset(model.eos_token_ids),
        stop_token_ids=frozenset(stop.stop_token_ids),
    )


def sampling_of(sampling: types_pb2.SamplingParams, stop: StopConditions, vocab_size: int) -> SamplingParams:
    """Returns how tokens are sampled. Raises InvalidRequest."""
    present = {descriptor.name for descriptor, _ in sampling.ListFields()}
    for name in _REQUIRED_SAMPLING:
        if name not in present:
            raise InvalidRequest(
                f"sampling.{name} is not set; workers take resolved parameters", field=f"sampling.{name}"
            )
    for name, (low, high) in _RANGES.items():
        _check_range(name, getattr(sampling, name), low, high)
    ids, values = sampling.logit_bias_token_ids, sampling.logit_bias_values
    if len(ids) != len(values):
        raise InvalidRequest(
            f"logit_bias has {len(ids)} tokens and {len(values)} values", field="sampling.logit_bias_values"
        )
    _check_token_set(ids, vocab_size, "sampling.logit_bias_token_ids")
    _check_token_set(sampling.allowed_token_ids, vocab_size, "sampling.allowed_token_ids")
    _check_alternatives(sampling.logprobs, vocab_size, "sampling.logprobs")
    _check_logprob_token_ids(sampling, vocab_size)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple(zip(ids, values, strict=True)),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        logprobs=min(sampling.logprobs, vocab_size) if sampling.HasField("logprobs") else None,
        min_tokens=stop.min_tokens,
        suppressed_token_ids=tuple(sorted(stop.eos_token_ids | stop.stop_token_ids)) if stop.min_tokens else (),
        logprob_token_ids=tuple(sampling.logprob_token_ids),
        forbidden_sequences=_forbidden_of(sampling, vocab_size),
        reasoning_limit=_limit_of(sampling.reasoning_limit, vocab_size) if "reasoning_limit" in present else None,
        extra_args=extra_args_of(sampling) if "extra_args" in present else (),
    )


def _parameters_of(submit: worker_pb2.SubmitRequest, model: ModelSpec) -> tuple[SamplingParams, StopConditions]:
    stop = stop_conditions_of(submit.stop, model)
    sampling = sampling_of(submit.sampling, stop, model.vocab_size)
    return _with_prompt_logprobs(sampling, submit.sampling, model), stop


def _check_alternatives(count: int, vocab_size: int, field: str) -> None:
    """Raises InvalidRequest for more alternatives than are given, unless all are asked for."""
    if count > _MAX_LOGPROBS and count != vocab_size:
        message = f"{field} is {count}; at most {_MAX_LOGPROBS} are given, or the whole vocabulary, {vocab_size}"
        raise InvalidRequest(message, field=field)


def _check_logprob_token_ids(sampling: types_pb2.SamplingParams, vocab_size: int) -> None:
    token_ids, field = sampling.logprob_token_ids, "sampling.logprob_token_ids"
    if token_ids and not sampling.HasField("logprobs"):
        raise InvalidRequest(f"{field} needs logprobs", field=field)
    if len(token_ids) > _MAX_LOGPROBS:
        raise InvalidRequest(f"{field} has {len(token_ids)} tokens, at most {_MAX_LOGPROBS} are given", field=field)
    _check_tokens(token_ids, vocab_size, field)


def _forbidden_of(sampling: types_pb2.SamplingParams, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    sequences, field = sampling.forbidden_sequences, "sampling.forbidden_sequences"
    if len(sequences) > _MAX_SEQUENCES:
        raise InvalidRequest(f"{field} has {len(sequences)}, at most {_MAX_SEQUENCES} are taken", field=field)
    for sequence in sequences:
        if not 1 <= len(sequence.token_ids) <= _MAX_SEQUENCE_TOKENS:
            count = len(sequence.token_ids)
            message = f"{field}: a sequence has {count} tokens; it must have 1 to {_MAX_SEQUENCE_TOKENS}"
            raise InvalidRequest(message, field=field)
        _check_tokens(sequence.token_ids, vocab_size, field)
    return tuple(tuple(sequence.token_ids) for sequence in sequences)


def _limit_of(limit: types_pb2.ReasoningLimit, vocab_size: int) -> ReasoningLimit:
    field = "sampling.reasoning_limit.end_token_ids"
    count = len(limit.end_token_ids)
    if not 1 <= count <= _MAX_SEQUENCE_TOKENS:
        raise InvalidRequest(f"{field} has {count} tokens; it must have 1 to {_MAX_SEQUENCE_TOKENS}", field=field)
    _check_tokens(limit.end_token_ids, vocab_size, field)
    start = limit.start_token_id if limit.HasField("start_token_id") else None
    return ReasoningLimit(limit.max_tokens, tuple(limit.end_token_ids), start)


def _with_prompt_logprobs(
    sampling: SamplingParams, given: types_pb2.SamplingParams, model: ModelSpec
) -> SamplingParams:
    if not given.HasField("prompt_logprobs"):
        return sampling
    field = "sampling.prompt_logprobs"
    _check_alternatives(given.prompt_logprobs, model.vocab_size, field)
    return replace(sampling, prompt_logprobs=min(given.prompt_logprobs, model.vocab_size))


def _check_token_set(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    # Repeated ids would slow every step of the whole batch.
    if len(token_ids) > vocab_size:
        raise InvalidRequest(f"{field} has {len(token_ids)} token ids; the vocabulary has {vocab_size}", field=field)
    _check_tokens(token_ids, vocab_size, field)


def _check_tokens(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    check_token_ids(as_token_ids(token_ids), vocab_size, field)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    above_zero = name in _ABOVE_ZERO
    if not low <= value <= high or (above_zero and value == 0):  # also refuses NaN
        bounds = f"{'(' if above_zero else '['}{low:g}, {high:g}]"
        raise InvalidRequest(f"sampling.{name} is {value:g}, must be in {bounds}", field=f"sampling.{name}")

"""Converts OpenAI's sampling fields and stop conditions to Baton's. Pure functions."""

from __future__ import annotations

from baton.gateway.fields.extra_args import extra_argument
from baton.gateway.schemas.requests import (
    GenerationFields,
    RepetitionDetection,
)
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

_UINT64 = 2**64 - 1


def sampling_of(request: GenerationFields, logprobs: int | None) -> types_pb2.SamplingParams:
    """Returns the sampling parameters; fields that the client left out stay unset."""
    bias = request.logit_bias or {}
    top_k = request.top_k
    seed = request.seed
    return types_pb2.SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if top_k is None else max(0, top_k),
        min_p=request.min_p,
        seed=None if seed is None else seed & _UINT64,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias_token_ids=bias.keys(),
        logit_bias_values=bias.values(),
        logprobs=logprobs,
        allowed_token_ids=request.allowed_token_ids,
        prompt_logprobs=request.prompt_logprobs,
        bad_words=request.bad_words,
        logprob_token_ids=request.logprob_token_ids,
        extra_args={name: extra_argument(value) for name, value in (request.vllm_xargs or {}).items()},
    )


def truncated(token_ids: list[int], request: GenerationFields, max_model_len: int) -> list[int]:
    """Returns the prompt truncated to truncate_prompt_tokens; -1 leaves room for one output token."""
    most = request.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most == -1:
        most = max_model_len - 1
    if not 1 <= most < max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {most}; give -1, or 1 to {max_model_len - 1}",
            field="truncate_prompt_tokens",
        )
    return token_ids[:most] if request.truncation_side == "right" else token_ids[-most:]


def stop_of(request: GenerationFields, max_tokens: int | None) -> types_pb2.StopConditions:
    """Returns the stop conditions."""
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    return types_pb2.StopConditions(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        stop=stop,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        repetition_detection=None if not request.repetition_detection else _detection_of(request.repetition_detection),
    )


def _detection_of(wanted: RepetitionDetection) -> types_pb2.RepetitionDetection:
    return types_pb2.RepetitionDetection(
        min_pattern_size=wanted.min_pattern_size,
        max_pattern_size=wanted.max_pattern_size,
        min_count=wanted.min_count,
    )

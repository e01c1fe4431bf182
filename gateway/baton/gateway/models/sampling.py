"""Applies defaults to a request's parameters and validates them for the model. Pure functions over values."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from baton.gateway.core import GenerationRequest
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

_NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_MAX_PATTERN = 1024  # tokens
_FROM_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MAX_TOKENS = "max_new_tokens"
CONFIG_FIELDS = (*_FROM_CONFIG, MAX_TOKENS)  # what is read of a generation_config.json


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request."""

    max_n: int = 128
    max_logprobs: int = 20
    max_logprob_token_ids: int = 128
    max_stop_strings: int = 16
    max_stop_chars: int = 1024  # per stop string


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling defaults of a model's generation_config, or neutral values."""

    values: Mapping[str, float]
    max_tokens: int | None = None  # of requests that give none; None: as many as the context holds

    @classmethod
    def from_config(cls, config: Mapping[str, Any], origin: str) -> SamplingDefaults:
        """Reads the content of generation_config.json. Raises InvalidRequest for values out of range."""
        values = dict(_NEUTRAL)
        for name in _FROM_CONFIG:
            value = config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidRequest(f"{origin}: {name} must be a number, not {value!r}", field="model")
            # Both 0 and -1 mean "off".
            values[name] = max(0, int(value)) if name == "top_k" else value
        try:
            check_sampling(_filled(types_pb2.SamplingParams(), values))
        except InvalidRequest as error:
            raise InvalidRequest(f"{origin}: {error.message}", field="model") from error
        max_tokens = config.get(MAX_TOKENS)
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens is True or max_tokens < 1):
            raise InvalidRequest(f"{origin}: {MAX_TOKENS} is {max_tokens!r}; it must be at least 1", field="model")
        return cls(values, max_tokens)


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request's parameters with every value set. Requests share the messages, which are not changed."""

    sampling: types_pb2.SamplingParams  # without the seed
    stop: types_pb2.StopConditions  # includes max_tokens; the gateway handles stop strings
    eos_ids: frozenset[int]  # empty with ignore_eos
    stop_ids: frozenset[int]  # the end-of-sequence and stop tokens, any of which ends the output
    seed: int  # of the first choice

    def end_of(self, output_token_ids: Sequence[int]) -> tuple[str, int | None] | None:
        """Returns the finish reason and stop token of a complete output, or None."""
        last = output_token_ids[-1] if output_token_ids else -1
        if last in self.eos_ids:
            return "stop", None
        if last in self.stop.stop_token_ids:
            return "stop", last
        return ("length", None) if len(output_token_ids) >= self.stop.max_tokens else None


@dataclass(frozen=True, slots=True)
class _Parameters:
    """What does not depend on a request's prompt and seed."""

    sampling: types_pb2.SamplingParams
    stop: types_pb2.StopConditions
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    max_tokens: int | None  # None: as many as the context holds


class Resolver:
    """Validates requests and applies defaults. What equal parameters have in common is read once in a row."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._known: _Parameters | None = None
        self._messages: tuple[object, ...] = ()  # those that `_known` was read from
        self._key: tuple[object, ...] = ()  # their content, and the model's part

    def resolve(
        self, request: GenerationRequest, defaults: SamplingDefaults, info: types_pb2.ModelInfo
    ) -> ResolvedRequest:
        """Returns the parameters of a request. Raises InvalidRequest that names the field."""
        _check_request(request, self._limits)
        max_output = _max_output_tokens(request, info)
        known = self._parameters(request, defaults, info)
        check_prompt_ids(request.prompt_token_ids, info.vocab_size)
        given = request.sampling
        seed = request.seed if request.seed is not None or not given.HasField("seed") else given.seed
        if seed is None:
            seed = random.getrandbits(64)
        return ResolvedRequest(known.sampling, _fitting(known, max_output), known.eos_ids, known.stop_ids, seed)

    def _parameters(
        self, request: GenerationRequest, defaults: SamplingDefaults, info: types_pb2.ModelInfo
    ) -> _Parameters:
        messages = (request.sampling, request.stop, defaults, info)
        if self._known is not None and all(map(operator.is_, messages, self._messages)):
            return self._known
        sampling = types_pb2.SamplingParams()
        sampling.CopyFrom(request.sampling)
        sampling.ClearField("seed")
        key = (
            sampling.SerializeToString(),
            request.stop.SerializeToString(),
            defaults,
            info.vocab_size,
            tuple(info.eos_token_ids),
        )
        if self._known is None or key != self._key:
            self._known = _parameters_of(_filled(sampling, defaults.values), request.stop, defaults, info, self._limits)
            self._key = key
        self._messages = messages
        return self._known


def resolve(
    request: GenerationRequest, defaults: SamplingDefaults, info: types_pb2.ModelInfo, limits: RequestLimits
) -> ResolvedRequest:
    """Validates one request for the model and applies defaults. Raises InvalidRequest that names the field."""
    return Resolver(limits).resolve(request, defaults, info)


def _parameters_of(
    sampling: types_pb2.SamplingParams,
    given: types_pb2.StopConditions,
    defaults: SamplingDefaults,
    info: types_pb2.ModelInfo,
    limits: RequestLimits,
) -> _Parameters:
    _check_parameters(sampling, given, info.vocab_size, limits)
    stop = types_pb2.StopConditions()
    stop.CopyFrom(given)
    del stop.stop[:]
    if stop.HasField("max_tokens") and stop.max_tokens < 1:
        raise _out_of_range("max_tokens", stop.max_tokens, "at least 1")
    if stop.HasField("max_tokens") and stop.min_tokens > stop.max_tokens:
        raise _out_of_range("min_tokens", stop.min_tokens, f"at most max_tokens, which is {stop.max_tokens}")
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else None
    if max_tokens is None and defaults.max_tokens is not None:
        max_tokens = max(defaults.max_tokens, stop.min_tokens)
    if max_tokens is not None:
        stop.max_tokens = max_tokens
    eos_ids = frozenset(() if stop.ignore_eos else info.eos_token_ids)
    parameters = _Parameters(sampling, stop, eos_ids, eos_ids.union(stop.stop_token_ids), max_tokens)
    _check_something_is_left(parameters, info.vocab_size)
    return parameters


def _fitting(known: _Parameters, max_output: int) -> types_pb2.StopConditions:
    """Returns the stop conditions with a max_tokens that the context has room for."""
    if known.max_tokens is not None and known.max_tokens <= max_output:
        return known.stop
    stop = types_pb2.StopConditions()
    stop.CopyFrom(known.stop)
    stop.max_tokens = max_output
    if stop.min_tokens > max_output:
        raise _out_of_range("min_tokens", stop.min_tokens, f"at most {max_output}, which the context has room for")
    return stop


def _check_parameters(
    sampling: types_pb2.SamplingParams, stop: types_pb2.StopConditions, vocab_size: int, limits: RequestLimits
) -> None:
    """Raises InvalidRequest for what does not depend on the prompt."""
    check_sampling(sampling)
    if sampling.HasField("logprobs") and sampling.logprobs > limits.max_logprobs:
        raise _out_of_range("logprobs", sampling.logprobs, f"at most {limits.max_logprobs}")
    if sampling.HasField("prompt_logprobs") and sampling.prompt_logprobs > limits.max_logprobs:
        raise _out_of_range("prompt_logprobs", sampling.prompt_logprobs, f"at most {limits.max_logprobs}")
    _check_ids("logit_bias", sampling.logit_bias_token_ids, vocab_size)
    _check_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    _check_ids("stop_token_ids", stop.stop_token_ids, vocab_size)
    _check_known("logprob_token_ids", sampling.logprob_token_ids, vocab_size)
    if sampling.logprob_token_ids and not sampling.HasField("logprobs"):
        raise InvalidRequest("logprob_token_ids needs logprobs", field="logprob_token_ids")
    if len(sampling.logprob_token_ids) > limits.max_logprob_token_ids:
        shown = f"{len(sampling.logprob_token_ids)} tokens"
        raise _out_of_range("logprob_token_ids", shown, f"at most {limits.max_logprob_token_ids}")
    _check_repetition(stop)


def seed_of_choice(seed: int, index: int) -> int:
    """Returns the seed of a choice; the first choice uses the request's seed."""
    if index == 0:
        return seed
    data = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def check_prompt_ids(token_ids: Iterable[int], vocab_size: int, field: str = "prompt") -> None:
    """Raises InvalidRequest, which names the field, for a token id outside the vocabulary."""
    _check_known(field, token_ids, vocab_size)


def check_count(name: str, count: int, vocab_size: int) -> None:
    """Raises InvalidRequest for a list with more token ids than the vocabulary."""
    if count > vocab_size:
        raise InvalidRequest(f"{name} has {count} token ids; the vocabulary has {vocab_size}", field=name)


def check_sampling(sampling: types_pb2.SamplingParams) -> None:
    """Raises InvalidRequest for a value out of its range. All values must be set."""
    _check_range("temperature", sampling.temperature, 0, 2)
    if not 0 < sampling.top_p <= 1:
        raise _out_of_range("top_p", sampling.top_p, "above 0 and at most 1")
    _check_range("min_p", sampling.min_p, 0, 1)
    _check_range("presence_penalty", sampling.presence_penalty, -2, 2)
    _check_range("frequency_penalty", sampling.frequency_penalty, -2, 2)
    if not 0 < sampling.repetition_penalty < math.inf:
        raise _out_of_range("repetition_penalty", sampling.repetition_penalty, "above 0")
    if len(sampling.logit_bias_token_ids) != len(sampling.logit_bias_values):
        raise InvalidRequest(
            f"logit_bias has {len(sampling.logit_bias_token_ids)} token ids and "
            f"{len(sampling.logit_bias_values)} values; give one value per token id",
            field="logit_bias",
        )
    for value in sampling.logit_bias_values:
        _check_range("logit_bias", value, -100, 100)


def _filled(sampling: types_pb2.SamplingParams, defaults: Mapping[str, float]) -> types_pb2.SamplingParams:
    filled = types_pb2.SamplingParams()
    filled.CopyFrom(sampling)
    for name, value in defaults.items():
        if not sampling.HasField(name):  # type: ignore[arg-type]
            setattr(filled, name, value)
    return filled


def _check_request(request: GenerationRequest, limits: RequestLimits) -> None:
    if not 1 <= request.n <= limits.max_n:
        raise _out_of_range("n", request.n, f"from 1 to {limits.max_n}")
    if not -(2**31) <= request.priority < 2**31:
        raise _out_of_range("priority", request.priority, "a 32-bit number")
    stops = request.stop.stop
    if stops and not request.detokenize:
        raise InvalidRequest("stop strings need the text, but detokenization is disabled; leave out stop", field="stop")
    if len(stops) > limits.max_stop_strings:
        raise _out_of_range("stop", f"{len(stops)} strings", f"at most {limits.max_stop_strings}")
    for stop in stops:
        if not 1 <= len(stop) <= limits.max_stop_chars:
            raise InvalidRequest(
                f"a stop string has {len(stop)} characters; give 1 to {limits.max_stop_chars}",
                field="stop",
            )


def _max_output_tokens(request: GenerationRequest, info: types_pb2.ModelInfo) -> int:
    num_tokens = len(request.prompt_token_ids)
    if not num_tokens:
        raise InvalidRequest("the prompt is empty; give at least one token", field="prompt")
    if num_tokens >= info.max_model_len:
        raise InvalidRequest(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your prompt has "
            f"{num_tokens} tokens; it must leave room for at least one output token.",
            field="prompt",
        )
    return info.max_model_len - num_tokens


def _check_repetition(stop: types_pb2.StopConditions) -> None:
    wanted, field = stop.repetition_detection, "repetition_detection"
    if not wanted.max_pattern_size:
        return
    if not wanted.min_pattern_size <= wanted.max_pattern_size <= _MAX_PATTERN:
        allowed = f"from min_pattern_size, {wanted.min_pattern_size}, to {_MAX_PATTERN}"
        raise _out_of_range(f"{field}.max_pattern_size", wanted.max_pattern_size, allowed)
    if wanted.min_count < 2:
        raise _out_of_range(f"{field}.min_count", wanted.min_count, "at least 2")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise _out_of_range(name, value, f"from {low} to {high}")


def _check_something_is_left(resolved: _Parameters, vocab_size: int) -> None:
    """Raises InvalidRequest if every allowed token would end the output before min_tokens."""
    if not resolved.stop.min_tokens:
        return
    allowed = resolved.sampling.allowed_token_ids
    ends_always = resolved.stop_ids.issuperset(allowed) if allowed else len(resolved.stop_ids) >= vocab_size
    if ends_always:
        raise InvalidRequest(
            f"min_tokens is {resolved.stop.min_tokens}, but every token that is allowed would end the output",
            field="min_tokens",
        )


def _check_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    check_count(name, len(token_ids), vocab_size)
    _check_known(name, token_ids, vocab_size)


def _check_known(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    largest = max(token_ids, default=-1)
    if largest >= vocab_size:
        raise _out_of_range(name, f"token id {largest}", f"below the vocabulary's size, {vocab_size}")


def _out_of_range(field: str, value: object, allowed: str) -> InvalidRequest:
    shown = f"{value:g}" if isinstance(value, float) else value
    return InvalidRequest(f"{field} is {shown}; it must be {allowed}", field=field)

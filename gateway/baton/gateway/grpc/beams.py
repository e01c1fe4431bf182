"""Beam search in the public gRPC API: rejects incompatible fields and selects the generator."""

from __future__ import annotations

from collections.abc import Iterator

from baton.gateway.core import Generator
from baton.gateway.generation.beam_search import BeamSearchGenerator
from baton.gateway.models.sampling import RequestLimits
from baton.gateway.models.served import ModelCatalog
from baton.rpc.errors import InvalidRequest
from baton.v1 import inference_pb2, types_pb2

# Fields of SamplingParams that change sampling, which beams do not use, or request output that beams do not return.
_SAMPLING = (
    "presence_penalty",
    "frequency_penalty",
    "logit_bias_token_ids",
    "allowed_token_ids",
    "logprobs",
    "prompt_logprobs",
    "bad_words",
    "forbidden_sequences",
    "reasoning_limit",
    "extra_args",
)
_MOST_PENALTY = 10.0


def generator_for(
    request: inference_pb2.GenerateRequest, generator: Generator, catalog: ModelCatalog, limits: RequestLimits
) -> Generator:
    """Returns the generator for a request. Raises InvalidRequest for fields that beam search does not support."""
    if not request.HasField("beam_search"):
        return generator
    wanted = request.beam_search
    for field in _misplaced(request):
        raise InvalidRequest(f"{field} is not allowed with beam_search", field=field)
    penalty = wanted.length_penalty if wanted.HasField("length_penalty") else 1.0
    if not -_MOST_PENALTY <= penalty <= _MOST_PENALTY:
        field = "beam_search.length_penalty"
        raise InvalidRequest(f"{field} is {penalty:g}; give -10 to 10", field=field)
    return BeamSearchGenerator(generator, catalog, limits, penalty)


def _misplaced(request: inference_pb2.GenerateRequest) -> Iterator[str]:
    for name in _SAMPLING:
        if name in {descriptor.name for descriptor, _ in request.sampling.ListFields()}:
            yield f"sampling.{name}"
    stop: types_pb2.StopConditions = request.stop
    if stop.min_tokens:
        yield "stop.min_tokens"
    if stop.HasField("repetition_detection"):
        yield "stop.repetition_detection"
    if request.HasField("constraint"):
        yield "constraint"
    if request.chat.tools:
        yield "chat.tools"
    if request.chat.HasField("thinking_token_budget"):
        yield "chat.thinking_token_budget"

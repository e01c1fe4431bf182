"""vLLM's SamplingParams, validated as the gateway validates a request's fields."""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgspec

from baton.gateway.bodies.decoder import wrong_field
from baton.gateway.fields.neutral import drop_neutral
from baton.gateway.schemas.requests import CompletionRequest
from baton.llm.parameters.names import InvalidParameter, refuse_unsupported, with_named_errors
from baton.llm.parameters.structured_outputs import RepetitionDetectionParams, StructuredOutputsParams

# Fields of vLLM that only have these values here.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "prompt_logprob_token_ids": (None, []),
    "prompt_logprob_start": (None, 0),
    "flat_logprobs": (False,),
    "stream_interval": (None, 1),
    "skip_reading_prefix_cache": (None, False),
    "routed_experts_prompt_start": (0,),
    "trace_decode_token_ids": (None, []),
    "logits_processors": (None, []),
}
# Fields that the request to the gateway's generation does not have: they concern this side.
_LOCAL = ("detokenize", "output_kind", "skip_clone", "thinking_token_budget", *_NEUTRAL)


class RequestOutputKind(enum.Enum):
    """What AsyncLLM yields: everything so far, what is new, or only the complete output."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@with_named_errors
@dataclass
class SamplingParams:
    """How tokens are chosen, when an output ends, and what is returned of it."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: disabled
    min_p: float = 0.0
    seed: int | None = None  # None: from the engine's seed
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the context's length
    min_tokens: int = 0
    logprobs: int | None = None  # alternatives per output token
    prompt_logprobs: int | None = None  # alternatives per prompt token
    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None  # returned instead of the most likely ones
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # without effect: texts are as the tokens spell them
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None  # None and -1: no limit
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None
    logits_processors: list[Any] | None = None

    def __post_init__(self) -> None:
        self.request_fields()

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Returns parameters in which None means the default."""
        return cls(**{name: value for name, value in values.items() if value is not None or name == "max_tokens"})

    def clone(self) -> SamplingParams:
        """Returns a deep copy."""
        return copy.deepcopy(self)

    def request_fields(self) -> CompletionRequest:
        """Returns the fields of a text completion. Raises InvalidParameter for a wrong type or value."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        refuse_unsupported(values, _NEUTRAL, type(self).__name__)
        self._check_local()
        given = {name: _plain(value) for name, value in values.items() if name not in _LOCAL}
        given["vllm_xargs"] = given.pop("extra_args")
        try:
            request = msgspec.convert(given, CompletionRequest)
        except msgspec.ValidationError as error:
            wrong = wrong_field(str(error), CompletionRequest)
            message, field = (text.replace("vllm_xargs", "extra_args") for text in (wrong.message, wrong.field))
            raise InvalidParameter(message, field=field) from None
        if request.max_tokens == 0:
            raise InvalidParameter("max_tokens is 0; give at least 1, or None for no limit", field="max_tokens")
        drop_neutral(request)
        return request

    def _check_local(self) -> None:
        if not isinstance(self.output_kind, RequestOutputKind):
            message = f"output_kind is {self.output_kind!r}; give a RequestOutputKind"
            raise InvalidParameter(message, field="output_kind")
        if not isinstance(self.detokenize, bool):
            raise InvalidParameter(f"detokenize is {self.detokenize!r}; give True or False", field="detokenize")
        budget = self.thinking_token_budget
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < -1):
            message = f"thinking_token_budget is {budget!r}; give a number of tokens, or -1 for no limit"
            raise InvalidParameter(message, field="thinking_token_budget")


def _plain(value: Any) -> Any:
    """Returns a parameter group as a mapping of the fields that are set."""
    if isinstance(value, StructuredOutputsParams):
        return {name: one for name, one in vars(value).items() if one is not None and one is not False}
    return asdict(value) if isinstance(value, RepetitionDetectionParams) else value

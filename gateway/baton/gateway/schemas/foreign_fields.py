"""Fields of other servers, and of their earlier versions. fields/adopted.py converts them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

# Fields that are refused if set, because ignoring them would change the output.
REFUSED = Meta(description="Not supported: null.", extra_json_schema={"type": "null"})
# The same for fields with neutral values.
NEUTRAL_ONLY = Meta(description="Not supported: null, or the neutral value.")
NO_EFFECT = Meta(description="Ignored and listed in the response header x-baton-ignored.")

_INT32_MAX = 2**31 - 1
SessionName = Annotated[str, Meta(max_length=4096)]  # hashed with each prompt
_OFF = (b"false", b"0", b"0.0")

Neutral = Mapping[str, tuple[bytes, ...]]  # values of fields as JSON, besides null, "", [] and {}

# Fields of other requests that change the output, with their neutral values. A request type that does not have one
# refuses it; other unknown fields are ignored and listed.
CHANGING: Neutral = MappingProxyType(
    {
        # OpenAI's, Anthropic's and vLLM's, each in some of the requests
        **dict.fromkeys(
            (
                "system", "instructions", "documents", "suffix", "conversation",
                "previous_response_id", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "stop",
                "stop_token_ids", "max_tokens", "max_completion_tokens", "max_output_tokens", "response_format",
                "structured_outputs", "output_config", "bad_words", "allowed_token_ids", "truncate_prompt_tokens",
                "tools", "tool_choice", "functions", "function_call", "text",
            ),
            (),
        ),
        **dict.fromkeys(
            (
                "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos", "logprobs", "top_logprobs",
                "prompt_logprobs", "use_beam_search", "echo", "continue_final_message", "return_token_ids",
            ),
            _OFF,
        ),
        **dict.fromkeys(("n", "best_of", "repetition_penalty", "length_penalty"), (b"1", b"1.0")),
        "parallel_tool_calls": (b"true",),
        # SGLang's, llama.cpp's, TGI's and Ollama's
        **dict.fromkeys(("images", "options", "template", "context", "input_ids", "input_embeds"), ()),
        "session_params": (),
        **dict.fromkeys(
            (
                "raw", "return_full_text", "return_logprob", "top_logprobs_num", "return_hidden_states", "n_probs",
                "top_n_tokens", "decoder_input_details", "truncate",
            ),
            _OFF,
        ),
        "parse_tool_calls": (b"true",),
        "reasoning_format": (b'"auto"', b'"deepseek"'),
    }
)  # fmt: skip


# The same of requests for vectors and scores.
CHANGING_VECTORS: Neutral = MappingProxyType(
    {
        **dict.fromkeys(("prompt_name", "instruction", "output_dimension"), ()),
        "normalize": (b"true",),
        "raw_scores": (b"false",),
        "output_dtype": (b'"float"',),
        "embedding_types": (b'["float"]',),
    }
)


class ForeignFields(Struct, kw_only=True):
    """Other names for a request's fields, and fields that are ignored."""

    CHANGING: ClassVar = CHANGING

    # vLLM before structured_outputs
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: Annotated[str, Meta(max_length=256)] | None = None
    guided_decoding_backend: Annotated[str | None, NO_EFFECT] = None
    # SGLang and llama.cpp: forms of structured_outputs
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None  # Ollama: json, or a JSON schema
    # other names
    num_predict: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None  # max_tokens; -1: no limit
    min_new_tokens: Annotated[int, Meta(ge=0, le=_INT32_MAX)] | None = None  # min_tokens
    stop_sequences: list[str] | None = None  # stop
    do_sample: bool | None = None  # false: temperature 0
    think: bool | str | None = None  # enable_thinking; a level is a reasoning_effort too
    thinking: dict[str, Any] | None = None  # {"type": "enabled" or "disabled", "budget_tokens": thinking_token_budget}
    max_new_tokens: Annotated[int, Meta(ge=1, le=_INT32_MAX)] | None = None  # max_tokens
    n_predict: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None  # max_tokens; -1: no limit
    repeat_penalty: Annotated[float, Meta(gt=0, le=1e6)] | None = None  # repetition_penalty
    random_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None  # seed
    no_stop_trim: bool | None = None  # include_stop_str_in_output
    enable_thinking: bool | None = None  # sets it in chat_template_kwargs
    thinking_budget: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None  # thinking_token_budget
    # Names of the request's session, the first before the second. Requests of a session prefer one worker.
    prompt_cache_key: SessionName | None = None
    user: SessionName | None = None
    # Fields that change sampling or the model.
    lora_path: Annotated[str | list[str | None] | None, REFUSED] = None
    lora: Annotated[list[dict[str, Any]] | None, REFUSED] = None
    adapter_id: Annotated[str | None, REFUSED] = None
    logits_processors: Annotated[list[Any] | None, REFUSED] = None
    custom_logit_processor: Annotated[str | None, REFUSED] = None
    custom_params: Annotated[dict[str, Any] | None, REFUSED] = None
    samplers: Annotated[list[str] | str | None, REFUSED] = None
    stop_regex: Annotated[str | list[str] | None, REFUSED] = None
    typical_p: Annotated[float | None, NEUTRAL_ONLY] = None
    tfs_z: Annotated[float | None, NEUTRAL_ONLY] = None
    top_a: Annotated[float | None, NEUTRAL_ONLY] = None
    top_n_sigma: Annotated[float | None, NEUTRAL_ONLY] = None
    dynatemp_range: Annotated[float | None, NEUTRAL_ONLY] = None
    xtc_probability: Annotated[float | None, NEUTRAL_ONLY] = None
    dry_multiplier: Annotated[float | None, NEUTRAL_ONLY] = None
    mirostat: Annotated[int | None, NEUTRAL_ONLY] = None
    mirostat_mode: Annotated[int | None, NEUTRAL_ONLY] = None
    epsilon_cutoff: Annotated[float | None, NEUTRAL_ONLY] = None
    eta_cutoff: Annotated[float | None, NEUTRAL_ONLY] = None
    smoothing_factor: Annotated[float | None, NEUTRAL_ONLY] = None
    watermark: Annotated[bool | None, NEUTRAL_ONLY] = None
    safe_prompt: Annotated[bool | None, NEUTRAL_ONLY] = None
    separate_reasoning: Annotated[bool | None, NEUTRAL_ONLY] = None
    # Fields that affect how an output is produced, not its content.
    prediction: Annotated[dict[str, Any] | None, NO_EFFECT] = None
    service_tier: Annotated[str | None, NO_EFFECT] = None
    safety_identifier: Annotated[str | None, NO_EFFECT] = None
    prompt_cache_retention: Annotated[str | None, NO_EFFECT] = None
    client_metadata: Annotated[dict[str, Any] | None, NO_EFFECT] = None
    verbosity: Annotated[str | None, NO_EFFECT] = None
    prompt_mode: Annotated[str | None, NO_EFFECT] = None
    stream_reasoning: Annotated[bool | None, NO_EFFECT] = None
    cache_prompt: Annotated[bool | None, NO_EFFECT] = None
    id_slot: Annotated[int | None, NO_EFFECT] = None
    mm_processor_kwargs: Annotated[dict[str, Any] | None, NO_EFFECT] = None
    media_io_kwargs: Annotated[dict[str, Any] | None, NO_EFFECT] = None

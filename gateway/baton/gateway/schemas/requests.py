"""OpenAI's and vLLM's request bodies. One definition for parsing and the OpenAPI document; answers.py has the
responses.

Null means unset; unknown keys are listed in the response header x-baton-ignored. Bounds that JSON Schema can express
are here, the others in fields/validation.py.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from baton.gateway.schemas.foreign_fields import REFUSED, ForeignFields

_INT32_MAX = 2**31 - 1

Count = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
CountOrZero = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
CountOrAll = Annotated[int, Meta(ge=-1, le=_INT32_MAX)]  # -1: the whole vocabulary
TokenId = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Name = Annotated[str, Meta(min_length=1)]
Salt = Annotated[str, Meta(min_length=1, max_length=4096)]  # hashed with each prompt
PrintableId = Annotated[str, Meta(pattern="^[!-~]{1,256}$")]
FunctionName = Annotated[str, Meta(pattern="^[A-Za-z0-9_.:/-]{1,256}$")]


class StreamOptions(Struct, kw_only=True):
    """What a stream contains besides text."""

    include_usage: bool | None = None  # a final chunk with the usage
    continuous_usage_stats: bool | None = None  # the current usage in every chunk


class JsonSchemaFormat(Struct, kw_only=True):
    """A schema that the output must follow."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None  # true: refuse schemas with keywords that cannot be enforced


class ResponseFormat(Struct, kw_only=True):
    """The form of the output."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None  # of a structural tag; alternative to the next two
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(Struct, kw_only=True):
    """A constraint on the output's text: exactly one of the first six."""

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark or GBNF
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: Annotated[str, Meta(max_length=256)] | None = None


class RepetitionDetection(Struct, kw_only=True):
    """Ends an output that repeats a pattern of tokens min_count times in a row."""

    max_pattern_size: Annotated[int, Meta(ge=0, le=1024)] = 0  # tokens; 0 is off
    min_pattern_size: Annotated[int, Meta(ge=0, le=1024)] = 0  # tokens; 0: disabled
    min_count: Annotated[int, Meta(ge=0, le=_INT32_MAX)] = 0  # tokens; 0 means 1


Scalar = bool | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float | str
ExtraValue = Scalar | Annotated[list[Scalar], Meta(max_length=16 << 10)]
ExtraArguments = Annotated[dict[str, ExtraValue], Meta(max_length=64)]


class GenerationFields(ForeignFields, kw_only=True):
    """The common fields of chat and text completions."""

    model: str | None = None  # null: the only served model
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None  # 0: greedy
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None  # 0 and -1: disabled
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    n: Count | None = None
    stop: str | list[Name] | None = None  # empty texts are ignored
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: CountOrZero | None = None
    logit_bias: dict[int, float] | None = None  # token id: bias from -100 to 100
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None  # null: true
    priority: Annotated[int, Meta(ge=-(2**31), le=_INT32_MAX)] | None = None  # lower runs earlier
    cache_salt: Salt | None = None  # namespace of the prefix cache: requests with different salts share no cached block
    prompt_logprobs: CountOrAll | None = None  # alternatives per prompt token; not for streams
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # keeps the prompt's end; -1: as many as fit
    return_token_ids: bool | None = None  # token_ids of each choice, and prompt_token_ids
    use_beam_search: bool | None = None  # returns the n best of n beams; not for streams
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None  # null: 1
    request_id: PrintableId | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    bad_words: Annotated[list[Name], Meta(max_length=1024)] | None = None  # texts that the output must not contain
    # returned instead of the most likely ones
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    return_tokens_as_token_ids: bool | None = None  # log-probabilities name tokens as "token_id:N"
    repetition_detection: RepetitionDetection | None = None
    truncation_side: Literal["left", "right"] | None = None  # null: left, which keeps the prompt's end
    spaces_between_special_tokens: bool | None = None  # ignored: texts are as the tokens spell them
    kv_transfer_params: Annotated[dict[str, Any] | None, REFUSED] = None
    ec_transfer_params: Annotated[dict[str, Any] | None, REFUSED] = None
    vllm_xargs: ExtraArguments | None = None  # arguments of the workers' logits processors (plugins), by name


class ContentPart(Struct, kw_only=True):
    """A text of a message's content. Parts of other types are refused."""

    TYPES: ClassVar = (b'"text"', b'"input_text"', b'"output_text"', b'"refusal"')

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[dict[str, Any]] | None = None  # of an earlier output; not used


class ChatMessage(Struct, kw_only=True):
    """A message of a chat."""

    OBJECTS: ClassVar = {"content": ContentPart}

    role: Name  # system, developer, user, assistant, tool, or another role of the model's template
    content: str | list[dict[str, Any]] | None = None  # a text, or parts of type text
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None  # of an assistant; its result is in a message of role function
    reasoning: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(Struct, kw_only=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON Schema of the arguments object
    strict: bool | None = None  # whether the arguments must follow the schema


class ToolDefinition(Struct, kw_only=True):
    """A tool. Types other than function are skipped and listed in the response header x-baton-ignored."""

    TYPES: ClassVar = (b'"function"',)  # types for which these keys are known

    type: str = "function"
    function: FunctionDefinition | None = None  # required for a function


class ChosenFunction(Struct, kw_only=True):
    """A function by name."""

    name: str


class NamedToolChoice(Struct, kw_only=True, tag_field="type", tag="function"):
    """A choice of the function that must be called."""

    function: ChosenFunction


class AllowedTools(Struct, kw_only=True):
    """The tools that may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Meta(min_length=1)]


class AllowedToolsChoice(Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """A choice that gives the model only some of the tools."""

    allowed_tools: AllowedTools


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Count | None = None  # overrides max_tokens
    max_tokens: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None  # null or -1: up to the context's length
    logprobs: bool | None = None
    top_logprobs: CountOrAll | None = None
    add_generation_prompt: bool | None = None  # null: true
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: list[ToolDefinition] | None = None
    # null: auto if there are tools
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None  # null: true; false: at most one call
    include_reasoning: bool | None = None  # null: true; false: at most one call
    # The deprecated form of tools: at most one call, returned as function_call.
    functions: list[FunctionDefinition] | None = None
    function_call: Literal["none", "auto"] | ChosenFunction | None = None  # null: auto if there are functions
    store: bool | None = None  # true: the response is stored under its id
    metadata: dict[str, str] | None = None  # the client's data, stored with the response
    modalities: list[str] | None = None
    audio: Annotated[dict[str, Any] | None, REFUSED] = None
    chat_template: str | None = None  # only if the gateway trusts templates of requests
    echo: bool | None = None  # prepends the assistant's last message
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None  # -1: no limit
    return_prompt_text: bool | None = None
    return_assistant_tokens_mask: bool | None = None  # of a chat whose template has {% generation %}
    web_search_options: Annotated[dict[str, Any] | None, REFUSED] = None
    best_of: Count | None = None  # must equal n


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions."""

    # A text, texts, token ids, or lists of token ids. Choice p * n + j is the j-th of prompt p.
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    max_tokens: CountOrZero | None = None  # null: 16. 0 only with echo
    logprobs: CountOrAll | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None  # null: true
    # generates this many choices and returns the n with the highest mean log-probability; not for streams
    best_of: Count | None = None
    suffix: Annotated[str | None, REFUSED] = None
    prompt_embeds: Annotated[str | list[str] | None, REFUSED] = None


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None  # null: true for a text, false for a chat
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None  # null: true
    continue_final_message: bool | None = None
    chat_template: str | None = None  # only if the gateway trusts templates of requests
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None
    return_assistant_tokens_mask: bool | None = None  # of a chat whose template has {% generation %}


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None

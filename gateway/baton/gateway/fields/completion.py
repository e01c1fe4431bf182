"""Validates the fields of text completions and returns their prompts. Pure functions."""

from __future__ import annotations

from baton.gateway.fields.validation import check_fields, check_logprob_token_ids, check_logprobs, refuse_unserved
from baton.gateway.schemas.requests import (
    CompletionRequest,
)
from baton.rpc.errors import InvalidRequest

DEFAULT_COMPLETION_TOKENS = 16

_UNSERVED_IN_COMPLETIONS = ("suffix", "prompt_embeds")

Prompt = str | list[int]


def check_completion(request: CompletionRequest, max_choices: int, max_logprobs: int, max_prompts: int) -> None:
    """Raises InvalidRequest for a completion that cannot be served."""
    check_fields(request, max_choices, max_logprobs)
    refuse_unserved(request, _UNSERVED_IN_COMPLETIONS)
    if request.logprobs is not None:
        check_logprobs("logprobs", request.logprobs, max_logprobs)
    check_logprob_token_ids(request, request.logprobs, "logprobs")
    _check_best_of(request, max_choices)
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("max_tokens is 0; give at least 1, or set echo", field="max_tokens")
    _check_num_prompts(request.prompt, max_prompts)
    prompts_of(request)


def _check_num_prompts(prompt: object, max_prompts: int) -> None:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) and len(prompt) > max_prompts:
        raise InvalidRequest(f"prompt has {len(prompt)} prompts; at most {max_prompts} are allowed", field="prompt")


def prompts_of(request: CompletionRequest) -> list[Prompt]:
    """Returns the list of prompts. Raises InvalidRequest for mixed forms."""
    prompt = request.prompt
    if prompt is None:
        raise InvalidRequest("prompt is required", field="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is empty; give at least one text or token", field="prompt")
    kind = type(prompt[0])
    if set(map(type, prompt)) != {kind}:
        index = next(index for index, item in enumerate(prompt) if type(item) is not kind)
        raise InvalidRequest(
            f"prompt.{index} has another type than prompt.0; give texts, token ids, or lists of token ids",
            field=f"prompt.{index}",
        )
    return [prompt] if kind is int else prompt  # type: ignore[list-item, return-value]


def _check_best_of(request: CompletionRequest, max_choices: int) -> None:
    best_of, n = request.best_of, request.n or 1
    if best_of is None:
        return
    if not n <= best_of <= max_choices:
        raise InvalidRequest(f"best_of is {best_of}; it must be from n, {n}, to {max_choices}", field="best_of")
    if best_of > n and request.stream:
        raise InvalidRequest("best_of above n is not allowed if stream is true", field="best_of")

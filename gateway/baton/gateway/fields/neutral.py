"""Removes neutral values in place, so that later checks do not reject them."""

from __future__ import annotations

from baton.gateway.schemas.requests import ChatCompletionRequest, GenerationFields


def drop_neutral(request: GenerationFields) -> None:
    """Unsets neutral fields of any generation."""
    if request.length_penalty == 1 and not request.use_beam_search:
        request.length_penalty = None
    if request.stop == "":
        request.stop = None
    options = request.stream_options
    if options is not None and not request.stream and not (options.include_usage or options.continuous_usage_stats):
        request.stream_options = None


def drop_neutral_choices(request: ChatCompletionRequest) -> None:
    """Unsets empty lists of tools or functions, tool choices without effect, and unlimited limits."""
    if request.max_tokens == -1:
        request.max_tokens = None
    request.tools = request.tools or None
    request.functions = request.functions or None
    if request.tools is None and request.tool_choice in ("auto", "none"):
        request.tool_choice = None
    if request.functions is None and request.function_call in ("auto", "none"):
        request.function_call = None

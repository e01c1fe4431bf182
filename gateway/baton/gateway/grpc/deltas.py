"""Converts deltas to messages of the public gRPC API."""

from __future__ import annotations

from collections.abc import Mapping

from baton.gateway.core import Delta, TokenLogprob, Usage
from baton.gateway.parsing.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText
from baton.v1 import inference_pb2, types_pb2

_FINISH_REASONS: Mapping[str, types_pb2.FinishReason.ValueType] = {
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
    "tool_calls": types_pb2.FINISH_REASON_TOOL_CALLS,
    "repetition": types_pb2.FINISH_REASON_REPETITION,
    "abort": types_pb2.FINISH_REASON_ABORT,
}


def responses_of(request_id: str, delta: Delta) -> list[inference_pb2.GenerateResponse]:
    """Returns one response, or more if the order of reasoning, text and calls does not fit into one."""
    first = inference_pb2.GenerateResponse(request_id=request_id, index=delta.index, token_ids=delta.token_ids)
    if delta.logprobs is not None:
        first.logprobs.extend(_logprobs(entry) for entry in delta.logprobs)
    if delta.prompt_logprobs is not None:
        first.prompt_logprobs.extend(_logprobs(entry) for entry in delta.prompt_logprobs)
    responses = [first]
    if delta.events is None:
        first.text = delta.text
    else:
        for event in delta.events:
            if not _follows(event, responses[-1]):
                responses.append(inference_pb2.GenerateResponse(request_id=request_id, index=delta.index))
            _add(event, responses[-1])
    last = responses[-1]
    if delta.finish_reason is not None:
        last.finish_reason = _FINISH_REASONS[delta.finish_reason]
    if isinstance(delta.stop_reason, str):
        if delta.finish_reason != "repetition":
            last.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        last.stop_token_id = delta.stop_reason
    return responses


def usage_response(request_id: str, usage: Usage) -> inference_pb2.GenerateResponse:
    """Returns the stream's last response."""
    return inference_pb2.GenerateResponse(
        request_id=request_id,
        usage=inference_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            reasoning_tokens=usage.reasoning_tokens,
        ),
    )


def _follows(event: Event, response: inference_pb2.GenerateResponse) -> bool:
    """Returns whether a response can hold an event in order: reasoning precedes text, and text precedes calls."""
    if isinstance(event, ReasoningText):
        return not response.text and not response.tool_calls
    return not (isinstance(event, ContentText) and response.tool_calls)


def _add(event: Event, response: inference_pb2.GenerateResponse) -> None:
    match event:
        case ContentText(text):
            response.text += text
        case ReasoningText(text):
            response.reasoning += text
        case CallStart(index, call_id, name):
            response.tool_calls.add(index=index, id=call_id, name=name)
        case CallArguments(index, fragment):
            calls = response.tool_calls
            if calls and calls[-1].index == index:
                calls[-1].arguments += fragment
            else:
                calls.add(index=index, arguments=fragment)
        case CallEnd():
            pass


def _logprobs(entry: TokenLogprob) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=[top.token_id for top in entry.top],
        top_logprobs=[top.logprob for top in entry.top],
    )
